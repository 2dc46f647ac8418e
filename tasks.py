"""Every task: its inputs, its split, its interaction structure, and what is known before training.

A task is a subclass of `Task` and its name in `TASKS`, at the end of the tasks. Shape letters as in
maskprior.py. After the tasks: where data sets are, how they are read, and where they come from.
"""
import argparse
import hashlib
import http.client
import importlib.util
import io
import lzma
import math
import os
import pickle
import random
import re
import shlex
import sys
import tarfile
import urllib.request
import uuid
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path, PurePosixPath

# numpy is not required; torch mentions its absence.
warnings.filterwarnings('ignore', 'Failed to initialize NumPy')
import torch
import torch.nn.functional as F

from maskprior import SHIFTS


class Task:
    """What train.py asks of a task. A constructor's parameters are settings, by their names.

    It sets:
      model       arguments of maskprior.Transformer: inputs, grid, outputs, ...
      distance    the interaction structure, [N, N] or [H, N, N] on the CPU: 0 where query i needs
                  key j, larger the less it does
      probe       fixed training inputs on the device, for prior_tv and for the QK arms
      n_train     number of training examples (Language: of words)
      device      where the examples are
      reference   what no training can change, for result.json: the MDI's metrics, and
                  training_examples, by which --resume tells another data set
    The class itself names its console_metrics, which are printed at each evaluation.
    """
    console_metrics = ('loss_seen',)
    reference = {}

    def draw(self, generator, size, step):
        """What makes the batch of a step, on the CPU, [size, ...]: here the examples' indices."""
        return torch.randint(self.n_train, (size,), generator=generator)

    def examples(self, drawn):
        """The inputs and targets of what was drawn, both on the device."""
        raise NotImplementedError

    def batch(self, generator, size, step=0, shard=slice(None)):
        """Inputs and targets of a training step; of several processes each takes its shard.

        All of a batch is drawn by each process, so that several together train as one does.
        """
        drawn = self.draw(generator, size, step)[shard]
        return self.examples(drawn.to(self.device, non_blocking=True))

    def loss(self, model, x, y):
        """The scalar that training minimises."""
        raise NotImplementedError

    def evaluate(self, model, quick=False):
        """{metric: number, or details}, loss_seen among them. `quick`: on fewer inputs."""
        raise NotImplementedError

    def final(self, model):
        """More metrics, for the end of a run."""
        return {}

    def fitted(self, metrics):
        """Whether the training set is fitted; if not, the unseen tells nothing. None: the question
        does not apply."""
        return None

    def summary(self, result):
        """The lines that are printed at the end of a run."""
        return []

    def verdict(self, result):
        """What was learned, in words."""
        return {True: 'fitted what it saw', False: 'has not fitted what it saw',
                None: 'done'}[result['fitted']]


class UsageError(Exception):
    """A setting that makes no task: one line, exit code 2."""


class DataError(Exception):
    """Data that is missing or damaged: one line, exit code 1."""


# The paper's numbers, as far as the text at hand gives them.
PAPER = {
    ('parity2', 'default'): dict(accuracy=0.75, loss=1.379),
    ('parity2', 'mask'): dict(accuracy=1., loss=0.0029),
    ('maj3', 'default'): dict(accuracy=0.87),
    ('maj3', 'mask'): dict(accuracy=1.),
    ('cyclic3', 'mask'): dict(accuracy=0.9998),
    ('add3', 'default'): dict(sequence_accuracy=0.0119, frac=0.004),
    ('add3', 'mask'): dict(sequence_accuracy=0.7749, frac=0.004),
    ('mul3', 'default'): dict(sequence_accuracy=0.0501, frac=0.03),
    ('mul3', 'mask'): dict(sequence_accuracy=0.6949, frac=0.03),
    ('cifar10', 'default'): dict(accuracy=0.9420),
    ('cifar10', 'impulse'): dict(accuracy=0.9512),
    ('cifar10', 'mask'): dict(accuracy=0.9566),
}


# --------------------------- Boolean: generalisation on the unseen (Abbe, Bengio, Lotfi, Rizk 2023)

BITS = 15

# name: (f on x [S, 15] in {-1, +1}, the bits that it makes interact, the default hole). The first
# three are the paper's. The other two are ours, chosen by what exchanging the group's bits predicts
# for the mask; the predictions were made before the runs:
#   parity3  (+,+,-) is the seen (+,-,+) with two bits exchanged: the mask answers -1, which is
#            right; the MDI answers +7.
#   diff2    is not symmetric, yet symmetric on what is seen: the mask answers f(-,+) = -1 on (+,-),
#            where the truth is +1, and stands at 75 %; the target is linear, so the MDI is right.
BOOLEAN_TARGETS = {
    'parity2': (lambda x: x[:, 0] * x[:, 1], (0, 1), '+-'),
    'maj3': (lambda x: x[:, :3].sum(1).sign(), (0, 1, 2), '++-'),
    'cyclic3': (lambda x: (x * x.roll(-1, 1) * x.roll(-2, 1)).sum(1), None, '---'),
    'parity3': (lambda x: x[:, :3].prod(1), (0, 1, 2), '++-'),
    'diff2': (lambda x: (x[:, 0] - x[:, 1]) / 2, (0, 1), '+-'),
}


def cube(n):
    """All of {-1, +1}^n, [2^n, n]; bit i of a row's index says that x_i is -1."""
    return 1. - 2. * (torch.arange(2 ** n)[:, None] >> torch.arange(n) & 1)


def fourier(f):
    """Fourier coefficients of f [2^n]: entry S (bit i set: x_i is in it) is E[f prod_S x_i].

    The fast Walsh-Hadamard transform; n stages of one addition each. 2^n fourier() inverts it.
    """
    n = f.numel().bit_length() - 1
    for i in range(n):
        f = f.view(-1, 2, 2 ** i)
        f = torch.stack([f[:, 0] + f[:, 1], f[:, 0] - f[:, 1]], 1) / 2
    return f.flatten()


def in_hole(x, hole):
    """bool [S]: the rows of x [S, n] in a hole such as '+-' or '-*-'; '*' leaves a bit free."""
    fixed = torch.tensor([{'+': 1., '-': -1., '*': 0.}[c] for c in hole])
    return ((x[:, :len(hole)] == fixed) | (fixed == 0)).all(1)


def minimum_degree_interpolator(f, hole):
    """The MDI [2^n] of f [2^n], seen outside the hole: its Fourier mass on the lowest degrees.

    With K the k bits that the hole fixes, to c, every interpolant is f + 1_hole g, with g a
    function of the free bits. Its coefficient at K and T, a set of free bits, is
    f_KT + g_T 2^-k prod(c). It alone reaches the degree k + |T|, so from the highest degree down
    each is made zero:
    g = -2^k prod(c) sum_T f_KT x_T, all of which is 1_hole times the sum of f's monomials that
    contain K.
    (Abbe et al. 2023, Definition 2, solved for a subcube; ours.)
    """
    n = f.numel().bit_length() - 1
    fixed = sum(2 ** i for i, c in enumerate(hole) if c != '*')
    contains = torch.arange(2 ** n) & fixed == fixed
    removed = 2 ** n * fourier(fourier(f) * contains)
    return f - in_hole(cube(n), hole) * 2 ** (len(hole) - hole.count('*')) * removed


def nearest_is_right(prediction, target, values):
    """bool [S]: the value nearest to the prediction [S] is the target [S]; a tie is wrong."""
    assert prediction.shape == target.shape, f'{prediction.shape} for {target.shape}'
    distance = (prediction[:, None] - values).abs()                      # [S, values]
    to_target = (prediction - target).abs()[:, None]
    return ((distance > to_target) | (values == target[:, None])).all(1)


# Their meaning: boolean_structure.
PATTERNS = ('group', 'cross', 'sink', 'chain', 'split')


def boolean_structure(bits, pattern='group', heads=1):
    """The interacting pairs, bool [N, N] or [H, N, N]: a group and a class token, or windows.

    Windows (`bits` None, N = 15): bit i needs bits i, i+1, i+2, cyclically. A group (N = 16), whose
    bit i is token i + 1 and whose class token is token 0, by `pattern`:
      group  the class token and every bit of the group need the group (the default)
      cross  likewise, but no bit needs itself
      sink   likewise, and each bit may look away, at the class token
      chain  the class token needs the first bit, each bit the next, the last bit itself
      split  one mask a head: in head h, they need only the group's bit h mod its size
    """
    if bits is None:
        return torch.stack([torch.eye(BITS).roll(shift, 1) for shift in range(3)]).sum(0).bool()
    n_masks = heads if pattern == 'split' else 1
    needed = torch.zeros(n_masks, BITS + 1, BITS + 1, dtype=torch.bool)
    group = [bit + 1 for bit in bits]
    for i, query in enumerate([0, *group]):
        for h in range(n_masks):
            keys = {'group': group,
                    'cross': [key for key in group if key != query],
                    'sink': [key for key in [0, *group] if key != query],
                    'chain': [group[min(i, len(group) - 1)]],
                    'split': [group[h % len(group)]]}[pattern]
            needed[h, query, keys] = True
    return needed if pattern == 'split' else needed[0]


