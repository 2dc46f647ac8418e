"""How fast a training step is, against the machine and against torch's own layers:  python train.py --bench [TASK ...]

Writes results/bench/bench.json (of some tasks alone: runs/bench/bench.json) and prints it as tables. Forward, backward and optimiser;
warm-up excluded; median [quartiles]. The data is made up (random images, random words), so that nothing has to be there. --threads,
--device, --seconds (for each number).
"""
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault('KINETO_LOG_LEVEL', '6')                                     # torch's profiler writes of itself to stderr
import tasks
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.flop_counter import FlopCounterMode

import maskprior
import train
from report import bench_tables

TASKS = ('parity2', 'maj3', 'cyclic3', 'add3', 'mul3', 'cifar10', 'wikitext2', 'tinystories')


def timed(seconds, device, *steps):
    """Seconds a call of each step: (median, first quartile, third quartile), after three calls that don't count.

    The steps take turns, so that whatever else the machine does meets all of them.
    """
    times, cuda = [[] for _ in steps], torch.device(device).type == 'cuda'
    while len(times[0]) < 8 or sum(map(sum, times)) < seconds * len(steps):
        for step, own in zip(steps, times):
            start = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize(device)
            own.append(time.perf_counter() - start)
    return [(median, low, high) for low, median, high in (statistics.quantiles(own[3:], n=4) for own in times)]


def product_rate(device, bf16, seconds, n=2048):
    """GFLOP/s of one large matrix product: what the machine gives at best."""
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    return 2e-9 * n ** 3 / timed(seconds, device, lambda: a @ a)[0][0]


def made_up_data(folder):
    """CIFAR-10 in its binary form, and both texts, of random content: the loaders can't tell."""
    generator = torch.Generator().manual_seed(0)
    (folder / 'cifar-10-batches-bin').mkdir()
    for name in (*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch'):
        record = torch.randint(256, (1000, 3073), generator=generator)
        record[:, 0] %= 10
        (folder / 'cifar-10-batches-bin' / f'{name}.bin').write_bytes(bytes(record.flatten().tolist()))
    def words(vocabulary, n):
        drawn = torch.randint(vocabulary, (n,), generator=generator).tolist()
        return ' '.join('w' + ''.join(chr(97 + int(digit)) for digit in str(i)) for i in [*range(vocabulary), *drawn])
    (folder / 'wikitext-2').mkdir()
    for split in ('train', 'valid', 'test'):
        (folder / 'wikitext-2' / f'{split}.txt').write_text(words(33_276, 10_000))
    (folder / 'tinystories').mkdir()
    (folder / 'tinystories' / 'TinyStories-train.txt').write_text('<|endoftext|>'.join(words(5000, 100) for _ in range(50)))


def step_of(settings, task, model, data):
    """A training step as train.py does it, with or without the making of its batch."""
    optimiser, generator, n = train.make_optimiser(model, settings), torch.Generator().manual_seed(0), iter(range(10 ** 9))
    fixed = task.batch(generator, settings.batch, 0)
    model.train()
    return lambda: train.update(model, optimiser, task, settings, *(task.batch(generator, settings.batch, next(n)) if data else fixed))


def costs(step):
    """The three operations that take most of a step's time, with their share."""
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step()
    own = {e.key: e.self_cpu_time_total + e.self_device_time_total for e in profile.key_averages()}
    top = sorted(own, key=own.get)[:-4:-1]
    return ', '.join(f'{key.removeprefix("aten::")} {own[key] / sum(own.values()):.0%}' for key in top)


class Peer(nn.TransformerEncoderLayer):
    """torch's own layer in the place of a Block, with the same mask."""

    def __init__(self, block, D, H):
        super().__init__(D, H, 4 * D, dropout=0, activation=F.gelu, batch_first=True, norm_first=True)
        self.M, self.allowed = block.attn.M, block.attn.allowed

    def forward(self, x, rows=slice(None)):
        return super().forward(x, src_mask=maskprior.mask_bias(self.M, self.allowed))[:, rows]


class PeerLM(nn.Module):
    """A causal LM with the loss as it is usually written: all logits, then torch's cross-entropy."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target):
        return F.cross_entropy(self.model(x).flatten(0, 1), target.flatten())


def bench_task(name, options, rates, seconds):
    """A row for each type: its rate, its share of the machine's, what data, mask and torch's layers make of it."""
    for bf16 in (False, True):
        def build(*more):
            settings = train.parse(['--task', name, '--bf16', str(bf16), *options, *more])
            return settings, *train.build(settings)[:2]
        settings, task, model = build()
        own, with_data = (step_of(settings, task, model, data) for data in (False, True))
        with FlopCounterMode(display=False) as counter:
            own()
        shared, peer = (build('--per-head', 'false') for _ in range(2))        # torch's layer has no mask a head for all inputs
        peer[2].blocks = nn.ModuleList(Peer(block, settings.width, settings.heads) for block in peer[2].blocks).to(settings.device)
        if not task.loss:
            peer = *peer[:2], PeerLM(peer[2])
        (median, low, high), (data, *_), (default, *_), (mine, *_), (theirs, *_) = timed(
            seconds, settings.device, own, with_data, *(step_of(*b, False) for b in (build('--init', 'default'), shared, peer)))
        gflops = counter.get_total_flops() / median / 1e9
        yield dict(task=name, dtype='bf16' if bf16 else 'fp32', parameters=sum(p.numel() for p in model.parameters()),
                   milliseconds=1e3 * median, quartiles=[1e3 * low, 1e3 * high], steps_per_second=1 / median,
                   tokens_per_second=settings.batch * math.prod(task.model['grid']) / median, gflops_per_second=gflops,
                   share_of_product=gflops / rates[bf16], with_data=data / median, mask_over_default=median / default,
                   torch_layers_over_ours=theirs / mine, costs=costs(with_data))


def bench_attention(device, seconds):
    """The attention alone, forward and backward: torch's MultiheadAttention and fused kernel over the explicit softmax."""
    for B, N, D, H in ((64, 16, 64, 4), (128, 64, 96, 3), (64, 64, 128, 4), (16, 197, 192, 3), *((4, n, 192, 3) for n in (64, 128, 256, 512, 1024))):
        for bf16 in (False, True):
            x = torch.randn(B, N, D, device=device)
            def of(layer, call):
                layer.M = nn.Parameter(torch.zeros(N, N))
                layer.to(device)
                def step():
                    layer.zero_grad()
                    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
                        y = call(layer)
                    y.float().square().sum().backward()
                return step
            torch_layer = of(nn.MultiheadAttention(D, H, batch_first=True),
                             lambda layer: layer(x, x, x, attn_mask=maskprior.mask_bias(layer.M), need_weights=False)[0])
            explicit, fused = (of(maskprior.Attention(D, H, sdpa=sdpa), lambda layer: layer(x)) for sdpa in (False, True))
            held = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel() * t.element_size()) or t, lambda t: t):
                explicit()
            ours, theirs, kernel = timed(seconds, device, explicit, torch_layer, fused)
            yield dict(shape=[B, N, D, H], dtype='bf16' if bf16 else 'fp32', milliseconds=1e3 * ours[0], quartiles=[1e3 * t for t in ours[1:]],
                       megabytes_for_backward=sum(held) / 1e6, multihead_over_ours=theirs[0] / ours[0], fused_over_ours=kernel[0] / ours[0])


