"""Trains one model on one task from one initialisation:  python train.py --task parity2 --init mask

Writes runs/TASK-INIT-sSEED/: config.json (the settings that make the run, torch's version, commit), log.jsonl (one object for each
evaluation), checkpoint.pt, and at the end result.json. Exit 0: done; 1: the run failed; 2: bad arguments.
--list names the tasks and the arms, and what each needs and sets. --bench [TASK ...] times a step: results/bench.py.
"""
import argparse
import dataclasses
import inspect
import json
import math
import os
import pickle
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tasks                                                                       # before torch, whose warning it silences
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import maskprior
from tasks import RunError, UsageError


# ------------------------------------------------------------------------------------------------------------ settings

def true_or_false(text):
    if text.lower() not in ('true', 'false'):
        raise argparse.ArgumentTypeError(f'{text!r} is neither true nor false')
    return text.lower() == 'true'


def bit_list(text):
    if not text.replace(',', '').isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is no list of bits, such as 2,3')
    return [int(bit) for bit in text.split(',')]


def setting(default, help, type=None, choices=None, tasks=None):
    return dataclasses.field(default=default, metadata=dict(help=help, type=type or default.__class__, choices=choices,
                                                            tasks=tasks))


FAMILIES = {  # names of tasks: the function that makes one; beside the name its parameters are settings
    tuple(tasks.BOOLEAN): tasks.boolean, tuple(tasks.ARITHMETIC): tasks.arithmetic, tuple(tasks.VISION): tasks.vision,
    tasks.LANGUAGE: tasks.language,
}
TASKS = sum(FAMILIES, ())
DATA = (*tasks.VISION, *tasks.LANGUAGE)


