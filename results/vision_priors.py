"""What training made of the priors on images, as a figure:  python results/vision_priors.py [results/vision]

From the checkpoints of cifar10-mask-s0 and cifar10-impulse-s0, for the patch in the middle of the grid and each head, means over
the layers: sigmoid(M), and the attention on 256 training images, before and after. Writes priors.png and its numbers, priors.json.
"""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import tasks
import torch

import maskprior
import train
from report import draw


def maps(folder):
    """{what: [H, rows, cols]} of the run in `folder`, before and after training."""
    def load(path):
        settings = train.Settings(**json.loads(path.read_text())['settings'] | dict(device='cpu', data_dir=tasks.default_data_dir()))
        if settings.task != 'cifar10':
            raise ValueError(f'a run of {settings.task}')
        return settings
    settings = train.read(folder / 'config.json', load, 'run_all.sh vision makes it')
    task, model, _ = train.build(settings)
    rows, cols = task.model['grid']
    middle = rows // 2 * cols + cols // 2
    found = {}
    for when in ('before', 'after'):
        if when == 'after':
            train.read(folder / 'checkpoint.pt', lambda p: model.load_state_dict(
                torch.load(p, weights_only=True, map_location='cpu')['model']))
        with torch.no_grad():
            attention = [attn.weights(x).mean(0) for attn, x in maskprior.layer_inputs(model, task.probe)]
            found[f'{settings.init}: attention, {when}'] = torch.stack(attention).mean(0)
            if settings.init == 'mask':
                found[f'mask: sigmoid(M), {when}'] = torch.stack([block.attn.M.sigmoid() for block in model.blocks]).mean(0)
    return {what: of[..., middle, :].view(-1, rows, cols) for what, of in found.items()}


def figure(found, path):
    try:
        from matplotlib import pyplot
    except ImportError:
        return print('vision_priors.py: no figure, matplotlib is not installed', file=sys.stderr)
    heads = max(map(len, found.values()))
    fig, axes = pyplot.subplots(len(found), heads, figsize=(2 * heads + 2.5, 2 * len(found)), squeeze=False)
    for row, (what, of) in zip(axes, sorted(found.items(), reverse=True)):
        for h, (axis, image) in enumerate(zip(row, of)):
            axis.imshow(image, vmin=0, vmax=1 if 'sigmoid' in what else float(of.max()), cmap='magma')
            axis.set(xticks=[], yticks=[], title=f'head {h}')
        row[0].set_ylabel(what.replace(', ', ',\n'), rotation=0, ha='right', va='center')
    draw(fig, path)


def main(argv=None):
    parser = tasks.Parser(description=__doc__)
    parser.add_argument('runs', nargs='?', type=Path, default=HERE / 'vision')
    out = parser.parse_args(argv).runs
    made, checkpoints = out / 'priors.json', [out / f'cifar10-{arm}-s0' / 'checkpoint.pt' for arm in ('mask', 'impulse')]
    there = [path for path in checkpoints if path.exists()]
    if made.exists() and all(path.stat().st_mtime <= made.stat().st_mtime for path in there):
        return print(f'{made} is already there')
    for path in checkpoints:
        if path not in there:
            raise tasks.DataError(f'{path} is missing: checkpoints are not committed; bash run_all.sh vision, with OUT= a new folder, makes it')
    found = maps(out / 'cifar10-mask-s0') | maps(out / 'cifar10-impulse-s0')
    tasks.write_json(made, {
        what: [[[round(v, 4) for v in row] for row in head] for head in of.tolist()] for what, of in found.items()})
    figure(found, out / 'priors.png')


if __name__ == '__main__':
    sys.exit(tasks.command(main, 'vision_priors.py'))