def mixed_difference(y, seen, *bits):
    """Whether y's mixed difference over these bits is non-zero where all its inputs are seen.

    y [2^n].

    For one bit f(x) - f(x^i), for two f(x) - f(x^i) - f(x^j) + f(x^ij), and so on, where x^i is x
    with bit i flipped. None where no place has all of its inputs seen.
    """
    at = torch.arange(len(y))
    total, visible = torch.zeros_like(y), torch.ones_like(seen)
    for r in range(len(bits) + 1):
        for flipped in combinations(bits, r):
            other = at ^ sum(2 ** bit for bit in flipped)
            total += (-1) ** r * y[other]
            visible &= seen[other]
    return bool((total[visible] != 0).any()) if visible.any() else None


def measured_pairs(y, seen):
    """The interacting pairs of bits, bool [n, n], from the labels y [2^n] of the seen inputs alone.

    A bit has influence if flipping it changes a seen label. Two bits with influence interact unless
    their mixed difference is 0 wherever it is seen; what cannot be measured stays open. (Ours.)
    """
    n = len(y).bit_length() - 1
    needed = torch.zeros(n, n, dtype=torch.bool)
    influential = [i for i in range(n) if mixed_difference(y, seen, i) is not False]
    needed[influential, influential] = True
    for i, j in combinations(influential, 2):
        needed[i, j] = needed[j, i] = mixed_difference(y, seen, i, j) is not False
    return needed


def largest_groups(needed, bit):
    """The largest sets of bits with this one in which all pairs interact, as sorted tuples."""
    others = [i for i in needed[bit].nonzero()[:, 0].tolist() if i != bit]
    interact = needed.tolist()
    for size in range(len(others), -1, -1):
        found = [tuple(sorted((bit, *group))) for group in combinations(others, size)
                 if all(interact[i][j] for i, j in combinations(group, 2))]
        if found:
            return found


def measured_structure(y, seen):
    """Which bits each bit needs, bool [n, n], from measured_pairs(): one of its largest groups.

    Bits next to each other in a chain of groups interact with more bits than are in any one group.
    So each takes the group that the fewest took before. Where that leaves out a pair that
    interacts, each bit keeps all of its pairs. (Ours.)
    """
    pairs = measured_pairs(y, seen)
    needed = torch.zeros_like(pairs)
    taken = []
    for bit in pairs.diagonal().nonzero()[:, 0].tolist():
        taken.append(min(largest_groups(pairs, bit), key=taken.count))
        needed[bit, list(taken[-1])] = True
    together = (needed.T.float() @ needed.float()) > 0
    return needed if torch.equal(together, pairs) else pairs


class Boolean(Task):
    """A Boolean target in 15 bits: trained outside the hole, evaluated on all 32,768 inputs.

    parity2, hole '+-': x = (-1, +1, -1, ...) -> tokens CLS 1 0 1 ..., target -1. Squared error.
    `prior_bits`: the bits that the prior says interact, in place of the right ones. `structure`:
    'known', or 'measured' from the training set. `pattern`, `heads`: see boolean_structure.
    """
    console_metrics = ('loss', 'accuracy_seen', 'accuracy_unseen')

    def __init__(self, name, hole=None, prior_bits=None, pattern='group', structure='known',
                 heads=1, device='cpu'):
        target, bits, default_hole = BOOLEAN_TARGETS[name]
        hole = default_hole if hole is None else hole
        self.check(name, bits, hole, prior_bits, pattern, structure)
        self.name = name
        own_prior = prior_bits is not None or pattern != 'group'
        self.papers_setup = hole == default_hole and not own_prior
        self.device = device
        x = cube(BITS)
        y = target(x)
        unseen = in_hole(x, hole)
        tokens = (x < 0).long()
        if bits is not None:
            # The class token, in front.
            tokens = F.pad(tokens, (1, 0), value=2)
        self.fitted_below = 0.01 * y.var(unbiased=False).item()
        self.values = y.unique().to(device)
        self.y, self.unseen, self.tokens = (t.to(device) for t in (y, unseen, tokens))
        self.seen_y = y[~unseen].to(device)
        self.seen_tokens = tokens[~unseen].to(device)
        self.n_train = len(self.seen_y)
        self.probe = self.batch(torch.Generator().manual_seed(0), 256)[0]
        self.quick = self.quick_inputs(unseen).to(device)
        self.monomials = self.monomials_of(bits, hole)

        if structure == 'measured':
            needed = measured_structure(y, ~unseen)
            if bits is not None:
                # The class token reads every bit that has influence.
                needed = F.pad(needed, (1, 0, 1, 0))
                needed[0] = needed.any(0)
        else:
            needed = boolean_structure(bits if prior_bits is None else prior_bits, pattern, heads)
        self.distance = (~needed).float()
        self.model = dict(inputs=3, grid=(tokens.shape[1],), outputs=1,
                          readout=slice(0, None if bits is None else 1))

        mdi = minimum_degree_interpolator(y.double(), hole).float().to(device)
        self.reference = {f'mdi_{metric}': value for metric, value in self.measure(mdi).items()}
        self.reference['target_fourier'] = self.measure(self.y)['fourier']

    @staticmethod
    def check(name, bits, hole, prior_bits, pattern, structure):
        if set(hole) - set('+-*') or len(hole) > BITS:
            raise UsageError(f'--hole {hole!r}: at most {BITS} of + (bit is +1), - (bit is -1) '
                             'and * (free)')
        if not hole.strip('*'):
            raise UsageError(f'--hole {hole!r} fixes no bit: everything would be unseen and '
                             'nothing left to train on')
        wrong_prior = prior_bits is not None or pattern != 'group'
        if wrong_prior and structure == 'measured':
            raise UsageError('--structure measured finds the pairs: no --prior-bits, no --pattern')
        if wrong_prior and bits is None:
            raise UsageError('--prior-bits and --pattern are for a group of bits; the prior of '
                             f'{name} is made of windows')
        if prior_bits is not None:
            if not all(0 <= b < BITS for b in prior_bits) or len(set(prior_bits)) < len(prior_bits):
                raise UsageError(f'--prior-bits takes different bits from 0 to {BITS - 1}')

    @staticmethod
    def quick_inputs(unseen, n=1024):
        """Indices of fixed inputs for a quick look: n unseen, then n seen."""
        generator = torch.Generator().manual_seed(0)
        parts = [part.nonzero()[:, 0] for part in (unseen, ~unseen)]
        return torch.cat([part[torch.randperm(len(part), generator=generator)[:n]]
                          for part in parts])

    @staticmethod
    def monomials_of(bits, hole):
        """The monomials that tell a learned function from the MDI, as tuples of bits.

        All over the first four bits of group and hole, and the one of the whole group.
        """
        shown = set(bits or ()) | {i for i, c in enumerate(hole) if c != '*'}
        shown = sorted(shown)[:4]
        monomials = [s for r in range(len(shown) + 1) for s in combinations(shown, r)]
        group = tuple(sorted(bits or ()))
        # The group's is the last.
        return [s for s in monomials if s != group] + [group] if group else monomials

    def examples(self, drawn):
        return self.seen_tokens[drawn], self.seen_y[drawn]

    def loss(self, model, x, y):
        outputs = model(x).float()
        assert outputs.shape == (*y.shape, 1), f'outputs {outputs.shape}, targets {y.shape}'
        return (outputs[:, 0] - y).square().mean()

    def accuracy_and_loss(self, prediction, at=slice(None)):
        """On the inputs `at`: on all, on those seen, and the accuracy on those unseen."""
        y, unseen = self.y[at], self.unseen[at]
        right = nearest_is_right(prediction, y, self.values).float()
        error = (prediction - y).square()
        return {'accuracy': right.mean().item(),
                'accuracy_seen': right[~unseen].mean().item(),
                'accuracy_unseen': right[unseen].mean().item(),
                'loss': error.mean().item(),
                'loss_seen': error[~unseen].mean().item(),
                'loss_unseen': error[unseen].mean().item()}

    def measure(self, prediction):
        """The metrics of a function on the cube, [32768]."""
        coefficients = fourier(prediction.cpu().double())
        named = {'*'.join(f'x{i}' for i in s) or '1': coefficients[sum(2 ** i for i in s)].item()
                 for s in self.monomials}
        metrics = self.accuracy_and_loss(prediction)
        del metrics['loss_unseen']
        return metrics | {'prediction_unseen': prediction[self.unseen].mean().item(),
                          'fourier': named}

    def evaluate(self, model, quick=False):
        if quick:
            return self.evaluate_quick(model)
        return self.measure(torch.cat([model(t)[:, 0].float() for t in self.tokens.split(1024)]))

    def evaluate_quick(self, model):
        """From the inputs of quick_inputs(); seen and unseen weighted as on the whole cube."""
        prediction = model(self.tokens[self.quick])[:, 0].float()
        metrics = self.accuracy_and_loss(prediction, self.quick)
        share = self.unseen.float().mean().item()
        for name in ('accuracy', 'loss'):
            metrics[name] = (share * metrics[f'{name}_unseen']
                             + (1 - share) * metrics[f'{name}_seen'])
        del metrics['loss_unseen']
        return {'inputs': len(self.quick)} | metrics

    def fitted(self, metrics):
        return metrics['loss_seen'] < self.fitted_below

    def summary(self, result):
        """What was learned, beside the minimum-degree interpolator and the paper."""
        paper = PAPER.get((self.name, result['init'])) if self.papers_setup else None
        mdi = {name.removeprefix('mdi_'): value for name, value in result.items()
               if name.startswith('mdi_')}
        rows = [('this run', result), ('MDI', mdi),
                ('target', {'fourier': result['target_fourier']})]
        rows += [('paper', paper)] if paper else []
        shown = list(result['fourier'])
        # At most eight; the last monomial is the whole group's.
        del shown[7:-1]
        header = ('accuracy', 'loss', 'on hole', *shown)
        widths = [max(10, len(name) + 1) for name in header]
        lines = [f'{"":9}' + ''.join(map(str.rjust, header, widths))]
        for label, metrics in rows:
            cells = [(metrics.get('accuracy'), '.2%'), (metrics.get('loss'), '.4f'),
                     (metrics.get('prediction_unseen'), '+.2f')]
            cells += [(metrics.get('fourier', {}).get(name), '+.2f') for name in shown]
            texts = ['' if value is None else f'{value:{form}}' for value, form in cells]
            lines.append(f'{label:9}' + ''.join(map(str.rjust, texts, widths)))
        return lines

    def verdict(self, result):
        if not result['fitted']:
            return 'has not fitted what it saw, so the rest does not count'
        if result['accuracy'] == 1:
            return 'right on the whole cube'
        if abs(result['accuracy_unseen'] - result['mdi_accuracy_unseen']) <= 0.05:
            return ('fitted what it saw and is right on as much of the rest as the minimum-degree '
                    'interpolator (MDI)')
        return f'fitted what it saw and is right on {result["accuracy_unseen"]:.0%} of the rest'


