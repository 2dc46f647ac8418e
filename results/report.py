"""Prints the README's tables from the recorded runs:  python results/report.py [results/] [--figures]

A row is a set of runs that differ in the seed alone. Mean +- standard deviation (n - 1) over the seeds. --figures also
draws the figures into the same folders (needs matplotlib).
"""
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tasks import BOOLEAN, PAPER


def read(folder):
    """{row label: [(settings, result, log) for each seed]} of the finished runs in `folder`."""
    rows = defaultdict(list)
    for path in sorted(folder.glob('*/result.json')):
        log = [json.loads(line) for line in (path.parent / 'log.jsonl').read_text().splitlines()]
        config = json.loads((path.parent / 'config.json').read_text())
        rows[path.parent.name.rsplit('-s', 1)[0]].append((config['settings'], json.loads(path.read_text()), log))
    return rows


def spread(values, digits=2, scale=1):
    values = [scale * v for v in values]
    return f'{mean(values):.{digits}f}' + (f' ± {stdev(values):.{digits}f}' if len(values) > 1 else '')


def table(header, lines):
    yield '| ' + ' | '.join(header) + ' |'
    yield '|' + '---|' * len(header)
    yield from ('| ' + ' | '.join(line) + ' |' for line in lines)
    yield ''


def outcome(runs):
    """accuracy, unseen accuracy, loss, prediction on the hole, fitted, prior_tv, steps, n"""
    of = lambda key: [result[key] for _, result, _ in runs]
    return [spread(of('accuracy'), scale=100), spread(of('accuracy_unseen'), scale=100), spread(of('loss'), 4),
            spread(of('prediction_unseen')), f'{sum(of("fitted"))}/{len(runs)}',
            f'{mean(of("prior_tv_init")):.3f} → {mean(of("prior_tv_final")):.3f}', f'{runs[0][1]["steps"]} × {len(runs)}']


OUTCOME = ['accuracy %', 'unseen %', 'loss', 'on the hole', 'fitted', 'prior_tv', 'steps × seeds']


def boolean(results):
    rows = read(results / 'boolean')
    versions = sorted({(r['torch'], r['device']) for runs in rows.values() for _, r, _ in runs})
    yield f'**Every arm, every task** (`bash run_all.sh boolean`; torch and device: {", ".join(map(" ".join, versions))})\n'
    def lines():
        for label, runs in sorted(rows.items(), key=order):
            task, init = label.split('-', 1)
            known, p = runs[0][1], PAPER.get((task, init))
            yield [task, init, *outcome(runs), f'{known["mdi_accuracy"]:.1%}, {known["mdi_loss"]:g}',
                   ', loss '.join(f'{n:g}' for n in [100 * p['accuracy'], *([p['loss']] if 'loss' in p else [])]) if p else '']
    yield from table(['task', 'arm', *OUTCOME, 'MDI: accuracy, loss', 'paper'], lines())

    yield '**What training does to the prior**: relative change of M, W_Q, W_K, and prior_tv, unseen accuracy over the steps\n'
    def curve(runs):
        """prior_tv and unseen accuracy, means over the seeds, at the first three evaluations and the last."""
        points = list(zip(*(log for _, _, log in runs)))                           # [evaluations][seeds]
        return ' → '.join(f'step {rows[0]["step"]}: {mean(r["prior_tv"] for r in rows):.2f}, '
                          f'{mean(r["accuracy_unseen"] for r in rows):.0%}' for rows in points[:3] + points[-1:])
    def lines():
        for label, runs in sorted(rows.items(), key=order):
            change = [spread([r[f'change_{w}'] for _, r, _ in runs], 3) if f'change_{w}' in runs[0][1] else ''
                      for w in ('M', 'W_Q', 'W_K')]
            yield [*label.split('-', 1), *change, curve(runs)]
    yield from table(['task', 'arm', 'M', 'W_Q', 'W_K', 'prior_tv, unseen accuracy'], lines())

    for name, title in (('fresh', 'The mask on five seeds that no setting was chosen by'),
                        ('hole', 'parity2 on the hole (-,-), where no exchange of bits helps'),
                        ('ablation', 'Ablations on parity2; whatever the name does not say is as above')):
        yield f'**{title}**\n'
        yield from table(['run', *OUTCOME], ([label, *outcome(runs)] for label, runs in read(results / 'boolean' / name).items()))


