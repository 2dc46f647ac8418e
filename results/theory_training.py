"""Beside theory.py's five parts: do the gradients that Theorem 1 bounds explain what washes out? parity2, SGD and Adam, the arms that hold the prior.

    python results/theory_training.py       # six runs, some minutes; writes results/theory/training.{md,json,png}

Each run is train.py's, but for the optimiser. The model's attention depends on three parts: M, the weights W_Q and W_K, and
the rest (embeddings, norms, MLPs: the inputs x of q = x W_Q and k = x W_K). `moved by` a part: mean TV on the probe batch between
the attention at step 0 and the same with that part alone taken from the trained model. `gradient`: norm over all layers.
"""
import copy
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tasks                                                                       # before torch, whose warning it silences
import torch

import train
from maskprior import layer_inputs, prior_tv, prior_weights, relative_change
from report import draw
from theory import diam, table, tv

OPTIMISERS = {'SGD': (0.03, 2000), 'Adam': (0.001, 1000)}  # learning rate, steps; SGD diverges at 0.1 (measured)
ARMS = {'mask': '-', 'qk-svd': '--', 'qk-opt': ':'}  # line style in the figure
WEIGHTS = {'M': 'attn.M', 'W_Q': 'attn.q.weight', 'W_K': 'attn.k.weight'}
PARTS = {'M': (WEIGHTS['M'],), 'QK': (WEIGHTS['W_Q'], WEIGHTS['W_K'])}


@torch.no_grad()
def moved(start, model, part, x):
    """Mean TV between the attention of `start` and of `start` with `part` (M, QK, rest or all) from `model`, on x [B, N]."""
    def inside(name):
        owner = next((p for p, ends in PARTS.items() if name.endswith(ends)), 'rest')
        return part in ('all', owner)
    mixed = copy.deepcopy(start)
    mixed.load_state_dict({n: z for n, z in model.state_dict().items() if inside(n)}, strict=False)
    pairs = zip(layer_inputs(start, x), layer_inputs(mixed, x))
    return torch.stack([tv(a.weights(y), b.weights(z)).mean() for (a, y), (b, z) in pairs]).mean().item()


@torch.no_grad()
def feature_norms(model, x):
    """Mean over layers, heads, rows and inputs of what Theorem 1's bounds carry: ||q||/sqrt(d) and diam(k)/sqrt(d)."""
    q, k = [], []
    for attn, X in layer_inputs(model, x):
        heads = [attn.split(f(X)) for f in (attn.q, attn.k)]  # [B, H, N, d]
        q.append(heads[0].norm(dim=-1).mean() / heads[0].shape[-1] ** 0.5)
        k.append(diam(heads[1].flatten(0, 1)).mean() / heads[1].shape[-1] ** 0.5)
    return {'||q||/sqrt(d)': torch.stack(q).mean().item(), 'diam(k)/sqrt(d)': torch.stack(k).mean().item()}


def run(optimiser, arm, seed, device, points=24):
    """{quantity: [(step, value)]} of one training."""
    lr, steps = OPTIMISERS[optimiser]
    settings = train.parse(['--task', 'parity2', '--init', arm, '--seed', str(seed), '--device', device,
                            '--lr', str(lr), '--steps', str(steps)])
    task, model, target = train.build(settings)
    start, initial, log = copy.deepcopy(model), prior_weights(model), {}
    opt = torch.optim.SGD(model.parameters(), settings.lr) if optimiser == 'SGD' else train.make_optimiser(model, settings)
    generator = torch.Generator().manual_seed(seed)

    def add(step, values):
        for name, y in values.items():
            log.setdefault(name, []).append((step, float(f'{y:.4g}')))

    for step in range(steps + 1):
        if step % math.ceil(steps / points) == 0 or step == steps:
            add(step, {'prior_tv': prior_tv(model, target, task.probe)} | feature_norms(model, task.probe))
            add(step, {f'change {n}': y for n, y in relative_change(model, initial).items()})
            add(step, {f'moved by {n}': moved(start, model, n, task.probe) for n in ('M', 'QK', 'rest', 'all')})
        if step == steps:
            with torch.no_grad():
                found = task.evaluate(model)
            add(step, {n: found[n] for n in ('accuracy', 'loss_seen')} | {'fitted': int(task.fitted(found))})
            return log
        for group in opt.param_groups:
            group['lr'] = train.learning_rate(step, settings)
        x, y = task.batch(generator, settings.batch)
        opt.zero_grad()
        task.loss(model(x), y).backward()
        for name, end in WEIGHTS.items():
            grads = [z.grad.flatten() for n, z in model.named_parameters() if n.endswith(end)]
            add(step, {f'gradient {name}': torch.cat(grads).norm().item()} if grads else {})
        opt.step()


