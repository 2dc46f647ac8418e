"""Makes the tables from the recorded runs, and records runs:

    python results/report.py [SECTION ...]       # prints the tables
    python results/report.py --write             # puts them into README.md and results/*.md
    python results/report.py --runs FOLDER       # the runs under FOLDER beside the recorded ones
    python results/report.py --collect RUN ...   # adds finished runs, or folders of runs
    python results/report.py --rows              # the arguments of train.py for each recorded run

A row of a table is a set of recorded runs (records.py) that differ in the seed alone: mean ±
standard deviation (n - 1) over the seeds.
"""
import argparse
import re
import sys
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import tasks
import torch
import train
from tasks import BOOLEAN_TARGETS, PAPER, UsageError
from train import RunError

from records import (ARMS, INTERVENTIONS, MAIN_ARMS, PAPER_TASKS, QK_ARMS, SECTIONS, all_arguments,
                     by_arm, by_row, changed, check_rows, collect, find_runs, intervened, place,
                     read_json, read_run, records, rows, same_seeds, section_of, values)

# By what runs are compared: metric, scale, name.
MEASURE = {'boolean': ('accuracy', 100, 'accuracy %'),
           'arithmetic': ('sequence_accuracy', 100, 'exact match %'),
           'images': ('accuracy', 100, 'top-1 %'),
           'language': ('perplexity_test', 1, 'test perplexity')}


def paper_rows():
    """{row: the paper's metrics} of the rows that have the paper's setting."""
    found = {}
    for (task, arm), paper in PAPER.items():
        folder = 'paper/' if section_of(task) == 'images' else ''
        frac = f'-{paper["frac"]}' if 'frac' in paper else ''
        found[f'{folder}{task}{frac}-{arm}'] = paper
    return found


PAPER_ROWS = paper_rows()


# ---------------------------------------------------------------------------------- cells

def spread(numbers, digits=2):
    """mean ± standard deviation; nothing for no numbers"""
    if not numbers:
        return ''
    text = f'{mean(numbers):.{digits}f}'
    return text if len(numbers) == 1 else f'{text} ± {stdev(numbers):.{digits}f}'


def measured(runs, section):
    metric, scale, _ = MEASURE[section]
    return spread(values(runs, metric, scale))


def of_paper(row, section):
    metric, scale, _ = MEASURE[section]
    value = PAPER_ROWS.get(row, {}).get(metric)
    return '' if value is None else f'{scale * value:g}'


def each(numbers):
    return ' '.join(f'{number:.2f}' for number in numbers)


def prior_tv(runs):
    before, after = mean(values(runs, 'prior_tv_init')), mean(values(runs, 'prior_tv_final'))
    return f'{before:.3f} → {after:.3f}'


def fitted(runs):
    return f'{sum(values(runs, "fitted"))}/{len(runs)}'


def table(header, lines):
    """The lines of a Markdown table, and an empty one; none for a table without lines."""
    if lines:
        yield '| ' + ' | '.join(header) + ' |'
        yield '|' + '---|' * len(header)
        for line in lines:
            yield '| ' + ' | '.join(line) + ' |'
        yield ''


# --------------------------------------------------------------------------- the headline

# Title, section, what the labels begin with.
HEADLINE = (
    ('parity2, accuracy %', 'boolean', 'parity2'),
    ('maj3, accuracy %', 'boolean', 'maj3'),
    ('cyclic3, accuracy %', 'boolean', 'cyclic3'),
    ('add3 from 0.05 % of the pairs, exact match %', 'arithmetic', 'add3-0.0005'),
    ('add3 from 0.1 % of the pairs, exact match %', 'arithmetic', 'add3-0.001'),
    ('add3 from 0.4 % of the pairs, exact match %', 'arithmetic', 'add3-0.004'),
    ('mul3 from 3 % of the pairs, exact match %', 'arithmetic', 'mul3-0.03'),
    ('CIFAR-10 ({:,} images), top-1 %', 'images', 'cifar10'),
    ('14 classes of ImageNet-100 at 64 pixels ({:,} images), top-1 %', 'images', 'imagenet100'),
    ('WikiText-2 ({:,} words), test perplexity', 'language', 'wikitext2'),
    ('TinyStories ({:,} words), test perplexity', 'language', 'tinystories'),
)


