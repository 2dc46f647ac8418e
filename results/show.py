"""Shows runs of train.py, finished or still going on:

    python results/show.py RUN [RUN ...]         # draws show.png into the first run's folder

The curves of all runs; then for each run the attention of each layer and head (blue) and sigmoid(M)
where there is an M (green; 1: free to attend, 0: suppressed). Rows look, columns are seen. Boolean:
mean over the probe inputs. Images: the same, what the patch in the middle sees. Arithmetic and
language: on the first probe input, whose tokens are the labels.
"""
import argparse
import sys
from pathlib import Path
from textwrap import fill

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train
import torch

from attention import attention, load_model, mask_weights, on_grid, load_run, shown_inputs
from look import COLOURS, draw_map, new_figure, save


def draw(folders):
    """The picture of some runs' folders."""
    # Before the work, so that it is not for nothing.
    new_figure(1)
    runs = [load_run(folder) for folder in folders]
    loaded = [load_model(*run, folder) for run, folder in zip(runs, folders)]
    shown = [shown_maps(*of_run) for of_run in loaded]
    heights = [2.] + [0.7 + len(maps) * row_height(maps) for maps, _, _ in shown]
    figure = new_figure(sum(heights))
    parts = figure.subfigures(1 + len(folders), 1, height_ratios=heights)
    draw_metrics(parts[0], folders, runs, loaded[0][0])
    for part, folder, (_, checkpoint), maps in zip(parts[1:], folders, runs, shown):
        green = ' (blue), sigmoid(M) (green)' if maps[1].any() else ''
        part.suptitle(f'{folder.resolve().name}, step {checkpoint["step"]}: attention{green}',
                      fontsize=9.5)
        draw_maps(part, *maps)
    return figure


def draw_metrics(part, folders, runs, task):
    """A panel a metric, a line a run, in its arm's colour if no two are of one arm."""
    metrics = [*task.console_metrics, 'prior_tv']
    axes = part.subplots(1, len(metrics))
    arms = [settings.init for settings, _ in runs]
    for i, (folder, (settings, checkpoint)) in enumerate(zip(folders, runs)):
        colour = f'C{i}'
        if len(set(arms)) == len(arms):
            colour = COLOURS.get(settings.init, colour)
        # The thinner lie on the thicker.
        width = 1 + 2 * (len(runs) - 1 - i) / len(runs)
        for axis, metric in zip(axes, metrics):
            points = [(row['step'], row[metric]) for row in checkpoint['log'] if metric in row]
            axis.plot([step for step, _ in points], [value for _, value in points], '.-',
                      markersize=3 + width, linewidth=width, color=colour,
                      label=folder.resolve().name)
    for axis, metric in zip(axes, metrics):
        title = metric if metric == 'prior_tv' else fill(metric.replace('_', ' '), 14)
        axis.set(title=title, xlabel='step')
        if 'loss' in metric or metric == 'perplexity':
            axis.set_yscale('log')
        else:
            axis.set_ylim(-0.03, 1.03)
    part.legend(*axes[0].get_legend_handles_labels(), loc='outside upper center', ncols=3)


def shown_maps(task, model):
    """The maps of a run [rows, columns, queries, keys], which of them are sigmoid(M) (bool [rows,
    columns]; the others are attention), and the tokens' labels."""
    x, labels = shown_inputs(task)
    maps = attention(model, x)
    masks = mask_weights(model, maps.shape[-1])
    is_mask = torch.zeros(maps.shape[:2], dtype=torch.bool)
    if masks is not None:
        # Beside the attention; below it, where that would leave no room for the labels.
        direction = 0 if labels and masks.shape[1] > 1 else 1
        maps = torch.cat([maps, masks], direction)
        is_mask = torch.cat([is_mask, torch.ones(masks.shape[:2], dtype=torch.bool)], direction)
    return on_grid(maps, task) if labels is None else maps, is_mask, labels


def row_height(maps):
    """Inches of a row of maps: they are square, and eight inches wide together."""
    return min(1.7, 0.1 + 6.6 / maps.shape[1])


def draw_maps(part, maps, is_mask, labels):
    """A row a layer: the attention of its heads; sigmoid(M) of each head or the one of all."""
    axes = part.subplots(*maps.shape[:2], squeeze=False)
    highest = maps[~is_mask].max().item()
    for masks, vmax, colours in ((False, highest, 'Blues'), (True, 1, 'Greens')):
        places = (is_mask == masks).nonzero().tolist()
        for row, column in places:
            image = draw_map(axes[row, column], maps[row, column].tolist(), vmax, colours,
                             'equal')
        if places:
            part.colorbar(image, ax=[axes[row, column] for row, column in places], fraction=0.05)
    H = len(is_mask[0]) - int(is_mask[0].sum())
    for column, axis in enumerate(axes[0]):
        shared = column == H and is_mask[0].sum() == 1
        axis.set_title('all heads' if shared else f'head {column % H + 1}')
    layers = len(maps) // (2 if is_mask[-1, 0] else 1)
    for row, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f'layer {row % layers + 1}')
    if labels:
        size = min(6.5, 60 * row_height(maps) / len(labels))
        for axis in axes[:, 0]:
            axis.set_yticks(range(len(labels)), labels, fontsize=size)
        for axis in axes[-1]:
            axis.set_xticks(range(len(labels)), labels, fontsize=size, rotation=90)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN')
    runs = parser.parse_args(argv).runs
    path = runs[0] / 'show.png'
    save(draw(runs), path)
    print(path)


if __name__ == '__main__':
    sys.exit(train.command(main, 'show.py'))