@dataclass
class Settings:
    """Every setting of a run, its default and where that comes from. RECIPES holds what a task sets otherwise."""
    task: str = setting('parity2', 'what to learn', choices=TASKS)
    init: str = setting('mask', 'the arm: where the prior is written', choices=tuple(maskprior.ARMS))
    seed: int = setting(0, 'of the weights, of the split, and, by a generator of its own, of the batches')
    # the task and its prior
    hole: str = setting(None, 'unseen part of the cube: + - * for each of the first bits; default: README, tasks', str,
                        tasks=tasks.BOOLEAN)
    prior_bits: list = setting(None, 'bits that the prior says interact, such as 2,3, instead of the right ones', bit_list,
                               tasks=tasks.BOOLEAN)
    pattern: str = setting('group', 'who needs whom in a group of bits: tasks.boolean_structure', choices=tasks.PATTERNS,
                           tasks=tasks.BOOLEAN)
    frac: float = setting(0.004, 'share of all pairs of operands that trains; paper', tasks=tasks.ARITHMETIC)
    order: str = setting('lsb', 'the digit of the answer that is written first, least or most significant', choices=('lsb', 'msb'),
                         tasks=tasks.ARITHMETIC)
    without: str = setting(None, 'part of the school algorithm that the prior leaves out: tasks.arithmetic_structure', str,
                           choices=('digits', 'carry', 'products'), tasks=tasks.ARITHMETIC)
    data_dir: str = setting(tasks.default_data_dir(), 'folder of the data sets; or MASKPRIOR_DATA', tasks=DATA)
    cache: str = setting('cache', 'folder for decoded images', tasks=tasks.VISION)
    image_size: int = setting(None, "side of the images, the data's own unless given: only for imagenet100", int, tasks=tasks.VISION)
    crop: str = setting('pad', 'augmentation: tasks.draw_augmentation', choices=('pad', 'resized'), tasks=tasks.VISION)
    randaugment: int = setting(0, 'operations of RandAugment an image', tasks=tasks.VISION)
    erasing: float = setting(0., 'probability of random erasing', tasks=tasks.VISION)
    mixup: float = setting(0., 'alpha of Mixup, 0 for none', tasks=tasks.VISION)
    cutmix: float = setting(0., 'alpha of CutMix, 0 for none', tasks=tasks.VISION)
    smoothing: float = setting(0.1, 'of the labels', tasks=tasks.VISION)
    context: int = setting(64, 'words in a window; ours', tasks=tasks.LANGUAGE)
    flip: float = setting(0., "share of the prior's entries that are flipped", tasks=tasks.BOOLEAN)
    strength: float = setting(8., 'nats by which the prior puts closed pairs below open ones; ours')
    level: float = setting(4., 'M at the open pairs; its gradient carries sigmoid(-level); ours')
    per_head: bool = setting(False, 'one M for each head, [H, N, N], instead of a shared [N, N]')
    freeze_mask: bool = setting(False, 'M does not learn')
    freeze_qk: bool = setting(False, 'W_Q and W_K do not learn')
    hold_inputs: bool = setting(False, "q and k read their layer's inputs in the untrained model")
    mask_lr: float = setting(1., "M's learning rate, in times of --lr")
    structure: str = setting('known', 'which tokens interact: known beforehand, or measured on the training set', choices=('known', 'measured'),
                             tasks=tasks.BOOLEAN)
    tie_mask: bool = setting(False, 'one entry of M for each distance: it goes on beyond the context', tasks=tasks.LANGUAGE)
    mimetic_v: bool = setting(False, 'W_V and W_proj as mimetic and impulse have them, for another arm', tasks=tasks.VISION)
    # the model
    width: int = setting(64, 'D; ours')
    heads: int = setting(4, 'H; ours')
    layers: int = setting(2, 'L; ours')
    patch: int = setting(None, 'side of a patch; 4, imagenet100 16', int, tasks=tasks.VISION)
    pool: str = setting('mean', 'of the patches, or a class token', choices=('mean', 'cls'), tasks=tasks.VISION)
    positions: str = setting('learned', 'fixed sin-cos (images), learned, or none (words)', choices=('sincos', 'learned', 'none'), tasks=DATA)
    dropout: float = setting(0., 'of the embedding and of each branch', tasks=tasks.LANGUAGE)
    drop_path: float = setting(0., 'stochastic depth, rising to this in the last block', tasks=tasks.VISION)
    pos_std: float = setting(0.1, 'standard deviation of the positional embedding (token embedding: 1); ours')
    init_std: float = setting(0.02, 'standard deviation of the weights of linear layers; GPT-2')
    bf16: bool = setting(False, 'autocast the model to bfloat16; weights and optimiser stay fp32')
    sdpa: bool = setting(False, "torch's fused attention kernel instead of the explicit softmax")
    compile: bool = setting(False, 'torch.compile the blocks; checkpoints are the same')
    # the optimisation
    steps: int = setting(1000, 'optimiser steps; ours')
    epochs: int = setting(None, 'instead of --steps; --warmup and --eval-every then count epochs too', int, tasks=tasks.VISION)
    batch: int = setting(64, 'B, inputs in a step, of all processes together; ours')
    lr: float = setting(1e-3, 'learning rate of AdamW, cosine to 0; ours')
    warmup: int = setting(50, 'steps over which the learning rate rises linearly; ours')
    weight_decay: float = setting(0., 'of the weights of linear layers; never of M, biases, norms and embeddings; ours')
    clip: float = setting(0., 'norm that the gradient is cut to, 0 for no limit')
    # the run
    eval_every: int = setting(200, 'steps between evaluations')
    eval_early: int = setting(0, 'over the first 200 steps, steps between evaluations on 2,048 of the inputs', tasks=tasks.BOOLEAN)
    device: str = setting('cpu', 'cpu, cuda, cuda:1 ...')
    out: str = setting('runs', 'folder of the runs')
    name: str = setting(None, "the run's folder in there; default TASK-INIT-sSEED", str)
    overwrite: bool = setting(False, 'run a finished run again')
    resume: bool = setting(False, 'go on with an interrupted run')


ADDITION = dict(width=128, layers=4, init_std=0.04, per_head=True, steps=2000, eval_every=1000, warmup=100, weight_decay=1.,
                bf16=True)
VISION = dict(width=96, heads=3, layers=6, init_std=0.06, positions='sincos', strength=0.5, level=2., per_head=True, epochs=12,
              eval_every=1, warmup=2, batch=128, weight_decay=0.05, clip=1., bf16=True)
LANGUAGE = dict(width=128, layers=4, pos_std=0.02, strength=1., level=0., per_head=True, steps=500, batch=32, lr=4e-3, warmup=100,
                eval_every=125, weight_decay=0.1, clip=1., bf16=True)