def headline(folder):
    found = {section: rows(section, folder=folder) for section in SECTIONS}
    lines = []
    for title, section, label in HEADLINE:
        arms = {arm: found[section].get(f'{label}-{arm}', []) for arm in MAIN_ARMS}
        recorded = [runs for runs in arms.values() if runs]
        if not recorded:
            continue
        title = title.format(recorded[0][0].result.get('training_examples'))
        seeds = dict.fromkeys(f(map(len, recorded)) for f in (min, max))
        ends = [f'{mean(values(runs, "prior_tv_final")):.2f}' if runs else '–'
                for runs in arms.values()]
        paper = [of_paper(f'{label}-{arm}', section) or '–' for arm in ('default', 'mask')]
        lines.append([title, *(headline_cell(runs, section) for runs in arms.values()),
                      ', '.join(ends), '–'.join(map(str, seeds)), ', '.join(paper)])
    yield from table(['', *MAIN_ARMS, f'prior_tv at the end: {", ".join(MAIN_ARMS)}', 'seeds',
                      'paper: default, mask'], lines)


def headline_cell(runs, section):
    # No image is seen twice alike, so there "fitted" means nothing.
    unfitted = values(runs, 'fitted').count(False) if section != 'images' else 0
    if not runs:
        return '–'
    return measured(runs, section) + (f' ({unfitted}/{len(runs)} not fitted)' if unfitted else '')


def first_run(folder):
    """The last lines of the README's first command."""
    runs = rows('boolean', folder=folder).get('parity2-mask')
    if runs and 'fourier' in runs[0].result:
        task, run = tasks.Boolean('parity2'), runs[0]
        result = task.reference | run.result | dict(task='parity2', init='mask', seed=run.seed)
        for line in train.closing_lines(f'runs/{run.name}', task, result):
            yield f'    {line}'.rstrip()


def knobs(folder):
    """What strength and level do to the mask on parity2."""
    lines = [[f'{run.settings.strength:g}', f'{run.settings.level:g}',
              f'{100 * run.result["accuracy_unseen"]:.0f}',
              f'{run.result["prediction_unseen"]:+.2f}', f'{run.result["prior_tv_final"]:.3f}',
              f'{100 * run.result["change_M"]:.2f}']
             for runs in rows('boolean', 'knobs', folder).values() for run in runs]
    lines.sort(key=lambda line: (line[1] != '4', float(line[0]), float(line[1])))
    yield from table(['strength', 'level', 'unseen %', 'on the hole (right: -1)',
                      'prior_tv after training', 'change of M %'], lines)


# --------------------------------------------------------------------------- the findings

def tv_range(row_of, labels):
    """'0.12 to 0.19': the smallest and the largest mean over the seeds."""
    means = [mean(values(row_of[label], 'prior_tv_final')) for label in labels if label in row_of]
    low, high = f'{min(means):.2f}', f'{max(means):.2f}'
    return low if low == high else f'{low} to {high}'


def right_runs(row_of, labels):
    """'9 of 10': the runs that are right on at least 99.9 % of the unseen inputs."""
    found = [value for label in labels if label in row_of
             for value in values(row_of[label], 'accuracy_unseen')]
    return f'{sum(value >= 0.999 for value in found)} of {len(found)}'


def findings(folder):
    """The README's bullets, with the numbers that are recorded."""
    plain = rows('boolean', folder=folder)
    sums = rows('arithmetic', folder=folder)
    # {task: {(arm, kind): runs}}
    by_task = {}
    for task, arm, kind, runs in intervened('boolean', folder):
        by_task.setdefault(task, {})[arm, kind] = runs
    complete = {task: by_task[task] for task in PAPER_TASKS
                if {(arm, kind) for arm in QK_ARMS for kind in FIXED}
                <= by_task.get(task, {}).keys()}
    if complete:
        yield from persistence(plain, complete)
        yield from two_causes(complete)
    yield from worth(sums)
    yield from symmetry(plain, rows('boolean', 'hole', folder))
    yield from next_words(rows('language', folder=folder))
    yield from differences(sums, rows('images', folder=folder))


# The interventions that tell the two causes apart.
FIXED = {'': 'neither', 'freeze-qk': 'W_Q and W_K', 'hold-inputs': 'inputs of q and k',
         'both': 'both'}


def persistence(plain, names):
    def labels(*arms):
        return [f'{task}-{arm}' for task in names for arm in arms]
    yield ('- **On the Boolean tasks M keeps the prior; W_Q and W_K lose much of it.** On '
           f'{", ".join(names)} prior_tv ends at {tv_range(plain, labels("mask"))} with the mask, '
           f'at {tv_range(plain, labels(*QK_ARMS))} with the QK arms, at '
           f'{tv_range(plain, labels("default"))} without a prior. At least 99.9 % of the unseen '
           f'inputs are right in {right_runs(plain, labels("mask"))} runs with the mask, in '
           f'{right_runs(plain, labels(*QK_ARMS))} with the QK arms.')


