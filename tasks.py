"""Every task: its inputs, its split, its interaction structure, and what is known of it before any training.

A `Task` is all that train.py needs; one function makes each. Shape letters as in maskprior.py.
"""
import random
from dataclasses import dataclass, field
from itertools import combinations
from typing import Callable

import torch
import torch.nn.functional as F


class UsageError(Exception):
    """A setting that makes no task; train.py prints it as one line and exits with 2."""


@dataclass
class Task:
    model: dict           # arguments of maskprior.Transformer: vocab, N, outputs, rows, pool, causal
    opened: torch.Tensor  # interaction structure, bool [N, N] or [H, N, N]: query token i needs key token j
    batch: Callable       # (generator, size) -> inputs [size, N] and their targets, drawn from the training set
    loss: Callable        # (outputs of the model, targets) -> scalar
    evaluate: Callable    # (predict: inputs -> outputs, without gradients) -> {metric: number, or details}
    probe: torch.Tensor   # [P, N] fixed training inputs, for prior_tv and the QK arms
    fitted: Callable      # (metrics) -> whether the training set is fitted: else the arm says nothing about extrapolation
    shown: tuple          # the metrics on the line that is printed at each evaluation
    summary: Callable     # (result) -> the lines that are printed at the end
    known: dict = field(default_factory=dict)  # what no training can change: the MDI's metrics


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


def boolean(name, hole=None, prior_bits=None, pattern='group', heads=1, device='cpu'):
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

    def batch(generator, size):
        i = torch.randint(len(seen_y), (size,), generator=generator).to(device)
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

    def evaluate(predict):
        return metrics(torch.cat([predict(t)[:, 0].float() for t in tokens.split(4096)]))

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

    opened = boolean_structure(bits if prior_bits is None else prior_bits, pattern, heads)
    fitted_below = 0.01 * y.var(unbiased=False).item()
    return Task(model=dict(vocab=3, N=tokens.shape[1], outputs=1, rows=slice(0, None if bits is None else 1)),
                opened=opened.to(device), batch=batch, loss=loss, evaluate=evaluate,
                probe=batch(torch.Generator().manual_seed(0), 256)[0],
                fitted=lambda metrics: metrics['loss_seen'] < fitted_below,
                shown=('loss', 'accuracy_seen', 'accuracy_unseen'), summary=summary,
                known={f'mdi_{k}': v for k, v in metrics(mdi).items()} | {'target_fourier': metrics(y)['fourier']})


# ------------------------------------------------------------------------------------- arithmetic, from few of all pairs

ARITHMETIC = {'add3': '+', 'add4': '+', 'add5': '+', 'mul3': '*'}
VOCAB = '0123456789+*='
PAPER |= {('add3', 'default'): dict(sequence_accuracy=0.0119, frac=0.004), ('add3', 'mask'): dict(sequence_accuracy=0.7749, frac=0.004),
          ('mul3', 'default'): dict(sequence_accuracy=0.0501, frac=0.03), ('mul3', 'mask'): dict(sequence_accuracy=0.6949, frac=0.03)}


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
      addition        needs a_k and b_k in every head but the last;
      multiplication  needs a_h and b_(k-h) in head h; b_j in turn needs a_h and itself there ('products': a_h * b_j);
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
        for h in range(heads - 1):
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
    first = 2 * n + 1
    pairs = dict(zip(('seen', 'test'), arithmetic_split(n, frac, seed)))
    texts = {key: arithmetic_text(*pair.T, sign, n, order).to(device) for key, pair in pairs.items()}
    seen, test = texts['seen'], texts['test']

    def batch(generator, size):
        text = seen[torch.randint(len(seen), (size,), generator=generator).to(device)]
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

    def evaluate(predict):
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
    return Task(model=dict(vocab=len(VOCAB), N=test.shape[1] - 1, outputs=len(VOCAB), rows=slice(first, None), pool=False,
                           causal=True),
                opened=(opened if per_head else opened.any(0)).to(device), batch=batch, loss=loss, evaluate=evaluate,
                probe=batch(torch.Generator().manual_seed(0), 256)[0],
                fitted=lambda metrics: metrics['sequence_accuracy_seen'] >= 0.99,
                shown=('loss_seen', 'sequence_accuracy_seen', 'sequence_accuracy', 'digit_accuracy'), summary=summary)