RECIPES = {  # one for a task, the same for all its arms; how they were found: results/README.md
    'maj3': dict(layers=3, pos_std=1.3, init_std=0.05, strength=4., steps=600, eval_every=100),
    'cyclic3': dict(pos_std=0.5, strength=6., eval_every=250),
    'parity3': dict(strength=6., steps=1200),
    'diff2': dict(strength=6., steps=600, eval_every=100),
    'add3': ADDITION,
    'add4': ADDITION | dict(frac=1e-5),
    'add5': ADDITION | dict(frac=1e-7),
    'mul3': ADDITION | dict(frac=0.03, init_std=0.05, steps=3500, eval_every=875, batch=256, lr=3e-3),
    'cifar10': VISION,
    'cifar100': VISION,
    'imagenet100': VISION | dict(crop='resized'),
    'wikitext2': LANGUAGE,
    'tinystories': LANGUAGE,
}


def parse(argv):
    """argv -> Settings: the dataclass's defaults, then the task's recipe, then the command line."""
    parser = tasks.Parser(description=__doc__, allow_abbrev=False)
    for f in dataclasses.fields(Settings):
        own = '; --list: some tasks set it otherwise' if any(f.name in recipe for recipe in RECIPES.values()) else ''
        default = f' [{f.default}{own}]' if f.default is not None else ''
        kwargs = dict(help=f.metadata['help'].replace('%', '%%') + default, choices=f.metadata['choices'],
                      default=argparse.SUPPRESS, type=f.metadata['type'])
        if f.metadata['type'] is bool:
            kwargs.update(type=true_or_false, nargs='?', const=True, metavar='true|false')
        parser.add_argument(option(f.name), **kwargs)
    # argparse would take the hole -- for the end of the options, and -+ for an option: a space before it hides that.
    argv = list(argv)
    for i, arg in enumerate(argv):
        if arg == '--hole' and i + 1 < len(argv):
            argv[i:i + 2] = [f'--hole= {argv[i + 1]}']
        elif arg.startswith('--hole='):
            argv[i] = arg.replace('=', '= ', 1)
    given = vars(parser.parse_args(argv))
    if 'hole' in given:
        given['hole'] = given['hole'].strip()
    settings = Settings(**(RECIPES.get(given.get('task', Settings.task), {}) | given))
    for names, fine, must in (
            (('width', 'heads', 'layers', 'init_std', 'batch', 'steps', 'epochs', 'eval_every', 'lr', 'strength', 'patch',
              'image_size', 'context'), lambda n: 0 < n < 1e18, 'positive and below 1e18'),
            (('mask_lr', 'eval_early', 'pos_std', 'warmup', 'weight_decay', 'clip', 'randaugment', 'mixup', 'cutmix'), lambda n: 0 <= n < 1e18,
             'at least 0 and below 1e18'),
            (('flip', 'frac', 'erasing', 'smoothing'), lambda n: 0 <= n <= 1, 'a share, from 0 to 1'),
            (('drop_path', 'dropout'), lambda n: 0 <= n < 1, 'a share, below 1'),
            (('seed',), lambda n: 0 <= n < 2 ** 63, 'from 0 to 2^63 - 1')):
        for name in names:
            if getattr(settings, name) is not None and not fine(getattr(settings, name)):
                raise UsageError(f'{option(name)} {getattr(settings, name)} must be {must}')
    for f in dataclasses.fields(Settings):
        if f.name in given and not concerns(f, settings.task):
            raise UsageError(f'{option(f.name)} says nothing about {settings.task}: it is for '
                             f'{", ".join(f.metadata["tasks"])}')
    s = settings
    for wrong, says in (
            *((getattr(s, name) and s.init != 'mask', f'{option(name)} goes with --init mask; there is no mask in --init {s.init}')
              for name in ('freeze_mask', 'tie_mask'))
            ,(s.mask_lr != 1 and s.init != 'mask', '--mask-lr goes with --init mask'),
            (s.positions == ('none' if s.task in tasks.VISION else 'sincos'), f'--positions {s.positions} is not for {s.task}'),
            (s.init in ('mimetic', 'impulse') and s.task not in tasks.VISION, f'--init {s.init} is about images; {s.task} has none'),
            (s.mimetic_v and s.init in ('mimetic', 'impulse'), f'--mimetic-v is what --init {s.init} has anyway'),
            (s.task == 'imagenet100' and s.crop == 'pad', '--crop pad is for CIFAR; imagenet100 has its images larger, for --crop resized'),
            ((s.mixup or s.cutmix) and s.batch % 2, f'--mixup and --cutmix mix neighbours: --batch {s.batch} must be even'),
            (s.name is not None and (not Path(s.name).parts or Path(s.name).is_absolute() or '..' in Path(s.name).parts),
             f'--name {s.name!r} must name a folder in --out'),
            (s.overwrite and s.resume, '--overwrite starts over and --resume goes on: choose one'),
            ('steps' in given and s.epochs, f'--steps says nothing about {s.task}, which counts epochs: --epochs'),
            ('pos_std' in given and s.positions != 'learned', f'--pos-std is about learned positions; these are {s.positions}'),
            (s.positions == 'sincos' and s.width % 4, f'--width {s.width} is not a multiple of 4, which --positions sincos needs'),
            (s.width % s.heads, f'--width {s.width} is not a multiple of --heads {s.heads}')):
        if wrong:
            raise UsageError(says)
    if settings.device == 'cuda' and 'LOCAL_RANK' in os.environ:                   # under torchrun
        settings.device = f'cuda:{os.environ["LOCAL_RANK"]}'
    tasks.check_device(settings.device)
    return settings


