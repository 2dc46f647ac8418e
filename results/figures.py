"""Draws the figures from what is recorded in results/, without training:

    python results/figures.py [NAME ...]         # results/NAME.png; without a name all of them

Thin lines and dots are seeds, thick lines and bars their mean. look() says how an arm is drawn, in
every figure. The maps of attention.json are recorded by attention.py.
"""
import argparse
import math
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train
from tasks import UsageError
from train import RunError

from look import (COLOURS, draw_dots, draw_map, end_values, legend, line_of, look,
                  new_figure, panel, save)
import records
from records import INTERVENTIONS, MAIN_ARMS, PAPER_TASKS, by_arm, intervened, rows, values

PRIOR_TV = 'prior_tv (0: the prior holds)'


class NothingRecorded(Exception):
    """What a figure is drawn from is not there."""


def needed(found, name):
    if not found:
        raise NothingRecorded(f'nothing is recorded for it in {name}')
    return found


def found_arms(section, tasks, folder):
    """{task: {arm: runs}} of what is recorded of the tasks, the arms in the order of the tables."""
    found = {}
    for task, arm, runs in by_arm(rows(section, folder=folder)):
        found.setdefault(task, {})[arm] = runs
    return needed({task: found[task] for task in tasks if task in found}, f'{section}.jsonl')


def read_json(name, folder):
    needed((folder / name).exists(), name)
    return records.read_json(folder / name)


def maps_of(task, folder):
    """{arm: its entry in attention.json, of seed 0}"""
    entries = read_json('attention.json', folder).values()
    found = {arm: entry for arm in COLOURS for entry in entries
             if (entry['task'], entry['init'], entry.get('seed', 0)) == (task, arm, 0)}
    return needed(found, 'attention.json')


# ------------------------------------------------------------------------------------ Boolean

def claim(folder):
    """parity2: the attention of each arm over training, unseen accuracy and prior_tv."""
    maps = maps_of('parity2', folder)
    arms = found_arms('boolean', ('parity2',), folder)['parity2']
    figure = new_figure(6.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.1 + len(maps), 2.9))
    draw_attention(top, maps)
    axes = bottom.subplots(1, 2)
    arms = {arm: arms[arm] for arm in MAIN_ARMS if arm in arms}
    axes[0].set(title='accuracy on unseen inputs, %', xlabel='training step', ylim=(-3, 103))
    axes[1].set(title=PRIOR_TV, xlabel='training step', ylim=(-0.03, 1.03))
    panel(axes[0], arms, 'accuracy_unseen', '.0f', True, 0.11, scale=100, until=300)
    panel(axes[1], arms, 'prior_tv', '.2f', True, 0.11, until=300)
    return figure


def draw_attention(part, maps):
    """A row an arm, a column a step, the target last."""
    steps = next(iter(maps.values()))['step']
    axes = part.subplots(len(maps), len(steps) + 1, squeeze=False)
    for line, (arm, entry) in zip(axes, maps.items()):
        layers = len(entry['attention'][0])
        # A white row between the layers.
        gap = [[math.nan] * len(entry['keys'])]
        for axis, images in zip(line, [*entry['attention'], [entry['target']] * layers]):
            draw_map(axis, sum([image + gap for image in images], [])[:-1], 0.5)
        line[0].set_ylabel(arm, color=COLOURS[arm], fontsize=10, fontweight='bold')
        line[-1].yaxis.tick_right()
        middles = [(len(entry['target']) + 1) * layer + 1 for layer in range(layers)]
        line[-1].set_yticks(middles, [f'layer {layer + 1}' for layer in range(layers)])
    for axis, step in zip(axes[0], steps):
        axis.set_title(f'step {step}' + (' (end)' if step == steps[-1] else ''))
    axes[0, -1].set_title('target: the prior')
    for axis in axes[-1]:
        axis.set_xticks((1.5, 15), ('x0, x1', 'x14'))
    part.suptitle('parity2, seed 0: where CLS, x0, x1 (rows) look, of CLS, x0, ... x14 (columns); '
                  'white: 0, dark: 0.5 or more', fontsize=9)


QK_KINDS = ('', 'freeze-qk', 'hold-inputs', 'both')
KINDS = {'qk-svd': QK_KINDS, 'qk-opt': QK_KINDS,
         'mask': ('', 'freeze-mask', 'mask-lr-10', *QK_KINDS[1:])}


