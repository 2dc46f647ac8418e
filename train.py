"""Trains one model on one task from one initialisation:

    python train.py --task parity2 --init mask
    python train.py --task cifar10 --help         # every setting, with that task's own values
    python train.py --list                        # the tasks and the arms

Writes runs/TASK-INIT-sSEED/: config.json (the settings that make the run, versions, device),
log.jsonl (one object an evaluation), checkpoint.pt, and at the end result.json.
Exit code 0: done; 1: the run failed; 2: bad arguments.
"""
import signal
if __name__ == '__main__':
    # Until main() runs, Ctrl-C ends the process without the traceback of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
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
from pathlib import Path

# Before torch, whose warning it silences.
import tasks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import maskprior
from tasks import Arithmetic, Boolean, DataError, Images, Language, UsageError


class RunError(Exception):
    """The run cannot go on: one line, exit code 1."""


# ------------------------------------------------------------------------------------- settings

LIMITS = {
    'positive': lambda n: 0 < n < 1e18,
    'at least 0': lambda n: 0 <= n < 1e18,
    'from 0 to 1': lambda n: 0 <= n <= 1,
    'at least 0 and below 1': lambda n: 0 <= n < 1,
    'from 0 to 1024': lambda n: 0 <= n <= 1024,
}


def true_or_false(text):
    if text.lower() not in ('true', 'false'):
        raise argparse.ArgumentTypeError(f'{text!r} is neither true nor false')
    return text.lower() == 'true'


def bit_list(text):
    if not all(bit.isdecimal() for bit in text.split(',')):
        raise argparse.ArgumentTypeError(f'{text!r} is no list of bits, such as 2,3')
    return [int(bit) for bit in text.split(',')]


def setting(default, help, limit=None, only=None):
    """A field of Settings. limit: a name in LIMITS, or the choices; only: the classes of tasks
    that it is for."""
    return dataclasses.field(default=default, metadata=dict(help=help, limit=limit, only=only))


DATA = (Images, Language)