def bench_seeds(device, seconds):
    """Several seeds of parity2 at once: one batched model (torch.func), time over that of as many single gradients."""
    builds = [train.build(train.parse(['--task', 'parity2', '--seed', str(seed), '--device', device])) for seed in range(8)]
    task, models = builds[0][0], [model for _, model, _ in builds]
    batches = [task.batch(torch.Generator().manual_seed(seed), 64) for seed in range(8)]
    def loss(parameters, buffers, x, y):
        return task.loss(functional_call(models[0], (parameters, buffers), (x,)), y)
    def single():
        task.loss(models[0](batches[0][0]), batches[0][1]).backward()
    for k in (1, 2, 4, 8):
        stacked = *stack_module_state(models[:k]), *(torch.stack(parts) for parts in zip(*batches[:k]))
        (one, *_), (all_of_them, *_) = timed(seconds, device, single, lambda: vmap(grad(loss))(*stacked))
        yield dict(seeds=k, batched_over_single=all_of_them / (k * one))


def main(argv=None):
    parser = tasks.Parser(description=__doc__)
    parser.add_argument('tasks', nargs='*', help=' '.join(TASKS))
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--seconds', type=float, default=2., help='time spent on each number (default %(default)s)')
    parser.add_argument('--out', type=Path)
    args = parser.parse_args(argv)
    args.out = args.out or (Path('runs/bench') if args.tasks else HERE / 'bench')
    if unknown := set(args.tasks) - set(TASKS):
        raise train.UsageError(f'--bench {" ".join(unknown)}: not among {", ".join(TASKS)}')
    if not 1 <= args.threads <= 1024 or not 0 < args.seconds < math.inf:
        raise train.UsageError('--threads must be from 1 to 1024, --seconds positive and finite')
    tasks.check_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)                                    # before the work
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rates = {bf16: product_rate(args.device, bf16, args.seconds) for bf16 in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        made_up_data(Path(folder))
        options = {name: ['--device', args.device, *(['--data-dir', folder] if name in tasks.PLACES else [])] for name in TASKS}
        rows = [row for name in args.tasks or TASKS for row in bench_task(name, options[name], rates, args.seconds)]
    found = dict(command=shlex.join(['python', 'train.py', '--bench', *(sys.argv[1:] if argv is None else argv)]), commit=train.commit(),
                 torch=torch.__version__, device=torch.cuda.get_device_name(args.device) if torch.device(args.device).type == 'cuda' else 'cpu',
                 threads=args.threads,
                 product={'fp32': rates[False], 'bf16': rates[True]}, tasks=rows, attention=list(bench_attention(args.device, args.seconds)),
                 seeds=list(bench_seeds(args.device, args.seconds)))
    tasks.write_json(args.out / 'bench.json', found)
    print('\n'.join(bench_tables(found)))


if __name__ == '__main__':
    sys.exit(tasks.command(main, 'bench.py'))