def order(item):
    task, init = item[0].split('-', 1)
    return list(BOOLEAN).index(task), ['default', 'default-10x', 'qk-svd', 'qk-opt', 'mask'].index(init)


ARMS = ['default', 'qk-svd', 'qk-opt', 'mask']


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
    points = [(f, mean(r['sequence_accuracy'] for _, r, _ in of)) for f, of in sorted(runs.items())]
    for (f0, low), (f1, high) in zip(points, points[1:]):
        if low <= level <= high:
            return '', f0 * (f1 / f0) ** ((level - low) / (high - low))
    return ('<', points[0][0]) if points[0][1] > level else ('>', points[-1][0])


def arithmetic(results):
    def outcome(runs):
        of = lambda key: [result[key] for _, result, _ in runs]
        return [spread(of('sequence_accuracy'), scale=100), ' '.join(f'{100 * v:.2f}' for v in of('sequence_accuracy')),
                spread(of('digit_accuracy'), scale=100), f'{100 * mean(of("sequence_accuracy_seen")):.1f}',
                f'{sum(of("fitted"))}/{len(runs)}', f'{mean(of("prior_tv_init")):.3f} → {mean(of("prior_tv_final")):.3f}',
                f'{runs[0][1]["steps"]} × {len(runs)}']
    header = ['whole answer %', 'each seed', 'digits %', 'training pairs %', 'fitted', 'prior_tv', 'steps × seeds']
    yield '**Arithmetic, by the share of pairs that trains** (`bash run_all.sh arithmetic`; test: 10,000 other pairs)\n'
    for folder in ('.', 'weight-decay-3'):
        if not (results / 'arithmetic' / folder).exists():
            continue
        if folder != '.':
            yield '**The same with a weight decay of 3**, which the default gains most by\n'
        found = curves(results / 'arithmetic' / folder)
        def lines():
            for task, curve in found.items():
                for frac in sorted({f for arm in curve.values() for f in arm}):
                    for arm in [*ARMS, 'default-10x']:
                        if frac in curve[arm]:
                            paper = PAPER.get((task, arm), {})
                            yield [task, f'{100 * frac:g} %', arm, *outcome(curve[arm][frac]),
                                   f'{100 * paper["sequence_accuracy"]:g}' if paper.get('frac') == frac else '']
        yield from table(['task', 'pairs', 'arm', *header, 'paper'], lines())
        yield '**Share of pairs needed for so many whole answers**, interpolated, and how much less than the default\n'
        def lines():
            for task, curve in found.items():
                for arm in filter(curve.get, ARMS if curve['default'] else ()):
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


def pyplot():
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    return pyplot


def arithmetic_figure(results):
    plt = pyplot()
    found = [(f'{task}{note}', curve) for folder, note in (('.', ''), ('weight-decay-3', ', weight decay 3'))
             for task, curve in curves(results / 'arithmetic' / folder).items()]
    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 4), squeeze=False)
    for axis, (task, curve) in zip(axes[0], found):
        for i, arm in enumerate(ARMS):
            if not curve[arm]:
                continue
            points = [(100 * f, [100 * r['sequence_accuracy'] for _, r, _ in runs]) for f, runs in sorted(curve[arm].items())]
            axis.plot([f for f, _ in points], [mean(values) for _, values in points], f'C{i}-', label=arm)
            for f, values in points:
                axis.plot([f] * len(values), values, f'C{i}.')
        axis.set(xscale='log', xlabel='training pairs, % of all', ylabel='whole answer right, %', title=task)
        fracs = sorted({100 * f for runs in curve.values() for f in runs})
        axis.set_xticks(fracs, [f'{f:g}' for f in fracs])
        axis.minorticks_off()
        axis.legend()
    figure.tight_layout()
    figure.savefig(results / 'arithmetic' / 'curve.png', dpi=110)