def interventions(folder):
    """prior_tv and unseen accuracy at the end, with parts of the model held still."""
    found = {(task, arm, kind): runs for task, arm, kind, runs in intervened('boolean', folder)}
    tasks = [task for task in PAPER_TASKS if any(task == name for name, _, _ in found)]
    needed(tasks, 'boolean.jsonl')
    lines = [(arm, kind) for arm, kinds in KINDS.items() for kind in kinds]
    # A gap before each arm.
    heights = [-i - 0.6 * list(KINDS).index(arm) for i, (arm, _) in enumerate(lines)]
    figure = new_figure(0.23 * len(lines) + 1.5)
    axes = figure.subplots(1, 2 * len(tasks), sharey=True)
    for i, axis in enumerate(axes):
        task = tasks[i % len(tasks)]
        metric, words, scale = (('prior_tv_final', 'prior_tv', 1) if i < len(tasks) else
                                ('accuracy_unseen', 'unseen, %', 100))
        for y, (arm, kind) in zip(heights, lines):
            runs = found.get((task, arm, kind), [])
            draw_dots(axis, y, values(runs, metric, scale), COLOURS[arm])
        axis.set(xlim=(-0.06 * scale, 1.06 * scale), xticks=(0, scale), title=f'{task}\n{words}')
        axis.grid(axis='x', linewidth=0.5)
    axes[0].set(ylim=(heights[-1] - 0.6, 0.6))
    axes[0].set_yticks(heights, [INTERVENTIONS[kind] if kind else f'{arm}: as it is'
                                 for arm, kind in lines])
    for text, (arm, kind) in zip(axes[0].get_yticklabels(), lines):
        text.set(color=COLOURS[arm], fontweight='normal' if kind else 'bold')
    figure.suptitle('prior_tv (0: the prior holds) and accuracy on unseen inputs, at the end; dots '
                    'are seeds, bars their mean', fontsize=9)
    return figure


def boolean(folder):
    """Unseen accuracy and prior_tv over the steps, for the paper's three targets."""
    found = found_arms('boolean', PAPER_TASKS, folder)
    figure = new_figure(4.4)
    axes = figure.subplots(2, len(found), sharex='col', sharey='row', squeeze=False)
    for column, (task, arms) in zip(axes.T, found.items()):
        arms = {arm: runs for arm, runs in arms.items() if arm in MAIN_ARMS}
        for axis in column:
            # The prior is lost in the first hundred steps, and some runs take thousands.
            axis.set_xscale('symlog', linthresh=20, linscale=0.5)
        column[0].set(title=task, ylim=(-3, 103))
        column[1].set(xlabel='training step', ylim=(-0.03, 1.03))
        panel(column[0], arms, 'accuracy_unseen', '.0f', scale=100)
        panel(column[1], arms, 'prior_tv', '.2f')
        steps = [step for step in (0, 10, 100, 1000) if step <= column[1].get_xlim()[1]]
        column[1].set_xticks(steps, steps)
        column[1].minorticks_off()
    axes[0, 0].set_ylabel('accuracy on unseen inputs, %')
    axes[1, 0].set_ylabel(PRIOR_TV)
    legend(figure, MAIN_ARMS, 6)
    return figure


def cyclic3(folder):
    """The windows of attention before and after training."""
    maps = maps_of('cyclic3', folder)
    figure = new_figure(3.9)
    axes = figure.subplots(2, 1 + len(maps))
    for line, when in zip(axes, ('before', 'after')):
        for axis, (arm, entry) in zip(line[1:], maps.items()):
            image = draw_map(axis, entry['attention'][0 if when == 'before' else -1], 1 / 3,
                             aspect='equal')
            axis.set_title(f'{arm}, {when}', color=COLOURS[arm])
    draw_map(axes[0, 0], next(iter(maps.values()))['target'], 1 / 3, aspect='equal')
    axes[0, 0].set(title='target: the prior', ylabel='bit that looks', xlabel='bit that is seen')
    axes[1, 0].axis('off')
    steps = next(iter(maps.values()))['step'][-1]
    figure.suptitle(f'cyclic3, seed 0, {steps:,} steps: mean over layers, heads and inputs',
                    fontsize=9)
    figure.colorbar(image, ax=axes[1, 0], location='left', label='attention', aspect=12,
                    ticks=(0, 1 / 3), format='%.2f')
    return figure


