"""What runs of train.py attend to, from their checkpoints: for show.py, and for the figures.

    python results/attention.py RUN [RUN ...]    # adds their maps to results/attention.json

Recorded is what figures.py draws: maps from before and after training and, of parity2, at the steps
of SNAPSHOTS, for which its first steps are trained again. The runs, made by run_all.sh:
runs/boolean/parity2-{default,qk-svd,qk-opt,mask}-s0, interventions/cyclic3-{qk-svd,qk-opt,mask}-s0,
images/cifar10-mask-s0, language/wikitext2-mask-s0. Those of add3 are short: train.py
--task add3 --frac 0.001 --steps 400 --eval-every 400 --init INIT, for default, qk-svd and mask.
"""
import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import tasks
import torch

import maskprior
import train
from tasks import Arithmetic, Boolean, Images, Language, UsageError
from train import RunError

from records import read_json

# Steps whose attention is recorded, beside the first and the last.
SNAPSHOTS = {'parity2': (20, 100)}
# Of a window of text as many as can be read.
WORDS = 16


# ------------------------------------------------------------------------------ reading a run

def load_run(folder):
    """(settings, content of the checkpoint) of a run's folder."""
    if not (folder / 'config.json').exists():
        raise UsageError(f'{folder} is no run of train.py: it holds no config.json')
    if not (folder / 'checkpoint.pt').exists():
        raise UsageError(f'{folder} holds no checkpoint.pt: train.py writes it at step 0')

    def load_settings(path):
        config = json.loads(path.read_text(encoding='utf-8'))['settings']
        return train.Settings(**config | dict(device='cpu', compile=False))
    settings = train.read(folder / 'config.json', load_settings, 'it is of another train.py')
    checkpoint = train.read(folder / 'checkpoint.pt', lambda path: torch.load(
        path, weights_only=True, map_location='cpu'), 'the run has to be made again')
    return settings, checkpoint


def load_model(settings, checkpoint, folder):
    """(task, trained model) of a run."""
    if settings.init in ('qk-svd', 'qk-opt'):
        # Their weights are in the checkpoint: no need to make them once more.
        settings = replace(settings, init='default')
    task, model, _ = train.build(settings)
    load_weights(model, checkpoint, folder)
    return task, model


def load_weights(model, checkpoint, folder):
    train.read(folder / 'checkpoint.pt', lambda _: model.load_state_dict(checkpoint['model']),
               'it is of another train.py')


@torch.no_grad()
def attention(model, x):
    """[L, H, N, N]: the attention of each layer and head, mean over the inputs x."""
    return torch.stack([attn.weights(z).mean(0) for attn, z in maskprior.layer_inputs(model, x)])


@torch.no_grad()
def mask_weights(model, N):
    """[L, H or 1, N, N]: sigmoid(M), 0 where a key is hard-masked; None where there is no M."""
    if model.blocks[0].attn.M is None:
        return None
    weights = torch.stack([block.attn.bias(slice(None), N).exp() for block in model.blocks])
    return weights if weights.ndim == 4 else weights[:, None]


def shown_inputs(task):
    """The inputs whose attention is shown, and their tokens' labels, None for patches."""
    if isinstance(task, Boolean):
        bits = [f'x{i}' for i in range(tasks.BITS)]
        return task.probe, ['CLS'] * (task.tokens.shape[1] > tasks.BITS) + bits
    if isinstance(task, Arithmetic):
        return task.probe[:1], [tasks.VOCABULARY[token] for token in task.probe[0]]
    if isinstance(task, Language):
        # A causal model does not look at what is behind these.
        return task.probe[:1, :WORDS], [task.vocabulary[word] for word in task.probe[0, :WORDS]]
    if isinstance(task, Images):
        return task.probe, None
    # A task of one's own.
    return task.probe, [str(i) for i in range(task.probe.shape[1])]


