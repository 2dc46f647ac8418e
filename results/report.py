"""Prints the tables from the recorded runs:  python results/report.py [results/] [--write] [--figures]

A row is a set of runs that differ in the seed alone. Mean +- standard deviation (n - 1) over the seeds. --write puts the tables
where README.md and results/README.md say `<!-- report: SECTION -->`; --figures draws the figures (needs matplotlib).
"""
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import theory
import train
from tasks import BOOLEAN, PAPER, Parser, RunError, UsageError, command, write, write_text

ARMS = ['default', 'default-10x', 'mimetic', 'impulse', 'qk-svd', 'qk-opt', 'alibi', 'mask-shared', 'mask']     # columns and rows


def load(path, parse=json.loads):
    return train.read(path, lambda p: parse(p.read_text(encoding='utf-8')), 'remove it, and what it belongs to')


def read(folder):
    """{row label: [(settings, result, log) for each seed]} of the finished runs in `folder`, which are named LABEL-sSEED."""
    rows = defaultdict(list)
    for run in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (run / 'result.json').exists():
            continue
        label, _, seed = run.name.rpartition('-s')
        settings, result = load(run / 'config.json')['settings'], load(run / 'result.json')
        if seed != str(result['seed']):
            raise RunError(f'{run} is of seed {result["seed"]}, and its name does not say so: rename or remove it')
        if label in rows:
            other = sorted(train.differing(train.describing(train.Settings(**settings)), rows[label][0][0]).keys() - {'seed'})
            if other:
                raise RunError(f'{run} differs from the seeds before it in {", ".join(map(train.option, other))}: remove what is not of this row')
        rows[label].append((settings, result, load(run / 'log.jsonl', lambda text: [*map(json.loads, text.splitlines())])))
    return rows


def values(runs, key, scale=1):
    found = [result[key] for _, result, _ in runs if key in result]
    return found if scale == 1 else [scale * value for value in found]


def spread(numbers, digits=2):
    """mean ± standard deviation; nothing for no numbers"""
    return '' if not numbers else f'{mean(numbers):.{digits}f}' + (f' ± {stdev(numbers):.{digits}f}' if len(numbers) > 1 else '')


def each(numbers):
    return ' '.join(f'{n:.2f}' for n in numbers)


def prior_tv(runs, digits=3):
    return f'{mean(values(runs, "prior_tv_init")):.{digits}f} → {mean(values(runs, "prior_tv_final")):.{digits}f}'


def fitted(runs):
    return f'{sum(values(runs, "fitted"))}/{len(runs)}'


def steps(runs, of='steps'):
    return f'{runs[0][1].get(of) or runs[0][0][of]} × {len(runs)}'


def table(header, lines):
    lines = list(lines)
    if lines:
        yield '| ' + ' | '.join(header) + ' |'
        yield '|' + '---|' * len(header)
        yield from ('| ' + ' | '.join(line) + ' |' for line in lines)
        yield ''


def by_arm(rows):
    """(task, arm, runs) of rows labelled TASK-ARM, in the order of ARMS."""
    split = [(*label.split('-', 1), runs) for label, runs in rows.items()]
    return sorted(split, key=lambda row: ((list(BOOLEAN) + [row[0]]).index(row[0]), row[0], (ARMS + [row[1]]).index(row[1]), row[1]))


# ------------------------------------------------------------------------------------------------------------ the headline

HEADLINE = [  # (what, folder, the runs' label, metric, scale, task and metric in the paper)
    *((f'{task}, accuracy %', 'boolean', task, 'accuracy', 100, task) for task in ('parity2', 'maj3', 'cyclic3')),
    *((f'add3 from {100 * frac:g} % of the pairs, whole answers %', 'arithmetic', f'add3-{frac}', 'sequence_accuracy', 100,
       'add3' if frac == 0.004 else None) for frac in (0.0005, 0.001, 0.004)),
    ('mul3 from 3 % of the pairs, whole answers %', 'arithmetic', 'mul3-0.03', 'sequence_accuracy', 100, 'mul3'),
    ('CIFAR-10 ({:,} images), top-1 %', 'vision', 'cifar10', 'accuracy', 100, None),
    ('ImageNet-100 ({:,} images), top-1 %', 'vision', 'imagenet100', 'accuracy', 100, None),
    ('WikiText-2 ({:,} words), test perplexity', 'language', 'wikitext2', 'perplexity_test', 1, None),
    ('TinyStories ({:,} words), test perplexity', 'language', 'tinystories', 'perplexity_test', 1, None)]
COLUMNS = ['default', 'mimetic', 'impulse', 'qk-svd', 'qk-opt', 'alibi', 'mask']