def vision(results):
    yield '**Vision** (`bash run_all.sh vision`): lossy subsets, see above; not comparable with the paper\'s numbers\n'
    def lines():
        for label, runs in read(results / 'vision').items():
            of = lambda key: [result[key] for _, result, _ in runs]
            half = [log[len(log) // 2]['accuracy'] for _, _, log in runs]
            yield [*label.split('-', 1), spread(of('accuracy'), scale=100), ' '.join(f'{100 * v:.2f}' for v in of('accuracy')),
                   spread(half, scale=100), spread(of('loss'), 3), f'{100 * mean(of("accuracy_seen")):.1f}',
                   f'{mean(of("prior_tv_init")):.3f} → {mean(of("prior_tv_final")):.3f}', f'{runs[0][0]["epochs"]} × {len(runs)}']
    yield from table(['task', 'arm', 'top-1 %', 'each seed', 'half-way', 'test loss', 'training images %', 'prior_tv', 'epochs × seeds'],
                     lines())


def language(results):
    yield '**Language** (`bash run_all.sh language`): word-level perplexity\n'
    rows = read(results / 'language')
    def lines():
        for label, runs in rows.items():
            task, arm = label.split('-', 1)
            final = {r['seed']: r['perplexity'] for _, r, _ in rows.get(f'{task}-default', [])}
            reached = [next((row['step'] for row in log if row['perplexity'] <= final.get(r['seed'], 0)), None) for _, r, log in runs]
            of = lambda key: [r[key] for _, r, _ in runs if key in r]
            yield [task, arm, spread(of('perplexity')), ' '.join(f'{v:.2f}' for v in of('perplexity')), spread(of('perplexity_test')),
                   ' '.join(map(str, reached)) if all(reached) else '', spread(of('perplexity_2x')) if of('perplexity_2x') else '',
                   spread(of('perplexity_4x')) if of('perplexity_4x') else '',
                   f'{mean(of("prior_tv_init")):.3f} → {mean(of("prior_tv_final")):.3f}', f'{runs[0][1]["steps"]} × {len(runs)}']
    yield from table(['task', 'arm', 'validation', 'each seed', 'test', "step at the default's final", 'context × 2', 'context × 4', 'prior_tv',
                      'steps × seeds'], lines())


SECTIONS = {'boolean': boolean, 'arithmetic': arithmetic, 'vision': vision, 'language': language}
def vision_figure(results):
    plt = pyplot()
    rows = read(results / 'vision')
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, key, title in zip(axes, ('accuracy', 'prior_tv'), ('CIFAR-10 subset: top-1 on the test images', 'prior_tv')):
        for label, runs in rows.items():
            if label.startswith('cifar10-'):
                points = list(zip(*(log for _, _, log in runs)))
                epochs = [runs[0][0]['epochs'] * p[0]['step'] / runs[0][1]['steps'] for p in points]
                axis.plot(epochs, [mean(r[key] for r in p) for p in points], label=label[8:])
        axis.set(xlabel='epoch', title=title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(results / 'vision' / 'curves.png', dpi=110)


FIGURES = {'arithmetic': arithmetic_figure, 'vision': vision_figure}


def main(results, figures):
    print('\n\n'.join('\n'.join(section(results)).strip() for name, section in SECTIONS.items() if (results / name).exists()))
    for name, figure in FIGURES.items():
        if figures and (results / name).exists():
            try:
                figure(results)
            except ImportError:
                sys.exit('report.py: the figures need matplotlib: pip install matplotlib')


if __name__ == '__main__':
    folders = [arg for arg in sys.argv[1:] if arg != '--figures']
    main(Path(folders[0]) if folders else Path(__file__).parent, '--figures' in sys.argv)