# -------------------------------------------------------------- arithmetic, from few of all pairs

# name: (sign, digits of an operand)
ARITHMETIC = {'add3': ('+', 3), 'add4': ('+', 4), 'add5': ('+', 5), 'mul3': ('*', 3)}
VOCABULARY = '0123456789+*='


def arithmetic_text(a, b, sign, n, order='lsb'):
    """Token ids [S, N + 1] of n-digit operands a, b [S] and their answer.

    7 + 5 is 007+005= and then 2100 (lsb: least significant digit first) or 0012 (msb).
    """
    def digits(number, count):
        return number[:, None] // 10 ** torch.arange(count - 1, -1, -1) % 10
    answer = digits(a + b, n + 1) if sign == '+' else digits(a * b, 2 * n)
    signs = torch.full((len(a), 1), VOCABULARY.index(sign))
    equals = torch.full((len(a), 1), VOCABULARY.index('='))
    answer = answer.flip(1) if order == 'lsb' else answer
    return torch.cat([digits(a, n), signs, digits(b, n), equals, answer], 1)


def arithmetic_split(n, frac, seed, n_test=10_000):
    """Training pairs and at most n_test test pairs, each [S, 2]. No test pair is a training pair,
    in either order of its operands.

    `frac` of the 10^2n ordered pairs train. Python's own generator, since the pairs of five digits
    cannot be enumerated.
    """
    base = 10 ** n
    n_train = round(frac * base ** 2)
    drawn = random.Random(seed).sample(range(base ** 2), min(base ** 2, n_train + 10 * n_test))
    seen = set(drawn[:n_train])
    test = [pair for pair in drawn[n_train:] if pair % base * base + pair // base not in seen]
    if not seen or not test:
        raise UsageError(f'--frac {frac:g} of the {base ** 2:,} pairs leaves nothing to '
                         f'{"test" if seen else "train"} on')
    return [torch.tensor([divmod(pair, base) for pair in pairs])
            for pairs in (drawn[:n_train], test[:n_test])]


def arithmetic_structure(sign, n, heads, order='lsb', without=None):
    """Which tokens each step of the school algorithm needs, bool [H, N, N].

    a_i, b_i, c_i: the digits of 10^i.
    The row that emits c_k:
      addition        needs a_k and b_k in every head but the last ('digits');
      multiplication  needs a_h and b_(k-h) in head h ('digits'); b_j in turn needs a_h and itself
                      there ('products': a_h * b_j);
      either          needs what the carry takes in the last head ('carry'): the previous answer row
                      and itself, or, with order msb, all the lower digits of a and b.
    A head for which this names no token needs the row's own. `without` leaves the rows of one part
    free.
    """
    a = [n - 1 - i for i in range(n)]
    b = [2 * n - i for i in range(n)]
    n_answer = n + 1 if sign == '+' else 2 * n
    # The '=' emits the first digit of the answer.
    first = 2 * n + 1
    needed = torch.zeros(heads, first + n_answer, first + n_answer, dtype=torch.bool)
    if sign == '*' and without != 'products':
        for h in range(n):
            for j in range(n):
                needed[h, b[j], [a[h], b[j]]] = True
    for row in range(first, first + n_answer):
        k = row - first if order == 'lsb' else first + n_answer - 1 - row
        for h in range(heads - 1 if without != 'digits' else 0):
            i, j = (k, k) if sign == '+' else (h, k - h)
            inside = 0 <= i < n and 0 <= j < n
            needed[h, row, [a[i], b[j]] if inside else [row]] = True
        if without != 'carry':
            lower = a[:k] + b[:k]
            keys = [max(row - 1, first), row] if order == 'lsb' else lower or [row]
            needed[-1, row, keys] = True
    return needed


class Arithmetic(Task):
    """n-digit addition or multiplication from `frac` of all pairs, decoded greedily.

    add3: 007+005=2100, the answer with its least significant digit first; the loss is the
    cross-entropy of the answer's digits. The prior is arithmetic_structure, or its union over the
    heads (`per_head` false).
    """
    console_metrics = ('loss_seen', 'sequence_accuracy_seen', 'sequence_accuracy', 'digit_accuracy')

    def __init__(self, name, frac, order='lsb', without=None, per_head=True, heads=4, seed=0,
                 device='cpu'):
        sign, n = ARITHMETIC[name]
        needs = 2 if sign == '+' else n + 1
        if heads < needs:
            raise UsageError(f'--heads {heads} is too few for the prior of {name}, which needs '
                             f'{needs}')
        if without == 'products' and sign == '+':
            raise UsageError(f'--without products is only for multiplication; {name} has none')
        if without and not per_head:
            raise UsageError('--without leaves rows of single heads free: it goes with --per-head')
        self.name = name
        self.order = order
        self.device = device
        # The answer's digits follow the '='.
        self.answer_start = 2 * n + 2
        pairs, test_pairs = arithmetic_split(n, frac, seed)
        self.train = arithmetic_text(*pairs.T, sign, n, order).to(device)
        self.test = arithmetic_text(*test_pairs.T, sign, n, order).to(device)
        self.n_train = len(self.train)
        self.probe = self.batch(torch.Generator().manual_seed(0), 256)[0]
        needed = arithmetic_structure(sign, n, heads, order, without)
        self.distance = (~(needed if per_head else needed.any(0))).float()
        self.model = dict(inputs=len(VOCABULARY), grid=(self.test.shape[1] - 1,),
                          outputs=len(VOCABULARY), readout=slice(self.answer_start - 1, None),
                          pool=None, causal=True)

    def examples(self, drawn):
        text = self.train[drawn]
        return text[:, :-1], text[:, self.answer_start:]

    def loss(self, model, x, y):
        outputs = model(x).float()
        assert outputs.shape == (*y.shape, len(VOCABULARY)), f'{outputs.shape} for {y.shape}'
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten())

    def decode(self, model, text):
        """Greedy answers [S, digits] to the questions in text [S, N + 1].

        What stands in the answer's places does not matter: the model is causal. All steps have one
        length, so --compile compiles once.
        """
        text = text.clone()
        text[:, self.answer_start:] = 0
        for i in range(text.shape[1] - self.answer_start):
            text[:, self.answer_start + i] = model(text[:, :-1])[:, i].float().argmax(-1)
        return text[:, self.answer_start:]

    def describe(self, text, answer):
        """'007+005=0012, answered 0013', most significant digit first whatever the order."""
        def number(digits):
            digits = digits.flip(0) if self.order == 'lsb' else digits
            return ''.join(VOCABULARY[d] for d in digits)
        question = ''.join(VOCABULARY[t] for t in text[:self.answer_start])
        return f'{question}{number(text[self.answer_start:])}, answered {number(answer)}'

    def evaluate(self, model, quick=False):
        train_subset = self.train[:2000]
        answers = torch.cat([self.decode(model, text) for text in self.test.split(2000)])
        right = answers == self.test[:, self.answer_start:]              # [S, digits]
        seen_right = self.decode(model, train_subset) == train_subset[:, self.answer_start:]
        loss = self.loss(model, train_subset[:, :-1], train_subset[:, self.answer_start:])
        wrong = (~right.all(1)).nonzero()[:5, 0].tolist()
        return {'sequence_accuracy': right.all(1).float().mean().item(),
                'digit_accuracy': right.float().mean().item(),
                'sequence_accuracy_seen': seen_right.all(1).float().mean().item(),
                'loss_seen': loss.item(),
                'accuracy_of_digit': right.float().mean(0).tolist(),
                'wrong': [self.describe(self.test[i], answers[i]) for i in wrong]}

    def fitted(self, metrics):
        return metrics['sequence_accuracy_seen'] >= 0.99

    def summary(self, result):
        paper = PAPER.get((self.name, result['init']))
        digits = ' '.join(f'{share:.2%}' for share in result['accuracy_of_digit'])
        lines = [f'{len(self.train):,} training pairs, {len(self.test):,} test pairs: '
                 f'exact match {result["sequence_accuracy"]:.2%}, digits '
                 f'{result["digit_accuracy"]:.2%} (in the order they are written: {digits})']
        if paper:
            lines.append(f'paper, {paper["frac"]:.1%} of the pairs: '
                         f'{paper["sequence_accuracy"]:.2%}')
        return lines + [f'wrong: {line}' for line in result['wrong']]

    def verdict(self, result):
        start = 'has fitted' if result['fitted'] else 'has not fitted'
        share = result['sequence_accuracy']
        return f'{start} its training pairs and answers {share:.1%} of the test pairs'