def option(name):
    return '--' + name.replace('_', '-')


def concerns(field, task):
    return task in (field.metadata['tasks'] or [task])


def listing():
    """The tasks and the arms, one a line, with what each needs and sets."""
    yield 'tasks: --task NAME'
    for task in TASKS:
        data = ('no data' if task not in tasks.PLACES else f'{" or ".join(tasks.PLACES[task])} in --data-dir'
                + (f' (python tasks.py download {task})' if task in tasks.DOWNLOADS else ' (from image-net.org, by hand)'))
        own = ' '.join(f'{option(k)} {v}' for k, v in RECIPES.get(task, {}).items())
        yield f'  {task:12} needs {data}' + (f'; sets {own}' if own else '')
    yield 'arms: --init NAME, where the prior is written'
    yield from (f'  {arm:12} {where}' for arm, where in maskprior.ARMS.items())


# --------------------------------------------------------------------------------------------------------------- parts

def build(settings):
    """Settings -> (task, model with the arm's prior written in, its target attention). Same seed: same weights but for the arm's own."""
    make = next(make for names, make in FAMILIES.items() if settings.task in names)
    own = [name for name in list(inspect.signature(make).parameters)[1:] if hasattr(settings, name)]
    task = make(settings.task, **{name: getattr(settings, name) for name in own})
    distance = task.distance
    if settings.flip:
        generator = torch.Generator().manual_seed(settings.seed)
        flipped = (torch.rand(distance.shape, generator=generator) < settings.flip).to(distance.device)
        distance = torch.where(flipped, 1 - distance, distance)
    torch.manual_seed(settings.seed)
    model = maskprior.Transformer(**task.model, D=settings.width, H=settings.heads, L=settings.layers,
                                  pos_std=settings.pos_std, init_std=settings.init_std,
                                  sdpa=settings.sdpa, dropout=settings.dropout).to(settings.device).eval()
    allowed = model.blocks[0].attn.allowed
    try:
        M0 = maskprior.prior_matrix(distance, settings.strength, settings.level)
        if settings.per_head and M0.ndim == 2:
            M0 = M0.expand(settings.heads, -1, -1)
        target = task.shifts if settings.init == 'impulse' else maskprior.target_attention(M0, allowed)
        if not maskprior.asking_rows(target, allowed).any():
            raise ValueError('it puts no pair of tokens above another')
        maskprior.init_arm(model, settings.init, M0, task.probe, settings.freeze_mask, settings.tie_mask, task.shifts, settings.seed,
                           settings.mimetic_v)
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise UsageError(f'--init {settings.init} can not write this prior: {error}') from None
    for block in model.blocks if settings.freeze_qk else ():
        block.attn.q.requires_grad_(False), block.attn.k.requires_grad_(False)
    if settings.hold_inputs:
        maskprior.hold_inputs(model)
    return task, model, target


