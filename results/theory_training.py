"""Beside theory.py's five parts: do the gradients that Theorem 1 bounds explain what washes out?

    python results/theory_training.py         # six runs of parity2, some minutes; into runs/theory/
    python results/theory_training.py --out results     # the record: results/theory_training.json

SGD and Adam, the arms that hold the prior. Each run is train.py's, but for the optimiser. The
model's attention depends on three parts: M, the weights W_Q and W_K, and the rest (embeddings,
norms, MLPs: the inputs x of q = x W_Q and k = x W_K). `moved by` a part: mean TV on the probe batch
between the attention at step 0 and the same with that part alone taken from the trained model.
`gradient`: norm over all layers, mean over a fortieth of the steps. Writes theory_training.json,
from which results/figures.py draws, and theory_training.md, the table.
"""
import argparse
import copy
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# before torch, whose warning it silences
from theory import Check, Part, diam, table, tv
import torch

import train
from maskprior import layer_inputs, prior_tv, prior_weights, relative_change

# learning rate, steps; SGD diverges at 0.1 (measured)
OPTIMISERS = {'SGD': (0.03, 2000), 'Adam': (0.001, 1000)}
ARMS = ('mask', 'qk-svd', 'qk-opt')
WEIGHTS = {'M': 'attn.M', 'W_Q': 'attn.q.weight', 'W_K': 'attn.k.weight'}
PARTS = {'M': (WEIGHTS['M'],), 'QK': (WEIGHTS['W_Q'], WEIGHTS['W_K'])}
MOVERS = ('M', 'QK', 'rest', 'all')


def owner(name):
    """The part that a parameter belongs to: M, QK or rest."""
    return next((part for part, ends in PARTS.items() if name.endswith(ends)), 'rest')


@torch.no_grad()
def moved(start, model, part, x):
    """Mean TV between the attention of `start` and of `start` with `part` (M, QK, rest or all) from
    `model`, on x [B, N]."""
    weights = {name: z for name, z in model.state_dict().items() if part in ('all', owner(name))}
    mixed = copy.deepcopy(start)
    mixed.load_state_dict(weights, strict=False)
    distances = []
    for (before, y), (after, z) in zip(layer_inputs(start, x), layer_inputs(mixed, x)):
        distances.append(tv(before.weights(y), after.weights(z)).mean())
    return torch.stack(distances).mean().item()


@torch.no_grad()
def feature_norms(model, x):
    """Mean over layers, heads, rows and inputs of what Theorem 1's bounds carry."""
    norms = {'||q||/sqrt(d)': [], 'diam(k)/sqrt(d)': []}
    for attn, X in layer_inputs(model, x):
        # [B, H, N, d]
        q, k = attn.split(attn.q(X)), attn.split(attn.k(X))
        norms['||q||/sqrt(d)'].append(q.norm(dim=-1).mean() / q.shape[-1] ** 0.5)
        norms['diam(k)/sqrt(d)'].append(diam(k.flatten(0, 1)).mean() / k.shape[-1] ** 0.5)
    return {name: torch.stack(z).mean().item() for name, z in norms.items()}


def gradients(model):
    """{'gradient M': norm over all layers, ...}, after a backward pass."""
    norms = {}
    for name, end in WEIGHTS.items():
        grads = [z.grad.flatten() for n, z in model.named_parameters() if n.endswith(end)]
        if grads:
            norms[f'gradient {name}'] = torch.cat(grads).norm().item()
    return norms


def state(task, model, target, start, initial):
    """{quantity: value} of the model beside what it was at step 0."""
    values = {'prior_tv': prior_tv(model, target, task.probe)} | feature_norms(model, task.probe)
    changes = relative_change(model, initial)
    values |= {f'change {name}': change for name, change in changes.items()}
    return values | {f'moved by {part}': moved(start, model, part, task.probe) for part in MOVERS}


def run(optimiser, arm, seed, device):
    """{quantity: [(step, value)]} of one training."""
    lr, steps = OPTIMISERS[optimiser]
    # with the batch of these runs, whatever the recipe of parity2 is by now
    options = {'task': 'parity2', 'init': arm, 'seed': seed, 'device': device, 'lr': lr,
               'steps': steps, 'batch': 64, 'clip': 0}
    settings = train.parse([f'--{name}={value}' for name, value in options.items()])
    task, model, target = train.build(settings)
    start, initial = copy.deepcopy(model), prior_weights(model)
    log, norms, stretch = {}, [], max(1, steps // 40)
    if optimiser == 'SGD':
        opt = torch.optim.SGD([dict(params=[*model.parameters()], factor=1.)], settings.lr)
    else:
        opt = train.make_optimiser(model, settings)
    generator = torch.Generator().manual_seed(seed)

    def add(step, values):
        for name, value in values.items():
            log.setdefault(name, []).append((step, float(f'{value:.4g}')))

    for step in range(steps):
        # 24 points
        if step % math.ceil(steps / 24) == 0:
            add(step, state(task, model, target, start, initial))
        train.update(model, opt, task, settings, generator, step)
        norms.append(gradients(model))
        if len(norms) == stretch:
            add(step - stretch // 2 + 1,
                {name: sum(z[name] for z in norms) / stretch for name in norms[0]})
            norms = []
    add(steps, state(task, model, target, start, initial))
    with torch.no_grad():
        found = task.evaluate(model)
    add(steps, {name: found[name] for name in ('accuracy', 'loss_seen')})
    add(steps, {'fitted': int(task.fitted(found))})
    return log


def pick(log, name, when):
    """The mean over the steps, the value at step 0 or the one at the end; or ''."""
    values = [value for _, value in log.get(name, ())]
    if not values:
        return ''
    return {'mean': sum(values) / len(values), 'step 0': values[0], 'end': values[-1]}[when]


def summary(logs):
    """The part of the table: one column a run."""
    changes = [f'change {name}' for name in WEIGHTS]
    moves = [f'moved by {part}' for part in MOVERS]
    wanted = {'mean': [f'gradient {name}' for name in WEIGHTS],
              'step 0': ['||q||/sqrt(d)', 'diam(k)/sqrt(d)', 'prior_tv'],
              'end': ['prior_tv', *changes, *moves, 'accuracy', 'loss_seen', 'fitted']}
    rows = []
    for when, names in wanted.items():
        for name in names:
            values = [pick(log, name, when) for log in logs.values()]
            rows.append(Check(f'{name}, {when}', values, None))
    runs = [f'{name} {lr:g}, {steps} steps' for name, (lr, steps) in OPTIMISERS.items()]
    return Part(f"6. parity2: {', '.join(runs)}", [' '.join(key) for key in logs], rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path, default=ROOT / 'runs' / 'theory', help='folder')
    args = parser.parse_args(argv)
    # before the work
    args.out.mkdir(parents=True, exist_ok=True)
    logs = {}
    for optimiser in OPTIMISERS:
        for arm in ARMS:
            logs[optimiser, arm] = run(optimiser, arm, args.seed, args.device)
    text = table([summary(logs)])
    record = {'device': args.device, 'seed': args.seed, 'torch': torch.__version__,
              'commit': train.git_commit(),
              'runs': {' '.join(key): log for key, log in logs.items()}}
    train.write_text(args.out / 'theory_training.md', f'```{text}\n```\n')
    train.write_text(args.out / 'theory_training.json', json.dumps(record, allow_nan=False) + '\n')
    print(text)


if __name__ == '__main__':
    sys.exit(train.command(main, 'theory_training.py'))