@dataclasses.dataclass
class Settings:
    """Every setting, its default and where that comes from; RECIPES: what a task sets otherwise."""
    # task
    task: str = setting('parity2', 'what to learn', tasks.TASKS)
    seed: int = setting(0, 'of weights, split and, by a generator of its own, batches')
    hole: str = setting(None, 'unseen inputs: + - or * (either) for each of the first bits',
                        only=Boolean)
    frac: float = setting(0.004, 'share of all pairs that trains; paper', 'from 0 to 1', Arithmetic)
    order: str = setting('lsb', 'digit of the answer written first', ('lsb', 'msb'), Arithmetic)
    image_size: int = setting(None, 'side, only for imagenet100', 'positive', Images)
    crop: str = setting('pad', 'shifted by up to an eighth, or a random part resized',
                        ('pad', 'resized'), Images)
    randaugment: int = setting(0, 'operations of RandAugment an image', 'at least 0', Images)
    erasing: float = setting(0., 'probability of random erasing', 'from 0 to 1', Images)
    mixup: float = setting(0., 'alpha of Mixup, 0 for none', 'at least 0', Images)
    cutmix: float = setting(0., 'alpha of CutMix, 0 for none', 'at least 0', Images)
    smoothing: float = setting(0.1, 'label smoothing', 'from 0 to 1', Images)
    context: int = setting(64, 'words in a window; ours', 'positive', Language)
    # prior
    init: str = setting('mask', 'arm: where the prior is written', maskprior.ARMS)
    strength: float = setting(8., 'nats by which the bias of other pairs is lower', 'positive')
    level: float = setting(4., 'M at the pairs that interact; its gradient carries sigmoid(-level)')
    per_head: bool = setting(False, 'one M for each head, [H, N, N], not a shared [N, N]')
    structure: str = setting('known', 'which bits interact: known, or measured on the training set',
                             ('known', 'measured'), Boolean)
    prior_bits: list = setting(None, 'bits such as 2,3 that a wrong prior says interact',
                               only=Boolean)
    pattern: str = setting('group', 'of the pairs in a group: tasks.boolean_structure',
                           tasks.PATTERNS, Boolean)
    flip: float = setting(0., 'share of M0 that is flipped', 'from 0 to 1', Boolean)
    without: str = setting(None, 'part that the prior leaves out: tasks.arithmetic_structure',
                           ('digits', 'carry', 'products'), Arithmetic)
    mimetic_v: bool = setting(False, 'W_V and W_proj as mimetic and impulse have them', only=Images)
    tie_mask: bool = setting(False, 'one entry of M for each distance', only=Language)
    freeze_mask: bool = setting(False, 'M does not learn')
    mask_lr: float = setting(1., "M's learning rate, as a multiple of --lr", 'at least 0')
    freeze_qk: bool = setting(False, 'W_Q and W_K do not learn')
    hold_inputs: bool = setting(False, "q and k read their layer's inputs in the untrained model")
    # model
    width: int = setting(64, 'D; ours', 'positive')
    heads: int = setting(4, 'H; ours', 'positive')
    layers: int = setting(2, 'L; ours', 'positive')
    patch: int = setting(None, 'side of a patch; 4, imagenet100 16', 'positive', Images)
    pool: str = setting('mean', 'of the patches, or a class token', ('mean', 'cls'), Images)
    positions: str = setting('learned', 'learned, sincos (images) or none (words)',
                             ('sincos', 'learned', 'none'), DATA)
    pos_std: float = setting(0.1, 'standard deviation of learned positions; ours', 'at least 0')
    init_std: float = setting(0.02, 'standard deviation of linear layers; GPT-2', 'positive')
    dropout: float = setting(0., 'of embedding and branches', 'at least 0 and below 1', Language)
    drop_path: float = setting(0., 'stochastic depth, rising to this in the last block',
                               'at least 0 and below 1', Images)
    bf16: bool = setting(False, 'autocast the model to bfloat16; weights and optimiser stay fp32')
    sdpa: bool = setting(False, "torch's fused attention kernel instead of the explicit softmax")
    compile: bool = setting(False, 'torch.compile the blocks; checkpoints are the same')
    # optimisation
    steps: int = setting(1000, 'optimiser steps; ours', 'positive')
    epochs: int = setting(None, 'instead of --steps; --warmup and --eval-every count epochs too',
                          'positive', Images)
    batch: int = setting(64, 'B, inputs in a step, of all processes together; ours', 'positive')
    lr: float = setting(1e-3, 'learning rate of AdamW, cosine to 0; ours', 'positive')
    warmup: int = setting(50, 'steps over which the learning rate rises; ours', 'at least 0')
    weight_decay: float = setting(0., 'only of the weights of linear layers; ours', 'at least 0')
    clip: float = setting(0., 'norm that the gradient is cut to, 0 for no limit', 'at least 0')
    # run
    eval_every: int = setting(200, 'steps between evaluations', 'positive')
    eval_early: int = setting(0, 'over the first 200 steps: steps between evaluations on 2,048 '
                              'inputs', 'at least 0', Boolean)
    device: str = setting('auto', 'cuda, cuda:1, mps, cpu; auto: the first that is there')
    threads: int = setting(0, "on a CPU; 0: one for the Boolean tasks, else torch's number",
                           'from 0 to 1024')
    data_dir: str = setting(tasks.DATA_DIR, 'data sets; or MASKPRIOR_DATA', only=DATA)
    cache: str = setting('cache', 'folder for decoded images', only=Images)
    out: str = setting('runs', 'folder of the runs')
    name: str = setting(None, "the run's folder in there; default TASK-INIT-sSEED")
    overwrite: bool = setting(False, 'run a finished run again')
    resume: bool = setting(False, 'go on with an interrupted run')


# The first setting of each group of --help, and the group.
GROUPS = {'task': 'task', 'init': 'prior', 'width': 'model', 'steps': 'optimisation',
          'eval_every': 'run'}
# A resumed run may change these, so they do not identify it.
NOT_OF_THE_RUN = ('device', 'threads', 'compile', 'data_dir', 'cache', 'out', 'name', 'overwrite',
                  'resume')

ADDITION = dict(width=128, layers=4, init_std=0.04, per_head=True, steps=2000, eval_every=1000,
                warmup=100, weight_decay=1., bf16=True)
IMAGES = dict(width=96, heads=3, layers=6, init_std=0.06, positions='sincos', strength=0.5,
              level=2., per_head=True, epochs=16, eval_every=2, warmup=2, batch=128, lr=2e-3,
              weight_decay=0.05, clip=1., bf16=True)
LANGUAGE = dict(width=128, layers=4, pos_std=0.02, strength=1., level=0., per_head=True, steps=500,
                batch=32, lr=4e-3, warmup=100, eval_every=125, weight_decay=0.1, clip=1., bf16=True)
# One for a task, the same for all of its arms; how they were found: results/.
RECIPES = {
    'parity2': dict(batch=128, clip=1., steps=400, eval_every=100, eval_early=10),
    'maj3': dict(layers=3, pos_std=1.3, init_std=0.05, strength=6., batch=256, steps=300,
                 eval_every=100, eval_early=10),
    'cyclic3': dict(layers=4, pos_std=1., strength=6., batch=256, lr=5e-4, steps=3500,
                    eval_every=500, eval_early=25),
    'parity3': dict(strength=6., steps=1200),
    'diff2': dict(strength=6., steps=600, eval_every=100),
    'add3': ADDITION,
    'add4': ADDITION | dict(frac=1e-5),
    'add5': ADDITION | dict(frac=1e-7),
    'mul3': ADDITION | dict(frac=0.03, init_std=0.05, steps=3500, eval_every=875, batch=256,
                            lr=3e-3),
    'cifar10': IMAGES,
    'cifar100': IMAGES,
    'imagenet100': IMAGES | dict(crop='resized'),
    'wikitext2': LANGUAGE | dict(steps=3060, eval_every=510, bf16=False),
    'tinystories': LANGUAGE | dict(dropout=0.1, steps=2000, eval_every=250),
}