def make_optimiser(model, settings):
    """AdamW in two groups: weight decay for the weights of linear layers alone. It would pull a prior in M to 0.

    Fused: 6 % of a step of the small tasks on a CPU (measured).
    """
    weights = lambda kind: {id(m.weight) for m in model.modules() if isinstance(m, kind)}
    decayed = weights(nn.Linear) - weights(nn.Embedding)                           # a tied output layer is an embedding
    learnable = [p for p in model.parameters() if p.requires_grad]
    M = {id(block.attn.M) for block in model.blocks} if settings.mask_lr != 1 else set()
    return torch.optim.AdamW([group for group in (
        dict(params=[p for p in learnable if id(p) in decayed], weight_decay=settings.weight_decay, factor=1.),
        dict(params=[p for p in learnable if id(p) not in decayed | M], weight_decay=0., factor=1.),
        dict(params=[p for p in learnable if id(p) in M], weight_decay=0., factor=settings.mask_lr)) if group['params']],
        lr=settings.lr, fused=True)


def learning_rate(step, settings):
    warm = min(1., (step + 1) / max(1, settings.warmup))
    return settings.lr * warm * (1 + math.cos(math.pi * step / settings.steps)) / 2


def read(path, load, advice='start over with --overwrite'):
    """load(path), or one line that names the file: a half-written or foreign file raises almost anything."""
    try:
        return load(path)
    except (PermissionError, torch.OutOfMemoryError, UsageError):
        raise
    except Exception as error:
        says = 'no file of this program' if isinstance(error, pickle.UnpicklingError) else str(error).partition('\n')[0]
        raise RunError(f'{path} can not be read ({type(error).__name__}: {says}): {advice}') from None


@contextmanager
def held(folder):
    """Keeps other runs out of the folder while the block lasts; the system frees it, even after a kill."""
    try:
        import fcntl                                                               # Windows has none: no lock there
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f'another run is at work in {folder}: choose another --name, or wait') from None
        yield
    finally:
        os.close(handle)


def commit():
    try:
        git = subprocess.run(['git', 'describe', '--always', '--dirty', '--exclude=*'], cwd=Path(__file__).parent,
                             capture_output=True, text=True)
        return git.stdout.strip() or None
    except OSError:                                                                # no git here
        return None


# ------------------------------------------------------------------------------------------------------------ training

def autocast(settings):
    return torch.autocast(torch.device(settings.device).type, torch.bfloat16, enabled=settings.bf16)


def update(model, optimiser, task, settings, x, y):
    """One optimiser step on a batch."""
    with autocast(settings):
        outputs = model(x, *(() if task.loss else (y,)))                           # a model's own loss takes the target
    loss = task.loss(outputs.float(), y) if task.loss else outputs
    optimiser.zero_grad()
    loss.backward()
    if settings.clip:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimiser.step()


