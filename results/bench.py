"""How fast a training step is, against the machine and against torch's own layers:

    python results/bench.py [TASK ...]     # into runs/speed/speed.json, and prints it as tables
    python results/bench.py --write        # into results/speed.json, what report.py shows

Forward, backward and optimiser; warm-up excluded; median [quartiles]. The data is made up (random
images, random words), so that nothing has to be there.
"""
import argparse
import importlib.util
import itertools
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
# torch's profiler writes of itself to stderr.
os.environ.setdefault('KINETO_LOG_LEVEL', '6')
# Before torch, whose warning it silences.
import tasks
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import DeviceType
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import maskprior
import train
from report import speed

TASKS = ('parity2', 'maj3', 'cyclic3', 'add3', 'mul3', 'cifar10', 'wikitext2', 'tinystories')
# B, N, D, H of the attention alone: those of the recipes, and of a ViT-Tiny.
SHAPES = ((64, 16, 64, 4), (128, 64, 96, 3), (64, 64, 128, 4), (16, 197, 192, 3))
# N of a layer that grows: B 1, D 192, H 3.
LENGTHS = (64, 256, 1024, 4096)


def timed(seconds, device, *steps):
    """Seconds a call of each step: (median, first quartile, third quartile).

    Three calls of each do not count. The steps take turns, so that whatever else the machine does
    meets all of them. On a GPU the device's own clock counts, read once at the end.
    """
    cuda = torch.device(device).type == 'cuda'

    def now():
        if torch.device(device).type == 'mps':
            torch.mps.synchronize()
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    calls = [[] for _ in steps]
    start = time.perf_counter()
    while len(calls[0]) < 8 or time.perf_counter() - start < seconds * len(steps):
        for step, times in zip(steps, calls):
            before = now()
            step()
            times.append((before, now()))
    if cuda:
        torch.cuda.synchronize(device)
    found = []
    for times in calls:
        taken = [before.elapsed_time(after) / 1e3 if cuda else after - before
                 for before, after in times[3:]]
        low, median, high = statistics.quantiles(taken, n=4)
        found.append((median, low, high))
    return found


def product_rate(device, bf16, seconds, n=2048):
    """GFLOP/s of one large matrix product: what the machine gives at best."""
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    return 2e-9 * n ** 3 / timed(seconds, device, lambda: a @ a)[0][0]


# ------------------------------------------------------------------------------ made-up data

def random_words(vocabulary, n, generator):
    """A text of each word of the vocabulary, then of n drawn ones."""
    drawn = torch.randint(vocabulary, (n,), generator=generator).tolist()
    spelled = [''.join(chr(97 + int(digit)) for digit in str(i)) for i in range(vocabulary)]
    return ' '.join(f'w{spelled[i]}' for i in [*range(vocabulary), *drawn])