def two_causes(by_task):
    numbers = [str(len(common_seeds(of_task))) for of_task in by_task.values()]
    seeds = f'{numbers[0]} seeds each' if len({*numbers}) == 1 else f'{", ".join(numbers)} seeds'
    yield ('- **A prior in W_Q and W_K is lost in two ways: these weights change, and so do the '
           'inputs of q and k** (ours). Either can be held: frozen weights, or inputs from the '
           'untrained model. Accuracy on unseen inputs, %, in the order '
           f'{", ".join(by_task)} ({seeds}; cyclic3 with 1,000 steps; *: not all runs have '
           'fitted):\n')
    lines = []
    for kind, words in FIXED.items():
        lines.append([words, *(', '.join(unseen(of_task, arm, kind)
                                         for of_task in by_task.values()) for arm in QK_ARMS)])
    for line in table(['held', *QK_ARMS], lines):
        yield f'  {line}'.rstrip()
    yield ('  With both held every run is right: a prior that is kept works there, too (so in '
           '[add3](results/arithmetic.md)). Held inputs are enough on parity2, on maj3 for qk-svd; '
           'on cyclic3 neither alone is. The mask is right whatever is held, M included (figure).')


def common_seeds(of_task):
    """The seeds that each of the QK arms has in each of FIXED."""
    return set.intersection(*({run.seed for run in of_task[arm, kind]}
                              for arm in QK_ARMS for kind in FIXED))


def unseen(of_task, arm, kind):
    """Unseen accuracy in %, the mean over the common seeds; with a * if a run has not fitted."""
    runs = [run for run in of_task[arm, kind] if run.seed in common_seeds(of_task)]
    mark = '' if all(values(runs, 'fitted')) else '*'
    return f'{mean(values(runs, "accuracy_unseen", 100)):.0f}{mark}'


def worth(sums):
    curve = curves(sums).get('add3', {})
    if {'mask', 'default'} <= curve.keys():
        signs, shares = zip(*(needed(curve[arm], 0.9) for arm in ('mask', 'default')))
        if any(signs):
            return
        yield (f'- **What a prior is worth.** For 90 % exact match on add3 the mask needs '
               f'{100 * shares[0]:.2g} % of the pairs, the default {100 * shares[1]:.2g} % '
               '(interpolated, [more shares](results/arithmetic.md); a default tuned for itself '
               'may need less). The QK arms lie between.')


def symmetry(plain, hole):
    tried = [label for label in hole if label.startswith('mask')]
    if not tried or not {'parity3-default', *(f'diff2-{arm}' for arm in MAIN_ARMS)} <= plain.keys():
        return
    diff2 = {arm: f'{mean(values(plain[f"diff2-{arm}"], "accuracy", 100)):.0f} %'
             for arm in MAIN_ARMS}
    priors = ' and '.join(dict.fromkeys(diff2[arm] for arm in MAIN_ARMS[1:]))
    yield ('- **A mask imposes a symmetry** (Boolean tasks). It treats the interacting bits alike, '
           'so on the unseen (+,-) it repeats what it saw on (-,+). On `diff2` that is wrong: mask '
           f'and QK arms {priors}, default {diff2["default"]}. If parity2\'s hole is (-,-), '
           f'which no exchange of bits reaches, {right_runs(hole, tried)} runs '
           f'(masks of {len(tried)} kinds) are right. Of our predictions for `diff2` and '
           '`parity3` the mask\'s came true; the default\'s, the MDI, in '
           f'{as_mdi(plain["diff2-default"])} and '
           f'{as_mdi(plain["parity3-default"])} runs.')


def as_mdi(runs):
    """'3 of 5': the runs whose accuracy is within a point of the MDI's."""
    gaps = [abs(run.result['accuracy'] - run.result['mdi_accuracy']) for run in runs]
    return f'{sum(gap < 0.01 for gap in gaps)} of {len(runs)}'


def next_words(language):
    """Mean test perplexity beside the default's of the same seeds, of what is recorded."""
    lines = []
    for task, name in ('tinystories', 'TinyStories'), ('wikitext2', 'WikiText-2'):
        changes = []
        for arm in MAIN_ARMS[1:]:
            pairs = same_seeds(*(language.get(f'{task}-{name}', []) for name in (arm, 'default')))
            if pairs:
                own, other = (mean(values(runs, 'perplexity_test')) for runs in zip(*pairs))
                changes.append(f'{arm} {100 * (own / other - 1):+.1f} % ({len(pairs)})')
        if changes:
            lines.append(f'{name}: {", ".join(changes)}')
    if lines:
        yield ('- **Language.** Test perplexity against the default of the same seeds (their '
               f'number). {"; ".join(lines)}.')


def differences(sums, images):
    over_default = difference(images, 'cifar10', 'mask', 'default')
    over_mimetic = difference(images, 'cifar10', 'mask-mimetic-v', 'mimetic')
    if not (over_default and over_mimetic and 'add3-0.004-default' in sums):
        return
    default = mean(values(sums['add3-0.004-default'], 'sequence_accuracy', 100))
    epochs = images['cifar10-mask'][0].settings.epochs
    yield ('- **Where ours differs from the paper.** At 0.4 % of the pairs of add3 our default has '
           f'{default:.2f} %, the paper\'s 1.19 %. On images we train a small ViT on JPEG copies '
           f'of CIFAR-10, {epochs} epochs instead of 300: the mask is {over_default[0]} '
           'points above the default (± standard error over the test images; the paper: +1.46), '
           f'and with mimetic\'s W_V and W_proj {over_mimetic[0]} above mimetic.')