def option(name):
    return '--' + name.replace('_', '-')


def task_settings(task):
    """The settings that a task asks for: its class's parameters after the first, its name."""
    return list(inspect.signature(tasks.TASKS[task]).parameters)[1:]


def applies_to(field, task):
    only = field.metadata['only']
    return (only is None or issubclass(tasks.TASKS[task], only)
            or field.name in task_settings(task))


def make_parser(task):
    """The command line; its --help shows the values of this task, and what is for it."""
    parser = argparse.ArgumentParser(prog='train.py', usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    for field in dataclasses.fields(Settings):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        value = RECIPES.get(task, {}).get(field.name, field.default)
        value = '' if value is None else f' [{value}]'
        limit = field.metadata['limit']
        kwargs = dict(type={bool: true_or_false, list: bit_list}.get(field.type, field.type),
                      choices=None if isinstance(limit, str) else limit, default=argparse.SUPPRESS,
                      help=(field.metadata['help'] + value).replace('%', '%%'))
        if field.type is bool:
            kwargs |= dict(nargs='?', const=True, metavar='true|false')
        in_epochs = field.name == 'steps' and 'epochs' in RECIPES.get(task, {})
        if in_epochs or not applies_to(field, task):
            kwargs['help'] = argparse.SUPPRESS
        group.add_argument(option(field.name), **kwargs)
    return parser


def parse(argv):
    """argv -> Settings: the defaults, then the task's recipe, then the command line."""
    # argparse would take the hole -- for the end of the options, and -+ for an option: a space
    # before it hides that.
    argv = list(argv)
    for i, arg in enumerate(argv):
        if arg == '--hole' and i + 1 < len(argv):
            argv[i:i + 2] = [f'--hole= {argv[i + 1]}']
        elif arg.startswith('--hole='):
            argv[i] = arg.replace('=', '= ', 1)
    find_task = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    find_task.add_argument('--task', nargs='?')
    task = find_task.parse_known_args(argv)[0].task
    task = task if task in tasks.TASKS else Settings.task
    given = vars(make_parser(task).parse_args(argv))
    if 'hole' in given:
        given['hole'] = given['hole'].strip()
    settings = Settings(**(RECIPES.get(task, {}) | given))
    check(settings, given)
    if settings.device == 'auto':
        mps = torch.backends.mps.is_available()
        settings.device = 'cuda' if torch.cuda.is_available() else 'mps' if mps else 'cpu'
    if settings.device == 'cuda' and 'LOCAL_RANK' in os.environ:
        # Under torchrun.
        settings.device = f'cuda:{os.environ["LOCAL_RANK"]}'
    try:
        torch.zeros(1, device=settings.device).item()
    # Each kind of device raises its own exception.
    except Exception as error:
        reason = str(error).strip().partition('\n')[0]
        raise UsageError(f'--device {settings.device} is unknown or absent: {reason}') from None
    return settings


def good_name(path):
    """Whether this names a folder below another: a relative path of parts that print."""
    parts = path.parts
    return bool(parts) and not path.is_absolute() and not {'..', *FILES} & {*parts} and all(
        part.isprintable() and part.strip() for part in parts)


def check(settings, given):
    """UsageError for a setting beyond its limit, not for this task, or not with another."""
    s = settings
    for field in dataclasses.fields(s):
        value, limit = getattr(s, field.name), field.metadata['limit']
        if value is not None and isinstance(limit, str) and not LIMITS[limit](value):
            below = ' and below 1e18' if limit in ('positive', 'at least 0') else ''
            raise UsageError(f'{option(field.name)} {value} must be {limit}{below}')
        if field.name in given and not applies_to(field, s.task):
            names = [name for name in tasks.TASKS if applies_to(field, name)]
            raise UsageError(f'{option(field.name)} does not apply to {s.task}: it is only for '
                             f'{", ".join(names)}')
    # Also a task of one's own that takes `patch`.
    images = applies_to(Settings.__dataclass_fields__['patch'], s.task)
    needs_mask = ('freeze_mask', 'tie_mask', 'mask_lr')
    wrong = {
        f'--seed {s.seed} must be from 0 to 2^63 - 1': not 0 <= s.seed < 2 ** 63,
        **{f'{option(name)} goes with --init mask; there is no mask in --init {s.init}':
               s.init != 'mask' and getattr(s, name) != getattr(Settings, name)
           for name in needs_mask},
        f'--mask-lr {s.mask_lr:g} does nothing beside --freeze-mask':
            s.freeze_mask and s.mask_lr != 1,
        f'--positions {s.positions} is not for {s.task}':
            s.positions == ('none' if images else 'sincos'),
        f'--init {s.init} is only for images; {s.task} has none':
            s.init in ('mimetic', 'impulse') and not images,
        f'--mimetic-v is what --init {s.init} has anyway':
            s.mimetic_v and s.init in ('mimetic', 'impulse'),
        '--crop pad is for CIFAR; imagenet100 needs --crop resized, as its images are larger':
            s.task == 'imagenet100' and s.crop == 'pad',
        f'--mixup and --cutmix mix neighbours: --batch {s.batch} must be even':
            (s.mixup or s.cutmix) and s.batch % 2,
        f'--name {s.name!r} must name a folder in --out':
            s.name is not None and not good_name(Path(s.name)),
        '--overwrite starts over and --resume goes on: choose one': s.overwrite and s.resume,
        f'--steps does not apply to {s.task}, which counts epochs: --epochs':
            'steps' in given and s.epochs,
        f'--pos-std is for learned positions; these are {s.positions}':
            'pos_std' in given and s.positions != 'learned',
        f'--width {s.width} is not a multiple of 4, which --positions sincos needs':
            s.positions == 'sincos' and s.width % 4,
        f'--width {s.width} is not a multiple of --heads {s.heads}': s.width % s.heads,
    }
    for message, refused in wrong.items():
        if refused:
            raise UsageError(message)


def run_config(settings):
    """The settings that make a run what it is, {name: value}: those that apply to its task."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(Settings)
            if applies_to(field, settings.task) and field.name not in NOT_OF_THE_RUN
            and not (field.name == 'steps' and settings.epochs)}


def changed_settings(config, before):
    """{name: what it was} where the run_config `before` is not `config`.

    An older run may not know a setting: it had its default.
    """
    was = {name: before.get(name, getattr(Settings, name)) for name in config}
    return {name: was[name] for name, value in config.items() if was[name] != value}


def check_same_settings(config, before, path):
    for name, was in changed_settings(config, before).items():
        raise UsageError(f'{path} holds a run with another {option(name)} ({was}, not '
                         f'{config[name]}): choose a --name, or --overwrite it')


def in_steps(settings, n_train):
    """Settings whose --epochs, with --warmup and --eval-every, are counted in steps."""
    if not settings.epochs:
        return settings
    steps = n_train / settings.batch
    return dataclasses.replace(settings, steps=max(1, round(settings.epochs * steps)),
                               warmup=round(settings.warmup * steps),
                               eval_every=max(1, round(settings.eval_every * steps)))


def listing():
    """The tasks and the arms, one a line, with what each needs and sets."""
    yield 'tasks: --task NAME'
    for task in tasks.TASKS:
        needs = 'no data'
        if task in tasks.DATA_PATHS:
            how = (f'python tasks.py download {task}' if task in tasks.DOWNLOADS else
                   'from image-net.org, by hand')
            needs = f'{" or ".join(tasks.DATA_PATHS[task])} in --data-dir ({how})'
        recipe = ' '.join(f'{option(name)} {v}' for name, v in RECIPES.get(task, {}).items())
        yield f'  {task:12} needs {needs}' + (f'; sets {recipe}' if recipe else '')
    yield 'arms: --init NAME, where the prior is written'
    for arm, init in maskprior.ARMS.items():
        summary = (init.__doc__ or '').partition('\n')[0]
        yield f'  {arm:12} {summary}'


# --------------------------------------------------------------------------- the parts of a run

def build(settings):
    """Settings -> task, model with the prior written in, target attention [N, N] or [H, N, N].

    The same seed gives the same weights, but for those that the arm sets.
    """
    task_class = tasks.TASKS[settings.task]
    names = task_settings(settings.task)
    for name in names:
        if not hasattr(settings, name):
            raise UsageError(f'{task_class.__name__} takes {name}, which is no setting: add it to '
                             'train.Settings')
    task = task_class(settings.task, **{name: getattr(settings, name) for name in names})
    distance = task.distance
    if settings.flip:
        generator = torch.Generator().manual_seed(settings.seed)
        flipped = torch.rand(distance.shape, generator=generator) < settings.flip
        distance = torch.where(flipped, 1 - distance, distance)
    torch.manual_seed(settings.seed)
    # On the CPU, as all initialisation is: it needs float64, which not every device has.
    model = maskprior.Transformer(
        **task.model, D=settings.width, H=settings.heads, L=settings.layers,
        pos_std=settings.pos_std, init_std=settings.init_std, sdpa=settings.sdpa,
        dropout=settings.dropout).eval()
    generator = torch.Generator().manual_seed(settings.seed)
    try:
        M0 = maskprior.prior_matrix(distance, settings.strength, settings.level)
        if settings.per_head and M0.ndim == 2:
            M0 = M0.expand(settings.heads, -1, -1)
        maskprior.check_shape('M0', M0, model)
        if settings.mimetic_v:
            maskprior.init_mimetic(model, generator=generator, qk=False)
        target = maskprior.ARMS[settings.init](model, M0, task.probe.cpu(), generator)
        if settings.tie_mask:
            maskprior.tie_mask(model)
        allowed = model.blocks[0].attn.allowed
        if target is None:
            target = maskprior.target_attention(M0, allowed)
        maskprior.check_shape('its target', target, model)
        if not maskprior.informative_rows(target, allowed).any():
            raise ValueError('it puts no pair of tokens above another')
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise UsageError(f'--init {settings.init} cannot write this prior: {error}') from None
    for block in model.blocks:
        block.attn.q.requires_grad_(not settings.freeze_qk)
        block.attn.k.requires_grad_(not settings.freeze_qk)
        if block.attn.M is not None:
            block.attn.M.requires_grad_(not settings.freeze_mask)
    if settings.hold_inputs:
        maskprior.hold_inputs(model)
    return task, model.to(settings.device), target.to(settings.device)


def make_optimiser(model, settings):
    """AdamW. Weight decay is only for the weights of linear layers: it would pull M to 0."""
    linear = {f'{name}.weight' for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    decayed = dict(params=[], weight_decay=settings.weight_decay, factor=1.)
    others = dict(params=[], weight_decay=0., factor=1.)
    masks = dict(params=[], weight_decay=0., factor=settings.mask_lr)
    # A tied output layer goes by its embedding's name, so it is not decayed.
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = decayed if name in linear else others
            if settings.mask_lr != 1 and name.endswith('.M'):
                group = masks
            group['params'].append(p)
    groups = [group for group in (decayed, others, masks) if group['params']]
    # Fused: 6 % of a step of the small tasks on a CPU (measured).
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def learning_rate(step, settings):
    """Linear warm-up and cosine to 0."""
    warm = min(1., (step + 1) / max(1, settings.warmup))
    return settings.lr * warm * (1 + math.cos(math.pi * step / settings.steps)) / 2


def autocast(settings):
    device = torch.device(settings.device).type
    return torch.autocast(device, torch.bfloat16, enabled=settings.bf16)


def fast_in_bf16(device):
    """False for a CPU without instructions for it: ten times as slow as in fp32 (measured)."""
    return device != 'cpu' or (torch.backends.mkldnn.is_available()
                               and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def processes():
    """(rank, number of processes) under torchrun, else (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def evaluate(task, model, target, settings, initial, step, quick=False):
    """The metrics at a step, as a row of the log. RunError if one is not finite."""
    model.eval()
    with torch.no_grad(), autocast(settings):
        metrics = task.evaluate(model, quick)
        if step == settings.steps:
            metrics |= task.final(model)
    metrics['prior_tv'] = maskprior.prior_tv(model, target, task.probe)
    changes = maskprior.relative_change(model, initial)
    metrics |= {f'change_{name}': change for name, change in changes.items()}
    model.train()
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            lower = f'--lr than {settings.lr:g}' if step else '--init-std, --pos-std or --strength'
            raise RunError(f'diverged: {name} is {value} at step {step}; try a lower {lower}')
    return metrics


# ---------------------------------------------------------------------------------------- files

def write(path, save):
    """Atomic: save(temporary path), then rename. A reader finds the old file or the new, whole."""
    try:
        with tasks.replacing(path) as temporary:
            save(temporary)
    # torch.save: RuntimeError on a full disk.
    except (OSError, RuntimeError) as error:
        message = str(error).partition('\n')[0]
        raise RunError(f'{path} cannot be written: {message}') from None


def write_text(path, text):
    write(path, lambda temporary: temporary.write_text(text, encoding='utf-8'))


def write_json(path, content):
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + '\n')


def write_log(path, log):
    write_text(path, ''.join(json.dumps(row, allow_nan=False) + '\n' for row in log))


def read(path, load, advice='start over with --overwrite'):
    """load(path); a RunError that names the file if it is damaged, which raises almost anything."""
    try:
        return load(path)
    except (PermissionError, torch.OutOfMemoryError, UsageError):
        raise
    except Exception as error:
        foreign = isinstance(error, pickle.UnpicklingError)
        message = 'no file of this program' if foreign else str(error).partition('\n')[0]
        raise RunError(f'{path} cannot be read ({type(error).__name__}: {message}): '
                       f'{advice}') from None


def to_cpu(content):
    """A nested dict or list with its tensors on the CPU, so that it loads on any machine."""
    if isinstance(content, torch.Tensor):
        return content.detach().cpu()
    if isinstance(content, dict):
        return {key: to_cpu(value) for key, value in content.items()}
    if isinstance(content, list):
        return [to_cpu(value) for value in content]
    return content


def data_fingerprint(task):
    """What tells training data apart: the number of examples and the mean of the probe inputs."""
    return {'training_examples': task.reference.get('training_examples'),
            'probe_mean': task.probe.cpu().double().mean().item()}


def save_checkpoint(path, config, task, model, optimiser, generator, step, seconds, log):
    content = dict(model=model.state_dict(), optimiser=optimiser.state_dict(),
                   generator=generator.get_state(), step=step, seconds=seconds, log=log,
                   run=config | data_fingerprint(task))
    write(path, lambda temporary: torch.save(to_cpu(content), temporary))


def load_checkpoint(path, config, settings, task, model, optimiser, generator):
    """-> step, seconds, log. RunError or UsageError for a damaged one, or one of another run."""
    def load(path):
        saved = torch.load(path, weights_only=True, map_location='cpu')
        check_same_settings(config, saved['run'], path)
        now = data_fingerprint(task)
        was = saved['run']['training_examples']
        difference = abs(saved['run'].get('probe_mean', now['probe_mean']) - now['probe_mean'])
        if was != now['training_examples'] or difference > 1e-4:
            raise UsageError(f'{path} is from other training data (examples then: {was}, now: '
                             f'{now["training_examples"]}): choose a --name, or --overwrite it')
        model.load_state_dict(saved['model'])
        group_keys = [set(group) for group in optimiser.param_groups]
        optimiser.load_state_dict(saved['optimiser'])
        if group_keys != [set(group) for group in optimiser.param_groups]:
            raise ValueError('the optimiser of another version')
        # The fused kernel does not check shapes.
        for parameter, state in optimiser.state.items():
            if any(m.ndim and m.shape != parameter.shape for m in state.values()):
                raise ValueError('the optimiser of another model')
        generator.set_state(saved['generator'])
        if not 0 <= saved['step'] <= settings.steps:
            raise ValueError(f'step {saved["step"]} of {settings.steps}')
        if not all({'step', 'prior_tv', *task.console_metrics} <= row.keys()
                   for row in saved['log']):
            raise ValueError('its log lacks a metric')
        return saved['step'], float(saved['seconds']), saved['log']
    return read(path, load)


# ------------------------------------------------------------------------------------- training

class Progress:
    """A line for each evaluation on all inputs, and one whenever ten seconds have passed."""

    def __init__(self, task, settings):
        self.metrics = task.console_metrics
        self.steps = settings.steps
        self.last = time.perf_counter()

    def line(self, step, text, seconds):
        left = f'  {seconds / step * (self.steps - step):5.0f} s left' if step else ''
        print(f'step {step:6d} of {self.steps}  {text}{left}', flush=True)
        self.last = time.perf_counter()

    def evaluation(self, step, row, seconds):
        texts = ['untrained']
        if step:
            texts = [f'{name} {row[name]:{"7.2%" if "accuracy" in name else ".4f"}}'
                     for name in self.metrics]
        self.line(step, '  '.join([*texts, f'prior_tv {row["prior_tv"]:.3f}']), seconds)

    def batch(self, step, loss, seconds):
        if time.perf_counter() - self.last > 10:
            self.line(step, f'loss of the batch {loss.item():.4f}', seconds)


def wrap(model, settings):
    """The model as training calls it: compiled, and one of several processes, where that is so."""
    if settings.compile:
        # The blocks alone: torch 2.6 compiles an embedding's gradient wrongly on a CPU (measured).
        for block in model.blocks:
            block.compile()
    return DistributedDataParallel(model) if processes()[1] > 1 else model


def update(model, optimiser, task, settings, generator, step):
    """One optimiser step, on this process's shard of the batch. -> its loss"""
    rank, world = processes()
    shard = slice(rank * settings.batch // world, (rank + 1) * settings.batch // world)
    for group in optimiser.param_groups:
        group['lr'] = learning_rate(step, settings) * group['factor']
    if settings.dropout or settings.drop_path:
        # One seed for each process and step, the same after --resume.
        torch.manual_seed(hash((settings.seed, step, rank)) % 2 ** 63)
    x, y = task.batch(generator, settings.batch, step, shard)
    with autocast(settings):
        loss = task.loss(model, x, y)
    optimiser.zero_grad()
    loss.backward()
    if settings.clip:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimiser.step()
    return loss.detach()


def train(settings, folder, config, task, model, target):
    """Trains from step 0 or from the checkpoint in `folder`, and returns the result.

    Writes config.json (`config`), the log and the checkpoints there. Of several processes each
    takes its shard of every batch; the first evaluates and writes.
    """
    run_settings = run_config(settings)
    settings = in_steps(settings, task.n_train)
    rank, _ = processes()
    optimiser = make_optimiser(model, settings)
    # Draws the batches and nothing else.
    generator = torch.Generator().manual_seed(settings.seed)
    initial = maskprior.prior_weights(model)
    step, seconds, log = 0, 0., []
    checkpoint = folder / 'checkpoint.pt'
    if settings.resume and checkpoint.exists():
        step, seconds, log = load_checkpoint(checkpoint, run_settings, settings, task, model,
                                             optimiser, generator)
    if rank == 0:
        # Only once the checkpoint has been accepted.
        write_json(folder / 'config.json', config)
        write_log(folder / 'log.jsonl', log)
    progress = Progress(task, settings)
    start = time.perf_counter() - seconds

    def record(quick=False):
        seconds = time.perf_counter() - start if step else 0.
        row = {'step': step, 'seconds': seconds}
        row |= evaluate(task, model, target, settings, initial, step, quick)
        log.append(row)
        write_log(folder / 'log.jsonl', log)
        save_checkpoint(checkpoint, run_settings, task, model, optimiser, generator, step,
                        seconds, log)
        if not quick:
            progress.evaluation(step, row, seconds)

    if not log and rank == 0:
        record()
    model.train()
    parallel = wrap(model, settings)
    while step < settings.steps:
        loss = update(parallel, optimiser, task, settings, generator, step)
        step += 1
        full = step % settings.eval_every == 0 or step == settings.steps
        early = settings.eval_early and step <= 200 and step % settings.eval_early == 0
        if rank == 0:
            progress.batch(step, loss, time.perf_counter() - start)
            if full or early:
                record(quick=not full)
    return make_result(settings, task, model, log) if rank == 0 else None


def make_result(settings, task, model, log):
    """result.json: the last evaluation, and what the run is."""
    final = {name: value for name, value in log[-1].items() if name not in ('step', 'prior_tv')}
    n_parameters = sum(p.numel() for name, p in model.named_parameters()
                       if not name.startswith('untrained'))
    return dict(task=settings.task, init=settings.init, seed=settings.seed,
                steps=settings.steps) | final | dict(
                    fitted=task.fitted(final), prior_tv_init=log[0]['prior_tv'],
                    prior_tv_final=log[-1]['prior_tv'], **task.reference,
                    parameters=n_parameters, device=device_name(settings.device),
                    torch=torch.__version__)


# --------------------------------------------------------------------------------- command line

FILES = ('config.json', 'log.jsonl', 'checkpoint.pt', 'result.json')


def run_folder(settings):
    default = f'{settings.task}-{settings.init}-s{settings.seed}'
    return Path(settings.out) / (settings.name or default)


def check_folder(settings):
    """Whether the run of these settings is finished.

    UsageError if the folder holds a run of other settings, or an unfinished one without --resume.
    """
    folder = run_folder(settings)
    if not any((folder / name).exists() for name in FILES):
        return False
    before = read(folder / 'config.json', lambda p: {**json.loads(p.read_text())['settings']})
    check_same_settings(run_config(settings), before, folder)
    if (folder / 'result.json').exists():
        read(folder / 'result.json', lambda p: json.loads(p.read_text())['fitted'])
        return True
    if not settings.resume:
        raise UsageError(f'{folder} holds an unfinished run: --resume goes on with it, '
                         '--overwrite starts over')
    return False


def clean_folder(settings):
    """Removes what an earlier run left that this one does not go on with."""
    folder = run_folder(settings)
    # Last to first: the result goes before what it rests on.
    for name in reversed(FILES):
        if name != 'config.json' and not settings.resume:
            (folder / name).unlink(missing_ok=True)
        # Left by a save that was killed.
        for temporary in folder.glob(f'{name}.*.tmp'):
            temporary.unlink(missing_ok=True)


def device_name(device):
    if device.startswith('cuda'):
        return f'{device} ({torch.cuda.get_device_name(device)})'
    return device


def git_commit():
    try:
        git = subprocess.run(['git', 'describe', '--always', '--dirty', '--exclude=*'],
                             cwd=Path(__file__).parent, capture_output=True, text=True)
        return git.stdout.strip() or None
    # No git here.
    except OSError:
        return None


def make_config(settings, argv, world):
    """config.json; the commit is that of every part of the run."""
    path = run_folder(settings) / 'config.json'
    commits = []
    if settings.resume and path.exists():
        commits = read(path, lambda p: (json.loads(p.read_text())['commit'] or '').split(', '))
    commits = dict.fromkeys(commit for commit in [*commits, git_commit()] if commit)
    return dict(settings=run_config(settings), command=shlex.join(['python', 'train.py', *argv]),
                torch=torch.__version__, device=device_name(settings.device),
                threads=torch.get_num_threads(), processes=world,
                commit=', '.join(commits) or None)


def start_processes(settings):
    """Under torchrun: joins the others. -> (rank, number of processes)"""
    if {'RANK', 'WORLD_SIZE', 'MASTER_ADDR'} <= os.environ.keys() and not dist.is_initialized():
        if settings.device.startswith('cuda'):
            torch.cuda.set_device(settings.device)
        dist.init_process_group('nccl' if settings.device.startswith('cuda') else 'gloo')
    rank, world = processes()
    if world > 1 and settings.batch % (2 * world):
        raise UsageError(f'--batch {settings.batch} is not a multiple of twice the {world} '
                         'processes')
    return rank, world


def run(settings, argv):
    """One run, from its settings to its result."""
    rank, world = start_processes(settings)
    folder = run_folder(settings)
    if rank == 0:
        n = torch.get_num_threads()
        threads = f', {n} thread{"s" * (n > 1)}' if settings.device == 'cpu' else ''
        print(f'{settings.task}, --init {settings.init}, seed {settings.seed}, on '
              f'{device_name(settings.device)}{threads}, {"bf16" if settings.bf16 else "fp32"}')
    # Refuses bad settings before any file is written.
    task, model, target = build(settings)
    schedule = in_steps(settings, task.n_train)
    if schedule.warmup >= schedule.steps and rank == 0:
        print(f'the warm-up of {schedule.warmup} steps is not shorter than the run of '
              f'{schedule.steps}: the full learning rate is not reached')
    if world > 1:
        # No process writes before all have read the folder.
        dist.barrier()
    if rank:
        train(settings, folder, None, task, model, target)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tasks.lock(folder, wait=False):
                # Again: another run may have finished while this one was built.
                if not settings.overwrite and check_folder(settings):
                    raise RunError(f'another run has finished in {folder} meanwhile: nothing is '
                                   'changed')
                clean_folder(settings)
                config = make_config(settings, argv, world)
                result = train(settings, folder, config, task, model, target)
                write_json(folder / 'result.json', result)
        except BlockingIOError:
            raise RunError(f'another run is at work in {folder}: choose another --name, or '
                           'wait') from None
        print('\n'.join(closing_lines(folder, task, result)))
    if world > 1:
        # torchrun kills all when one fails: the others wait until the first has its result.
        dist.barrier()
        dist.destroy_process_group()


def closing_lines(folder, task, result):
    """What a run prints at its end: tables, what was learned in words, how it was held."""
    name = f'{result["task"]} --init {result["init"]} --seed {result["seed"]}'
    return [*task.summary(result), f'{name}: {task.verdict(result)}.',
            f'loss_seen {result["loss_seen"]:.2g}; prior_tv {result["prior_tv_init"]:.3f} -> '
            f'{result["prior_tv_final"]:.3f}; {result["seconds"]:.0f} s; {folder}']


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if '--list' in argv:
        if len(argv) > 1:
            raise UsageError('--list stands alone')
        print('\n'.join(listing()))
        return
    settings = parse(argv)
    if settings.bf16 and not any(arg.startswith('--bf16') for arg in argv):
        # The recipe's, which a hand may still choose.
        settings.bf16 = fast_in_bf16(settings.device)
    if not settings.overwrite and check_folder(settings):
        if os.environ.get('RANK', '0') == '0':
            print(f'{run_folder(settings)} is finished: nothing to do (--overwrite runs it again)')
        return
    # Tiny models: a second thread saves little, and on a busy machine it waits (measured).
    tiny = issubclass(tasks.TASKS[settings.task], Boolean)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads or (1 if tiny else threads))
    try:
        run(settings, argv)
    finally:
        torch.set_num_threads(threads)


def interruptible(main):
    """main(); meanwhile Ctrl-C is a KeyboardInterrupt, else what it was: a second one ends all."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, before)


def command(main, script):
    """Runs main(). A refusal becomes one line and the exit code: 2 bad arguments, 1 the rest."""
    training = script == 'train.py'
    try:
        # For a terminal without Unicode; what stands in for stdout may not have it.
        sys.stdout.reconfigure(errors='backslashreplace')
    except AttributeError:
        pass
    try:
        return interruptible(main)
    except UsageError as error:
        code, message = 2, error
    except BrokenPipeError:
        # Whoever read the output has closed it, such as head: nothing to say, nor to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RunError, DataError, OSError) as error:
        code, message = 1, error
    except KeyboardInterrupt:
        code, message = 1, 'interrupted'
        if training:
            message += '; --resume goes on from the last evaluation'
    except MemoryError:
        code, message = 1, 'out of memory'
    except RuntimeError as error:
        # A bug keeps its traceback.
        known = ('out of memory', 'allocate memory', 'No working C++ compiler')
        lines = [line for line in str(error).splitlines() if any(word in line for word in known)]
        if not lines:
            raise
        code, message = 1, lines[0]
        if training and 'memory' in message:
            message += '; make --batch, --width or --layers smaller'
    print(f'{script}: {message}', file=sys.stderr)
    return code


if __name__ == '__main__':
    sys.exit(command(main, 'train.py'))