def headline(results):
    folders = {folder: read(results / folder) for _, folder, *_ in HEADLINE}
    rows = [(row, {arm: folders[row[1]][f'{row[2]}-{arm}'] for arm in COLUMNS if f'{row[2]}-{arm}' in folders[row[1]]}) for row in HEADLINE]
    rows = [(row, arms) for row, arms in rows if arms]
    if not rows:
        return
    def label(row, arms):
        return row[0].format(next(iter(arms.values()))[0][1].get('training_examples'))
    def lines():
        for row, arms in rows:
            _, _, _, key, scale, task = row
            seeds = sorted({len(runs) for runs in arms.values()})
            paper = [PAPER.get((task, arm), {}).get(key) for arm in ('default', 'mask')]
            cells = []
            for arm in COLUMNS:
                runs = arms.get(arm, ())
                unfitted = sum(fit is False for fit in values(runs, 'fitted')) if row[1] != 'vision' else 0            # no image is seen twice alike
                cells.append(spread(values(runs, key, scale)) + (f' ({unfitted}/{len(runs)} not fitted)' if unfitted else ''))
            yield [label(row, arms), *cells, '–'.join(map(str, dict.fromkeys((seeds[0], seeds[-1])))),
                   ', '.join('?' if p is None else f'{scale * p:g}' for p in paper) if any(paper) else '']
    yield from table(['', *COLUMNS, 'seeds', 'paper: default, mask'], lines())
    yield 'prior_tv, how far the attention is from the prior (0: the prior holds, 1: nothing is left of it), before → after training:\n'
    yield from table(['', *COLUMNS], ([label(row, arms).rsplit(', ', 1)[0], *(prior_tv(arms[arm], 2) if arm in arms else '' for arm in COLUMNS)]
                                      for row, arms in rows))


# ----------------------------------------------------------------------------------------------------------------- boolean

OUTCOME = ['accuracy %', 'unseen %', 'loss', 'on the hole', 'fitted', 'prior_tv', 'steps × seeds']


def boolean(results):
    rows = read(results / 'boolean')
    def outcome(runs):
        return [spread(values(runs, 'accuracy', 100)), spread(values(runs, 'accuracy_unseen', 100)), spread(values(runs, 'loss'), 4),
                spread(values(runs, 'prediction_unseen')), fitted(runs), prior_tv(runs), steps(runs)]
    versions = sorted({(r['torch'], r['device']) for runs in rows.values() for _, r, _ in runs})
    yield f'**Every arm, every task** (`bash run_all.sh boolean`; torch and device: {", ".join(map(" ".join, versions))})\n'
    def lines():
        for task, arm, runs in by_arm(rows):
            known, p = runs[0][1], PAPER.get((task, arm))
            yield [task, arm, *outcome(runs), f'{known["mdi_accuracy"]:.1%}, {known["mdi_loss"]:g}',
                   ', loss '.join(f'{n:g}' for n in [100 * p['accuracy'], *([p['loss']] if 'loss' in p else [])]) if p else '']
    yield from table(['task', 'arm', *OUTCOME, 'MDI: accuracy, loss', 'paper'], lines())

    yield '**What training does to the prior**: relative change of M, W_Q, W_K, and prior_tv, unseen accuracy over the steps\n'
    def curve(runs):
        """prior_tv and unseen accuracy, means over the seeds, at the first three evaluations and the last."""
        points = list(zip(*(log for _, _, log in runs)))                           # [evaluations][seeds]
        return ' → '.join(f'step {rows[0]["step"]}: {mean(r["prior_tv"] for r in rows):.2f}, '
                          f'{mean(r["accuracy_unseen"] for r in rows):.0%}' for rows in points[:3] + points[3:][-1:])
    yield from table(['task', 'arm', 'M', 'W_Q', 'W_K', 'prior_tv, unseen accuracy'],
                     ([task, arm, *(spread(values(runs, f'change_{w}'), 3) for w in ('M', 'W_Q', 'W_K')), curve(runs)]
                      for task, arm, runs in by_arm(rows)))
    for name, title in (('fresh', 'The mask on five seeds that no setting was chosen by'),
                        ('hole', 'parity2 on the hole (-,-), where no exchange of bits helps'),
                        ('ablation', 'Ablations on parity2; whatever the name does not say is as above')):
        yield f'**{title}**\n'
        yield from table(['run', *OUTCOME], ([label, *outcome(runs)] for label, runs in read(results / 'boolean' / name).items()))


# -------------------------------------------------------------------------------------------------------------- arithmetic