# -------------------------------------------------------------------------------- boolean

OUTCOME = ('accuracy %', 'unseen %', 'loss', 'on the hole', 'fitted', 'prior_tv', 'steps × seeds')


def boolean(folder):
    by_task = by_arm(rows('boolean', folder=folder))
    versions = sorted({f'{run.torch} {run.device}' for _, _, runs in by_task for run in runs})
    yield ('**Every arm, every task** (`bash run_all.sh boolean`; torch and device: '
           f'{", ".join(versions)})\n')
    yield from table(['task', 'arm', *OUTCOME, 'MDI: accuracy, loss', 'paper'],
                     [[task, arm, *boolean_outcome(runs), *boolean_known(runs[0])]
                      for task, arm, runs in by_task])
    yield ('**What training does to the prior**: relative change of M, W_Q, W_K, and prior_tv, '
           'unseen accuracy over the steps\n')
    yield from table(['task', 'arm', 'M', 'W_Q', 'W_K', 'prior_tv, unseen accuracy'],
                     [[task, arm, *(spread(values(runs, f'change_{weight}'), 3)
                                    for weight in ('M', 'W_Q', 'W_K')), course(runs)]
                      for task, arm, runs in by_task])
    yield from interventions('boolean', 'accuracy_unseen', folder)
    yield from found_structure()
    for prefix, title in BOOLEAN_TABLES.items():
        found = rows('boolean', prefix, folder)
        if found:
            yield f'**{title}**\n'
            yield from table(['run', *OUTCOME], [[label, *boolean_outcome(runs)]
                                                 for label, runs in found.items()])


BOOLEAN_TABLES = {
    'measured': 'The structure measured on the training set; elsewhere it is the known one',
    'knobs': 'Strength and level, seed 100',
    'batch-64': 'Batches of 64 and no clipping: an earlier setting, with spikes of the loss',
    'fresh': 'The mask in that setting, on five seeds that it was not chosen by',
    '2-layers': 'cyclic3 with 2 layers, pos_std 0.5, batches of 64 and 1,000 steps (10x: 10,000)',
    '3-layers': 'cyclic3 with 3 layers, batches of 128, lr 1e-3 and 2,500 steps',
    'hole': 'parity2 on the hole (-,-), where no exchange of bits helps; batches of 64',
    'ablation': 'Ablations on parity2: batches of 64, the rest as in the first table',
}
def interventions(section, metric, folder):
    lines = [[task, arm, INTERVENTIONS[kind], prior_tv(runs), spread(values(runs, metric, 100), 1),
              ' '.join(f'{100 * n:.0f}' for n in values(runs, metric)), fitted(runs),
              str(runs[0].steps)] for task, arm, kind, runs in intervened(section, folder)]
    if lines:
        yield '**Interventions: what is held still while the rest learns**\n'
        outcome = 'unseen %' if section == 'boolean' else EXACT[0]
        yield from table(['task', 'arm', 'held still', 'prior_tv', outcome, 'each seed', 'fitted',
                          'steps'], lines)


# Of the seen inputs, the share that is known, and how many of their labels are negated.
KNOWN = {'all': (1, 0), 'a half': (0.5, 0), 'a fifth': (0.2, 0), 'a tenth': (0.1, 0),
         'a twentieth': (0.05, 0), 'all, one label wrong': (1, 1), 'all, 250 wrong': (1, 250)}


def found_structure():
    """Where `--structure measured` breaks: pairs of bits that it opens, with less or worse data."""
    lines = []
    x = tasks.cube(tasks.BITS)
    for task in PAPER_TASKS:
        target, _, hole = BOOLEAN_TARGETS[task]
        y, seen = target(x), ~tasks.in_hole(x, hole)
        upper = torch.ones(tasks.BITS, tasks.BITS, dtype=torch.bool).triu(1)
        right = tasks.measured_pairs(y, torch.ones_like(seen)) & upper
        cells = []
        for share, wrong in KNOWN.values():
            generator = torch.Generator().manual_seed(0)
            known = seen & (torch.rand(len(y), generator=generator) < share)
            order = torch.randperm(len(y), generator=generator)
            negated = order[known[order]][:wrong]
            labels = y.clone()
            labels[negated] *= -1
            opened = tasks.measured_pairs(labels, known) & upper
            cells.append(f'{(opened & right).sum()} of {right.sum()}, '
                         f'{(opened & ~right).sum()} of {(upper & ~right).sum()}')
        lines.append([task, *cells])
    yield ('**Where `--structure measured` breaks**: pairs that interact, and others, that it '
           'leaves open, by what is known of the seen inputs\n')
    yield from table(['task', *KNOWN], lines)


