"""Prints the README's tables from the recorded runs:  python results/report.py [results/]

A row is a set of runs that differ in the seed alone. Mean +- standard deviation (n - 1) over the seeds.
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


def main(results):
    if (results / 'boolean').exists():
        print('\n'.join(boolean(results)).strip())


if __name__ == '__main__':
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