# -------------------------------------------------------------------------------- arithmetic

def arithmetic(folder):
    """Exact match by the share of the pairs that trains."""
    found = {}
    for run in records.records('arithmetic', folder):
        prefix = run.row.rpartition('/')[0]
        arm = run.settings.init
        if prefix in ('', 'weight-decay-3') and run.label.endswith(f'-{arm}'):
            curve = found.setdefault((prefix, run.settings.task), {}).setdefault(arm, {})
            curve.setdefault(100 * run.settings.frac, {})[run.seed] = run
    needed(found, 'arithmetic.jsonl')
    figure = new_figure(3.2)
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, ((prefix, task), curves) in zip(axes, sorted(found.items())):
        shares = sorted({share for curve in curves.values() for share in curve})
        for arm, curve in curves.items():
            draw_efficiency(axis, arm, curve)
        axis.set(xscale='log', title=', '.join(filter(None, (task, prefix.replace('-', ' ')))),
                 xlabel='training pairs, % of all')
        axis.set_xticks(shares, [f'{share:g}' for share in shares], rotation=45)
        axis.minorticks_off()
    axes[0].set_ylabel('exact match on test pairs, %')
    legend(figure, MAIN_ARMS, 6)
    return figure


def draw_efficiency(axis, arm, curve):
    """{share of the pairs: {seed: run}}: a thin line for each seed, and their mean."""
    exact = {share: {seed: 100 * run.result['sequence_accuracy'] for seed, run in runs.items()}
             for share, runs in sorted(curve.items())}
    for seed in sorted({seed for of_seed in exact.values() for seed in of_seed}):
        points = [(share, of_seed[seed]) for share, of_seed in exact.items() if seed in of_seed]
        axis.plot(*zip(*points), '.-', linewidth=0.6, alpha=0.5, markersize=4, color=COLOURS[arm])
    means = [mean(of_seed.values()) for of_seed in exact.values()]
    axis.plot(list(exact), means, linewidth=2, **look(arm))


def arithmetic_masks(folder):
    """add3: the prior of each head beside what it looks at after training, on one example."""
    maps = maps_of('add3', folder)
    entry = next(iter(maps.values()))
    lines = [('the prior', 'black', entry['target'])]
    for arm, of_arm in maps.items():
        lines.append((f'{arm}\nafter', COLOURS[arm], of_arm['attention'][-1]))
    figure = new_figure(0.95 * len(lines) + 0.8)
    axes = figure.subplots(len(lines), len(entry['target']), sharex=True, sharey=True,
                           squeeze=False)
    for line, (title, colour, images) in zip(axes, lines):
        line[0].set_ylabel(title, color=colour, fontweight='bold')
        for axis, image in zip(line, images):
            shown = draw_map(axis, image, 0.5)
    axes[0, 0].set_xticks(range(len(entry['keys'])), entry['keys'])
    axes[0, 0].set_yticks(range(len(entry['queries'])), entry['queries'])
    for head, axis in enumerate(axes[0], 1):
        axis.set_title(f'head {head}')
    for axis in axes.flat:
        axis.tick_params(length=0)
    figure.colorbar(shown, ax=axes, label='attention (0.5 or more: dark)',
                    ticks=(0, 0.5), aspect=40, fraction=0.03)
    figure.supxlabel('token that is seen', fontsize=8.5)
    figure.suptitle('add3, seed 0: a new sum, its answer lowest digit first; mean over the layers',
                    fontsize=9)
    return figure


# ----------------------------------------------------------------------- images and language