def boolean_outcome(runs):
    return [spread(values(runs, 'accuracy', 100)), spread(values(runs, 'accuracy_unseen', 100)),
            spread(values(runs, 'loss'), 4), spread(values(runs, 'prediction_unseen')),
            fitted(runs), prior_tv(runs), f'{runs[0].steps} × {len(runs)}']


def boolean_known(run):
    """What the minimum-degree interpolator has, and what the paper has."""
    loss = PAPER_ROWS.get(run.row, {}).get('loss')
    return [f'{run.result["mdi_accuracy"]:.1%}, {run.result["mdi_loss"]:g}',
            of_paper(run.row, 'boolean') + (f', loss {loss:g}' if loss else '')]


def course(runs):
    """prior_tv and unseen accuracy over the steps, means: at the start, early on, at the end."""
    steps = runs[0].log['step']
    early = [max(i for i, step in enumerate(steps) if step <= at) for at in (0, 20, 100)]
    points = []
    for i in dict.fromkeys((*early, len(steps) - 1)):
        tv = mean(run.log['prior_tv'][i] for run in runs)
        unseen = mean(run.log['accuracy_unseen'][i] for run in runs)
        points.append(f'step {steps[i]}: {tv:.2f}, {unseen:.0%}')
    return ' → '.join(points)


# ----------------------------------------------------------------------------- arithmetic

EXACT = ('exact match %', 'each seed', 'digits %', 'training pairs %', 'fitted', 'prior_tv',
         'steps × seeds')


def arithmetic(folder):
    yield ('**Arithmetic, by the share of pairs that trains** (`bash run_all.sh arithmetic`; '
           'test: 10,000 other pairs)\n')
    for prefix, title in (('', ''), ('weight-decay-3', 'The same with a weight decay of 3')):
        found = curves(rows('arithmetic', prefix, folder))
        if not found:
            continue
        if title:
            yield f'**{title}**\n'
        yield from table(['task', 'pairs', 'arm', *EXACT, 'paper'], curve_lines(found))
        yield ('**Share of pairs needed for 50 and 90 % exact match**, interpolated, and how much '
               'less than the default\n')
        yield from table(['task', 'arm', '50 %', '90 %'], needed_lines(found))
    yield from interventions('arithmetic', 'sequence_accuracy', folder)
    ablation = rows('arithmetic', 'ablation', folder)
    if ablation:
        yield ('**What in the prior does the work, and longer operands** (at an equal number of '
               'pairs)\n')
        yield from table(['run', *EXACT], [[label, *arithmetic_outcome(runs)]
                                           for label, runs in ablation.items()])


def curves(rows):
    """{label: runs} named TASK-FRAC-ARM -> {task: {arm: {frac: runs}}}, arms as in ARMS."""
    found = {}
    split = [(*label.split('-', 2), runs) for label, runs in rows.items()]
    for task, frac, arm, runs in sorted(split, key=lambda row: (row[0], place(row[2], ARMS))):
        found.setdefault(task, {}).setdefault(arm, {})[float(frac)] = runs
    return found


def arithmetic_outcome(runs):
    exact = values(runs, 'sequence_accuracy', 100)
    return [spread(exact), each(exact), spread(values(runs, 'digit_accuracy', 100)),
            f'{mean(values(runs, "sequence_accuracy_seen", 100)):.1f}', fitted(runs),
            prior_tv(runs), f'{runs[0].steps} × {len(runs)}']


def curve_lines(found):
    lines = []
    for task, curve in found.items():
        for frac in sorted({frac for by_frac in curve.values() for frac in by_frac}):
            for arm, by_frac in curve.items():
                if frac in by_frac:
                    runs = by_frac[frac]
                    lines.append([task, f'{100 * frac:g} %', arm, *arithmetic_outcome(runs),
                                  of_paper(runs[0].row, 'arithmetic')])
    return lines


def needed(by_frac, level):
    """('', the share of pairs at which an arm has `level` exact matches), means over the seeds,
    taken as linear in the logarithm of the share; ('<' or '>', the end of what was measured)."""
    points = [(frac, mean(values(runs, 'sequence_accuracy')))
              for frac, runs in sorted(by_frac.items())]
    if points[0][1] > level:
        return '<', points[0][0]
    for (f0, low), (f1, high) in zip(points, points[1:]):
        if low <= level <= high:
            return '', f0 if low == level else f0 * (f1 / f0) ** ((level - low) / (high - low))
    return '>', points[-1][0]