def curves(folder):
    """{task: {arm: {frac: runs}}} of the data-efficiency runs, named TASK-FRAC-ARM."""
    curves = defaultdict(lambda: defaultdict(dict))
    for label, runs in read(folder).items():
        task, frac, arm = label.split('-', 2)
        curves[task][arm][float(frac)] = runs
    return curves


def needed(runs, level):
    """('', the share of pairs at which an arm has `level` whole answers right); ('<' or '>', the smallest or largest measured).

    Means over the seeds; between two measured shares the accuracy is taken as linear in the log of the share.
    """
    points = [(f, mean(values(of, 'sequence_accuracy'))) for f, of in sorted(runs.items())]
    for (f0, low), (f1, high) in zip(points, points[1:]):
        if low <= level <= high:
            return '', f0 * (f1 / f0) ** ((level - low) / (high - low))
    return ('<', points[0][0]) if points[0][1] > level else ('>', points[-1][0])


def arithmetic(results):
    def outcome(runs):
        right = values(runs, 'sequence_accuracy', 100)
        return [spread(right), each(right), spread(values(runs, 'digit_accuracy', 100)),
                f'{mean(values(runs, "sequence_accuracy_seen", 100)):.1f}', fitted(runs), prior_tv(runs), steps(runs)]
    header = ['whole answer %', 'each seed', 'digits %', 'training pairs %', 'fitted', 'prior_tv', 'steps × seeds']
    yield '**Arithmetic, by the share of pairs that trains** (`bash run_all.sh arithmetic`; test: 10,000 other pairs)\n'
    for folder in ('.', 'weight-decay-3'):
        if not (results / 'arithmetic' / folder).exists():
            continue
        if folder != '.':
            yield '**The same with a weight decay of 3**\n'
        found = curves(results / 'arithmetic' / folder)
        def lines():
            for task, curve in found.items():
                for frac in sorted({f for arm in curve.values() for f in arm}):
                    for arm in ARMS:
                        if frac in curve[arm]:
                            paper = PAPER.get((task, arm), {})
                            yield [task, f'{100 * frac:g} %', arm, *outcome(curve[arm][frac]),
                                   f'{100 * paper["sequence_accuracy"]:g}' if paper.get('frac') == frac else '']
        yield from table(['task', 'pairs', 'arm', *header, 'paper'], lines())
        yield '**Share of pairs needed for so many whole answers**, interpolated, and how much less than the default\n'
        def lines():
            for task, curve in found.items():
                for arm in ARMS:
                    if not curve['default'] or len(curve[arm]) < 2:
                        continue
                    row = [task, arm]
                    for level in (0.5, 0.9):
                        (sign, share), (unmeasured, default) = needed(curve[arm], level), needed(curve['default'], level)
                        less = f', {default / share:.1f} times less' if arm != 'default' and not unmeasured and sign != '>' else ''
                        row.append(f'{sign}{100 * share:.2g} %' + (less.replace(',', ', more than') if sign else less))
                    yield row
        yield from table(['task', 'arm', '50 %', '90 %'], lines())
    if (results / 'arithmetic' / 'ablation').exists():
        yield '**What in the prior does the work, and longer operands** (at an equal number of pairs)\n'
        yield from table(['run', *header], ([label, *outcome(runs)] for label, runs in read(results / 'arithmetic' / 'ablation').items()))


def arithmetic_figure(plt, results):
    found = [(f'{task}{note}', curve) for folder, note in (('.', ''), ('weight-decay-3', ', weight decay 3'))
             for task, curve in curves(results / 'arithmetic' / folder).items()]
    if not found:
        return
    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 4), squeeze=False)
    for axis, (task, curve) in zip(axes[0], found):
        for i, arm in enumerate(['default', 'qk-svd', 'qk-opt', 'mask']):
            if not curve[arm]:
                continue
            points = [(100 * f, values(runs, 'sequence_accuracy', 100)) for f, runs in sorted(curve[arm].items())]
            axis.plot([f for f, _ in points], [mean(right) for _, right in points], f'C{i}-', label=arm)
            for f, right in points:
                axis.plot([f] * len(right), right, f'C{i}.')
        axis.set(xscale='log', xlabel='training pairs, % of all', ylabel='whole answer right, %', title=task)
        fracs = sorted({100 * f for runs in curve.values() for f in runs})
        axis.set_xticks(fracs, [f'{f:g}' for f in fracs])
        axis.minorticks_off()
        axis.legend()
    draw(figure, results / 'arithmetic' / 'curve.png')


# ------------------------------------------------------------------------------------------------------ vision and language