def processes():
    """(rank, number of processes) under torchrun, else (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train(settings, folder, config, task, model, target):
    """Trains from step 0 or from the checkpoint in `folder`, writes the run's files there, `config` first, returns the result.

    Of several processes each takes its part of every batch; the first evaluates and writes.
    """
    run, examples, probe_mean = describing(settings), task.known.get('training_examples'), task.probe.double().mean().item()
    if settings.epochs:
        per_epoch = examples / settings.batch
        settings = dataclasses.replace(settings, steps=max(1, round(settings.epochs * per_epoch)),
                                       warmup=round(settings.warmup * per_epoch), eval_every=max(1, round(settings.eval_every * per_epoch)))
    rank, world = processes()
    part = slice(rank * settings.batch // world, (rank + 1) * settings.batch // world)
    optimiser = make_optimiser(model, settings)
    generator = torch.Generator().manual_seed(settings.seed)                       # of the batches, and nothing else
    initial = maskprior.prior_weights(model)
    step, seconds, log = 0, 0., []
    def write_log():
        tasks.write_text(folder / 'log.jsonl', ''.join(json.dumps(row, allow_nan=False) + '\n' for row in log))

    def predict(x, target=None):
        with autocast(settings):
            return model(x, target).float()

    def restore(path):
        saved = torch.load(path, weights_only=True, map_location='cpu')
        refuse_another(run, saved['run'], path)
        if (was := saved['run']['training_examples']) != examples or abs(saved['run'].get('probe_mean', probe_mean) - probe_mean) > 1e-4:
            raise UsageError(f'{path} is from other training data (examples then: {was}, now: {examples}): choose a --name, or --overwrite it')
        model.load_state_dict(saved['model'])
        optimiser.load_state_dict(saved['optimiser'])
        if any(moment.ndim and moment.shape != p.shape for p, state in optimiser.state.items() for moment in state.values()):
            raise ValueError('the optimiser of another model')                     # its fused kernel would not look
        generator.set_state(saved['generator'])
        if not 0 <= saved['step'] <= settings.steps:
            raise ValueError(f'step {saved["step"]} of {settings.steps}')
        if not all({'step', 'prior_tv', *task.shown} <= row.keys() for row in saved['log']):
            raise ValueError('its log lacks a metric')
        return saved['step'], float(saved['seconds']), saved['log']

    if settings.resume and (folder / 'checkpoint.pt').exists():
        step, seconds, log = read(folder / 'checkpoint.pt', restore)
    if rank == 0:                                                                  # not before the checkpoint is taken
        tasks.write_json(folder / 'config.json', config)
        if log:
            write_log()

    def evaluate(early):
        model.eval()
        with torch.no_grad():
            metrics = (task.evaluate(predict, quick=True) if early else task.evaluate(predict, last=step == settings.steps))
        metrics['prior_tv'] = maskprior.prior_tv(model, target, task.probe)
        model.train()
        return metrics | {f'change_{k}': v for k, v in maskprior.relative_change(model, initial).items()}

    def record(early=False):
        if rank:
            return
        row = {'step': step, 'seconds': seconds} | evaluate(early)
        if not all(math.isfinite(v) for v in row.values() if isinstance(v, float)):
            raise RunError(f'diverged: a metric is not finite at step {step}; try a lower '
                           + (f'--lr than {settings.lr:g}' if step else '--init-std, --pos-std or --strength'))
        log.append(row)
        write_log()
        tasks.write(folder / 'checkpoint.pt', lambda p: torch.save(
            dict(model=model.state_dict(), optimiser=optimiser.state_dict(), generator=generator.get_state(), step=step,
                 seconds=seconds, log=log, run=run | {'training_examples': examples, 'probe_mean': probe_mean}), p))
        left = f'{seconds / step * (settings.steps - step):4.0f} s left' if step else ''
        shown = '  '.join(f'{name} {row[name]:{"7.2%" if "accuracy" in name else ".4f"}}' for name in task.shown)
        print(f'step {step:6d}  {shown}  prior_tv {row["prior_tv"]:.3f}  {left}', flush=True)

    start = time.perf_counter() - seconds
    if not log:
        record()
    model.train()
    if settings.compile:                       # the blocks alone: torch 2.6 compiles an embedding's gradient wrongly on a CPU (measured)
        for block in model.blocks:
            block.compile()
    parallel = DistributedDataParallel(model) if world > 1 else model
    while step < settings.steps:
        for group in optimiser.param_groups:
            group['lr'] = learning_rate(step, settings) * group['factor']
        if settings.dropout or settings.drop_path:                                 # its own for each process, the same after a --resume
            torch.manual_seed(hash((settings.seed, step, rank)) % 2 ** 63)
        update(parallel, optimiser, task, settings, *task.batch(generator, settings.batch, step, part))
        step += 1
        full = step % settings.eval_every == 0 or step == settings.steps
        early = settings.eval_early and step <= 200 and step % settings.eval_early == 0
        if full or early:
            seconds = time.perf_counter() - start
            record(early=not full)

    if rank:
        return
    final = {k: v for k, v in log[-1].items() if k not in ('step', 'prior_tv')}
    return dict(task=settings.task, init=settings.init, seed=settings.seed, steps=settings.steps) | final | dict(
        fitted=task.fitted(final), prior_tv_init=log[0]['prior_tv'],
        prior_tv_final=log[-1]['prior_tv'], **task.known,
        parameters=sum(p.numel() for n, p in model.named_parameters() if not n.startswith('untrained')), device=settings.device, torch=torch.__version__)


ANYWHERE = ('device', 'compile')                                                   # a run may go on with another of these
FILES = ('config.json', 'log.jsonl', 'checkpoint.pt', 'result.json')


def folder_of(settings):
    return Path(settings.out) / (settings.name or f'{settings.task}-{settings.init}-s{settings.seed}')


def describing(settings):
    """The settings that make a run what it is, for its config.json: those that say something about its task."""
    return {f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings) if concerns(f, settings.task)
            and f.name not in ('out', 'name', 'overwrite', 'resume', 'data_dir', 'cache', *(['steps'] if settings.epochs else []))}


def differing(run, before):
    """{name: what it was} of the settings in which the run `before` isn't `run`, which is as by describing()."""
    was = {name: before.get(name, getattr(Settings, name)) for name in run}        # an older run may not know the setting
    return {name: was[name] for name, value in run.items() if name not in ANYWHERE and was[name] != value}