def needed_lines(found):
    lines = []
    for task, curve in found.items():
        for arm, by_frac in curve.items():
            if 'default' in curve and len(by_frac) > 1:
                cells = [needed_cell(by_frac, curve['default'], level, arm) for level in (0.5, 0.9)]
                lines.append([task, arm, *cells])
    return lines


def needed_cell(by_frac, default, level, arm):
    sign, share = needed(by_frac, level)
    default_sign, default_share = needed(default, level)
    cell = f'{sign}{100 * share:.2g} %'
    if arm == 'default' or default_sign or sign == '>':
        return cell
    return f'{cell},{" more than" if sign else ""} {default_share / share:.1f} times less'


# -------------------------------------------------------------------- images and language

IMAGES = ('task', 'images', 'arm', 'top-1 %', 'each seed', 'half-way', 'test loss',
          'training images %', 'prior_tv', 'epochs × seeds')


# Whose difference answers a question.
IMAGE_PAIRS = (('mask', 'default'), ('mask-mimetic-v', 'default-mimetic-v'),
               ('mask-mimetic-v', 'mimetic'), ('mimetic', 'default-mimetic-v'),
               ('impulse', 'default-learned'), ('mimetic', 'impulse'),
               ('default-mimetic-v', 'default'), ('default-learned', 'default'))


def images(folder):
    found = rows('images', folder=folder)
    yield '**Images** (`bash run_all.sh images`)\n'
    yield from table(IMAGES, [images_line(*row) for row in by_arm(found)])
    compared = {(task, *pair): difference(found, task, *pair)
                for task in tasks.IMAGES for pair in IMAGE_PAIRS}
    lines = [[task, f'{arm} − {other}', *gain] for (task, arm, other), gain in compared.items()
             if gain]
    if lines:
        yield '**Differences** in points of top-1; the standard error is over the test images\n'
        yield from table(['task', 'arms', 'difference', 'each seed'], lines)
    for prefix, title in IMAGE_TABLES.items():
        found = by_arm(rows('images', prefix, folder))
        if found:
            yield f'**{title}**\n'
            yield from table([*IMAGES, 'paper'],
                             [[*images_line(*row), of_paper(row[2][0].row, 'images')]
                              for row in found])


IMAGE_TABLES = {'earlier': 'An earlier setting: 12 epochs, a fifth of CIFAR-10',
                'epoch': 'One epoch, without RandAugment and with it',
                'paper': "At the paper's size"}


def difference(found, task, arm, other):
    """Mean difference ± its standard error, and that of each seed, of the seeds of both rows.

    Both are asked the same images: the error is that of the mean over them of the difference. None
    without common seeds; earlier runs, which do not say which images are right, do not count.
    """
    of_arm, of_other = ([run for run in found.get(f'{task}-{name}', [])
                         if 'right_images' in run.result] for name in (arm, other))
    pairs = [[*map(right_images, pair)] for pair in same_seeds(of_arm, of_other)]
    if not pairs:
        return None
    right, right_of_other = torch.tensor(pairs).unbind(1)                # [seeds, images]
    gain = 100. * (right - right_of_other)
    error = gain.mean(0).std().item() / gain.shape[1] ** 0.5
    return [f'{gain.mean():+.2f} ± {error:.2f}', ' '.join(f'{g:+.2f}' for g in gain.mean(1))]


def right_images(run):
    """[1 or 0 for each test image] of a run, as tasks.Images.final writes them; 0 in front where
    their number is not a multiple of 4."""
    digits = run.result['right_images']
    return [int(bit) for digit in digits for bit in f'{int(digit, 16):04b}']


def images_line(task, arm, runs):
    top1 = values(runs, 'accuracy', 100)
    examples = runs[0].result['training_examples']
    return [task, f'{examples:,}', arm, spread(top1), each(top1),
            spread(half_way(runs)), spread(values(runs, 'loss'), 3),
            f'{mean(values(runs, "accuracy_seen", 100)):.1f}', prior_tv(runs),
            f'{runs[0].settings.epochs} × {len(runs)}']


def half_way(runs):
    """Top-1 of each run at the evaluation nearest to half of its steps, %; of short runs none."""
    found = []
    for run in runs:
        distance = {abs(step - run.steps / 2): 100 * accuracy for step, accuracy
                    in zip(run.log['step'], run.log['accuracy']) if 0 < step < run.steps}
        if distance:
            found.append(distance[min(distance)])
    return found


LANGUAGE = ('task', 'arm', 'validation', 'each seed', 'gain over the default', 'test', 'each seed',
            'context × 2', 'context × 4', "step at the default's final", 'prior_tv',
            'steps × seeds')
LANGUAGE_TABLES = {
    '': 'Language (`bash run_all.sh language`): word-level perplexity',
    'short': 'Earlier, shorter runs: 500 steps without dropout'}