# -------------------------------------------------------------------------------------- images

# name: (classes, side in pixels, patch, channel means, channel standard deviations of the training
# images in [0, 1])
IMAGES = {
    'cifar10': (10, 32, 4, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    'cifar100': (100, 32, 4, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    'imagenet100': (100, 224, 16, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


# Not anew at every step.
@lru_cache(maxsize=2)
def permutation(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch))


def shuffled(n, size, step, seed):
    """Indices [size] of a step's batch in an endless stream of epochs, each a permutation of n."""
    start, end = step * size, (step + 1) * size
    epochs = range(start // n, (end - 1) // n + 1)
    return torch.cat([permutation(n, seed, epoch) for epoch in epochs])[start % n:][:size]


def affine(B, **entries):
    """[B, 3, 3] maps of output to input coordinates in [-1, 1]: the identity but for entries such
    as xy=[B], x from y, and x1, the shift of x."""
    matrix = torch.eye(3).repeat(B, 1, 1)
    for name, values in entries.items():
        matrix[:, 'xy'.index(name[0]), 'xy1'.index(name[1])] = values
    return matrix


def uniform(generator, low, high, *shape):
    return low + (high - low) * torch.rand(*shape, generator=generator)


def random_box(generator, B, side, min_area, max_area, log_aspect, tries, otherwise):
    """[B, 4]: boxes of whole pixels inside the image, top, left, bottom, right in shares of `side`.

    Of `tries` areas, with a log-uniform aspect, the first that fits; else a square of `otherwise`
    pixels (0: no box).
    """
    area = side ** 2 * uniform(generator, min_area, max_area, tries, B)
    aspect = uniform(generator, -log_aspect, log_aspect, tries, B).exp()
    size = torch.stack([area * aspect, area / aspect], 2).sqrt().round()           # [tries, B, 2]
    size = F.pad(size, (0, 0, 0, 0, 0, 1), value=otherwise)
    first = (size <= side).all(2).int().argmax(0)
    size = size[first, torch.arange(B)]
    corner = (uniform(generator, 0, 1, B, 2) * (side - size + 1)).floor().minimum(side - size)
    return torch.cat([corner, corner + size], 1) / side


OPERATIONS = ('rotate', 'shear x', 'shear y', 'translate x', 'translate y', 'brightness',
              'contrast', 'saturation', 'posterize', 'solarize')

# What is drawn for an image, and how many numbers each is: its index, then for augment() and mix().
PARAMETERS = {'index': 1, 'geometry': 6, 'brightness': 1, 'contrast': 1, 'saturation': 1,
              'posterize': 1, 'solarize': 1, 'erase': 4, 'share': 1, 'box': 4}


def draw_augmentation(generator, B, side, crop='pad', operations=0, magnitude=9, erasing=0.):
    """The parameters of augment() for B images of `side` pixels, {name: [B, ...]} on the CPU.

    crop: 'pad' shifts by up to an eighth of the side, black beyond the edge; 'resized' is
    torchvision's RandomResizedCrop, 8 to 100 % of the area at an aspect of 3/4 to 4/3. A flip with
    probability 1/2. RandAugment (Cubuk et al. 2019): `operations` of OPERATIONS an image. Erasing
    (Zhong et al. 2017) at torchvision's sizes; `erasing` is its probability.
    """
    flip = uniform(generator, 0, 1, B).lt(0.5) * -2. + 1
    if crop == 'resized':
        box = random_box(generator, B, side, 0.08, 1, math.log(4 / 3), 10, side)
        y0, x0, y1, x1 = box.T
        geometry = affine(B, xx=flip * (x1 - x0), yy=y1 - y0, x1=x0 + x1 - 1, y1=y0 + y1 - 1)
    else:
        pad = side // 8
        shift = torch.randint(-pad, pad + 1, (2, B), generator=generator) * 2. / side
        geometry = affine(B, xx=flip, x1=shift[0], y1=shift[1])
    colour, operation = draw_operations(generator, B, operations, magnitude)
    geometry = geometry @ operation
    # One try, for torchvision's ten: about one box in 300 does not fit, and is none.
    erase = random_box(generator, B, side, 0.02, 1 / 3, math.log(10 / 3), 1, 0)
    erase = erase * uniform(generator, 0, 1, B).lt(erasing)[:, None]
    return colour | {'geometry': geometry[:, :2], 'erase': erase}


def draw_operations(generator, B, operations, magnitude):
    """RandAugment: its colours, {name: [B]}, and its geometry, [B, 3, 3].

    Sizes and signs are torchvision's, at `magnitude` of 10. Unlike torchvision's, OPERATIONS lack
    identity, sharpness, autocontrast and equalize, geometry comes before colour, and beyond the
    edge of a crop the image goes on.
    """
    p = {name: torch.ones(B) for name in ('brightness', 'contrast', 'saturation', 'posterize')}
    # From here on an image is inverted: 2 is never.
    p['solarize'] = torch.full((B,), 2.)
    geometry = affine(B)
    for _ in range(operations):
        chosen = torch.randint(len(OPERATIONS), (B,), generator=generator)
        amount = (uniform(generator, 0, 1, B).lt(0.5) * 2. - 1) * magnitude / 10
        amounts = {name: (chosen == i) * amount for i, name in enumerate(OPERATIONS)}
        angle = math.radians(30) * amounts['rotate']
        # A shear keeps the upper left corner, at (-1, -1).
        across, down = 0.3 * amounts['shear x'], 0.3 * amounts['shear y']
        right, below = (300 / 331 * amounts[f'translate {axis}'] for axis in 'xy')
        # At most one operation an image is not the identity, so the entries add up.
        geometry = geometry @ affine(
            B, xx=angle.cos(), xy=across - angle.sin(), x1=across + right,
            yx=down + angle.sin(), yy=angle.cos(), y1=down + below)
        for name in ('brightness', 'contrast', 'saturation'):
            p[name] = p[name] * (1 + 0.9 * amounts[name])
        # The step in grey values: up to 4 of 8 bits go.
        step = 2 ** (4 * amounts['posterize'].abs()).round()
        p['posterize'] = p['posterize'].maximum(step)
        threshold = 1 - amounts['solarize'].abs()
        p['solarize'] = p['solarize'].minimum(torch.where(threshold < 1, threshold, 2.))
    return p, geometry


def draw_mix(generator, B, mixup, cutmix):
    """What mix() needs: each image's share of itself, [B], and the box of its partner's, [B, 4].

    mixup, cutmix: the alpha of Beta(alpha, alpha), from which a batch's share is drawn; 0 turns it
    off. With both on, each batch gets one, at random. A box of zeros is none.
    """
    dice = random.Random(int(torch.randint(2 ** 62, (1,), generator=generator)))
    cut = cutmix and (not mixup or dice.random() < 0.5)
    alpha = cutmix if cut else mixup
    share, box = 1., [0.] * 4
    if alpha:
        share = dice.betavariate(alpha, alpha)
    if cut:
        half = math.sqrt(1 - share) / 2
        centre = dice.random(), dice.random()
        box = [max(0., c - half) for c in centre] + [min(1., c + half) for c in centre]
        share = 1.
    return {'share': torch.full((B,), share), 'box': torch.tensor(box).expand(B, 4)}


def box_mask(box, h, w):
    """bool [B, 1, h, w]: the pixels of the boxes [B, 4] (top, left, bottom, right in shares)."""
    y = torch.arange(h, device=box.device)[None, :, None] + 0.5
    x = torch.arange(w, device=box.device)[None, None, :] + 0.5
    top, left, bottom, right = box[..., None, None].unbind(1)
    return ((y > top * h) & (y < bottom * h) & (x > left * w) & (x < right * w))[:, None]


def to_grayscale(x):
    """[B, 3, h, w] -> [B, 1, h, w]: luma."""
    red, green, blue = x.split(1, 1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def blend(x, other, share):
    """`share` of x and the rest of the other; a share of 1 is x to the last bit."""
    return (share * x + (1 - share) * other).clamp(0, 1)


def augment(x, p, side, mean, std):
    """uint8 [B, 3, R, R] -> normalised [B, 3, side, side], by draw_augmentation's parameters p."""
    def per_image(name):
        return p[name].view(-1, 1, 1, 1)
    geometry = p['geometry'].reshape(-1, 2, 3)
    grid = F.affine_grid(geometry, (len(x), 3, side, side), align_corners=False)
    x = F.grid_sample(x.float() / 255, grid, align_corners=False)
    x = (x * per_image('brightness')).clamp(0, 1)
    x = blend(x, to_grayscale(x).mean((2, 3), keepdim=True), per_image('contrast'))
    x = blend(x, to_grayscale(x), per_image('saturation'))
    step = per_image('posterize')
    x = torch.where(step > 1, ((x * 255).round() / step).floor() * step / 255, x)
    x = torch.where(x >= per_image('solarize'), 1 - x, x)
    x = (x - mean) / std
    return x.masked_fill(box_mask(p['erase'], side, side), 0.)


def mix(x, y, p):
    """Mixup (Zhang et al. 2017) or CutMix (Yun et al. 2019) of the neighbours 2i and 2i + 1.

    x [B, 3, h, w], y [B, classes], p by draw_mix().
    """
    other_x, other_y = (t.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for t in (x, y))
    within = box_mask(p['box'], *x.shape[2:])
    share = p['share'].view(-1, 1, 1, 1)
    x = torch.where(within, other_x, share * x + (1 - share) * other_x)
    share = (share - within.float().mean((1, 2, 3), keepdim=True))[:, :, 0, 0]
    return x, share * y + (1 - share) * other_y


def locality(rows, cols, heads=0):
    """The prior's distance on a grid: 4 outside the 3 x 3 neighbourhood; or, for each of `heads`,
    [H, N, N], the squared distance from the query's place moved by the head's shift, at most 9.

    No place wraps around the edge. Heads beyond nine begin again with the first shift.
    """
    place = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    offset = place[None] - place[:, None]                                # [N, N, 2], query to key
    if not heads:
        return 4. * (offset.abs().amax(-1) > 1)
    shifts = torch.tensor(SHIFTS)[torch.arange(heads) % len(SHIFTS)]
    return (offset - shifts[:, None, None]).square().sum(-1).clamp(max=9).float()


class Images(Task):
    """Image classification: a grid of patches, a prior of locality, soft labels in the loss.

    The images are one uint8 tensor on the device, and augmentation is tensor code there.
    """
    console_metrics = ('loss', 'accuracy_seen', 'accuracy')

    def __init__(self, name, data_dir, patch=None, image_size=None, pool='mean',
                 positions='sincos', drop_path=0., per_head=True, heads=3, crop='pad',
                 randaugment=0, erasing=0., mixup=0., cutmix=0., smoothing=0.1, batch=128,
                 cache='cache', seed=0, device='cpu'):
        classes, own_side, own_patch, mean, std = IMAGES[name]
        side = image_size or own_side
        patch = patch or own_patch
        if side % patch:
            raise UsageError(f'--image-size {side} is not a multiple of --patch {patch}')
        if name == 'imagenet100':
            # 256 for 224, as is usual.
            (x, y), (test_x, test_y) = imagenet100(data_dir, side * 8 // 7, cache)
            classes = int(y.max()) + 1
        elif side != own_side:
            raise UsageError(f'--image-size: the images of {name} have {own_side} pixels')
        else:
            (x, y), (test_x, test_y) = cifar(name, data_dir)
        self.name = name
        self.device = device
        self.seed = seed
        self.side = side
        self.classes = classes
        self.smoothing = smoothing
        self.augmentation = dict(crop=crop, operations=randaugment, erasing=erasing)
        self.mixing = dict(mixup=mixup, cutmix=cutmix)
        # No more at a time than a step trains on, which takes more memory for each.
        self.eval_batch = batch
        self.n_train = len(y)
        self.x, self.y = x.to(device), y.to(device)
        self.test_x, self.test_y = test_x.to(device), test_y.to(device)
        self.mean, self.std = (torch.tensor(t).view(3, 1, 1).to(device) for t in (mean, std))
        # In a random order, since ImageNet's files are in the order of the classes.
        self.train_indices = permutation(len(y), 0, 0)[:2000].to(device)
        grid = (side // patch, side // patch)
        # 256, or as many as have no more patches together than 256 images of CIFAR.
        n_probe = min(256, max(1, 256 * 64 // math.prod(grid)))
        self.probe = self.normalised(self.x[self.train_indices[:n_probe]])
        self.reference = {'training_examples': len(y)}
        self.distance = locality(*grid, heads if per_head else 0)
        if pool == 'cls':
            # The class token is free, and free to be seen.
            self.distance = F.pad(self.distance, (1, 0, 1, 0))
        self.model = dict(inputs=(3, patch), grid=grid, outputs=classes,
                          class_token=pool == 'cls', pool='mean', positions=positions,
                          readout=slice(0, 1 if pool == 'cls' else None), drop_path=drop_path)

    def normalised(self, x):
        """uint8 [B, 3, R, R] -> [B, 3, side, side], the centre."""
        edge = (x.shape[2] - self.side) // 2
        x = x[..., edge:edge + self.side, edge:edge + self.side]
        return (x.float() / 255 - self.mean) / self.std

    def draw(self, generator, size, step):
        """The parameters of augment() and mix(), [size, numbers]: one tensor, so one copy."""
        p = draw_augmentation(generator, size, self.x.shape[2], **self.augmentation)
        p |= draw_mix(generator, size, **self.mixing)
        # Exact in fp32 below 2^24 images.
        p['index'] = shuffled(self.n_train, size, step, self.seed).float()
        return torch.cat([p[name].reshape(size, -1) for name in PARAMETERS], 1)

    def examples(self, drawn):
        p = dict(zip(PARAMETERS, drawn.split(list(PARAMETERS.values()), 1)))
        index = p['index'][:, 0].long()
        labels = F.one_hot(self.y[index], self.classes)
        y = labels * (1 - self.smoothing) + self.smoothing / self.classes
        x = augment(self.x[index], p, self.side, self.mean, self.std)
        if any(self.mixing.values()):
            x, y = mix(x, y, p)
        return x, y

    def loss(self, model, x, y):
        return F.cross_entropy(model(x).float(), y)

    def outputs(self, model, chunks):
        """The model's outputs [S, classes] on images that are given in chunks."""
        return torch.cat([model(self.normalised(x)).float() for x in chunks])

    def score(self, model, chunks, y):
        """Top-1 accuracy and mean cross-entropy on images, given in chunks."""
        outputs = self.outputs(model, chunks)
        right = (outputs.argmax(1) == y).float()
        return right.mean().item(), F.cross_entropy(outputs, y).item()

    def evaluate(self, model, quick=False):
        chunks = self.test_x.split(self.eval_batch)
        accuracy, loss = self.score(model, chunks, self.test_y)
        chunks = (self.x[i] for i in self.train_indices.split(self.eval_batch))
        accuracy_seen, loss_seen = self.score(model, chunks, self.y[self.train_indices])
        return {'accuracy': accuracy, 'loss': loss, 'accuracy_seen': accuracy_seen,
                'loss_seen': loss_seen}

    def final(self, model):
        """Which test images are right, a bit each in hexadecimal, so that runs can be compared
        image by image."""
        outputs = self.outputs(model, self.test_x.split(self.eval_batch))
        bits = (outputs.argmax(1) == self.test_y).int().tolist()
        digits = math.ceil(len(bits) / 4)
        return {'right_images': f'{int("".join(map(str, bits)), 2):0{digits}x}'}

    def fitted(self, metrics):
        return metrics['accuracy_seen'] >= 0.99

    def summary(self, result):
        paper = PAPER.get((self.name, result['init']))
        line = (f'{self.n_train:,} training images of {self.classes} classes, '
                f'{len(self.test_y):,} test images: top-1 {result["accuracy"]:.2%}')
        if paper:
            line += f' (paper, all of the data, 300 epochs: {paper["accuracy"]:.2%})'
        return [line]

    def verdict(self, result):
        return f'{result["accuracy"]:.1%} of the test images are right'


# ------------------------------------------------------------------------------------- language

STORIES_VOCABULARY = 4096
# Windows; the perplexity does not depend on it.
EVAL_BATCH = 64


def wikitext_words(text):
    """The words as they come, and <eos> after each line."""
    return [word for line in io.StringIO(text) for word in (*line.split(), '<eos>')]


def story_words(text):
    """Yields each story's words and <eos>: lower case; a word with its apostrophes, a number, or
    one other mark at a time.

    "Lily's 2 cats!" -> lily's 2 cats ! <eos>. A last story that no separator ends is taken for cut
    off and left out, unless it is the only one.
    """
    stories = text.split('<|endoftext|>')
    for story in stories[:-1] if len(stories) > 1 else stories:
        words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[^\w\s]|_", story.lower())
        if words:
            yield [*words, '<eos>']


def corpus(name, data_dir):
    """{'train', 'valid', 'test': word ids [S]} and the vocabulary, from the training words alone.

    Most frequent words first, <unk> and <eos> among them (in front, where they are rare).
    wikitext2: its three files, every word. tinystories: one training file, its last 5 % of stories
    (at most 1,000) for test and as many before for validation, the 4,096 most frequent words.
    """
    path = find_dataset(name, data_dir)
    # {word: its place in the order of appearance}
    word_ids = {}

    def to_ids(words):
        # A tensor a story: all words as str would not fit in memory.
        return torch.tensor([word_ids.setdefault(word, len(word_ids)) for word in words],
                            dtype=torch.int32)
    if name == 'wikitext2':
        splits = {split: [to_ids(wikitext_words(read_text(path.with_stem(split))))]
                  for split in ('train', 'valid', 'test')}
    else:
        stories = [to_ids(story) for story in story_words(read_text(path))]
        # 1,000 stories, some 200,000 words, are enough.
        n_holdout = min(max(1, len(stories) // 20), 1000)
        splits = {'train': stories[:-2 * n_holdout], 'valid': stories[-2 * n_holdout:-n_holdout],
                  'test': stories[-n_holdout:]}
    for split, texts in splits.items():
        if not sum(map(len, texts)):
            raise DataError(f'{name} in {data_dir}: nothing is left for {split}')
    splits = {split: torch.cat(texts) for split, texts in splits.items()}
    count = splits['train'].bincount(minlength=len(word_ids))
    words = list(word_ids)
    size = len(words) + 2 if name == 'wikitext2' else STORIES_VOCABULARY
    order = count.argsort(descending=True, stable=True)[:size].tolist()
    vocabulary = [words[i] for i in order if count[i]]
    rare = [word for word in ('<unk>', '<eos>') if word not in vocabulary[:size - 1]]
    vocabulary = rare + vocabulary[:size - len(rare)]
    index_of = {word: i for i, word in enumerate(vocabulary)}
    ids = torch.tensor([index_of.get(word, index_of['<unk>']) for word in words])
    return {split: ids[text] for split, text in splits.items()}, vocabulary


def relative_distance(N, heads):
    """The prior's distance between words, [H, N, N]: slope * (i - j), slopes 2^(-8 h / H).

    At strength 1 the attention begins as ALiBi's (Press et al. 2022): M0 = logit(c exp(-slope (i -
    j))), c = sigmoid(level). c = 1 is ALiBi's bias to the letter, but there M is infinite at
    distance 0 and its gradient gone; level 0, c = 1/2, has both.
    """
    offset = (torch.arange(N)[:, None] - torch.arange(N)).clamp(min=0)
    return 2 ** (-8 * torch.arange(1, heads + 1) / heads).view(-1, 1, 1) * offset


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits x W^T, for x [T, D], W [V, D] and target [T]; as torch's, a
    target of -100 does not count.

    `chunk` rows of logits at a time: 4,096 positions of 33,278 words are half a gigabyte in fp32.
    The gradients are formed with the loss (`gradients`: whether they are wanted), so nothing is
    computed twice. The softmax keeps the type of the logits (its kernel sums in fp32): no copies,
    twice as fast in bf16 on a CPU, and the mean over 4,096 words is within 3e-6 (measured).
    """

    @staticmethod
    def forward(ctx, x, W, target, gradients=True, chunk=128):
        device = x.device.type
        counts = target != -100
        # At least one, so that no division is by 0; a tensor, so that a GPU need not be waited for.
        n = counts.sum().clamp(min=1)
        target = target.where(counts, 0)[:, None]
        loss = 0.
        grad_x = torch.empty_like(x) if gradients else None
        grad_W = torch.zeros_like(W) if gradients else None
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
            W = W.to(torch.get_autocast_dtype(device))
        # The types are chosen here.
        with torch.autocast(device, enabled=False):
            for low in range(0, len(x), chunk):
                rows = slice(low, low + chunk)
                grad = (x[rows] @ W.T).softmax(-1)
                p = grad.gather(1, target[rows])
                p = p.to(torch.promote_types(x.dtype, torch.float32))
                log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
                loss = loss - (log_p * counts[rows, None]).sum()
                if gradients:
                    grad.scatter_add_(1, target[rows], -torch.ones_like(grad[:, :1]))
                    grad *= counts[rows, None]
                    grad_x[rows] = grad @ W
                    # An fp32 sum of what is bf16 under autocast.
                    grad_W += grad.T @ x[rows]
        ctx.save_for_backward(grad_x, grad_W, n)
        return loss / n

    @staticmethod
    def backward(ctx, grad):
        # With create_graph the second derivative would be silently wrong.
        if torch.is_grad_enabled():
            raise RuntimeError('the cross-entropy in chunks has no second derivative')
        grad_x, grad_W, n = ctx.saved_tensors
        return grad_x * (grad / n), grad_W * (grad / n), None, None, None


def text_loss(mean_loss, ids, start, N, batch):
    """Mean of -log p over the words in ids [S], each predicted once, from at most N words before.

    mean_loss(x, y) of windows x [B, N]; `start` stands before the first word; the last, short
    window counts like any other.
    """
    inputs = torch.cat([ids.new_tensor([start]), ids[:-1]])
    whole = len(ids) // N * N
    total = 0.
    for low in range(0, whole, N * batch):
        chunk = slice(low, min(low + N * batch, whole))
        loss = mean_loss(inputs[chunk].view(-1, N), ids[chunk].view(-1, N))
        total += loss.item() * (chunk.stop - chunk.start)
    if whole < len(ids):
        total += mean_loss(inputs[None, whole:], ids[None, whole:]).item() * (len(ids) - whole)
    return total / len(ids)


class Language(Task):
    """Next-word prediction in windows of `context` words.

    Measured by perplexity = exp(total loss / predicted words). Without positions the model is made
    for 4 times the context, and is measured at 2 and 4 times what it was trained at.
    """
    console_metrics = ('perplexity', 'loss_seen')

    def __init__(self, name, data_dir, context=64, positions='learned', per_head=True, heads=4,
                 device='cpu'):
        ids, self.vocabulary = corpus(name, data_dir)
        unknown = self.vocabulary.index('<unk>')
        self.unknown_rate = {split: (i == unknown).float().mean().item()
                             for split, i in ids.items()}
        self.ids = {split: i.to(device) for split, i in ids.items()}
        self.start = self.vocabulary.index('<eos>')
        self.device = device
        self.context = context
        self.n_train = len(ids['train'])
        if self.n_train <= context:
            raise DataError(f'{name} in {data_dir}: {self.n_train} words to train on are too few '
                            f'for a context of {context}')
        self.window = torch.arange(context + 1, device=device)
        self.probe = self.batch(torch.Generator().manual_seed(0), 64)[0]
        self.longer = positions == 'none'
        N = context * (4 if self.longer else 1)
        distance = relative_distance(N, heads)
        self.distance = distance if per_head else distance.mean(0)
        self.reference = {'training_examples': self.n_train}
        self.model = dict(inputs=len(self.vocabulary), grid=(N,), outputs=len(self.vocabulary),
                          pool=None, causal=True, tied=True, positions=positions)

    def draw(self, generator, size, step):
        """The windows' first words."""
        return torch.randint(self.n_train - self.context, (size,), generator=generator)

    def examples(self, drawn):
        text = self.ids['train'][drawn[:, None] + self.window]
        return text[:, :-1], text[:, 1:]

    def loss(self, model, x, y):
        def cross_entropy(tokens, head):
            assert head.bias is None, 'an output layer without bias: tied=True'
            return LinearCrossEntropy.apply(tokens.flatten(0, 1), head.weight, y.flatten(),
                                            torch.is_grad_enabled())
        return model(x, cross_entropy)

    def mean_loss(self, model, ids, N):
        return text_loss(partial(self.loss, model), ids, self.start, N, EVAL_BATCH)

    def perplexity(self, model, split, N):
        # NaN stays NaN.
        return math.exp(min(self.mean_loss(model, self.ids[split], N), 80.))

    def evaluate(self, model, quick=False):
        perplexity = self.perplexity(model, 'valid', self.context)
        train_subset = self.ids['train'][:EVAL_BATCH * self.context]
        return {'perplexity': perplexity, 'loss': math.log(perplexity),
                'loss_seen': self.mean_loss(model, train_subset, self.context)}

    def final(self, model):
        found = {'perplexity_test': self.perplexity(model, 'test', self.context),
                 'sample': self.sample(model)}
        for times in (2, 4) if self.longer else ():
            found[f'perplexity_{times}x'] = self.perplexity(model, 'valid', times * self.context)
        return found

    def sample(self, model, n_words=40):
        """Words drawn from the model, at one length, so that --compile compiles once."""
        generator = torch.Generator().manual_seed(0)
        text = [self.start]
        for _ in range(n_words):
            last = text[-self.context:]
            window = last + [self.start] * (self.context - len(last))
            logits = model(torch.tensor([window], device=self.device))[0, len(last) - 1]
            p = logits.float().softmax(-1).cpu()
            text.append(torch.multinomial(p, 1, generator=generator).item())
        return ' '.join(self.vocabulary[i] for i in text[1:])

    def summary(self, result):
        rates = ', '.join(f'{split} {rate:.2%}' for split, rate in self.unknown_rate.items())
        lines = [f'{len(self.vocabulary):,} words in the vocabulary; <unk>: {rates}',
                 f'perplexity: validation {result["perplexity"]:.2f}, '
                 f'test {result["perplexity_test"]:.2f}']
        if self.longer:
            lines.append(f'at 2 and 4 times the context, validation: '
                         f'{result["perplexity_2x"]:.2f}, {result["perplexity_4x"]:.2f}')
        return [*lines, f'sample: {result["sample"]}']

    def verdict(self, result):
        return f'validation perplexity {result["perplexity"]:.1f}'


# A task of your own: its class, under its name.
TASKS = {
    **dict.fromkeys(BOOLEAN_TARGETS, Boolean),
    **dict.fromkeys(ARITHMETIC, Arithmetic),
    **dict.fromkeys(IMAGES, Images),
    'wikitext2': Language,
    'tinystories': Language,
}


# ----------------------------------------------------- data sets: where they are, how to read them

# In data_dir; the first that is there is taken.
DATA_PATHS = {
    'cifar10': ('cifar-10-batches-py', 'cifar-10-python.tar.gz', 'cifar-10-batches-bin',
                'cifar-10-binary.tar.gz'),
    'cifar100': ('cifar-100-python', 'cifar-100-python.tar.gz', 'cifar-100-binary',
                 'cifar-100-binary.tar.gz'),
    'imagenet100': ('imagenet100/train',),
    'wikitext2': ('wikitext-2/train.txt',),
    'tinystories': ('tinystories/TinyStories-train.txt', 'tinystories/TinyStories-train*.txt'),
}
TORONTO = 'https://www.cs.toronto.edu/~kriz'
STORIES = 'https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main'
WIKITEXT = ('https://raw.githubusercontent.com/pytorch/examples/main/'
            'word_language_model/data/wikitext-2')
# name: [(where, file in data_dir, size in bytes, md5), ...]; None where no one publishes them.
DOWNLOADS = {
    'cifar10': [
        (TORONTO, 'cifar-10-python.tar.gz', 170498071, 'c58f30108f718f92721af3b95e74349a')],
    'cifar100': [
        (TORONTO, 'cifar-100-python.tar.gz', 169001437, 'eb9058c3a382ffc7106e4002c42a8d85')],
    'wikitext2': [
        (WIKITEXT, 'wikitext-2/train.txt', 10797148, '34a77ebe59551b3a3b3d8c0a2797c976'),
        (WIKITEXT, 'wikitext-2/valid.txt', 1121681, 'd756d22ab2310e7e60c094bea5c5a8eb'),
        (WIKITEXT, 'wikitext-2/test.txt', 1256449, '781c9418ab9414bd09e4aad825aae752')],
    'tinystories': [(STORIES, 'tinystories/TinyStories-train.txt', None, None)],
}
DATA_DIR = os.environ.get('MASKPRIOR_DATA') or 'data'


def find_dataset(name, data_dir):
    """The path of a data set, or a DataError that says how to get it."""
    for pattern in DATA_PATHS[name]:
        found = sorted(Path(data_dir).glob(pattern))
        if found:
            return found[0]
    if Path(data_dir).is_dir():
        # One that may not be read looks empty to glob.
        os.listdir(data_dir)
    quoted = shlex.quote(str(data_dir))
    how = (f'python tasks.py download {name} --data-dir {quoted}' if name in DOWNLOADS else
           'ImageNet has to be fetched from image-net.org by hand; its class folders go to '
           'imagenet100/train/<WordNet id>/*.JPEG and imagenet100/val/<WordNet id>/*.JPEG, those '
           'named in imagenet100_classes.txt if that is there')
    raise DataError(f'{name} is not in {data_dir}: {how}')


@contextmanager
def replacing(path):
    """Atomic: yields a temporary path, which becomes `path` when the block has ended well."""
    # Beyond the process id, since two containers may share a folder and an id.
    temporary = path.with_name(f'{path.name}.{uuid.uuid4().hex}.tmp')
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def lock(path, wait=True):
    """One process at a time, of all on this system; the system frees it, even after a kill.

    `path`: a folder, or a file that is made. BlockingIOError if taken and not `wait`.
    """
    try:
        import fcntl
    except ImportError:
        # Windows has none: no lock there.
        yield
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def read_text(path):
    """The text of a UTF-8 file whatever the locale; a byte-order mark and \\r\\n change nothing."""
    try:
        return path.read_text(encoding='utf-8-sig')
    except FileNotFoundError:
        raise DataError(f'{path} is missing: download its data set again') from None
    except UnicodeDecodeError as error:
        raise DataError(f'{path} is not UTF-8 text ({error}): replace it') from None


class NumpyStandIn:
    """Stands in for numpy's ndarray and its dtype, which may only be uint8: notes its state."""

    def __init__(self, kind='u1', *_):
        if kind not in ('u1', b'u1'):
            raise pickle.UnpicklingError(f'an array of type {kind!r}')

    def __setstate__(self, state):
        self.state = state


class CifarUnpickler(pickle.Unpickler):
    """Runs no code of the file: any name but those of numpy's arrays is refused."""

    STAND_INS = {
        ('multiarray', '_reconstruct'): lambda *_: NumpyStandIn(),
        ('numpy', 'ndarray'): NumpyStandIn,
        ('numpy', 'dtype'): NumpyStandIn,
        ('_codecs', 'encode'): lambda text, _: text.encode('latin1'),
    }

    def find_class(self, module, name):
        short = module.removeprefix('numpy.core.').removeprefix('numpy._core.')
        if (short, name) not in self.STAND_INS:
            raise pickle.UnpicklingError(f'it asks for {module}.{name}')
        return self.STAND_INS[short, name]


def unpickle(data):
    """The dictionary in a CIFAR pickle (bytes), with str keys and uint8 tensors, without numpy."""
    content = CifarUnpickler(io.BytesIO(data), encoding='bytes').load()
    found = {}
    for key, value in content.items():
        if isinstance(value, NumpyStandIn):
            _, shape, _, by_columns, pixels = value.state
            if by_columns:
                raise pickle.UnpicklingError('an array stored by columns')
            value = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
        found[key.decode() if isinstance(key, bytes) else key] = value
    return found


def cifar_files(name, data_dir):
    """(where, {file: content}) of the official archive, as a folder or .tar.gz, in memory."""
    where = find_dataset(name, data_dir)
    if where.is_dir():
        return where, {path.name: path.read_bytes() for path in where.iterdir() if path.is_file()}
    files = {}
    try:
        with tarfile.open(where) as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if not (member.isfile() or member.isdir()) or '..' in parts or parts[:1] == ('/',):
                    raise DataError(f'{where} holds {member.name}, which no official archive does')
                if member.isfile():
                    files[PurePosixPath(member.name).name] = tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        reason = str(error).partition('\n')[0]
        raise DataError(f'{where} cannot be read ({reason}): download it again') from None
    return where, files


def read_cifar_binary(content, path, n_coarse):
    """Images [S, 3072] and labels of records: n_coarse coarse labels, a label, 3072 pixels."""
    record = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if len(record) % (3073 + n_coarse):
        raise DataError(f'{path} is cut off: {len(record)} bytes are no whole number of records')
    record = record.view(-1, 3073 + n_coarse)
    return record[:, 1 + n_coarse:], record[:, n_coarse].long()


def read_cifar_pickle(content, path, name):
    """Images [S, 3072] and labels."""
    try:
        content = unpickle(content)
        images = content['data']
        labels = list(content['fine_labels' if name == 'cifar100' else 'labels'])
        if not isinstance(images, torch.Tensor) or not all(type(label) is int for label in labels):
            raise ValueError('images that are no array, or labels that are no integers')
        labels = torch.tensor(labels)
    # A damaged pickle raises almost anything.
    except Exception as error:
        raise DataError(f'{path} is no CIFAR batch ({error}): download {name} again') from None
    return images, labels


def cifar(name, data_dir):
    """((images, labels), (images, labels)), train and test: uint8 [S, 3, 32, 32], int64 [S]."""
    where, files = cifar_files(name, data_dir)
    binary = any(file.endswith('.bin') for file in files)
    # CIFAR-100's records begin with one.
    n_coarse = int(name == 'cifar100')

    def read(file):
        file += '.bin' if binary else ''
        path = f'{where}/{file}'
        if not files.get(file):
            raise DataError(f'{path} is {"empty" if file in files else "missing"}: remove {where} '
                            f'and download {name} again')
        if binary:
            images, labels = read_cifar_binary(files[file], path, n_coarse)
        else:
            images, labels = read_cifar_pickle(files[file], path, name)
        if images.shape != (len(labels), 3072):
            raise DataError(f'{path} holds {len(labels)} labels for images of shape '
                            f'{tuple(images.shape)}')
        if not len(labels) or labels.min() < 0 or labels.max() >= IMAGES[name][0]:
            raise DataError(f'{path} has no images, or labels beyond the {IMAGES[name][0]} classes')
        return images.view(-1, 3, 32, 32), labels

    if name == 'cifar100':
        return read('train'), read('test')
    # A pickle says how many batches there are.
    said = re.search(rb'training batch \d+ of (\d+)', files.get('data_batch_1') or b'')
    batches = [read(f'data_batch_{i + 1}') for i in range(int(said[1]) if said else 5)]
    images, labels = map(torch.cat, zip(*batches))
    return (images, labels), read('test_batch')


def image_files(root, split, classes):
    """{class: [its .jpeg and .jpg files]}, sorted, of root/split/<class>/.

    A class without any is left out, and one that is not in `classes`, unless that is None.
    """
    found = {}
    for folder in sorted((root / split).glob('*')):
        asked = classes is None or folder.name in classes
        if folder.is_dir() and not folder.name.startswith('.') and asked:
            files = sorted(path for path in folder.iterdir() if not path.name.startswith('.')
                           and path.suffix.lower() in ('.jpeg', '.jpg'))
            if files:
                found[folder.name] = files
    return found


def decode_image(file, side):
    """The pixels of an image file, rows of R G B: short edge to `side`, centre crop."""
    from PIL import Image
    try:
        with Image.open(file) as image:
            # Greyscale, CMYK, a PNG by another name.
            image = image.convert('RGB')
            scale = side / min(image.size)
            size = [max(side, round(n * scale)) for n in image.size]
            image = image.resize(size, Image.Resampling.BICUBIC)
            left, top = ((n - side) // 2 for n in image.size)
            return image.crop((left, top, left + side, top + side)).tobytes()
    # Pillow raises almost anything.
    except Exception as error:
        raise DataError(f'{file} cannot be decoded ({error}): remove or replace it') from None


def decode_images(files, side, cache):
    """uint8 [S, 3, side, side] of the image files, decoded once, into the folder `cache`.

    The cache is a memory-mapped file, named by which files, sizes and dates went into it. It gets
    that name when it is complete. One process decodes, others wait for it.
    """
    stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    stamp = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
    path = Path(cache) / f'{len(files)}-images-{side}px-{stamp}.u8'
    size = len(files) * 3 * side * side
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.with_suffix('.lock')):
        if not path.exists() or path.stat().st_size != size:
            if importlib.util.find_spec('PIL') is None:
                raise DataError('decoding JPEG files needs Pillow: pip install pillow')
            # What decoding left that was killed.
            for temporary in path.parent.glob(f'{path.name}.*.tmp'):
                temporary.unlink()
            decode = partial(decode_image, side=side)
            with replacing(path) as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
                with open(temporary, 'wb') as out:
                    # No more than a thousand wait in memory.
                    for start in range(0, len(files), 1000):
                        out.writelines(pool.map(decode, files[start:start + 1000]))
    pixels = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return pixels.view(-1, side, side, 3).permute(0, 3, 1, 2)


def imagenet100(data_dir, side, cache):
    """As cifar(), from imagenet100/{train,val}/<WordNet id>/*.JPEG.

    data_dir/imagenet100_classes.txt says which classes, if it is there.
    """
    root = find_dataset('imagenet100', data_dir).parent
    listed = Path(data_dir) / 'imagenet100_classes.txt'
    classes = set(read_text(listed).split()) if listed.exists() else None
    found = {split: image_files(root, split, classes) for split in ('train', 'val')}
    names = list(found['train'])
    if not names or set(found['val']) != set(names):
        chosen = f'; {listed} says which are taken' if listed.exists() else ''
        raise DataError(f'{root}: train has images of {len(names)} classes, val of '
                        f'{len(found["val"])}, and they must be the same{chosen}')
    splits = []
    for split in ('train', 'val'):
        files = [file for name in names for file in found[split][name]]
        labels = [i for i, name in enumerate(names) for _ in found[split][name]]
        splits.append((decode_images(files, side, cache), torch.tensor(labels)))
    return splits


def download(address, path, size, md5):
    """Fetches a file, checked by size and md5, where known, before it gets its name."""
    try:
        # A damaged one is fetched again.
        if path.is_file() and path.stat().st_size and size in (None, path.stat().st_size):
            print(f'{path} is already there')
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.md5()
        got = 0
        with replacing(path) as temporary:
            source = urllib.request.urlopen(address, timeout=60)
            with source, open(temporary, 'wb') as out:
                expected = size or int(source.headers.get('Content-Length') or 0)
                while chunk := source.read(1 << 20):
                    out.write(chunk)
                    digest.update(chunk)
                    got += len(chunk)
                    print(f'\r{path.name}: {got / 1e6:.0f} of {expected / 1e6:.0f} MB', end='',
                          flush=True)
            print(f'  md5 {digest.hexdigest()}')
            if (expected and got != expected) or (md5 and digest.hexdigest() != md5):
                wanted = f', not {md5}' if md5 else ''
                raise DataError(f'{address}: got {got} of {expected} bytes, md5 '
                                f'{digest.hexdigest()}{wanted}: nothing is kept')
    # No network, no space, no such page.
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f'{address} cannot be fetched to {path}: {error}') from None


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog='tasks.py', usage=argparse.SUPPRESS,
        description='Fetches a data set: python tasks.py download cifar10')
    parser.add_argument('command', choices=['download'])
    parser.add_argument('name', choices=sorted(DOWNLOADS))
    parser.add_argument('--data-dir', default=DATA_DIR,
                        help='folder to put it in (default %(default)s)')
    args = parser.parse_args(argv)
    for where, file, size, md5 in DOWNLOADS[args.name]:
        path = Path(args.data_dir) / file
        download(f'{where}/{path.name}', path, size, md5)


if __name__ == '__main__':
    try:
        main()
    except (DataError, OSError) as error:
        sys.exit(f'tasks.py: {error}')
    except KeyboardInterrupt:
        sys.exit('tasks.py: interrupted')
