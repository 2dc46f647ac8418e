"""Every task: its inputs, its split, its interaction structure, and what is known of it before any training.

A `Task` is all that train.py needs; one function makes each. Shape letters as in maskprior.py.
"""
import argparse
import hashlib
import http.client
import io
import json
import lzma
import math
import os
import pickle
import random
import re
import sys
import tarfile
import urllib.request
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Callable

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')  # numpy is not required; torch mentions its absence
import torch
import torch.nn.functional as F


class UsageError(Exception):
    """A setting that makes no task; train.py prints it as one line and exits with 2."""


class DataError(Exception):
    """Data that is missing or damaged; train.py prints it as one line and exits with 1."""


class RunError(Exception):
    """The run can't go on; train.py prints it as one line and exits with 1."""


class Parser(argparse.ArgumentParser):
    """argparse whose refusals are one line."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        raise UsageError(message)


def command(main, script):
    """Runs main(); its refusals become one line on stderr and the exit code: 2 bad arguments, 1 anything that failed."""
    training = script == 'train.py' and '--bench' not in sys.argv
    try:
        sys.stdout.reconfigure(errors='backslashreplace')                          # of a terminal that has no Unicode
    except AttributeError:                                                         # replaced by something that isn't a file
        pass
    try:
        return main()
    except UsageError as error:
        code, says = 2, error
    except (RunError, DataError, OSError) as error:
        code, says = 1, error
    except KeyboardInterrupt:
        code, says = 1, 'interrupted' + ('; --resume goes on from the last evaluation' if training else '')
    except MemoryError:
        code, says = 1, 'out of memory'
    except RuntimeError as error:
        known = ('out of memory', 'allocate memory', 'No working C++ compiler')    # a bug keeps its traceback
        says = next((line for line in str(error).splitlines() if any(words in line for words in known)), None)
        if says is None:
            raise
        code, says = 1, says + ('; make --batch, --width or --context smaller' if training and 'memory' in says else '')
    print(f'{script}: {says}', file=sys.stderr)
    return code


def check_device(device):
    """Refuses a --device that isn't there or can't do float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except Exception as error:                                                     # each kind of device has its own
        raise UsageError(f'--device {device} is unknown, absent or without float64: {str(error).strip().splitlines()[0]}') from None


@contextmanager
def replacing(path):
    """Atomic: yields a temporary path, which gets the name `path` when the block has ended well, and is removed when not."""
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path, save):
    """Atomic: save(temporary path), then rename. Whoever reads `path` finds the old file or the new one, whole."""
    try:
        with replacing(path) as temporary:
            save(temporary)
    except (OSError, RuntimeError) as error:                                       # torch.save: RuntimeError on a full disk
        raise RunError(f'{path} can not be written: {str(error).splitlines()[0]}') from None


def write_text(path, text):
    write(path, lambda p: p.write_text(text, encoding='utf-8'))


def write_json(path, content):
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + '\n')


@dataclass
class Task:
    model: dict           # arguments of maskprior.Transformer: inputs, grid, outputs, rows, pool, causal, ...
    distance: torch.Tensor  # interaction structure, [N, N] or [H, N, N]: 0 where query i needs key j, and the more the less it does
    batch: Callable       # (generator, size, step, part) -> inputs and targets of the training set; of the batch, a part
    loss: Callable        # (outputs of the model, targets) -> scalar; None: the model's own, of a large vocabulary
    evaluate: Callable    # (predict: inputs -> outputs, without gradients; last) -> {metric: number, or details}, loss_seen among them
    probe: torch.Tensor   # fixed training inputs, [P, N] or images, for prior_tv and the QK arms
    fitted: Callable      # (metrics) -> whether the training set is fitted: else the arm says nothing about extrapolation; None: no such question
    shown: tuple          # the metrics on the line that is printed at each evaluation
    summary: Callable     # (result) -> the lines that are printed at the end
    known: dict = field(default_factory=dict)  # what no training can change: the MDI's metrics, the size of the data
    shifts: torch.Tensor = None  # [H, N, N] one-hot: the target attention of the arm impulse


# ------------------------------------------------------- Boolean: generalisation on the unseen (Abbe et al., ICML 2023)

BITS = 15

# name: (f on x [S, 15] in {-1, +1}, the bits it makes interact, the default hole). The first three are the paper's.
# The other two are ours, chosen by what the exchange of x0 and x1 predicts for the mask; predictions made before the runs:
#   parity3  (+,+,-) is an exchange of seen inputs: the mask answers -1 there, right; the MDI is +7.
#   diff2    is not symmetric, yet symmetric on what is seen: the mask answers f(-,+) = -1 on (+,-), where the
#            truth is +1, and stands at 75 %; the target is linear, so the MDI, and with it the default, is right.
BOOLEAN = {
    'parity2': (lambda x: x[:, 0] * x[:, 1], (0, 1), '+-'),
    'maj3': (lambda x: x[:, :3].sum(1).sign(), (0, 1, 2), '++-'),
    'cyclic3': (lambda x: (x * x.roll(-1, 1) * x.roll(-2, 1)).sum(1), None, '---'),
    'parity3': (lambda x: x[:, :3].prod(1), (0, 1, 2), '++-'),
    'diff2': (lambda x: (x[:, 0] - x[:, 1]) / 2, (0, 1), '+-'),
}


# The paper's numbers, as far as the text at hand gives them.
PAPER = {
    ('parity2', 'default'): dict(accuracy=0.75, loss=1.379), ('parity2', 'mask'): dict(accuracy=1., loss=0.0029),
    ('maj3', 'default'): dict(accuracy=0.87), ('maj3', 'mask'): dict(accuracy=1.), ('cyclic3', 'mask'): dict(accuracy=0.9998),
    ('add3', 'default'): dict(sequence_accuracy=0.0119, frac=0.004), ('add3', 'mask'): dict(sequence_accuracy=0.7749, frac=0.004),
    ('mul3', 'default'): dict(sequence_accuracy=0.0501, frac=0.03), ('mul3', 'mask'): dict(sequence_accuracy=0.6949, frac=0.03),
    ('cifar10', 'default'): dict(accuracy=0.9420), ('cifar10', 'impulse'): dict(accuracy=0.9512), ('cifar10', 'mask'): dict(accuracy=0.9566),
}


def cube(n):
    """All of {-1, +1}^n, [2^n, n], ordered such that bit i of the row's index says that x_i is -1."""
    return 1. - 2. * (torch.arange(2 ** n)[:, None] >> torch.arange(n) & 1)


def fourier(f):
    """Fourier coefficients of f [2^n] over the cube: entry S (bit i set: x_i is in the monomial) is E[f prod_S x_i].

    The fast Walsh-Hadamard transform; n stages of one addition each. `2^n * fourier` is its own inverse.
    """
    n = f.numel().bit_length() - 1
    for i in range(n):
        f = f.view(-1, 2, 2 ** i)
        f = torch.stack([f[:, 0] + f[:, 1], f[:, 0] - f[:, 1]], 1) / 2
    return f.flatten()