def images(folder):
    """Top-1 accuracy and prior_tv over the epochs."""
    found = found_arms('images', ('cifar10', 'imagenet100'), folder)
    figure = new_figure(6)
    axes = figure.subplots(2, len(found), sharey='row', squeeze=False)
    for column, (task, arms) in zip(axes.T, found.items()):
        run = next(iter(arms.values()))[0]
        epochs = run.settings.epochs
        column[0].set_title(f'{task}, {run.result["training_examples"]:,} training images')
        column[1].set(xlabel='epoch', ylim=(0, 1))
        # What an untrained model has would hide the rest.
        panel(column[0], arms, 'accuracy', '.1f', True, 0.06, scale=100, first=1)
        panel(column[1], arms, 'prior_tv', '.2f', True, 0.06)
        for axis in column:
            ticks = range(0, epochs + 1, max(1, epochs // 4))
            axis.set_xticks([run.steps * epoch / epochs for epoch in ticks], ticks)
            axis.set_xlim(0)
    axes[0, 0].set_ylabel('top-1 accuracy, %')
    axes[1, 0].set_ylabel(PRIOR_TV)
    legend(figure, [], 2)
    return figure


def images_priors(folder):
    """What the patch in the middle sees in each head, before and after: sigmoid(M), attention."""
    maps = maps_of('cifar10', folder)
    lines = [(arm, what) for arm, entry in maps.items() for what in ('mask', 'attention')
             if what in entry]
    heads = len(maps[lines[0][0]]['attention'][0])
    figure = new_figure(1.3 * len(lines) + 0.6)
    axes = figure.subplots(len(lines), 2 * heads, squeeze=False)
    for line, (arm, what) in zip(axes, lines):
        before, after = maps[arm][what]
        vmax, words = {'mask': (1, 'sigmoid(M)'), 'attention': (0.2, 'attention')}[what]
        for axis, image in zip(line, [*before, *after]):
            shown = draw_map(axis, image, vmax, 'magma', 'equal')
        line[0].set_ylabel(f'{arm}:\n{words}', color=COLOURS[arm], fontweight='bold')
        figure.colorbar(shown, ax=line[-1], ticks=(0, vmax), format='%.2g', fraction=0.08)
    for i, axis in enumerate(axes[0]):
        axis.set_title(f'{"before" if i < heads else "after"}, head {i % heads + 1}')
    figure.suptitle('cifar10, seed 0: what the patch in the middle sees; mean over the layers and '
                    '256 training images', fontsize=9)
    return figure


def language(folder):
    """Validation perplexity over the steps."""
    found = found_arms('language', ('wikitext2', 'tinystories'), folder)
    figure = new_figure(3.6)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (task, arms) in zip(axes, found.items()):
        axis.set_yscale('log')
        # At step 0 it is the size of the vocabulary, which would hide the rest.
        panel(axis, arms, 'perplexity', '.1f', True, 0.055, first=1)
        axis.set(title=task, xlabel='training step')
        axis.minorticks_off()
        axis.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 4, 5, 7))
        axis.yaxis.set_major_formatter('{x:g}')
    axes[0].set_ylabel('validation perplexity')
    legend(figure, [], 2)
    return figure


def language_masks(folder):
    """The bias of M by distance, and its change: a panel a head, a line a layer."""
    before, after = maps_of('wikitext2', folder)['mask']['bias']
    figure = new_figure(4)
    axes = figure.subplots(2, len(after[0]), sharex=True, sharey='row')
    for head, (bias, change) in enumerate(axes.T):
        # M starts the same in every layer.
        start = before[0][head]
        for layer, heads in enumerate(after):
            style = dict(color=COLOURS['mask'], alpha=(layer + 1) / len(after))
            bias.plot(heads[head], label=f'after, layer {layer + 1}', **style)
            change.plot([b - a for a, b in zip(start, heads[head])], **style)
        bias.plot(start, '--', linewidth=1, color='black', label='before, all layers (on top)')
        bias.set_title(f'head {head + 1}')
        change.set_xlabel('distance, words')
    axes[0, 0].set_ylabel('bias log sigmoid(M)')
    axes[1, 0].set_ylabel('its change')
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside upper center', ncols=5)
    return figure


# ---------------------------------------------------------------------------------- theory

def theory_scaling(folder):
    """The loss's gradient as features grow and a row stays as it is, by the slopes of theory.py."""
    slopes = [part for part in read_json('theory.json', folder)['parts']
              if 'slope of log' in part['title']]
    part = needed(slopes, 'theory.json')[0]
    figure = new_figure(2.9)
    axes = figure.subplots(1, len(part['rows']), sharey=True)
    for axis, row in zip(axes, part['rows']):
        draw_slopes(axis, dict(zip(part['columns'], row['values'])))
        axis.set_title(row['statement'].split(':')[0].replace(', ', ',\n'))
    axes[0].set_ylabel('norm of the gradient,\nrelative to a = 1')
    return figure