def made_up_data(folder):
    """CIFAR-10 in its binary form, and both texts, of random content: the loaders cannot tell."""
    generator = torch.Generator().manual_seed(0)
    cifar = folder / 'cifar-10-batches-bin'
    cifar.mkdir()
    for name in (*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch'):
        record = torch.randint(256, (1000, 3073), generator=generator)
        record[:, 0] %= 10
        (cifar / f'{name}.bin').write_bytes(bytes(record.flatten().tolist()))
    wikitext = folder / 'wikitext-2'
    wikitext.mkdir()
    for split in ('train', 'valid', 'test'):
        (wikitext / f'{split}.txt').write_text(random_words(33_276, 10_000, generator))
    stories = folder / 'tinystories'
    stories.mkdir()
    text = '<|endoftext|>'.join(random_words(5000, 100, generator) for _ in range(50))
    (stories / 'TinyStories-train.txt').write_text(text)


# ------------------------------------------------------------------------- a step of training

def drawn(settings, task):
    """The batches that train.py makes."""
    generator = torch.Generator().manual_seed(0)
    for step in itertools.count():
        yield task.batch(generator, settings.batch, step)


def fixed(settings, task):
    return itertools.repeat(next(drawn(settings, task)))


def loaded(settings, task):
    """The batches of a Boolean task from torch's DataLoader, as GOTU's code takes them."""
    loader = DataLoader(TensorDataset(task.seen_tokens, task.seen_y), settings.batch, shuffle=True)
    while True:
        yield from loader


def make_step(settings, task, model, loss, batches=fixed):
    """A training step as train.py does it."""
    optimiser = train.make_optimiser(model, settings)
    batches = batches(settings, task)
    model.train()

    def step():
        x, y = next(batches)
        with train.autocast(settings):
            found = loss(model, x, y)
        optimiser.zero_grad()
        found.backward()
        if settings.clip:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()

    return step


def costs(step, device):
    """The three operations (on a GPU: kernels) that take most of a step, with their share."""
    cuda = torch.device(device).type == 'cuda'
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step()
    taken = {e.key: e.self_device_time_total if cuda else e.self_cpu_time_total
             for e in profile.key_averages() if (e.device_type == DeviceType.CUDA) == cuda}
    top = sorted(taken, key=taken.get)[:-4:-1]
    total = sum(taken.values())
    return ', '.join(f'{key.removeprefix("aten::")} {taken[key] / total:.0%}' for key in top)


class TorchBlock(nn.TransformerEncoderLayer):
    """torch's own layer in the place of a Block, with the same mask."""

    def __init__(self, block, D, H):
        super().__init__(D, H, 4 * D, dropout=0, activation=F.gelu, batch_first=True,
                         norm_first=True)
        self.M = block.attn.M
        self.allowed = block.attn.allowed

    def forward(self, x, rows=slice(None), qk_input=None):
        bias = maskprior.mask_bias(self.M, self.allowed)
        return super().forward(x, src_mask=bias)[:, rows]


class FusedBlock(nn.Module):
    """A block as nanoGPT writes it: one product for q, k and v, torch's fused attention, no M."""

    def __init__(self, block, D, H):
        super().__init__()
        self.H = H
        self.causal = block.attn.allowed is not None
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.proj = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x, rows=slice(None), qk_input=None):
        q, k, v = (z.unflatten(-1, (self.H, -1)).transpose(1, 2)
                   for z in self.qkv(self.norm1(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norm2(x)))[:, rows]


def simple_vit(settings, task):
    """(name with version, vit-pytorch's SimpleViT of the same size); None if not installed."""
    try:
        found = f'SimpleViT of vit-pytorch {version("vit-pytorch")}'
        # The file alone: the package wants torchvision.
        folder = Path(importlib.util.find_spec('vit_pytorch').origin).parent
        spec = importlib.util.spec_from_file_location('simple_vit', folder / 'simple_vit.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (AttributeError, ImportError, PackageNotFoundError):
        return None
    return found, module.SimpleViT(
        image_size=32, patch_size=task.model['inputs'][1], num_classes=task.model['outputs'],
        dim=settings.width, depth=settings.layers, heads=settings.heads,
        mlp_dim=4 * settings.width, dim_head=settings.width // settings.heads).to(settings.device)


def usual_loss(model, x, y):
    """A language model's loss as it is usually written: all logits, then torch's function."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def replaced(build, block):
    """(settings, task, model) of a build with each of its blocks replaced, and its usual loss."""
    settings, task, model = build
    blocks = [block(before, settings.width, settings.heads) for before in model.blocks]
    model.blocks = nn.ModuleList(blocks).to(settings.device)
    return *build, usual_loss if isinstance(task, tasks.Language) else task.loss


def bench_task(name, options, rates, seconds):
    """A row for each type: its rate, its share of the machine's, and ratios of times, each named by
    what is over what."""
    for bf16 in (False, True):
        def build(*more):
            settings = train.parse(['--task', name, '--bf16', str(bf16), *options, *more])
            return settings, *train.build(settings)[:2]

        settings, task, model = build()
        ours = make_step(settings, task, model, task.loss)
        with_data = make_step(settings, task, model, task.loss, drawn)
        plain = ['--init', 'default']
        # torch's layer has no mask for each head that holds for all inputs.
        shared = ['--per-head', 'false']
        boolean = isinstance(task, tasks.Boolean)
        peer = 'fused blocks' + (', DataLoader' if boolean else '')
        peer_step = make_step(*replaced(build(*plain), FusedBlock), loaded if boolean else drawn)
        vit = simple_vit(settings, task) if isinstance(task, tasks.Images) else None
        if vit:
            peer, vit_model = vit
            peer_step = make_step(settings, task, vit_model, task.loss, drawn)
        with FlopCounterMode(display=False) as counter:
            ours()
        (median, *quartiles), *others = timed(
            seconds, settings.device, ours, with_data, make_step(*build(*plain), task.loss),
            make_step(*build(*shared), task.loss),
            make_step(*replaced(build(*shared), TorchBlock)),
            make_step(*build(*plain), task.loss, drawn), peer_step)
        data, default, with_shared, of_torch, default_data, of_peer = [time for time, *_ in others]
        gflops = counter.get_total_flops() / median / 1e9
        tokens = settings.batch * math.prod(task.model['grid'])
        yield dict(task=name, dtype='bf16' if bf16 else 'fp32', threads=torch.get_num_threads(),
                   parameters=sum(p.numel() for p in model.parameters()),
                   milliseconds=1e3 * median, quartiles=[1e3 * time for time in quartiles],
                   steps_per_second=1 / median, tokens_per_second=tokens / median,
                   gflops_per_second=gflops, share_of_product=gflops / rates[bf16],
                   with_data=data / median, mask_over_default=median / default,
                   torch_layers_over_ours=of_torch / with_shared, peer=peer,
                   peer_over_default=of_peer / default_data,
                   costs=costs(with_data, settings.device))


# ----------------------------------------------------------------- the attention, and the seeds

def attention_step(layer, call, shape, device, bf16, M_shape=None):
    """Forward and backward of a layer with an M of zeros."""
    B, N, D, _ = shape
    x = torch.randn(B, N, D, device=device)
    layer.M = nn.Parameter(torch.zeros(M_shape or (N, N)))
    layer.to(device)

    def step():
        layer.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
            y = call(layer, x)
        y.float().square().sum().backward()

    return step


def call_torch(layer, x):
    return layer(x, x, x, attn_mask=maskprior.mask_bias(layer.M), need_weights=False)[0]


def bytes_for_backward(step):
    saved_bytes = []

    def save(t):
        saved_bytes.append(t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        step()
    return sum(saved_bytes)


def bench_attention(device, seconds):
    """The attention alone, and over it torch's MultiheadAttention and fused kernel."""
    for shape in SHAPES:
        _, _, D, H = shape
        for bf16 in (False, True):
            explicit, fused = [attention_step(maskprior.Attention(D, H, sdpa=sdpa),
                                              lambda layer, x: layer(x), shape, device, bf16)
                               for sdpa in (False, True)]
            theirs = attention_step(nn.MultiheadAttention(D, H, batch_first=True), call_torch,
                                    shape, device, bf16)
            megabytes = bytes_for_backward(explicit) / 1e6
            ours, theirs, fused = timed(seconds, device, explicit, theirs, fused)
            yield dict(shape=list(shape), dtype='bf16' if bf16 else 'fp32',
                       milliseconds=1e3 * ours[0], quartiles=[1e3 * time for time in ours[1:]],
                       megabytes_for_backward=megabytes,
                       multihead_over_ours=theirs[0] / ours[0], fused_over_ours=fused[0] / ours[0])


def bench_growth(device, seconds, D=192, H=3):
    """A layer over more and more tokens, with an M [N, N], one for each head, and a tied one."""
    for N in LENGTHS:
        layers = [maskprior.Attention(D, H) for _ in range(3)]
        layers[2].tied_mask = True
        steps = [attention_step(layer, lambda layer, x: layer(x), (1, N, D, H), device, False, M)
                 for layer, M in zip(layers, ((N, N), (H, N, N), (H, N)))]
        yield dict(N=N, milliseconds=[1e3 * median for median, *_ in
                                      timed(seconds, device, *steps)],
                   megabytes_for_backward=[bytes_for_backward(step) / 1e6 for step in steps])


def bench_seeds(device, seconds):
    """Gradients of several seeds of parity2 in one batched model (torch.func), over the time of as
    many single ones."""
    builds = [train.build(train.parse(['--task', 'parity2', '--seed', str(seed), '--device',
                                       device])) for seed in range(8)]
    task = builds[0][0]
    models = [model for _, model, _ in builds]
    batches = [task.batch(torch.Generator().manual_seed(seed), 64) for seed in range(8)]

    def loss(parameters, buffers, x, y):
        def model(x):
            return functional_call(models[0], (parameters, buffers), (x,))
        return task.loss(model, x, y)

    def single():
        task.loss(models[0], *batches[0]).backward()

    for k in (1, 2, 4, 8):
        stacked = (*stack_module_state(models[:k]), *map(torch.stack, zip(*batches[:k])))
        one, together = timed(seconds, device, single, lambda: vmap(grad(loss))(*stacked))
        yield dict(seeds=k, batched_over_single=together[0] / (k * one[0]))


# --------------------------------------------------------------------------------------- main

def bench(args, argv):
    """All that is measured, as speed.json has it."""
    torch.manual_seed(0)
    rows, product = [], {}
    with tempfile.TemporaryDirectory() as folder:
        made_up_data(Path(folder))
        for threads in dict.fromkeys((1, args.threads)):
            torch.set_num_threads(threads)
            rates = {bf16: product_rate(args.device, bf16, args.seconds) for bf16 in (False, True)}
            product[threads] = {'fp32': rates[False], 'bf16': rates[True]}
            for name in args.tasks or TASKS:
                options = ['--device', args.device]
                if name in tasks.DATA_PATHS:
                    options += ['--data-dir', folder]
                rows += bench_task(name, options, rates, args.seconds)
    return dict(command=shlex.join(['python', 'results/bench.py', *argv]),
                commit=train.git_commit(), torch=torch.__version__,
                device=train.device_name(args.device), threads=args.threads, product=product,
                tasks=rows, attention=list(bench_attention(args.device, args.seconds)),
                growth=list(bench_growth(args.device, args.seconds)),
                seeds=list(bench_seeds(args.device, args.seconds)))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('tasks', nargs='*', metavar='TASK', help=' '.join(TASKS))
    parser.add_argument('--write', action='store_true', help='record it in results/')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads(),
                        help='steps are timed with one and with these')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--seconds', type=float, default=2., help='for each number')
    args = parser.parse_args(argv)
    unknown = sorted(set(args.tasks) - set(TASKS))
    if unknown:
        raise train.UsageError(f'no task {unknown[0]} here: {" ".join(TASKS)}')
    if args.write and args.tasks:
        raise train.UsageError('--write records all of the tasks: name none')
    if not 1 <= args.threads <= 1024 or not 0 < args.seconds < math.inf:
        raise train.UsageError('--threads must be from 1 to 1024, --seconds positive and finite')
    # Refuses a device that is not there.
    args.device = train.parse(['--device', args.device]).device
    folder = HERE if args.write else Path('runs/speed')
    # Before the work.
    folder.mkdir(parents=True, exist_ok=True)
    train.write_json(folder / 'speed.json', bench(args, argv))
    print('\n'.join(speed(folder)))


if __name__ == '__main__':
    sys.exit(train.command(main, 'bench.py'))