def in_hole(x, hole):
    """bool [S]: the rows of x [S, n] that a hole such as '+-' or '-*-' takes; '*' leaves a bit free, as does the end."""
    fixed = torch.tensor([{'+': 1., '-': -1., '*': 0.}[c] for c in hole])
    return ((x[:, :len(hole)] == fixed) | (fixed == 0)).all(1)


def minimum_degree_interpolator(f, hole):
    """The MDI [2^n] of f [2^n], seen outside the hole: the interpolant with its Fourier mass on the lowest degrees.

    With K the k bits that the hole fixes, to c, every interpolant is f + 1_hole g, with g a function of the free bits.
    Its coefficient at K and T (T free bits) is f_KT + g_T 2^-k prod(c). It alone reaches the degree k + |T|, so from the
    highest degree down each is made zero: g = -2^k prod(c) sum_T f_KT x_T, all of which is 1_hole times the sum of
    f's monomials that contain K. (Abbe et al. 2023, Definition 2, solved for a subcube; ours.)
    """
    n = f.numel().bit_length() - 1
    fixed = sum(2 ** i for i, c in enumerate(hole) if c != '*')
    contains = torch.arange(2 ** n) & fixed == fixed
    removed = 2 ** n * fourier(fourier(f) * contains)
    return f - in_hole(cube(n), hole) * 2 ** bin(fixed).count('1') * removed


def nearest_is_right(prediction, target, values):
    """bool [S]: the attainable value nearest to the prediction [S] is the target [S]; an exact tie is wrong."""
    assert prediction.shape == target.shape, f'{tuple(prediction.shape)} predictions for {tuple(target.shape)} targets'
    distance = (prediction[:, None] - values).abs()                                # [S, values]
    own = (prediction - target).abs()
    return ((distance > own[:, None]) | (values == target[:, None])).all(1)


PATTERNS = ('group', 'cross', 'sink', 'chain', 'split')


def boolean_structure(bits, pattern='group', heads=1):
    """The interacting pairs as bool [N, N] or [H, N, N]: a group of bits, read by a class token (N = 16), or windows (N = 15).

    Windows (`bits` None): bit i needs bits i, i+1, i+2, cyclically. A group, whose bit i is token i + 1 and whose class
    token is token 0, by `pattern`:
      group  the class token and every bit of the group need the group (the default)
      cross  likewise, but no bit needs itself
      sink   likewise, and each bit may look away, at the class token
      chain  the class token needs the first bit, each bit the next, the last bit itself
      split  one mask per head: in head h, the class token and the group need only the group's bit h mod its size
    """
    if bits is None:
        return torch.stack([torch.eye(BITS).roll(s, 1) for s in range(3)]).sum(0).bool()
    opened = torch.zeros(heads if pattern == 'split' else 1, BITS + 1, BITS + 1, dtype=torch.bool)
    group = [bit + 1 for bit in bits]
    for i, query in enumerate([0, *group]):
        for h, head in enumerate(opened):
            keys = {'group': group, 'cross': [key for key in group if key != query],
                    'sink': [key for key in [0, *group] if key != query],
                    'chain': [group[min(i, len(group) - 1)]], 'split': [group[h % len(group)]]}[pattern]
            head[query, keys] = True
    return opened if pattern == 'split' else opened[0]


def measured_structure(y, unseen):
    """The interacting pairs of bits as bool [n, n], from the labels y [2^n] of the seen inputs alone.

    Bit i has influence if flipping it changes a seen label; without it, it interacts with none. Of bits with influence, i and j interact
    unless f(x) - f(x^i) - f(x^j) + f(x^ij) is 0 wherever all four inputs are seen, and there is such a place: a pair that can't be
    measured stays open. (Ours.)
    """
    n, at = y.numel().bit_length() - 1, torch.arange(y.numel())
    def differs(*bits):
        flips = [sum(2 ** b for b in part) for r in range(len(bits) + 1) for part in combinations(bits, r)]
        seen = torch.stack([~unseen[at ^ flip] for flip in flips]).all(0)
        signed = sum((-1) ** bin(flip).count('1') * y[at ^ flip] for flip in flips)[seen]
        return bool((signed != 0).any()) if len(signed) else None
    influence = torch.tensor([differs(i) is not False for i in range(n)])
    opened = torch.eye(n, dtype=torch.bool)
    for i, j in combinations(range(n), 2):
        opened[i, j] = opened[j, i] = differs(i, j) is not False
    return opened & influence & influence[:, None]