def refuse_another(run, before, path):
    for name, was in differing(run, before).items():
        raise UsageError(f'{path} holds a run with another {option(name)} ({was}, not {run[name]}): choose a --name, or --overwrite it')


def is_finished(settings, resume):
    """Whether the run of these settings is finished; refuses to go on with one of other settings, or unasked with one at all."""
    folder = folder_of(settings)
    if not any((folder / f).exists() for f in FILES):
        return False
    before = read(folder / 'config.json', lambda p: {**json.loads(p.read_text())['settings']})
    refuse_another(describing(settings), before, folder)
    if (folder / 'result.json').exists():
        read(folder / 'result.json', lambda p: json.loads(p.read_text())['fitted'])
        return True
    if not resume:
        raise UsageError(f'{folder} holds an unfinished run: --resume goes on with it, --overwrite starts over')
    return False


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if '--list' in argv:
        if len(argv) > 1:
            raise UsageError('--list stands alone')
        return print('\n'.join(listing()))
    if '--bench' in argv:
        sys.path.insert(0, str(Path(__file__).parent / 'results'))
        import bench
        return bench.main([arg for arg in argv if arg != '--bench'])
    settings = parse(argv)
    folder, described = folder_of(settings), describing(settings)
    if not settings.overwrite and is_finished(settings, settings.resume):
        if os.environ.get('RANK', '0') == '0':
            print(f'{folder} is finished: nothing to do (--overwrite runs it again)')
        return
    if {'RANK', 'WORLD_SIZE', 'MASTER_ADDR'} <= os.environ.keys() and not dist.is_initialized():       # under torchrun
        if settings.device.startswith('cuda'):
            torch.cuda.set_device(settings.device)
        dist.init_process_group('nccl' if settings.device.startswith('cuda') else 'gloo')
    rank, world = processes()
    if settings.batch % (2 * world) and world > 1:
        raise UsageError(f'--batch {settings.batch} is not a multiple of twice the {world} processes')
    built = build(settings)                                                        # refuses bad settings before any file
    if world > 1:
        dist.barrier()                                                             # all have read what is there
    if rank:
        train(settings, folder, None, *built)
        dist.barrier()                                                             # torchrun ends all when one ends badly: not before
        dist.destroy_process_group()                                               # the first has written its result
        return
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        if not settings.overwrite and is_finished(settings, settings.resume):      # since it was asked first: to build takes a while
            raise RunError(f'another run has finished in {folder} meanwhile: nothing is changed')
        stale = [folder / name for name in ('result.json', *(() if settings.resume else ('checkpoint.pt', 'log.jsonl')))]
        for path in [*stale, *(tmp for name in FILES for tmp in folder.glob(f'{name}.*.tmp'))]:        # .tmp: a save that was killed
            path.unlink(missing_ok=True)
        commits = [commit()]
        if settings.resume and (folder / 'config.json').exists():                  # the code of every part of the run
            commits = [*read(folder / 'config.json', lambda p: (json.loads(p.read_text())['commit'] or '').split(', ')), *commits]
        config = dict(settings=described, command=shlex.join(['python', 'train.py', *argv]), torch=torch.__version__,
                      threads=torch.get_num_threads(), processes=world, commit=', '.join(dict.fromkeys(filter(None, commits))) or None)
        result = train(settings, folder, config, *built)
        tasks.write_json(folder / 'result.json', result)
    print('\n'.join(built[0].summary(result)))
    fitted = {True: 'fitted what it saw', False: 'has NOT FITTED what it saw', None: 'is done'}[result['fitted']]
    print(f'{settings.task} --init {settings.init} --seed {settings.seed} {fitted} (loss {result["loss_seen"]:.2g}); prior_tv '
          f'{result["prior_tv_init"]:.3f} -> {result["prior_tv_final"]:.3f}; {result["seconds"]:.0f} s')
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == '__main__':
    sys.exit(tasks.command(main, 'train.py'))