def language(folder):
    for prefix, title in LANGUAGE_TABLES.items():
        found = rows('language', prefix, folder)
        lines = [[task, arm, *language_outcome(runs, found.get(f'{task}-default', []))]
                 for task, arm, runs in by_arm(found)]
        if lines:
            yield f'**{title}**\n'
            yield from table(LANGUAGE, lines)


def language_outcome(runs, default):
    validation, test = values(runs, 'perplexity'), values(runs, 'perplexity_test')
    pairs = [(run.log, other.log) for run, other in same_seeds(runs, default)]
    gains = [other['perplexity'][-1] - log['perplexity'][-1] for log, other in pairs]
    longer = [spread(values(runs, f'perplexity_{times}')) for times in ('2x', '4x')]
    return [spread(validation), each(validation), '' if runs is default else spread(gains),
            spread(test), each(test), *longer,
            ' '.join(reached_at(log, other['perplexity'][-1]) for log, other in pairs),
            prior_tv(runs), f'{runs[0].steps} × {len(runs)}']


def reached_at(log, final):
    """The step of the first evaluation with this perplexity or a lower one; – for none."""
    return next((str(step) for step, perplexity in zip(log['step'], log['perplexity'])
                 if perplexity <= final), '–')


# ----------------------------------------------------------------------- theory and speed

def theory(folder):
    """What theory.py found: a table for each of its parts."""
    found = read_json(folder / 'theory.json')
    for part in found['parts']:
        lines = [[f'`{row["statement"]}`'.replace('|', '\\|'), *map(number, row['values']),
                  'yes' if row['ok'] else 'NO'] for row in part['rows']]
        header = [part['title'], *part['columns'], 'ok']
        yield from table([cell.replace('|', '\\|') for cell in header], lines)
    yield (f'{len(found["failed"])} failed. {found["seconds"]} s on {found["device"]}, torch '
           f'{found["torch"]}, --draws {found["draws"]} --seed {found["seed"]}')


def number(value):
    if isinstance(value, (int, str)):
        return str(value)
    return f'{value:.6f}' if 0.01 <= abs(value) <= 2 else f'{value:.3g}'


def speed(folder):
    """What bench.py measured."""
    found = read_json(folder / 'speed.json')
    rates = [f'{rates["fp32"]:.0f} and {rates["bf16"]:.0f} GFLOP/s with {threads} thread(s)'
             for threads, rates in found['product'].items()]
    yield (f'torch {found["torch"]}, {found["device"]}; a product of 2048 x 2048 in fp32 and bf16: '
           f'{", ".join(rates)}\n')
    yield from table(['task', '', 'threads', 'ms a step', 'tokens/s', 'GFLOP/s', 'of the product',
                      'with data ×', 'mask / default', "torch's layers / ours", 'peer / default',
                      'peer', 'largest costs'],
                     [[row['task'], row['dtype'], str(row['threads']), median(row, 1),
                       f'{row["tokens_per_second"]:,.0f}', f'{row["gflops_per_second"]:.0f}',
                       f'{row["share_of_product"]:.0%}', f'{row["with_data"]:.2f}',
                       f'{row["mask_over_default"]:.2f}', f'{row["torch_layers_over_ours"]:.2f}',
                       f'{row["peer_over_default"]:.2f}', row['peer'], row['costs']]
                      for row in found['tasks']])
    yield from table(['attention B, N, D, H', '', 'ms', 'MB for backward',
                      'MultiheadAttention / ours', 'fused kernel / ours'],
                     [[', '.join(map(str, row['shape'])), row['dtype'], median(row, 2),
                       f'{row["megabytes_for_backward"]:.1f}', f'{row["multihead_over_ours"]:.2f}',
                       f'{row["fused_over_ours"]:.2f}'] for row in found['attention']])
    yield from growth(found['growth'])
    yield from table(['seeds of parity2 in one batched model', 'time / that of single models'],
                     [[str(row['seeds']), f'{row["batched_over_single"]:.2f}']
                      for row in found['seeds']])


def growth(rows):
    """Memory of M, 16 bytes an entry (M, gradient, AdamW's two moments), and a layer's time."""
    measured = {row['N']: row for row in rows}
    lines = []
    for N in [*measured, 16_384, 131_072]:
        sizes = [f'{16e-6 * entries:,.3g}' for entries in (N * N, 3 * N * N, 3 * N)]
        row = measured.get(N)
        times = [f'{n:,.3g}' for n in row['milliseconds']] if row else [''] * 3
        saved = f'{row["megabytes_for_backward"][0]:,.3g}' if row else ''
        lines.append([f'{N:,}', *sizes, *times, saved])
    yield from table(['N', 'M [N, N]: MB', '[3, N, N]: MB', 'tied [3, N]: MB', '[N, N]: ms',
                      '[3, N, N]: ms', 'tied: ms', 'saved for backward, MB'], lines)