def boolean(name, hole=None, prior_bits=None, pattern='group', structure='known', heads=1, device='cpu'):
    """A Boolean target in 15 bits: trained outside the hole, evaluated on the whole cube of 32,768 inputs.

    parity2 on the hole '+-': x = (-1, +1, -1, ...) -> tokens CLS 1 0 1 ..., target -1. Squared error.
    `prior_bits`: the bits that the prior says interact, instead of the task's own (a wrong prior). `pattern`, `heads`: see
    boolean_structure.
    """
    f, bits, default_hole = BOOLEAN[name]
    hole = default_hole if hole is None else hole
    if set(hole) - set('+-*') or len(hole) > BITS:
        raise UsageError(f'--hole {hole!r}: at most {BITS} of + (bit is +1), - (bit is -1) and * (free)')
    if not hole.strip('*'):
        raise UsageError(f'--hole {hole!r} fixes no bit: everything would be unseen and nothing left to train on')
    if bits is None and (prior_bits is not None or pattern != 'group'):
        raise UsageError(f'--prior-bits and --pattern are about a group of bits; the prior of {name} is made of windows')
    if prior_bits is not None:
        if not all(0 <= b < BITS for b in prior_bits) or len(set(prior_bits)) < len(prior_bits):
            raise UsageError(f'--prior-bits takes different bits from 0 to {BITS - 1}')
    x = cube(BITS).to(device)
    y = f(x)
    unseen = in_hole(x.cpu(), hole).to(device)
    mdi = minimum_degree_interpolator(y.cpu().double(), hole).float().to(device)
    values = y.unique()
    tokens = (x < 0).long()
    if bits is not None:
        tokens = torch.cat([torch.full_like(tokens[:, :1], 2), tokens], 1)         # the class token
    seen_tokens, seen_y = tokens[~unseen], y[~unseen]

    def batch(generator, size, step=0, part=slice(None)):
        i = torch.randint(len(seen_y), (size,), generator=generator)[part].to(device)
        return seen_tokens[i], seen_y[i]

    def loss(outputs, target):
        assert outputs.shape == (*target.shape, 1), f'outputs {tuple(outputs.shape)}, targets {tuple(target.shape)}'
        return (outputs[:, 0] - target).square().mean()

    # The monomials that tell the learned function apart from the MDI: those over the bits of group or hole.
    shown = sorted(set(bits or ()) | {i for i, c in enumerate(hole) if c != '*'})[:4]
    monomials = [s for r in range(len(shown) + 1) for s in combinations(shown, r)]

    def metrics(prediction):
        right, error = nearest_is_right(prediction, y, values).float(), (prediction - y).square()
        coefficients = fourier(prediction.double().cpu())
        return {'accuracy': right.mean().item(), 'accuracy_seen': right[~unseen].mean().item(),
                'accuracy_unseen': right[unseen].mean().item(),
                'loss': error.mean().item(), 'loss_seen': error[~unseen].mean().item(),
                'prediction_unseen': prediction[unseen].mean().item(),
                'fourier': {'*'.join(f'x{i}' for i in s) or '1': coefficients[sum(2 ** i for i in s)].item()
                            for s in monomials}}

    some = torch.Generator().manual_seed(0)                                        # for a quick look: 1,024 seen and 1,024 unseen inputs
    some = torch.cat([part[torch.randperm(len(part), generator=some)[:1024]] for part in (unseen.cpu().nonzero()[:, 0], (~unseen.cpu()).nonzero()[:, 0])])

    def evaluate(predict, last=False, quick=False):
        if not quick:
            return metrics(torch.cat([predict(t)[:, 0].float() for t in tokens.split(4096)]))
        prediction, share = predict(tokens[some])[:, 0].float(), unseen.float().mean().item()
        found = {}
        for part in (unseen[some], ~unseen[some]):
            right = nearest_is_right(prediction, y[some], values).float()
            found['unseen' if not found else 'seen'] = right[part].mean().item(), (prediction - y[some]).square()[part].mean().item()
        return {'accuracy': share * found['unseen'][0] + (1 - share) * found['seen'][0], 'accuracy_seen': found['seen'][0],
                'accuracy_unseen': found['unseen'][0], 'loss': share * found['unseen'][1] + (1 - share) * found['seen'][1],
                'loss_seen': found['seen'][1], 'inputs': len(some)}

    def summary(result):
        """What was learned, beside the minimum-degree interpolator and the paper."""
        paper = PAPER.get((name, result['init']), {})
        columns = list(result['fourier'])[:8]
        rows = [('', 'accuracy', 'loss', 'on hole', *columns)]
        for row, of in (('this run', result), ('MDI', {k[4:]: v for k, v in result.items() if k.startswith('mdi_')}),
                        ('target', {'fourier': result['target_fourier']}), ('paper', paper)):
            numbers = [of.get(k) for k in ('accuracy', 'loss', 'prediction_unseen')]
            numbers += [of.get('fourier', {}).get(m) for m in columns]
            rows.append((row, *('' if n is None else f'{n:{form}}' for n, form in zip(numbers, ['.2%', '.4f'] + ['+.2f'] * 9))))
        return [f'{row[0]:9}' + ''.join(f'{cell:>10}' for cell in row[1:]) for row in rows[:None if paper else -1]]

    if structure == 'measured':
        opened = measured_structure(y.cpu(), unseen.cpu())
        if bits is not None:                                                       # the class token reads whatever has influence
            opened = F.pad(opened, (1, 0, 1, 0))
            opened[0] = opened.any(0)
    else:
        opened = boolean_structure(bits if prior_bits is None else prior_bits, pattern, heads)
    fitted_below = 0.01 * y.var(unbiased=False).item()
    return Task(model=dict(inputs=3, grid=(tokens.shape[1],), outputs=1, rows=slice(0, None if bits is None else 1)),
                distance=(~opened).float().to(device), batch=batch, loss=loss, evaluate=evaluate,
                probe=batch(torch.Generator().manual_seed(0), 256)[0],
                fitted=lambda metrics: metrics['loss_seen'] < fitted_below,
                shown=('loss', 'accuracy_seen', 'accuracy_unseen'), summary=summary,
                known={f'mdi_{k}': v for k, v in metrics(mdi).items()} | {'target_fourier': metrics(y)['fourier']})


# ------------------------------------------------------------------------------------- arithmetic, from few of all pairs

ARITHMETIC = {'add3': '+', 'add4': '+', 'add5': '+', 'mul3': '*'}
VOCAB = '0123456789+*='


def arithmetic_text(a, b, sign, n, order='lsb'):
    """Token ids [S, N + 1] of n-digit operands a, b [S] and their answer: 7 + 5 is 007+005= and 2100 (lsb) or 0012 (msb)."""
    def digits(number, count):
        return number[:, None] // 10 ** torch.arange(count - 1, -1, -1) % 10
    answer = digits(a + b, n + 1) if sign == '+' else digits(a * b, 2 * n)
    sign, equals = (torch.full((len(a), 1), VOCAB.index(c)) for c in (sign, '='))
    return torch.cat([digits(a, n), sign, digits(b, n), equals, answer.flip(1) if order == 'lsb' else answer], 1)