def summary(logs):
    """The part of the table: one column a run; gradients as the mean over the steps."""
    first, last, mean = (lambda z: z[0][1]), (lambda z: z[-1][1]), (lambda z: sum(y for _, y in z) / len(z))
    wanted = [('mean', mean, [f'gradient {n}' for n in WEIGHTS]),
              ('step 0', first, ['||q||/sqrt(d)', 'diam(k)/sqrt(d)', 'prior_tv']),
              ('end', last, ['prior_tv', *(f'change {n}' for n in WEIGHTS), *(f'moved by {n}' for n in ('M', 'QK', 'rest', 'all')),
                             'accuracy', 'loss_seen', 'fitted'])]
    return [('6. parity2: ' + ', '.join(f'{o} {lr:g}, {n} steps' for o, (lr, n) in OPTIMISERS.items()), [' '.join(r) for r in logs],
             [(f'{n}, {when}', [pick(z[n]) if n in z else '' for z in logs.values()]) for when, pick, names in wanted for n in names])]


def figure(logs, path):
    """Rows: optimisers. Columns: gradient norms, relative change, what each part alone moves, prior_tv."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return print('theory_training.py: no figure, matplotlib is not installed', file=sys.stderr)
    columns = {'gradient norm': [f'gradient {n}' for n in WEIGHTS], 'relative change': [f'change {n}' for n in WEIGHTS],
               'TV moved by each part alone': [f'moved by {n}' for n in ('M', 'QK', 'rest')], 'prior_tv': ['prior_tv']}
    fig, axes = pyplot.subplots(len(OPTIMISERS), len(columns), figsize=(18, 7.5), sharex='row', sharey='col')
    for (optimiser, arm), log in logs.items():
        for axis, (title, names) in zip(axes[list(OPTIMISERS).index(optimiser)], columns.items()):
            for color, name in enumerate(names):
                if name in log:
                    points = [p for p in log[name] if p[1] > 0 or title == 'prior_tv']
                    color = list(ARMS).index(arm) if title == 'prior_tv' else color
                    axis.plot(*zip(*points) if points else ([], []), color=f'C{color}', linestyle=ARMS[arm], linewidth=1,
                              label=f'{arm}, {name.split()[-1]}')
            axis.set(title=f'{optimiser}: {title}', xlabel='step', yscale='linear' if title == 'prior_tv' else 'log')
            axis.legend(fontsize=6)
    draw(fig, path)


def main(argv=None):
    parser = tasks.Parser(description=__doc__)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path, default=Path(__file__).resolve().parent / 'theory')
    args = parser.parse_args(argv)
    tasks.check_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)                                    # before the work
    logs = {(o, arm): run(o, arm, args.seed, args.device) for o in OPTIMISERS for arm in ARMS}
    parts = [(t, c, [(n, y, None) for n, y in rows]) for t, c, rows in summary(logs)]
    tasks.write_text(args.out / 'training.md', table(parts, bar='\\|') + '\n')
    tasks.write_text(args.out / 'training.json', json.dumps({'device': args.device, 'seed': args.seed, 'torch': torch.__version__,
                                                             'runs': {' '.join(k): z for k, z in logs.items()}}, allow_nan=False) + '\n')
    figure(logs, args.out / 'training.png')
    print(table(parts))


if __name__ == '__main__':
    sys.exit(tasks.command(main, 'theory_training.py'))