def vision(results):
    yield '**Vision** (`bash run_all.sh vision`)\n'
    def lines(folder, paper=False):
        for task, arm, runs in by_arm(read(folder)):
            right = values(runs, 'accuracy', 100)
            half = [100 * min(log, key=lambda row: abs(row['step'] - result['steps'] / 2))['accuracy'] for _, result, log in runs]
            yield [task, f'{runs[0][1]["training_examples"]:,}', arm, spread(right), each(right), spread(half), spread(values(runs, 'loss'), 3),
                   f'{mean(values(runs, "accuracy_seen", 100)):.1f}', prior_tv(runs), steps(runs, 'epochs'),
                   *([spread([100 * PAPER[task, arm]['accuracy']] if (task, arm) in PAPER else [])] if paper else [])]
    header = ['task', 'images', 'arm', 'top-1 %', 'each seed', 'half-way', 'test loss', 'training images %', 'prior_tv', 'epochs × seeds']
    yield from table(header, lines(results / 'vision'))
    if (results / 'vision' / 'paper').exists():
        yield '**At the paper\'s size**\n'
        yield from table([*header, 'paper'], lines(results / 'vision' / 'paper', True))


def language(results):
    yield '**Language** (`bash run_all.sh language`): word-level perplexity\n'
    rows = read(results / 'language')
    def lines():
        for task, arm, runs in by_arm(rows):
            final = {r['seed']: r['perplexity'] for _, r, _ in rows.get(f'{task}-default', [])}
            reached = [next((row['step'] for row in log if row['perplexity'] <= final.get(r['seed'], 0)), None) for _, r, log in runs]
            valid = values(runs, 'perplexity')
            yield [task, arm, spread(valid), each(valid), *(spread(values(runs, f'perplexity_{k}')) for k in ('test', '2x', '4x')),
                   ' '.join(map(str, reached)) if all(reached) else '', prior_tv(runs), steps(runs)]
    yield from table(['task', 'arm', 'validation', 'each seed', 'test', 'context × 2', 'context × 4', "step at the default's final",
                      'prior_tv', 'steps × seeds'], lines())


# ------------------------------------------------------------------------------------------------------------------- speed

def bench_tables(found):
    """What results/bench.py measured."""
    yield f'torch {found["torch"]}, {found["device"]}, {found["threads"]} threads; a product of 2048 x 2048: ' + ', '.join(
        f'{rate:.0f} GFLOP/s in {dtype}' for dtype, rate in found['product'].items()) + '\n'
    yield from table(['task', '', 'ms a step', 'steps/s', 'tokens/s', 'GFLOP/s', 'of the product', 'with data ×', 'mask / default',
                      "torch's layers / ours", 'largest costs'], (
        [r['task'], r['dtype'], f'{r["milliseconds"]:.1f} [{r["quartiles"][0]:.1f}, {r["quartiles"][1]:.1f}]', f'{r["steps_per_second"]:.1f}',
         f'{r["tokens_per_second"]:,.0f}', f'{r["gflops_per_second"]:.0f}', f'{r["share_of_product"]:.0%}', f'{r["with_data"]:.2f}',
         f'{r["mask_over_default"]:.2f}', f'{r["torch_layers_over_ours"]:.2f}', r['costs']] for r in found['tasks']))
    yield from table(['attention B, N, D, H', '', 'ms', 'MB for backward', 'MultiheadAttention / ours', 'fused kernel / ours'], (
        [', '.join(map(str, r['shape'])), r['dtype'], f'{r["milliseconds"]:.2f} [{r["quartiles"][0]:.2f}, {r["quartiles"][1]:.2f}]',
         f'{r["megabytes_for_backward"]:.1f}', f'{r["multihead_over_ours"]:.2f}', f'{r["fused_over_ours"]:.2f}'] for r in found['attention']))
    yield from table(['seeds of parity2 in one batched model', 'time / that of single models'],
                     ([str(r['seeds']), f'{r["batched_over_single"]:.2f}'] for r in found['seeds']))


# ----------------------------------------------------------------------------------------------------------------- figures

def draw(figure, path):
    figure.tight_layout()
    write(path, lambda p: figure.savefig(p, format='png', dpi=110))