def arithmetic_split(n, frac, seed, tests=10_000):
    """Training pairs and at most `tests` test pairs, each [S, 2]: no pair, and no pair exchanged, is in both.

    `frac` of the 10^2n ordered pairs train; Python's own generator, since the pairs of 5 digits can't be enumerated.
    """
    base = 10 ** n
    size = round(frac * base ** 2)
    drawn = random.Random(seed).sample(range(base ** 2), min(base ** 2, size + 10 * tests))
    seen = set(drawn[:size])
    test = [pair for pair in drawn[size:] if pair % base * base + pair // base not in seen][:tests]
    if not seen or not test:
        raise UsageError(f'--frac {frac:g} of the {base ** 2:,} pairs leaves nothing to {"test" if seen else "train"} on')
    return [torch.tensor([divmod(pair, base) for pair in pairs]) for pairs in (drawn[:size], test)]


def arithmetic_structure(sign, n, heads, order='lsb', without=None):
    """Which tokens each step of the school algorithm needs, bool [H, N, N]. a_i is the digit of 10^i, and so are b_i, c_i.

    The row that emits c_k:
      addition        needs a_k and b_k in every head but the last ('digits');
      multiplication  needs a_h and b_(k-h) in head h ('digits'); b_j in turn needs a_h and itself there ('products': a_h * b_j);
      either          needs what the carry takes in the last head ('carry'): the previous answer row and itself, or, with
                      the most significant digit first, all the lower digits of a and b.
    Where that names no token, a head needs its own. `without` leaves the rows of one of these parts free.
    """
    a, b = [n - 1 - i for i in range(n)], [2 * n - i for i in range(n)]            # tokens of a_i, b_i
    answers = n + 1 if sign == '+' else 2 * n
    first = 2 * n + 1                                                              # '=' emits the first answer digit
    opened = torch.zeros(heads, first + answers, first + answers, dtype=torch.bool)
    if sign == '*' and without != 'products':
        for h in range(n):
            for j in range(n):
                opened[h, b[j], [a[h], b[j]]] = True
    for row in range(first, first + answers):
        k = row - first if order == 'lsb' else first + answers - 1 - row
        for h in range(heads - 1 if without != 'digits' else 0):
            i, j = (k, k) if sign == '+' else (h, k - h)
            opened[h, row, [a[i], b[j]] if 0 <= i < n and 0 <= j < n else [row]] = True
        if without != 'carry':
            lower = a[:k] + b[:k]
            keys = [max(row - 1, first), row] if order == 'lsb' else lower or [row]
            opened[-1, row, keys] = True
    return opened


def arithmetic(name, frac, order='lsb', without=None, per_head=True, heads=4, seed=0, device='cpu'):
    """n-digit addition or multiplication, learned from `frac` of all pairs and decoded greedily, character by character.

    The loss is the cross-entropy of the answer's digits. The prior is `arithmetic_structure`, or its union over the heads.
    """
    sign, n = ARITHMETIC[name], int(name[3:])
    need = 2 if sign == '+' else n + 1
    if heads < need:
        raise UsageError(f'--heads {heads} is too few for the prior of {name}, which needs {need}')
    if without == 'products' and sign == '+':
        raise UsageError(f'--without products is about multiplication; {name} has none')
    if without and not per_head:
        raise UsageError('--without leaves rows of single heads free: it goes with --per-head')
    first = 2 * n + 1
    seen, test = (arithmetic_text(*pairs.T, sign, n, order).to(device) for pairs in arithmetic_split(n, frac, seed))

    def batch(generator, size, step=0, part=slice(None)):
        text = seen[torch.randint(len(seen), (size,), generator=generator)[part].to(device)]
        return text[:, :-1], text[:, first + 1:]

    def loss(outputs, target):
        assert outputs.shape == (*target.shape, len(VOCAB)), f'{tuple(outputs.shape)}, targets {tuple(target.shape)}'
        return F.cross_entropy(outputs.flatten(0, 1), target.flatten())

    def decode(predict, text):
        """Greedy answers [S, answers] to the questions in text [S, >= first + 1]; what follows the '=' is not looked at."""
        question, length = text[:, :first + 1], test.shape[1]
        while question.shape[1] < length:
            question = torch.cat([question, predict(question)[:, -1:].argmax(-1)], 1)
        return question[:, first + 1:]

    def show(question, answer):
        number = lambda digits: ''.join(VOCAB[d] for d in (digits.flip(0) if order == 'lsb' else digits))
        return (f'{"".join(VOCAB[t] for t in question[:first + 1])}{number(question[first + 1:])}, answered {number(answer)}')

    def evaluate(predict, last=False):
        some = seen[:2000]
        answers = torch.cat([decode(predict, t) for t in test.split(2000)])
        right = answers == test[:, first + 1:]                                     # [S, answers]
        wrong = (~right.all(1)).nonzero()[:5, 0].tolist()
        return {'sequence_accuracy': right.all(1).float().mean().item(), 'digit_accuracy': right.float().mean().item(),
                'sequence_accuracy_seen': (decode(predict, some) == some[:, first + 1:]).all(1).float().mean().item(),
                'loss_seen': loss(predict(some[:, :-1]), some[:, first + 1:]).item(),
                'accuracy_of_digit': right.float().mean(0).tolist(), 'wrong': [show(test[i], answers[i]) for i in wrong]}

    def summary(result):
        paper = PAPER.get((name, result['init']))
        digits = ' '.join(f'{share:.2%}' for share in result['accuracy_of_digit'])
        return [f'{len(seen):,} training pairs, {len(test):,} test pairs: whole answer right {result["sequence_accuracy"]:.2%}, '
                f'digits {result["digit_accuracy"]:.2%} (in the order they are written: {digits})',
                *([f'paper, {paper["frac"]:.1%} of the pairs: {paper["sequence_accuracy"]:.2%}'] if paper else []),
                *(f'wrong: {line}' for line in result['wrong'])]

    opened = arithmetic_structure(sign, n, heads, order, without)
    return Task(model=dict(inputs=len(VOCAB), grid=(test.shape[1] - 1,), outputs=len(VOCAB), rows=slice(first, None), pool=None,
                           causal=True),
                distance=(~(opened if per_head else opened.any(0))).float().to(device), batch=batch, loss=loss, evaluate=evaluate,
                probe=batch(torch.Generator().manual_seed(0), 256)[0],
                fitted=lambda metrics: metrics['sequence_accuracy_seen'] >= 0.99,
                shown=('loss_seen', 'sequence_accuracy_seen', 'sequence_accuracy', 'digit_accuracy'), summary=summary)


# ------------------------------------------------------------------------------------------------------------- vision

# name: (classes, side in pixels, patch, channel means, channel standard deviations of the training images in [0, 1])
VISION = {
    'cifar10': (10, 32, 4, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    'cifar100': (100, 32, 4, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    'imagenet100': (100, 224, 16, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

def unpickle(data):
    """The dictionary in a CIFAR pickle (bytes), with str keys and uint8 tensors, without numpy.

    No code of the file runs: numpy's constructors are replaced by stand-ins that note shape and bytes, and any other name is
    refused with an UnpicklingError.
    """
    class Array:
        def __setstate__(self, state):
            _, self.shape, _, by_columns, self.bytes = state
            if by_columns:
                raise pickle.UnpicklingError('an array stored by columns')

    class Dtype:
        def __init__(self, kind, *_):
            if kind not in ('u1', b'u1', 'uint8', b'uint8'):
                raise pickle.UnpicklingError(f'an array of type {kind!r}')

        def __setstate__(self, state):
            pass

    stand_ins = {('multiarray', '_reconstruct'): lambda *_: Array(), ('numpy', 'ndarray'): Array, ('numpy', 'dtype'): Dtype,
                 ('_codecs', 'encode'): lambda text, _: text.encode('latin1')}

    class Restricted(pickle.Unpickler):
        def find_class(self, module, name):
            short = module.removeprefix('numpy.core.').removeprefix('numpy._core.')
            if (short, name) not in stand_ins:
                raise pickle.UnpicklingError(f'it asks for {module}.{name}')
            return stand_ins[short, name]

    content = Restricted(io.BytesIO(data), encoding='bytes').load()
    content = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    return {k: torch.frombuffer(bytearray(v.bytes), dtype=torch.uint8).view(v.shape) if isinstance(v, Array) else v
            for k, v in content.items()}


def cifar_files(name, data_dir):
    """(where, {file name: content}) of the official archive, python or binary, as a folder or .tar.gz; nothing is unpacked."""
    where, files = find(name, data_dir), {}
    if where.is_dir():
        return where, {path.name: path.read_bytes() for path in where.iterdir() if path.is_file()}
    try:
        with tarfile.open(where) as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if not (member.isfile() or member.isdir()) or '..' in parts or parts[:1] == ('/',):
                    raise DataError(f'{where} holds {member.name}, which no official archive does')
                if member.isfile():
                    files[parts[-1]] = tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f'{where} can not be read ({str(error).splitlines()[0]}): download it again') from None
    return where, files


def cifar(name, data_dir):
    """((images, labels), (images, labels)) to train and to test on: uint8 [S, 3, 32, 32] and int64 [S]."""
    where, files = cifar_files(name, data_dir)
    binary = any(file.endswith('.bin') for file in files)
    fine = int(name == 'cifar100')                                                 # records begin with a coarse label

    def read(file):
        """-> images, labels, the number of training batches that the file says there are"""
        path = f'{where}/{file}'
        if not files.get(file):
            raise DataError(f'{path} is {"empty" if file in files else "missing"}: remove {where} and download {name} again')
        if binary:                                                                 # (coarse label,) label, 3072 pixels
            record = torch.frombuffer(bytearray(files[file]), dtype=torch.uint8)
            if len(record) % (3073 + fine):
                raise DataError(f'{path} is cut off: {len(record)} bytes are no whole number of records')
            record = record.view(-1, 3073 + fine)
            images, labels, batches = record[:, 1 + fine:], record[:, fine].long(), 5
        else:
            try:
                content = unpickle(files[file])
                images, labels = content['data'], list(content['fine_labels' if fine else 'labels'])
                if not isinstance(images, torch.Tensor) or not all(type(label) is int for label in labels):
                    raise ValueError('images that are no array, or labels that are no integers')
                labels = torch.tensor(labels)
            except Exception as error:                                             # a damaged pickle raises almost anything
                raise DataError(f'{path} is no CIFAR batch ({error}): download {name} again') from None
            says = re.search(r'training batch \d+ of (\d+)', str(content.get('batch_label')))
            batches = int(says[1]) if says else 5
        if images.shape != (len(labels), 3072):
            raise DataError(f'{path} holds {len(labels)} labels for images of shape {tuple(images.shape)}')
        if not len(labels) or labels.min() < 0 or labels.max() >= VISION[name][0]:
            raise DataError(f'{path} has no images, or labels beyond the {VISION[name][0]} classes')
        return images.view(-1, 3, 32, 32), labels, batches

    end = '.bin' if binary else ''
    if fine:
        return read('train' + end)[:2], read('test' + end)[:2]
    first = read('data_batch_1' + end)
    parts = [first, *(read(f'data_batch_{i}{end}') for i in range(2, first[2] + 1))]
    return tuple(torch.cat([part[i] for part in parts]) for i in (0, 1)), read('test_batch' + end)[:2]


def image_files(root, split, classes):
    """{class: [files]} of root/split/<class>/, of the classes asked for (all: None) that hold an image; sorted, each file once."""
    folders = [f for f in sorted((root / split).glob('*')) if f.is_dir() and not f.name.startswith('.')
               and (classes is None or f.name in classes)]
    found = {f.name: sorted(p for p in f.iterdir() if p.suffix.lower() in ('.jpeg', '.jpg') and not p.name.startswith('.'))
             for f in folders}
    return {name: files for name, files in found.items() if files}


def decoded(files, side, cache):
    """uint8 [S, 3, side, side] of the image files: short edge to `side`, centre crop. Decoded once, into the folder `cache`.

    The cache is a memory-mapped file under a name that says which files, sizes and dates went into it; it gets that name when
    it is complete, so an interrupted build is never taken for a finished one.
    """
    stamp = hashlib.sha256(repr([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()).hexdigest()[:16]
    path, size = Path(cache) / f'{len(files)}-images-{side}px-{stamp}.u8', len(files) * 3 * side * side
    if not path.exists() or path.stat().st_size != size:
        try:
            from PIL import Image
        except ImportError:
            raise DataError('decoding JPEG files needs Pillow: pip install pillow') from None

        def decode(file):
            try:
                with Image.open(file) as image:
                    image = image.convert('RGB')                                   # greyscale, CMYK, a PNG by another name
                    scale = side / min(image.size)
                    image = image.resize([max(side, round(n * scale)) for n in image.size], Image.Resampling.BICUBIC)
                    left, top = ((n - side) // 2 for n in image.size)
                    return image.crop((left, top, left + side, top + side)).tobytes()        # rows of pixels, each R G B
            except Exception as error:                                             # Pillow raises almost anything
                raise DataError(f'{file} can not be decoded ({error}): remove or replace it') from None

        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, open(temporary, 'wb') as out, ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, len(files), 1000):                               # so that no more than this waits in memory
                for image in pool.map(decode, files[start:start + 1000]):
                    out.write(image)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(-1, side, side, 3).permute(0, 3, 1, 2)


def imagenet100(data_dir, side, cache):
    """As cifar(), from imagenet100/{train,val}/<WordNet id>/*.JPEG; data_dir/imagenet100_classes.txt, if there, says which."""
    root, listed = find('imagenet100', data_dir).parent, Path(data_dir) / 'imagenet100_classes.txt'
    classes = set(read_text(listed).split()) if listed.exists() else None
    found = {split: image_files(root, split, classes) for split in ('train', 'val')}
    names = list(found['train'])
    if not names or set(found['val']) != set(names):
        raise DataError(f'{root}: train has images of {len(names)} classes, val of {len(found["val"])}, and they must be the same'
                        + (f'; {listed} says which are taken' if listed.exists() else ''))
    parts = []
    for split in ('train', 'val'):
        files = [file for name in names for file in found[split][name]]
        parts.append((decoded(files, side, cache), torch.tensor([names.index(f.parent.name) for f in files])))
    return tuple(parts)


@lru_cache(maxsize=2)                                                               # not anew at every step
def permutation(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch))


def shuffled(n, size, step, seed):
    """The indices [size] of batch `step` in an endless stream of epochs, each a permutation of all n of its own."""
    start, end = step * size, (step + 1) * size
    order = [permutation(n, seed, epoch) for epoch in range(start // n, (end - 1) // n + 1)]
    return torch.cat(order)[start % n:][:size]


def affine(B, **entries):
    """[B, 3, 3] maps of output to input coordinates in [-1, 1]: the identity but for entries such as xy=[B], x from y."""
    matrix = torch.eye(3).repeat(B, 1, 1)
    for name, values in entries.items():
        matrix[:, 'xy'.index(name[0]), 'xy1'.index(name[1])] = values
    return matrix


OPERATIONS = ('rotate', 'shear x', 'shear y', 'translate x', 'translate y', 'brightness', 'contrast', 'saturation', 'posterize',
              'solarize')


def draw_augmentation(generator, B, side, crop='pad', operations=0, magnitude=9, erasing=0.):
    """The random parameters of augment() for B images of `side` pixels, {name: [B, ...]} on the CPU.

    crop: 'pad' shifts by up to an eighth of the side, black beyond the edge; 'resized' takes 8 to 100 % of the area at an aspect
    of 3/4 to 4/3. A flip with probability 1/2. RandAugment (Cubuk et al. 2019): `operations` of OPERATIONS an image,
    at `magnitude` of 10 with a random sign; here geometry comes before colour. Erasing (Zhong et al. 2017), with this probability.
    """
    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(B, *shape, generator=generator)

    def box(low, high, log_aspect):
        """top, left, bottom, right [B, 4], in shares of the side: an area from low to high, somewhere inside."""
        area, aspect = uniform(low, high), uniform(-log_aspect, log_aspect).exp()
        size = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], 1).clamp(max=1)
        corner = uniform(0, 1, 2) * (1 - size)
        return torch.cat([corner, corner + size], 1)

    flip = uniform(0, 1).lt(0.5) * -2. + 1
    if crop == 'resized':
        y0, x0, y1, x1 = box(0.08, 1, math.log(4 / 3)).T
        geometry = affine(B, xx=flip * (x1 - x0), yy=y1 - y0, x1=x0 + x1 - 1, y1=y0 + y1 - 1)
    else:
        pad = side // 8
        shift = torch.randint(-pad, pad + 1, (2, B), generator=generator) * 2. / side
        geometry = affine(B, xx=flip, x1=shift[0], y1=shift[1])
    p = dict(brightness=torch.ones(B), contrast=torch.ones(B), saturation=torch.ones(B), posterize=torch.ones(B),
             solarize=torch.full((B,), 2.))
    for _ in range(operations):
        chosen = torch.randint(len(OPERATIONS), (B,), generator=generator)
        signed = uniform(0, 1).lt(0.5) * 2. - 1
        amount = {name: (chosen == i) * signed * magnitude / 10 for i, name in enumerate(OPERATIONS)}
        angle = math.radians(30) * amount['rotate']
        for matrix in (affine(B, xx=angle.cos(), xy=-angle.sin(), yx=angle.sin(), yy=angle.cos()),
                       affine(B, xy=0.3 * amount['shear x']), affine(B, yx=0.3 * amount['shear y']),
                       affine(B, x1=0.9 * amount['translate x'], y1=0.9 * amount['translate y'])):
            geometry = geometry @ matrix
        for name in ('brightness', 'contrast', 'saturation'):
            p[name] = p[name] * (1 + 0.9 * amount[name])
        p['posterize'] = p['posterize'] * 2 ** (4 * amount['posterize'].abs()).floor()       # the step in grey values
        p['solarize'] = p['solarize'] - 2 * amount['solarize'].abs()                         # above this, inverted: 2 never
    erased = box(0.02, 1 / 3, math.log(10 / 3)) * uniform(0, 1).lt(erasing)[:, None]
    return p | dict(geometry=geometry[:, :2], erase=erased)


def inside(box, h, w):
    """bool [B, 1, h, w]: the pixels of the boxes [B, 4] (top, left, bottom, right in shares of the side)."""
    y = torch.arange(h, device=box.device)[None, :, None] + 0.5
    x = torch.arange(w, device=box.device)[None, None, :] + 0.5
    top, left, bottom, right = (box[:, i, None, None] for i in range(4))
    return ((y > top * h) & (y < bottom * h) & (x > left * w) & (x < right * w))[:, None]


def augment(x, p, side, mean, std):
    """uint8 [B, 3, R, R] -> normalised [B, 3, side, side], by the parameters p of draw_augmentation on the same device."""
    per = lambda name: p[name][:, None, None, None]
    grid = F.affine_grid(p['geometry'], (len(x), 3, side, side), align_corners=False)
    x = F.grid_sample(x.float() / 255, grid, align_corners=False)
    x = (x * per('brightness')).clamp(0, 1)
    grey = x.mean((1, 2, 3), keepdim=True)
    x = (grey + (x - grey) * per('contrast')).clamp(0, 1)
    grey = x.mean(1, keepdim=True)
    x = (grey + (x - grey) * per('saturation')).clamp(0, 1)
    steps = per('posterize')
    x = torch.where(steps > 1, (x * 255 / steps).floor() * steps / 255, x)
    x = torch.where(x >= per('solarize'), 1 - x, x)
    x = (x - mean) / std
    return x.masked_fill(inside(p['erase'], side, side), 0.)


def mix(x, y, generator, mixup, cutmix):
    """Mixup (Zhang et al. 2017) or CutMix (Yun et al. 2019) of neighbours 2i and 2i + 1; x [B, 3, h, w], y [B, classes].

    mixup, cutmix: the alpha of Beta(alpha, alpha), from which a batch's share is drawn, 0 for without. Both: one of them at random.
    """
    dice = random.Random(int(torch.randint(2 ** 62, (1,), generator=generator)))
    alpha, cut = (cutmix, True) if cutmix and (not mixup or dice.random() < 0.5) else (mixup, False)
    if not alpha:
        return x, y
    share = dice.betavariate(alpha, alpha)                                         # of the image itself
    other_x, other_y = (t.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for t in (x, y))
    if cut:
        half, centre = math.sqrt(1 - share) / 2, (dice.random(), dice.random())
        box = torch.tensor([[max(0., c - half) for c in centre] + [min(1., c + half) for c in centre]], device=x.device)
        within = inside(box, *x.shape[2:])
        share = 1 - within.float().mean()
        x = torch.where(within, other_x, x)
    else:
        x = share * x + (1 - share) * other_x
    return x, share * y + (1 - share) * other_y


SHIFTS = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1), (-1, -1), (-1, 1), (1, -1), (1, 1))   # centre, up, right, down, left, ...


def locality(rows, cols, heads=0):
    """The prior's distance on a grid: 4 outside the 3 x 3 neighbourhood; or, for each of `heads`, [H, N, N], the squared distance
    from the query's place moved by the head's shift, at most 9. Heads beyond nine begin again with the first shift.
    """
    place = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    to = place[None] - place[:, None]                                              # [N, N, 2], from query i to key j; nothing wraps
    if not heads:
        return 4. * (to.abs().amax(-1) > 1)
    return torch.stack([(to - torch.tensor(SHIFTS[h % 9])).square().sum(-1).clamp(max=9).float() for h in range(heads)])


def shift_targets(rows, cols, heads):
    """[H, N, N], one-hot rows: the patch that each head's shift leads to; beyond the edge, the nearest one inside."""
    return F.one_hot(locality(rows, cols, heads).argmin(-1), rows * cols).float()


def vision(name, data_dir, patch=None, image_size=None, pool='mean', positions='sincos', drop_path=0., per_head=True, heads=3,
           crop='pad', randaugment=0, erasing=0., mixup=0., cutmix=0., smoothing=0.1, cache='cache', seed=0, device='cpu'):
    """Image classification: a grid of patches, a prior of locality (`locality`), soft labels in the loss.

    The images are one uint8 tensor on the device, and augmentation is tensor code there.
    """
    classes, own_side, own_patch, mean, std = VISION[name]
    side, patch = image_size or own_side, patch or own_patch
    if side % patch:
        raise UsageError(f'--image-size {side} is not a multiple of --patch {patch}')
    if name == 'imagenet100':
        stored = side * 8 // 7                                                     # 256 for 224, as is usual
        (x, y), (test_x, test_y) = imagenet100(data_dir, stored, cache)
        classes = int(y.max()) + 1
    elif side != own_side:
        raise UsageError(f'--image-size: the images of {name} have {own_side} pixels')
    else:
        (x, y), (test_x, test_y) = cifar(name, data_dir)
    x, y, test_x, test_y = (t.to(device) for t in (x, y, test_x, test_y))
    mean, std = (torch.tensor(c, device=device).view(3, 1, 1) for c in (mean, std))
    some = permutation(len(y), 0, 0)[:2000]                                        # ImageNet's files are in the order of the classes

    def plain(x):
        edge = (x.shape[2] - side) // 2
        return (x[..., edge:edge + side, edge:edge + side].float() / 255 - mean) / std

    def batch(generator, size, step=0, part=slice(None)):
        """The parameters of all the batch are drawn, whatever the part, so that several processes together are as one."""
        i = shuffled(len(y), size, step, seed)[part].to(device)
        p = {k: v[part].to(device) for k, v in draw_augmentation(generator, size, x.shape[2], crop, randaugment, erasing=erasing).items()}
        target = F.one_hot(y[i], classes) * (1 - smoothing) + smoothing / classes
        return mix(augment(x[i], p, side, mean, std), target, generator, mixup, cutmix)

    def evaluate(predict, last=False):
        def score(x, y):
            outputs = torch.cat([predict(plain(part)) for part in x.split(1000)])
            return (outputs.argmax(1) == y).float().mean().item(), F.cross_entropy(outputs, y).item()
        (accuracy, loss), (seen, loss_seen) = score(test_x, test_y), score(x[some], y[some])
        return {'accuracy': accuracy, 'loss': loss, 'accuracy_seen': seen, 'loss_seen': loss_seen}

    def summary(result):
        paper = PAPER.get((name, result['init']))
        return [f'{len(y):,} training images of {classes} classes, {len(test_y):,} test images: top-1 {result["accuracy"]:.2%}'
                + (f' (paper, all of the data, 300 epochs: {paper["accuracy"]:.2%})' if paper else '')]

    grid = (side // patch,) * 2
    distance = locality(*grid, heads if per_head else 0)
    if pool == 'cls':
        distance = F.pad(distance, (1, 0, 1, 0))                                   # the class token is free, and free to be seen
    return Task(model=dict(inputs=(3, patch), grid=grid, outputs=classes, class_token=pool == 'cls', pool='mean',
                           rows=slice(0, 1 if pool == 'cls' else None), positions=positions, drop_path=drop_path),
                distance=distance.to(device), batch=batch, loss=F.cross_entropy, evaluate=evaluate, probe=plain(x[some[:256]]),
                fitted=lambda metrics: metrics['accuracy_seen'] >= 0.99, shown=('loss', 'accuracy_seen', 'accuracy'), summary=summary,
                known=dict(training_examples=len(y)), shifts=shift_targets(*grid, heads).to(device))


# ----------------------------------------------------------------------------------------------------------- language

LANGUAGE = ('wikitext2', 'tinystories')
STORIES_VOCABULARY = 4096
EVAL_BATCH = 64                                                                    # windows; the perplexity doesn't depend on it


def read_text(path):
    """The text of a UTF-8 file, whatever the locale, with or without a byte-order mark, its lines ended by \\n or \\r\\n."""
    try:
        return path.read_text(encoding='utf-8-sig')
    except FileNotFoundError:
        raise DataError(f'{path} is missing: download its data set again') from None
    except UnicodeDecodeError as error:
        raise DataError(f'{path} is not UTF-8 text ({error}): download it again') from None


def wikitext_words(text):
    """The words as they come, and <eos> after each line."""
    return [word for line in text.removesuffix('\n').split('\n') for word in (*line.split(), '<eos>')] if text else []


def story_words(text):
    """Yields each story's words and <eos>: lower case, a word with its apostrophes, a number, or one other mark at a time.

    "Lily's 2 cats!" -> lily's 2 cats ! <eos>. A last story that no separator ends is taken for cut off and left out, unless it is
    the only one.
    """
    stories = text.split('<|endoftext|>')
    for story in stories[:-1] if len(stories) > 1 else stories:
        if words := re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[^\w\s]|_", story.lower()):
            yield [*words, '<eos>']


def corpus(name, data_dir):
    """{'train', 'valid', 'test': word ids [S]} and the vocabulary, from the training words alone, <unk> and <eos> in it
    (first, where they are rare), the most frequent first.

    wikitext2: its three files, every word. tinystories: one training file, its last 5 % of stories (at most 1,000) for test and as
    many before for validation, the 4,096 most frequent words.
    """
    path, first = find(name, data_dir), {}                                         # first: {word: its place in the order of appearance}
    def number(words):                                                             # at once: 2 GB of stories are too many str
        return torch.tensor([first.setdefault(word, len(first)) for word in words], dtype=torch.int32)
    if name == 'wikitext2':
        parts = {split: [number(wikitext_words(read_text(path.with_stem(split))))] for split in ('train', 'valid', 'test')}
    else:
        stories = [number(story) for story in story_words(read_text(path))]
        held = min(max(1, len(stories) // 20), 1000)                               # 200,000 words say enough
        parts = {'train': stories[:-2 * held], 'valid': stories[-2 * held:-held], 'test': stories[-held:]}
    for split, part in parts.items():
        if not sum(map(len, part)):
            raise DataError(f'{name} in {data_dir}: nothing is left for {split}')
    parts = {split: torch.cat(part) for split, part in parts.items()}
    count = parts['train'].bincount(minlength=len(first))
    words, size = list(first), len(first) + 2 if name == 'wikitext2' else STORIES_VOCABULARY
    vocabulary = [words[i] for i in count.argsort(descending=True, stable=True)[:size].tolist() if count[i]]
    rare = [word for word in ('<unk>', '<eos>') if word not in vocabulary[:size - 1]]
    vocabulary = rare + vocabulary[:size - len(rare)]
    place = {word: i for i, word in enumerate(vocabulary)}
    ids = torch.tensor([place.get(word, place['<unk>']) for word in words])
    return {split: ids[part] for split, part in parts.items()}, vocabulary


def relative_distance(N, heads):
    """The prior's distance between words, [H, N, N]: slope * (i - j), with ALiBi's slopes 2^(-8 h / H), h = 1 ... H.

    At strength 1 the attention begins as ALiBi's (Press et al. 2022): M0 = logit(c exp(-slope (i - j))), c = sigmoid(level). c = 1
    is ALiBi's bias to the letter, but M is infinite at distance 0 then and its gradient gone; level 0, c = 1/2, has both.
    """
    to = (torch.arange(N)[:, None] - torch.arange(N)).clamp(min=0)
    return 2 ** (-8 * torch.arange(1, heads + 1) / heads).view(-1, 1, 1) * to


def total_loss(predict, ids, start, N, batch):
    """Sum of -log p over the words in ids [S], each predicted once, from at most N words before it; `start` stands before the first.

    predict(x, target) is the mean loss of windows x [B, N]; the last, short window counts like any other.
    """
    inputs, whole, total = torch.cat([ids.new_tensor([start]), ids[:-1]]), len(ids) // N * N, 0.
    for low in range(0, whole, N * batch):
        part = slice(low, min(low + N * batch, whole))
        total += predict(inputs[part].view(-1, N), ids[part].view(-1, N)).item() * (part.stop - part.start)
    if whole < len(ids):
        total += predict(inputs[None, whole:], ids[None, whole:]).item() * (len(ids) - whole)
    return total


def language(name, data_dir, context=64, positions='learned', per_head=True, heads=4, device='cpu'):
    """Next-word prediction in windows of `context` words, measured by perplexity = exp(total loss / predicted words).

    Without positions the model is made for 4 times the context, and is measured at 2 and 4 times what it was trained at.
    """
    ids, vocabulary = corpus(name, data_dir)
    ids = {split: i.to(device) for split, i in ids.items()}
    unknown_rate = {split: (i == vocabulary.index('<unk>')).float().mean().item() for split, i in ids.items()}
    start, train = vocabulary.index('<eos>'), ids['train']
    if len(train) <= context:
        raise DataError(f'{name} in {data_dir}: {len(train)} words to train on are too few for a context of {context}')
    window = torch.arange(context + 1, device=device)

    def batch(generator, size, step=0, part=slice(None)):
        text = train[torch.randint(len(train) - context, (size,), generator=generator)[part].to(device)[:, None] + window]
        return text[:, :-1], text[:, 1:]

    def perplexity(predict, split, N=context):
        return math.exp(min(total_loss(predict, ids[split], start, N, EVAL_BATCH) / len(ids[split]), 80.))        # NaN stays NaN

    def sample(predict, words=40):
        generator, text = torch.Generator().manual_seed(0), [start]
        for _ in range(words):
            p = predict(torch.tensor([text[-context:]], device=device))[0, -1].softmax(-1).cpu()
            text.append(torch.multinomial(p, 1, generator=generator).item())
        return ' '.join(vocabulary[i] for i in text[1:])

    def evaluate(predict, last=False):
        found = {'perplexity': perplexity(predict, 'valid')}
        found['loss'] = math.log(found['perplexity'])
        some = train[:EVAL_BATCH * context]
        found['loss_seen'] = total_loss(predict, some, start, context, EVAL_BATCH) / len(some)
        if last:
            found |= {'perplexity_test': perplexity(predict, 'test'), 'sample': sample(predict)}
            if positions == 'none':
                found |= {f'perplexity_{k}x': perplexity(predict, 'valid', k * context) for k in (2, 4)}
        return found

    def summary(result):
        lines = [f'{len(vocabulary):,} words in the vocabulary; <unk>: ' + ', '.join(f'{s} {r:.2%}' for s, r in unknown_rate.items()),
                 f'perplexity: validation {result["perplexity"]:.2f}, test {result["perplexity_test"]:.2f}']
        if positions == 'none':
            lines.append('at 2 and 4 times the context, validation: '
                         + ', '.join(f'{result[f"perplexity_{k}x"]:.2f}' for k in (2, 4)))
        return [*lines, f'sample: {result["sample"]}']

    N = context * (4 if positions == 'none' else 1)
    distance = relative_distance(N, heads)
    return Task(model=dict(inputs=len(vocabulary), grid=(N,), outputs=len(vocabulary), pool=None, causal=True, tied=True, positions=positions),
                distance=(distance if per_head else distance.mean(0)).to(device), batch=batch, loss=None, evaluate=evaluate,
                probe=batch(torch.Generator().manual_seed(0), 64)[0], fitted=lambda metrics: None, shown=('perplexity', 'loss_seen'),
                summary=summary, known=dict(training_examples=len(train)))


# ------------------------------------------------------------------------------------------- where data is, and comes from

PLACES = {  # in data_dir; the first that is there is taken
    'cifar10': ('cifar-10-batches-py', 'cifar-10-python.tar.gz', 'cifar-10-batches-bin', 'cifar-10-binary.tar.gz'),
    'cifar100': ('cifar-100-python', 'cifar-100-python.tar.gz', 'cifar-100-binary', 'cifar-100-binary.tar.gz'),
    'imagenet100': ('imagenet100/train',),
    'wikitext2': ('wikitext-2/train.txt',),
    'tinystories': ('tinystories/TinyStories-train.txt', 'tinystories/TinyStories-train*.txt'),
}
WEB = {'toronto': 'https://www.cs.toronto.edu/~kriz', 'stories': 'https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main',
       'wikitext': 'https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2'}
DOWNLOADS = {  # name: [(address, file in data_dir, size in bytes, md5), ...]; None where no one publishes them
    'cifar10': [(f'{WEB["toronto"]}/cifar-10-python.tar.gz', 'cifar-10-python.tar.gz', 170498071, 'c58f30108f718f92721af3b95e74349a')],
    'cifar100': [(f'{WEB["toronto"]}/cifar-100-python.tar.gz', 'cifar-100-python.tar.gz', 169001437, 'eb9058c3a382ffc7106e4002c42a8d85')],
    'wikitext2': [(f'{WEB["wikitext"]}/{split}.txt', f'wikitext-2/{split}.txt', size, md5) for split, size, md5 in (
        ('train', 10797148, '34a77ebe59551b3a3b3d8c0a2797c976'), ('valid', 1121681, 'd756d22ab2310e7e60c094bea5c5a8eb'),
        ('test', 1256449, '781c9418ab9414bd09e4aad825aae752'))],
    'tinystories': [(f'{WEB["stories"]}/TinyStories-train.txt', 'tinystories/TinyStories-train.txt', None, None)],
}


def default_data_dir():
    return os.environ.get('MASKPRIOR_DATA') or 'data'


def find(name, data_dir):
    """The path of a data set, or a DataError that says how to get it."""
    for place in PLACES[name]:
        if found := sorted(Path(data_dir).glob(place)):
            return found[0]
    if Path(data_dir).is_dir():
        os.listdir(data_dir)                                                       # one that may not be read looks empty to glob
    raise DataError(f'{name} is not in {data_dir}: ' + (
        f'python tasks.py download {name} --data-dir {data_dir}' if name in DOWNLOADS else
        'ImageNet has to be fetched from image-net.org by hand; its class folders go to imagenet100/train/<WordNet id>/*.JPEG and '
        'imagenet100/val/<WordNet id>/*.JPEG, those named in imagenet100_classes.txt if that is there'))


def download(address, path, size, md5):
    """Fetches a file from its official address, checked by size and md5, where known, before it gets its name."""
    try:
        if path.is_file() and path.stat().st_size and size in (None, path.stat().st_size):      # else a damaged one, fetched again
            return print(f'{path} is already there')
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, got = hashlib.md5(), 0
        with replacing(path) as temporary:
            with urllib.request.urlopen(address, timeout=60) as source, open(temporary, 'wb') as out:
                expected = size or int(source.headers.get('Content-Length') or 0)
                while chunk := source.read(1 << 20):
                    out.write(chunk)
                    digest.update(chunk)
                    got += len(chunk)
                    print(f'\r{path.name}: {got / 1e6:.0f} of {expected / 1e6:.0f} MB', end='', flush=True)
            print(f'  md5 {digest.hexdigest()}')
            if (expected and got != expected) or (md5 and digest.hexdigest() != md5):
                raise DataError(f'{address}: got {got} bytes with md5 {digest.hexdigest()}, expected {expected} with {md5}: '
                                'nothing is kept')
    except (OSError, http.client.HTTPException) as error:                          # no network, no space, no such page
        raise DataError(f'{address} can not be fetched to {path}: {error}') from None


def main(argv=None):
    parser = Parser(description='Fetches a data set from its official address: python tasks.py download cifar10')
    parser.add_argument('command', choices=['download'])
    parser.add_argument('name', choices=sorted(DOWNLOADS))
    parser.add_argument('--data-dir', default=default_data_dir(), help='folder to put it in (default %(default)s)')
    args = parser.parse_args(argv)
    for address, file, size, md5 in DOWNLOADS[args.name]:
        download(address, Path(args.data_dir) / file, size, md5)


if __name__ == '__main__':
    sys.exit(command(main, 'tasks.py'))