def on_grid(maps, task):
    """What the patch in the middle sees: maps [..., N, N] -> [..., rows, columns]."""
    rows, columns = task.model['grid']
    patches = maps[..., -rows * columns:, -rows * columns:]
    return patches[..., rows // 2 * columns + columns // 2, :].unflatten(-1, (rows, columns))


# ----------------------------------------------------------------------- maps for the figures

def replay(settings, task, model, optimiser):
    """Trains as train.train does; yields each step before it is made."""
    generator = torch.Generator().manual_seed(settings.seed)
    model.train()
    for step in range(settings.steps):
        yield step
        train.update(model, optimiser, task, settings, generator, step)


def snapshot(settings, task, model, target):
    """{what: a small tensor} of a model, for a figure."""
    if isinstance(task, Language):
        bias = mask_weights(model, task.context).log()
        return {'bias': torch.stack([bias.diagonal(-distance, -2, -1).mean(-1)
                                     for distance in range(task.context)], -1)}
    if isinstance(task, Images):
        found = {'attention': on_grid(attention(model, task.probe).mean(0), task)}
        if settings.init == 'mask':
            found['mask'] = on_grid(mask_weights(model, model.N).mean(0), task)
        return found
    if isinstance(task, Arithmetic):
        # The rows that write the answer, on an example that it has not seen.
        maps = attention(model, task.test[:1, :-1]).mean(0)
        return {'attention': maps[:, task.answer_start - 1:]}
    maps = attention(model, task.probe).mean(1)[:, maskprior.informative_rows(target)]
    return {'attention': maps if settings.task in SNAPSHOTS else maps.mean(0)}


def labels_of(task, target):
    """What stays the same in a recorded run: the target and the words at rows and columns."""
    if isinstance(task, Boolean):
        labels = shown_inputs(task)[1]
        rows = maskprior.informative_rows(target)
        return {'target': to_list(target[rows]), 'keys': labels,
                'queries': [label for label, row in zip(labels, rows) if row]}
    if isinstance(task, Arithmetic):
        text = [tasks.VOCABULARY[token] for token in task.test[0]]
        first = task.answer_start - 1
        return {'target': to_list(target[:, first:]), 'keys': text[:-1],
                'queries': [f'writes {digit}' for digit in text[first + 1:]]}
    return {}


def to_list(t):
    """A tensor as nested lists, rounded to three decimals."""
    return (t.double() * 1000).round().div(1000).tolist()


def record(folder):
    """The entry of attention.json of a finished run: before, after, and SNAPSHOTS between."""
    settings, checkpoint = load_run(folder)
    task, model, target = train.build(settings)
    if isinstance(task, Language) and settings.init != 'mask':
        raise UsageError(f'{folder} has no M, whose bias is what is recorded of language')
    schedule = train.in_steps(settings, task.n_train)
    wanted = [step for step in (0, *SNAPSHOTS.get(settings.task, ())) if step < schedule.steps]
    found = []
    for step in replay(schedule, task, model, train.make_optimiser(model, schedule)):
        if step in wanted:
            found.append(snapshot(settings, task, model.eval(), target))
            model.train()
        if step == wanted[-1]:
            break
    load_weights(model, checkpoint, folder)
    found.append(snapshot(settings, task, model.eval(), target))
    config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
    maps = {what: [to_list(of_step[what]) for of_step in found] for what in found[0]}
    entry = dict(task=settings.task, init=settings.init, seed=settings.seed,
                 command=config['command'], commit=config['commit'],
                 step=[*wanted, checkpoint['step']])
    return entry | maps | labels_of(task, target)


def read_entries(path):
    """{name: entry} of attention.json; {} where there is none."""
    entries = read_json(path) if path.exists() else {}
    if not isinstance(entries, dict):
        raise RunError(f'{path} is damaged: take it from git again')
    return entries


def record_all(folders, path):
    """Adds finished runs to attention.json, one a line; a run of the same name is replaced."""
    for folder in folders:
        if not (folder / 'result.json').exists():
            raise RunError(f'{folder} is no finished run: no result.json in it')
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UsageError('two of the runs have one name')
    # Before the work.
    read_entries(path)
    new = {name: record(folder) for name, folder in zip(names, folders)}
    # Another process that records waits until this one has.
    with tasks.lock(path.parent):
        entries = read_entries(path) | new
        lines = [f'{json.dumps(name)}: {json.dumps(entries[name], separators=(",", ":"))}'
                 for name in sorted(entries)]
        train.write_text(path, '{\n' + ',\n'.join(lines) + '\n}\n')


def main(argv=None, path=HERE / 'attention.json'):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN')
    record_all(parser.parse_args(argv).runs, path)
    print(path)


if __name__ == '__main__':
    sys.exit(train.command(main, 'attention.py'))