def training_figure(plt, results, section, tasks, metric):
    """Above the metric over the steps, below prior_tv; a column for each task; means over the seeds."""
    rows = by_arm(read(results / section))
    tasks = [task for task in tasks if any(task == row[0] for row in rows)]
    if not tasks:
        return
    figure, axes = plt.subplots(2, len(tasks), figsize=(5 * len(tasks), 7), squeeze=False)
    for task, arm, runs in rows:
        of = arm.removesuffix('-mimetic-v')                                        # dashed
        if task in tasks and of in ARMS and arm != 'default-10x':
            points = list(zip(*(log for _, _, log in runs)))                       # [evaluations][seeds]
            for axis, key in zip(axes[:, tasks.index(task)], (metric, 'prior_tv')):
                shown = points[1:] if key == 'perplexity' else points              # the vocabulary's size at step 0 would hide the rest
                axis.plot([p[0]['step'] for p in shown], [mean(r[key] for r in p) for p in shown],
                          f'C{ARMS.index(of)}{"-" if of == arm else "--"}', label=arm)
                axis.set(xlabel='step', ylabel=key, title=task, yscale='log' if key == 'perplexity' else 'linear')
    for axis in axes[0]:
        axis.legend()
    draw(figure, results / section / 'training.png')


def theory_figure(plt, results):
    """The size of the loss's gradient as features and weights grow by a, the row of attention held fixed (theory.py, part 4)."""
    figure, axes = plt.subplots(1, len(theory.SCALINGS), figsize=(5 * len(theory.SCALINGS), 4), sharey=True)
    for axis, (title, powers, _) in zip(axes, theory.SCALINGS):
        found = theory.gradients_over_a(0, 'cpu', powers)
        for place in theory.PLACES:
            axis.loglog([math.exp(t) for t in theory.LOG_A], [z[place].median().item() for z in found], label=place)
        axis.set(xlabel='a', ylabel='||dl/d.||, median of 64 rows', title=title)
        axis.legend()
    draw(figure, results / 'theory' / 'scaling.png')


FIGURES = {  # section: how to draw it
    'boolean': lambda plt, results: training_figure(plt, results, 'boolean', ['parity2', 'maj3', 'cyclic3'], 'accuracy_unseen'),
    'theory': theory_figure,
    'arithmetic': arithmetic_figure,
    'vision': lambda plt, results: training_figure(plt, results, 'vision', ['cifar10', 'imagenet100'], 'accuracy'),
    'language': lambda plt, results: training_figure(plt, results, 'language', ['wikitext2', 'tinystories'], 'perplexity'),
}


# -------------------------------------------------------------------------------------------------------------------- main

SECTIONS = {'boolean': boolean, 'arithmetic': arithmetic, 'vision': vision, 'language': language,
            'bench': lambda results: bench_tables(load(path)) if (path := results / 'bench' / 'bench.json').exists() else ()}


def sections(results):
    """{section: its tables, Markdown} of what is recorded."""
    found = {name: section for name, section in SECTIONS.items() if (results / name).exists()}
    tables = {}
    for name, section in ({'headline': headline} | found).items():
        try:
            tables[name] = '\n'.join(section(results)).strip()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:        # a file that no run wrote
            raise RunError(f'{results}, {name}: a run is not named as in run_all.sh, or incomplete ({type(error).__name__}: {error})') from None
    return tables


def filled(text, tables):
    """The text with the tables in place of what stands between `<!-- report: SECTION -->` and `<!-- /report -->`."""
    def fill(found):
        start, section, end = found.groups()
        if section not in tables:
            raise RunError(f'a README has a table of {section}, and there is no {HERE / section} to make it from: nothing is written')
        return start + tables[section] + '\n' + end
    return re.sub(r'(<!-- report: (\w+) -->\n).*?\n?(<!-- /report -->)', fill, text, flags=re.DOTALL)


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument('results', nargs='?', type=Path, default=HERE)
    parser.add_argument('--write', action='store_true')
    parser.add_argument('--figures', action='store_true')
    args = parser.parse_args(argv)
    if not args.results.is_dir():
        raise UsageError(f'{args.results} is no folder')
    if args.write and args.results.resolve() != HERE:
        raise UsageError(f'--write puts the tables of {HERE} into the READMEs, not those of {args.results}')
    tables = sections(args.results)
    if not any(tables.values()) and not (args.results / 'theory').exists():        # whose table theory.py prints
        print(f'report.py: no finished runs in {args.results}, as run_all.sh records them', file=sys.stderr)
    print('\n\n'.join(tables.values()))
    readmes = (HERE.parent / 'README.md', HERE / 'README.md') if args.write else ()
    for path, text in [(path, filled(path.read_text(encoding='utf-8'), tables)) for path in readmes]:      # both, or none
        write_text(path, text)
    if args.figures:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise RunError('the figures need matplotlib: pip install matplotlib') from None
        for name, figure in FIGURES.items():
            if (args.results / name).exists():
                figure(pyplot, args.results)


if __name__ == '__main__':
    sys.exit(command(main, 'report.py'))