PLACES = {'m': COLOURS['mask'], 'k': COLOURS['qk-svd'], 'q': COLOURS['qk-opt'],
          'W_Q': COLOURS['impulse'], 'W_K': COLOURS['mimetic']}


def draw_slopes(axis, slopes):
    """{place: slope} from a = 1e-3 to 1e3: thinner lines on thicker ones, named at their end."""
    named = {}
    for width, (place, slope) in zip((5, 4, 3, 2, 1), slopes.items()):
        axis.loglog((1e-3, 1e3), (1e-3 ** slope, 1e3 ** slope), linewidth=width,
                    color=PLACES[place])
        named.setdefault(round(slope, 2), []).append(place)
    axis.set(xlabel='a', ylim=(10 ** -6.5, 10 ** 6.5))
    axis.margins(x=0)
    end_values(axis, [(1e3 ** slope, ', '.join(places), PLACES[places[0]])
                      for slope, places in named.items()])


# What is drawn of theory_training.json: {title: {quantity: words}}.
IN_TRAINING = {
    'norm of the gradient': {'gradient M': 'M', 'gradient W_Q': 'W_Q', 'gradient W_K': 'W_K'},
    'relative change': {'change M': 'M', 'change W_Q': 'W_Q', 'change W_K': 'W_K'},
    'attention moved\nby a part alone': {'moved by M': 'M', 'moved by QK': 'W_Q and W_K',
                                         'moved by rest': 'all the rest'},
    'prior_tv': {'prior_tv': 'the whole model'},
}


def theory_training(folder):
    """parity2 under SGD and Adam: gradients, changes, what each part moves, prior_tv."""
    found = read_json('theory_training.json', folder)
    runs = found['runs']
    figure = new_figure(7)
    axes = figure.subplots(len(IN_TRAINING), 2, sharex='col', sharey='row')
    for line, (title, quantities) in zip(axes, IN_TRAINING.items()):
        styles = dict(zip(quantities, ('-', '--', ':')))
        for axis, optimiser in zip(line, ('SGD', 'Adam')):
            if title != 'prior_tv':
                axis.set_yscale('log', nonpositive='mask')
            for arm in MAIN_ARMS[1:]:
                log = runs[f'{optimiser} {arm}']
                for quantity in filter(log.__contains__, quantities):
                    axis.plot(*zip(*log[quantity]), styles[quantity], color=COLOURS[arm])
        line[0].set_ylabel(title)
        line[1].legend(handles=[line_of(words, styles[quantity])
                                for quantity, words in quantities.items()],
                       loc='center left', bbox_to_anchor=(1, 0.5))
    for column, optimiser in zip(axes.T, ('SGD', 'Adam')):
        column[0].set_title(optimiser)
        column[-1].set_xlabel('training step')
    figure.legend(handles=[line_of(arm, '-', COLOURS[arm], linewidth=2) for arm in MAIN_ARMS[1:]],
                  loc='outside upper center', ncols=3,
                  title=f'parity2, seed {found["seed"]}; the changes of the mask\'s W_Q and W_K '
                        'lie on each other')
    return figure


# ------------------------------------------------------------------------------------- main

FIGURES = {figure.__name__: figure for figure in
           (claim, interventions, boolean, cyclic3, arithmetic, arithmetic_masks, images,
            images_priors, language, language_masks, theory_scaling, theory_training)}


def main(argv=None, folder=HERE):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('names', nargs='*', metavar='NAME', help=' '.join(FIGURES))
    names = parser.parse_args(argv).names
    for name in names:
        if name not in FIGURES:
            raise UsageError(f'no figure {name}: {" ".join(FIGURES)}')
    for name in names or FIGURES:
        try:
            save(FIGURES[name](folder), folder / f'{name}.png', colours=256)
            print(folder / f'{name}.png')
        except NothingRecorded as missing:
            print(f'figures.py: {name}: {missing}', file=sys.stderr)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise RunError(f'{name}: what is recorded for it is damaged '
                           f'({type(error).__name__}: {error})') from None


if __name__ == '__main__':
    sys.exit(train.command(main, 'figures.py'))