def median(row, digits):
    low, high = row['quartiles']
    return f'{row["milliseconds"]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]'


# ------------------------------------------------------------------ runs of this machine

def beside_recorded(folder, recorded=HERE):
    """The finished runs under the folder beside the recorded ones and the paper's numbers."""
    found = {section: [] for section in SECTIONS}
    for run in find_runs(folder):
        try:
            section, _, record = read_run(run, folder)
        except RunError as error:
            # A task of one's own, another name, an older version, a damaged file.
            print(f'report.py: {run} is left out: {error}', file=sys.stderr)
            continue
        if any(other.name == record.name for other in found[section]):
            raise RunError(f'{run} is a second {record.name} of {section}: give one of the folders')
        found[section].append(record)
    for section, here in found.items():
        check_rows(here)
        before = by_row(records(section, recorded)) if here else {}
        lines = [beside_line(runs, before.get(row, []), section)
                 for row, runs in by_row(here).items()]
        if lines:
            yield f'**{section}, {MEASURE[section][2]}**\n'
            yield from table(['row', 'this machine (seeds)', 'recorded (seeds)', 'paper'], lines)


def beside_line(runs, before, section):
    row = runs[0].row
    # Where this machine's settings are not the recorded ones, the row says what they are.
    other = changed(before[0], runs[0]) if before else {}
    settings = ''.join(f' {option} {value}' for option, value in other.items())
    cells = [f'{measured(of, section)} ({len(of)})' if of else '' for of in (runs, before)]
    return [row + settings, *cells, of_paper(row, section)]


# ----------------------------------------------------------------------------------- main

TABLES = {'headline': headline, 'first_run': first_run, 'findings': findings, 'knobs': knobs,
          'boolean': boolean, 'arithmetic': arithmetic, 'images': images, 'language': language,
          'theory': theory, 'speed': speed}

# Those that no file is named by.
OF_SEVERAL = {'headline', 'first_run', 'findings', 'knobs'}


def sections(folder=HERE, names=TABLES):
    """{section: its tables, Markdown} of what is recorded in the folder."""
    there = {path.stem for path in folder.glob('*.json*')} | OF_SEVERAL
    found = {}
    for name in names:
        if name in there:
            try:
                found[name] = '\n'.join(TABLES[name](folder)).strip('\n')
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise RunError(f'{folder / name}: what is recorded is damaged '
                               f'({type(error).__name__}: {error})') from None
    return found


def filled(text, tables):
    """The text with each table between its `<!-- report: SECTION -->` and `<!-- /report -->`."""
    if text.count('<!-- report: ') != text.count('<!-- /report -->'):
        raise RunError('a page has a table that does not end: no page is written')

    def fill(match):
        start, section, end = match.groups()
        if section not in tables:
            raise RunError(f'nothing is recorded for the table of {section}: no page is written')
        return start + tables[section] + '\n' + end
    return re.sub(r'(<!-- report: (\w+) -->\n).*?\n?(<!-- /report -->)', fill, text,
                  flags=re.DOTALL)


def write_pages():
    """Puts the tables into every page that has a place for them; after an error into none."""
    def read(path):
        return train.read(path, lambda p: p.read_text(encoding='utf-8'), 'take it from git again')
    pages = [HERE.parent / 'README.md', *sorted(HERE.glob('*.md'))]
    # Another process that records waits until this one has.
    with tasks.lock(HERE):
        tables = sections()
        before = {path: read(path) for path in pages}
        after = {path: filled(text, tables) for path, text in before.items()}
        for path in pages:
            if after[path] != before[path]:
                train.write_text(path, after[path])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('sections', nargs='*', metavar='SECTION', help=' '.join(TABLES))
    parser.add_argument('--write', action='store_true')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--rows', action='store_true')
    what.add_argument('--runs', type=Path, metavar='FOLDER')
    what.add_argument('--collect', type=Path, nargs='+', metavar='RUN')
    args = parser.parse_args(argv)
    for name in args.sections:
        if name not in TABLES:
            raise UsageError(f'no section {name}: {" ".join(TABLES)}')
    if args.sections and (args.write or args.runs or args.collect or args.rows):
        raise UsageError('a section is only for printing its tables: the options take none')
    if args.collect:
        print('\n'.join(collect(args.collect)))
    elif args.runs:
        print('\n'.join(beside_recorded(args.runs)).strip())
    elif args.rows:
        print('\n'.join(all_arguments()))
    elif not args.write:
        tables = sections(names=args.sections or TABLES)
        for name in args.sections:
            if name not in tables:
                raise RunError(f'nothing is recorded for {name}')
        print('\n\n'.join(tables.values()))
    if args.write:
        write_pages()


if __name__ == '__main__':
    sys.exit(train.command(main, 'report.py'))
