"""Theorem 1 and Corollary 1 of "Mask-Based Priors Are More Persistent than Query-Key
Initializations", checked in float64 on the CPU.

    python theory.py     # some minutes; prints a table, writes runs/theory/; exit 1: one failed

One row of attention: N keys, model width D, head width d, query token x, key tokens X_j,
    q = x W_Q,  k_j = X_j W_K,  s_j = q.k_j/sqrt(d) + log sigmoid(m_j)  (-inf where hard-masked),
    p = softmax(s),  o = sum_j p_j v_j,  g = dl/do, the gradient of the loss l at the output.
Norms ||.||: Euclidean of vectors, Frobenius of d./dW, spectral of dp/d., do/d. and A. diam(z) =
max_jl ||z_j - z_l||, G = ||g||, R = diam(v); osc = max - min over the keys.

1. Derivatives. Any f(p), c = df/dp, sees s_j by e_j = df/ds_j = p_j (c_j - sum_l p_l c_l), and
     df/dm_j = e_j sigmoid(-m_j),  df/dk_j = e_j q/sqrt(d),  df/dq = sum_j e_j k_j/sqrt(d),
     df/dW_Q = x^T df/dq, df/dW_K = sum_j X_j^T df/dk_j, df/dx = df/dq W_Q^T, df/dX = df/dk W_K^T.
   p_i: e_j = p_i (delta_ij - p_j), so dp_i/dq = p_i (k_i - sum_l p_l k_l)/sqrt(d). The loss: e_j =
   p_j g.(v_j - o). All of p or of o: f is u.p or w.o, for directions u and w.
2. Bounds, for every row, hard-masked keys included. |delta_ij - p_j| <= 1; p_i p_j and p_i (1-p_i)
   are at most 1/4; k_i - sum_l p_l k_l averages the k_i - k_l. p, J = diag(p) - p p^T: u^T J u =
   Var_p(u) <= osc(u)^2/4 <= 1/2 for a unit u, so ||J|| <= 1/2; dp/dm = J diag(sigmoid(-m)), dp/dk =
   J (x) q/sqrt(d). dp/dq: for a unit y let z_j = k_j.y, of range at most diam(k); ||J z|| is convex
   in z, so largest where z has two values, of mass P and 1-P: ||J z||^2 <= 2 (P (1-P) diam(k))^2.
   Output and loss: v_j - o = sum_{l != j} p_l (v_j - v_l), so ||v_j - o|| <= (1-p_j) R. Through q:
   sum_j e_j k_j = Cov_p(g.v, k), along any direction at most sd(g.v) sd(k) <= (GR/2) (diam(k)/2);
   dl/dW_K = Cov_p(g.v, X)^T q/sqrt(d) alike. Through W_Q and W_K the bounds are quadratic in the
   inputs, as q = x W_Q and k = X W_K; no bound through m has q, k or an input in it.
3. Tight. Each is an equality as p_i -> 0, i = j, keys k and -k, or for two keys with p = 1/2.
4. Scaling. q -> a q, k -> k/a leaves p as it is: dl/dk_j gains a factor a, dl/dq 1/a, dl/dm none.
   In every row ||dl/dk_j||/|dl/dm_j| = ||q||/(sqrt(d) sigmoid(-m_j)) >= ||q||/sqrt(d). So when q
   and k grow together and the row saturates, all gradients fade, the mask's too, but not the ratio.
5. How far a row moves in total variation, TV (ours, not the paper's). Lemma: TV <= tanh(osc(ds)/4)
   if s moves by ds. TV = max_A |p'(A) - p(A)|, the odds of a set A of keys change by at most e^osc,
   and sigmoid(y + osc) - sigmoid(y) peaks at y = -osc/2. Tight for two keys.
   T steps of SGD of size h through one place, ||g|| <= G throughout: osc <= gain T h GR/2. M: m_j
   moves at most h p_j (1-p_j) sigmoid(-m_j) GR a step, and log sigmoid(m_j), of slope sigmoid(-m) <
   1, no more. As p_j (1-p_j) + p_l (1-p_l) <= 1/2, osc grows by h GR/2 at most: gain 1. sigmoid(-m)
   counts twice, no m_j falls by more than T h GR/4: gain S^2, S = sigmoid(T h GR/4 - min m).
   q moves at most h GR kappa/(4 sqrt(d)), kappa = diam(k), osc kappa/sqrt(d) times that: gain
   kappa^2/(2d). W_Q: ||x||^2 times q's, as x (W_Q - h x^T dq) = q - h ||x||^2 dq. Keys N(0, 1) have
   E||k - k'||^2 = 2d, where q breaks even with M. Worst cases, met while T h GR is small.
   Third way: the INPUTS of q and k move, whatever moves them. A = W_Q W_K^T/sqrt(d), L = ||A||, the
   sharpness of what W_Q and W_K hold. ds_j = dx A X_j^T + (x + dx) A dX_j^T, so in ds_j - ds_l
   stand X_j - X_l and dX_j - dX_l: osc <= L (||dx|| diam(X) + 2 max_j ||dX_j|| (||x|| + ||dx||)).
   T steps of at most eps on each input: osc <= L rho (diam(X) + 2 ||x|| + 2 rho), rho = T eps.
   Inputs held, ds_j = x dA X_j^T: osc <= ||dA|| ||x|| diam(X). No input is in log sigmoid(M): 0.
   So to freeze W_Q and W_K (--freeze-qk) protects nothing: L stays, and no gradient of theirs is in
   the bound. To hold the inputs (--hold-inputs) protects up to dA, the weights' own movement. And
   the sharper a prior, the less it bears: one of S nats in the weights has L >= S/(||x|| diam(X)).
"""
import argparse
import json
import math
import sys
import time
import uuid
import warnings
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

# numpy is not required; torch would mention its absence
warnings.filterwarnings('ignore', 'Failed to initialize NumPy')
import torch
import torch.nn.functional as F

from maskprior import attention_weights, mask_bias

# allowed for rounding, relative to what was added up
ROUND = 1e-12
# what is differentiated, by what
PLACES = ('m', 'k', 'q', 'W_Q', 'W_K')
FUNCTIONS = {'p_i': PLACES, 'u.p': PLACES[:3], 'w.o': PLACES[:3], 'loss': PLACES}
DERIVATIVES = [(f, place) for f, places in FUNCTIONS.items() for place in places]
uniform = partial(torch.rand, dtype=torch.float64)
normal = partial(torch.randn, dtype=torch.float64)

# ||d function / d place|| <= limit(row)
Bound = namedtuple('Bound', 'statement function place limit')
# parts of a row times powers of a, and the slopes that follow
Scaling = namedtuple('Scaling', 'title powers slopes')
# through a place TV <= tanh(osc(row, dose)/4), for a dose T h GR or rho
Way = namedtuple('Way', 'statement place osc')
# a line and a section of the table
Check = namedtuple('Check', 'statement values ok')
Part = namedtuple('Part', 'title columns rows')

# ------------------------------------------------------------------- a row and its derivatives

def norm(z):
    return z.flatten(1).norm(dim=1, keepdim=True)

def longest(z):
    return z.norm(dim=-1).amax(1, keepdim=True)

def diam(z):
    """[B, N, d] -> [B, 1]. Centred on z_0, so that the Gram matrix is exact to rounding."""
    z = z - z[:, :1]
    square = (z * z).sum(-1)
    distance = square[:, :, None] + square[:, None] - 2 * z @ z.mT
    return distance.flatten(1).amax(1, keepdim=True).clamp_min(0.0).sqrt()

@dataclass(eq=False)
class Row:
    """B rows: x [B, 1, D], X [B, N, D], W_Q and W_K [B, D, d], m [B, 1, N], v [B, N, d],
    g [B, 1, d], allowed [B, 1, N], False where hard-masked."""
    x: torch.Tensor
    X: torch.Tensor
    W_Q: torch.Tensor
    W_K: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    allowed: torch.Tensor = None

    def __post_init__(self):
        self.root = self.W_Q.shape[-1] ** 0.5
        self.q, self.k = self.x @ self.W_Q, self.X @ self.W_K
        self.p = attention_weights(self.q, self.k, mask_bias(self.m, self.allowed))

    def measure(self, i=None, u=None, w=None):
        """Adds c = df/dp [B, 1, N] of each function, for p_i (i [B, 1, 1]; else 0) and directions u
        of p and w of o, and the sizes in the bounds, those of q and k divided by sqrt(d): [B, 1],
        or [B, N] where they depend on the key j."""
        i = torch.zeros_like(self.m[..., :1]).long() if i is None else i
        u = F.normalize(self.m if u is None else u, dim=-1)
        w = F.normalize(self.g if w is None else w, dim=-1)
        self.c = {'p_i': torch.zeros_like(self.p).scatter(2, i, 1.0), 'u.p': u,
                  'w.o': w @ self.v.mT, 'loss': self.g @ self.v.mT}
        self.p_i, self.p_j = self.p.gather(2, i)[:, 0], self.p[:, 0]
        self.gate = torch.sigmoid(-self.m)[:, 0]
        self.max_gate = self.gate.amax(1, keepdim=True)
        self.norm_x, self.norm_q = norm(self.x), norm(self.q) / self.root
        self.max_X, self.max_k = longest(self.X), longest(self.k) / self.root
        self.diam_X, self.diam_k = diam(self.X), diam(self.k) / self.root
        self.spread_X = longest(self.X - self.X.gather(1, i.expand_as(self.x)))
        self.spread_k = longest(self.k - self.k.gather(1, i.expand_as(self.q))) / self.root
        self.G, self.R = norm(self.g), diam(self.v)
        # the bound of p_j ||v_j - o||
        self.away = self.p_j * (1 - self.p_j) * self.R
        return self

def through_softmax(p, c):
    """e = df/ds [B, 1, N] of a function f of p whose df/dp is c."""
    return p * (c - (p * c).sum(-1, keepdim=True))

THROUGH = {  # df/d place of a row from e
    'm': lambda r, e: e * torch.sigmoid(-r.m),
    'k': lambda r, e: e.mT @ r.q / r.root,
    'q': lambda r, e: e @ r.k / r.root,
    'W_Q': lambda r, e: r.x.mT @ (e @ r.k) / r.root,
    'W_K': lambda r, e: r.X.mT @ e.mT @ r.q / r.root,
    'x': lambda r, e: e @ r.k @ r.W_Q.mT / r.root,
    'X': lambda r, e: e.mT @ r.q @ r.W_K.mT / r.root,
}

def closed_form(row):
    """{(function, place): derivative} by the formulas of part 1."""
    e = {f: through_softmax(row.p, c) for f, c in row.c.items()}
    return {(f, place): THROUGH[place](row, e[f]) for f, place in DERIVATIVES}

def autograd(row):
    """The same by backpropagation."""
    parts = ('x', 'X', 'W_Q', 'W_K', 'm')
    leaves = {part: getattr(row, part).detach().requires_grad_() for part in parts}
    moving, grads = replace(row, **leaves), {}
    for f, places in FUNCTIONS.items():
        wanted = [getattr(moving, place) for place in places]
        found = torch.autograd.grad((row.c[f] * moving.p).sum(), wanted, retain_graph=True)
        grads |= {(f, place): grad for place, grad in zip(places, found)}
    return grads

def size(f, place, grad):
    """The norm that a bound speaks of: [B, N] per key, or [B, 1] as a whole."""
    if f == 'u.p' or place in ('q', 'W_Q', 'W_K'):
        return norm(grad)
    return grad[:, 0].abs() if place == 'm' else grad.norm(dim=-1)

def term_size(row, f, place):
    """Of the terms that a derivative adds up, which rounding is relative to. Shaped as size()."""
    value = longest(row.v) * (row.p_j if place in ('m', 'k') else 1.0)
    of_function = {'p_i': row.p_i, 'u.p': 1.0, 'w.o': value, 'loss': value * row.G}
    of_place = {'m': row.max_gate if f == 'u.p' else row.gate, 'k': row.norm_q, 'q': row.max_k,
                'W_Q': row.norm_x * row.max_k, 'W_K': row.max_X * row.norm_q}
    return of_function[f] * of_place[place]

BOUNDS = [
    Bound('|dp_i/dm_j| <= p_i sigmoid(-m_j)', 'p_i', 'm', lambda r: r.p_i * r.gate),
    Bound('|dp_i/dm_j| <= p_i', 'p_i', 'm', lambda r: r.p_i),
    Bound('|dp_i/dm_j| <= sigmoid(-m_j)/4', 'p_i', 'm', lambda r: r.gate / 4),
    Bound('||dp_i/dk_j|| <= p_i ||q||/sqrt(d)', 'p_i', 'k', lambda r: r.p_i * r.norm_q),
    Bound('||dp_i/dq|| <= p_i max_l ||k_i-k_l||/sqrt(d)', 'p_i', 'q', lambda r: r.p_i * r.spread_k),
    Bound('||dp_i/dq|| <= 2 p_i max ||k||/sqrt(d)', 'p_i', 'q', lambda r: 2 * r.p_i * r.max_k),
    Bound('||dp_i/dW_Q|| <= ||x|| p_i max_l ||k_i-k_l||/sqrt(d)', 'p_i', 'W_Q',
          lambda r: r.norm_x * r.p_i * r.spread_k),
    Bound('||dp_i/dW_K|| <= max_l ||x_i-x_l|| p_i ||q||/sqrt(d)', 'p_i', 'W_K',
          lambda r: r.spread_X * r.p_i * r.norm_q),
    Bound('||dp/dm|| <= max sigmoid(-m)/2 <= 1/2', 'u.p', 'm', lambda r: r.max_gate / 2),
    Bound('||dp/dk|| <= ||q||/(2 sqrt(d))', 'u.p', 'k', lambda r: r.norm_q / 2),
    Bound('||dp/dq|| <= diam(k)/sqrt(8d)', 'u.p', 'q', lambda r: r.diam_k / 8 ** 0.5),
    Bound('||do/dm_j|| <= p_j(1-p_j) sigmoid(-m_j) R', 'w.o', 'm', lambda r: r.away * r.gate),
    Bound('||do/dk_j|| <= p_j(1-p_j) R ||q||/sqrt(d)', 'w.o', 'k', lambda r: r.away * r.norm_q),
    Bound('||do/dq|| <= R diam(k)/(4 sqrt(d))', 'w.o', 'q', lambda r: r.R * r.diam_k / 4),
    Bound('|dl/dm_j| <= p_j(1-p_j) sigmoid(-m_j) GR', 'loss', 'm', lambda r: r.away * r.G * r.gate),
    Bound('||dl/dk_j|| <= p_j(1-p_j) GR ||q||/sqrt(d)', 'loss', 'k',
          lambda r: r.away * r.G * r.norm_q),
    Bound('||dl/dq|| <= GR diam(k)/(4 sqrt(d))', 'loss', 'q', lambda r: r.G * r.R * r.diam_k / 4),
    Bound('||dl/dW_Q|| <= ||x|| GR diam(k)/(4 sqrt(d))', 'loss', 'W_Q',
          lambda r: r.norm_x * r.G * r.R * r.diam_k / 4),
    Bound('||dl/dW_K|| <= diam(x) GR ||q||/(4 sqrt(d))', 'loss', 'W_K',
          lambda r: r.diam_X * r.G * r.R * r.norm_q / 4),
]

def ratio(seen, limit, rounding=ROUND):
    """seen / limit less what rounding may have added; 0 / 0 counts as 0, a NaN as 1e300."""
    return ((seen - rounding).clamp_min(0.0) / limit.clamp_min(1e-300)).nan_to_num(nan=1e300)

def tightness(bound, row, grads):
    """[B] observed / bound at the worst key, and [B] whether the bound is 0 to rounding at every
    key (one key, saturation, squares that underflow): then the observed is 0 too."""
    _, f, place, limit = bound
    rounding = ROUND * term_size(row, f, place) + 1e-140
    ratios = ratio(size(f, place, grads[f, place]), limit(row), rounding)
    return ratios.amax(1), (limit(row) <= rounding).all(1)

def holds(ratios, built):
    return max(ratios) <= 1 + ROUND and built >= 0.99

# ------------------------------------------- parts 1 to 3: random rows, an adversary, built rows

def normals(B, N, d, gen, **factor):
    """{part: tensor} of B random rows: N(0, 1) features (D = d), M uniform on -2..2, the named
    parts times a factor. The rows share their weights' directions, as B d^2 normals are dear."""
    shapes = dict(x=(B, 1, d), X=(B, N, d), W_Q=(1, d, d), W_K=(1, d, d), v=(B, N, d), g=(B, 1, d))
    parts = {name: normal(shape, generator=gen) for name, shape in shapes.items()}
    parts |= {name: parts[name].expand(B, -1, -1) / d ** 0.5 for name in ('W_Q', 'W_K')}
    parts['m'] = 4 * uniform(B, 1, N, generator=gen) - 2
    return {name: z * factor.get(name, 1.0) for name, z in parts.items()}

def random_row(B, N, d, gen):
    """q, k, inputs, v and g at scales 1e-3..1e3 each; a row has one of five masks: M uniform on
    -50..50, or on -2..2, all but one at -50, all but one hard-masked, or causal. p_i is the
    largest in half of them; u and w nearly meet the bounds."""
    draw = partial(uniform, generator=gen)
    c_x, c_q, c_k, c_v, c_g = 10 ** (6 * draw(5, B, 1, 1) - 3)
    parts = normals(B, N, d, gen, x=c_x, X=c_x, W_Q=c_q / c_x, W_K=c_k / c_x, v=c_v, g=c_g)
    kind, last, key = (5 * draw(B, 1, 1)).long(), (N * draw(B, 1, 1)).long(), torch.arange(N)
    m = (100 * draw(B, 1, N) - 50) / torch.where(kind == 1, 25.0, 1.0)
    parts['m'] = torch.where((kind == 2) & (key != last), -50.0, m)
    row = Row(**parts, allowed=(kind < 3) | (key == last) | (kind == 4) & (key < last))
    largest, other, u = draw(B, 1, 1) < 0.5, (N * draw(B, 1, 1)).long(), draw(B, 1, N) - 0.5
    i = torch.where(largest, row.p.argmax(-1, keepdim=True), other)
    # power iteration: u.p then sees nearly the spectral norm of dp/dm
    for _ in range(5):
        u = torch.sigmoid(-row.m) ** 2 * through_softmax(row.p, u)
        u = F.normalize(through_softmax(row.p, u), dim=-1)
    # w.o sees the whole of do/dm_i
    return row.measure(i, u, row.v.gather(1, i.expand(B, 1, d)) - row.p @ row.v)

def random_rows(draws, gen):
    """At least so many rows, in batches of one N and d, fewer of the large ones."""
    shapes = [*product((1, 2, 3, 5, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64, 128))]
    total = sum((N * d) ** -0.5 for N, d in shapes)
    for N, d in shapes:
        left = math.ceil(draws * (N * d) ** -0.5 / total)
        while left > 0:
            B = max(1, min(left, 2 ** 17 // (d * max(N, d))))
            yield random_row(B, N, d, gen)
            left -= B

def check_derivatives(draws, gen, formulas):
    """Part 1. Values reach 1e12, where float64 has no digit at 1e-10, so `scaled` is the difference
    over term_size() where that is above 1."""
    count, scaled, absolute = 0, dict.fromkeys(DERIVATIVES, 0.0), dict.fromkeys(DERIVATIVES, 0.0)
    for row in random_rows(draws, gen):
        count += len(row.p)
        grads, found = autograd(row), formulas(row)
        for key in DERIVATIVES:
            gap = size(*key, grads[key] - found[key]).nan_to_num(nan=1e300)
            relative = (gap / term_size(row, *key).clamp_min(1.0)).nan_to_num(nan=1e300)
            absolute[key] = max(absolute[key], gap.max().item())
            scaled[key] = max(scaled[key], relative.max().item())
    checks = [Check(f'd {key[0]} / d {key[1]}', [scaled[key], absolute[key]], scaled[key] < 1e-10)
              for key in DERIVATIVES]
    title = f'1. formula - autograd, {count} rows: scaled < 1e-10'
    return Part(title, ('scaled', 'absolute'), checks)

def ascend(params, objective, steps):
    """objective() after Adam uphill on its sum over params, {name: tensor}."""
    opt = torch.optim.Adam([z.requires_grad_() for z in params.values()], lr=0.05, maximize=True)
    for _ in range(steps):
        opt.zero_grad()
        objective().sum().backward()
        opt.step()
    return objective().detach()

def adversary(bounds, gen, steps):
    """Observed / bound after gradient ascent on its log over all of a row, N = 4 and d = 3; each
    bound has restarts of its own."""
    restarts = 32
    params = normals(len(bounds) * restarts, 4, 3, gen)
    directions = {'u': params['m'].clone(), 'w': params['g'].clone()}

    def log_ratios():
        row = Row(**params).measure(**directions)
        grads = closed_form(row)
        ratios = torch.stack([tightness(bound, row, grads)[0] for bound in bounds])
        return ratios.view(len(bounds), len(bounds), -1).diagonal().clamp_min(1e-300).log()

    return ascend(params | directions, log_ratios, steps).exp().amax(0).tolist()

def two_keys(*m, weight=1e-9):
    """Rows with keys k, -k, values v, -v, d = 4; q = weight k, so that the two logits differ by
    weight. m: a pair for each row."""
    k = torch.eye(4, dtype=torch.float64)[:1].expand(len(m), 1, 4)
    X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(len(m), 2, 1)
    m = torch.tensor(m, dtype=torch.float64)[:, None]
    return Row(X[:, :1], X, weight * k, k, m, X @ k, k).measure(u=X.mT, w=k)

def check_bounds(draws, gen, bounds, steps):
    """Parts 2 and 3. Constructed: p_i = e^-50 or p = (1/2, 1/2), whichever is larger."""
    worst, zeros = [0.0] * len(bounds), [0] * len(bounds)
    for row in random_rows(draws, gen):
        grads = closed_form(row)
        for n, bound in enumerate(bounds):
            ratios, zero = tightness(bound, row, grads)
            worst[n] = max(worst[n], ratios.max().item())
            zeros[n] += zero.sum().item()
    row, checks = two_keys((-50.0, 0.0), (-50.0, -50.0)), []
    for n, climbed in enumerate(adversary(bounds, gen, steps)):
        built = tightness(bounds[n], row, closed_form(row))[0].max().item()
        values = [worst[n], climbed, built]
        checks.append(Check(bounds[n].statement, [*values, zeros[n]], holds(values, built)))
    return Part('2, 3. observed/bound <= 1, constructed >= 0.99',
                ('draws', 'adversary', 'constructed', 'bound is 0'), checks)

# ----------------------------------------------------------------------------- part 4: scaling

SCALINGS = [
    Scaling('q x a, k x 1/a', dict(W_Q=1, W_K=-1), dict(m=0, k=1, q=-1)),
    Scaling('q x 1/a, k x a', dict(W_Q=-1, W_K=1), dict(m=0, k=-1, q=1)),
    Scaling('inputs x a, weights x 1/a', dict(x=1, X=1, W_Q=-1, W_K=-1),
            dict(m=0, k=0, q=0, W_Q=1, W_K=1)),
    Scaling('inputs x a, W_Q x 1/a^2', dict(x=1, X=1, W_Q=-2), dict(m=0, k=-1, q=1, W_Q=2)),
]
# a from 1e-3 to 1e3
LOG_A = [math.log(10) * step / 2 for step in range(-6, 7)]

def scaled_rows(B, seed, **factor):
    """The same B rows at each call (N = d = 16), the named parts times their factors."""
    return Row(**normals(B, 16, 16, torch.Generator().manual_seed(seed), **factor)).measure()

def loss_norms(row):
    """{place: ||dloss/d place|| [B]}."""
    e = through_softmax(row.p, row.c['loss'])
    return {place: norm(THROUGH[place](row, e))[:, 0] for place in PLACES}

def check_slopes(seed):
    """Part 4 at fixed p: least-squares slopes in log a, whose mean is 0."""
    checks = []
    for title, powers, expected in SCALINGS:
        totals = dict.fromkeys(PLACES, 0.0)
        for log_a in LOG_A:
            factor = {part: math.exp(power * log_a) for part, power in powers.items()}
            norms = loss_norms(scaled_rows(64, seed, **factor))
            totals = {place: total + log_a * norms[place].log() for place, total in totals.items()}
        slopes = {place: z / sum(log_a ** 2 for log_a in LOG_A) for place, z in totals.items()}
        gaps = [(slopes[place] - slope).abs().max().item() for place, slope in expected.items()]
        signs = [f'{place} {slope:+d}' for place, slope in expected.items()]
        values = [slopes[place].mean().item() for place in PLACES]
        ok = all(gap < 0.01 for gap in gaps)
        checks.append(Check(f"{title}: {', '.join(signs)}".replace('+0', '0'), values, ok))
    return Part('4. slope of log ||dl/d.|| in log a, row fixed, +- 0.01', PLACES, checks)

def check_growth(seed):
    """Part 4 as q and k grow together. Below 1e-140 squares underflow."""
    checks = []
    for a in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        row = scaled_rows(2000, seed, W_Q=a, W_K=a)
        norms = loss_norms(row)
        ok = (norms['k'] + 1e-140 >= norms['m'] * row.norm_q[:, 0] * (1 - ROUND)).all().item()
        m, k, q = (norms[n].mean().item() for n in 'mkq')
        checks.append(Check(f'q and k x {a:g}', [row.p.amax(-1).mean().item(), m, k, q, k / m], ok))
    return Part('4. both grow: ||dl/dk|| >= ||dl/dm|| ||q||/sqrt(d)',
                ('largest p', '||dl/dm||', '||dl/dk||', '||dl/dq||', 'k / m'), checks)

# ------------------------------------------------------------ part 5: how far a row can move

def sharpness(row):
    return torch.linalg.matrix_norm(row.W_Q @ row.W_K.mT / row.root, 2)[:, None]

WAYS = [
    Way('M alone: tanh(T h G R/8)', 'm', lambda r, z: z / 2),
    Way('M alone: tanh(S^2 T h G R/8)', 'm',
        lambda r, z: torch.sigmoid(z / 4 - r.m.amin(-1)) ** 2 * z / 2),
    Way('q alone: tanh(kappa^2/(2d) T h G R/8)', 'q', lambda r, z: r.diam_k ** 2 * z / 4),
    Way('W_Q alone: tanh(||x||^2 kappa^2/(2d) T h G R/8)', 'W_Q',
        lambda r, z: (r.norm_x * r.diam_k) ** 2 * z / 4),
    Way('inputs, rho = T eps: tanh(L rho (diam(X) + 2||x|| + 2 rho)/4)', 'inputs',
        lambda r, z: sharpness(r) * z * (r.diam_X + 2 * r.norm_x + 2 * z)),
]

def tv(p, p0):
    return (p - p0).abs().sum(-1) / 2

def tv_bound(osc):
    return torch.tanh(osc / 4)

def check_lemma(bound, gen, steps):
    """Part 5 for random s and ds, after gradient ascent, and for two keys with s = -ds/2."""
    def score(s, ds):
        osc = ds.amax(-1) - ds.amin(-1)
        return ratio(tv((s + ds).softmax(-1), s.softmax(-1)), bound(osc))

    scale = 10 ** (2.5 * uniform(2, 20000, 1, generator=gen) - 1)
    s, ds = scale * normal(2, 20000, 8, generator=gen)
    start = {'s': s[:64].clone(), 'ds': ds[:64].clone()}
    two = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    scores = [score(s, ds), ascend(start, lambda: score(**start), steps), score(-two / 2, two)]
    values = [z.max().item() for z in scores]
    return Part('5. TV/bound <= 1 for any change ds of the logits',
                ('random', 'adversary', 'constructed'),
                [Check('TV <= tanh(osc(ds)/4)', values, holds(values, values[2]))])

def sgd_path(way, row, g, dose, T):
    """T steps on the loss g.o through a way's place: SGD of the size h at which T h GR = dose
    [B, 1], or x and each X_j by dose/T along their gradients. g [1 or T, B, 1, d]: fixed, or fresh
    each step. Returns TV(p_t, p_0) and its bound for t = 1..T, both [T, B, 1]."""
    h = (dose / T / (g.norm(dim=-1).amax(0) * row.R))[..., None]
    inputs, now, moved = way.place == 'inputs', row, []
    places = ('x', 'X') if inputs else (way.place,)
    # q moves by h as x W_Q does when W_Q moves by h/||x||^2
    if way.place == 'q':
        places, h = ('W_Q',), h / row.norm_x[..., None] ** 2
    for t in range(1, T + 1):
        e = through_softmax(now.p, g[t % len(g)] @ now.v.mT)
        after = {}
        for place in places:
            z = THROUGH[place](now, e)
            move = F.normalize(z, dim=-1) * dose[..., None] / T if inputs else h * z
            after[place] = getattr(now, place) - move
        now = replace(now, **after)
        moved.append(tv(now.p, row.p))
    steps = torch.arange(1.0, T + 1).view(-1, 1, 1)
    return torch.stack(moved), tv_bound(way.osc(row, dose * steps / T))

def check_way(way, gen, steps, T, betas):
    """Part 5, TV / bound: the worst over random rows and t <= T (keys and inputs at scales 1e-2 to
    1e2, q.k of order 1, g fixed or fresh); two keys at p = 1/2 and osc/4 = 0.01; at osc/4 = betas,
    after gradient ascent through 20 steps over the row and a fixed g."""
    def ratios(row, g, beta, T=20):
        dose = 4 * beta / (0.5 if way.place == 'm' else way.osc(row, torch.ones_like(beta)))
        return ratio(*sgd_path(way, row, g, dose, T))

    worst = 0.0
    for N, fresh in product((2, 16, 64), (1, T)):
        c_X, c_x = 10 ** (4 * uniform(2, 64, 1, 1, generator=gen) - 2)
        row = Row(**normals(64, N, 8, gen, x=c_x, X=c_X, W_Q=1 / (c_x * c_X))).measure()
        beta = 10 ** (3.5 * uniform(64, 1, generator=gen) - 3)
        g = normal(fresh, 64, 1, 8, generator=gen)
        worst = max(worst, ratios(row, g, beta, T).max().item())
    row, start = two_keys((-51.0, -50.0), weight=1.0), normals(16 * len(betas), 3, 2, gen)
    built = ratios(row, -row.g[None], torch.full_like(row.R, 0.01))[-1].item()
    beta = torch.tensor(betas, dtype=torch.float64).repeat_interleave(16)[:, None]

    def climb():
        return ratios(Row(**start).measure(), start['g'][None], beta)[-1]

    values = [worst, built, *ascend(start, climb, steps).view(-1, 16).amax(1).tolist()]
    return Check(way.statement, values, holds(values, built))

def check_places(seed):
    """Part 5, where M and q break even."""
    checks = []
    for a in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        row = scaled_rows(256, seed, W_K=a, W_Q=1 / a)
        dose = torch.full_like(row.R, 0.8)
        paths = [sgd_path(WAYS[n], row, row.g[None], dose, 100) for n in (0, 2)]
        ok = all((moved <= bound + ROUND).all().item() for moved, bound in paths)
        ends = [z[-1] for path in paths for z in path]
        values = [z.mean().item() for z in (row.diam_k ** 2 / 2, *ends)]
        checks.append(Check(f'k x {a:g}, q x {1 / a:.3g}', values, ok))
    return Part('5. TV moved <= bound at T h G R/8 = 0.1, means',
                ('kappa^2/(2d)', 'by M', 'bound', 'by q', 'bound'), checks)

# --------------------------------------------------------------------------------- the report

def check_all(draws, seed, bounds=BOUNDS, formulas=closed_form, ways=WAYS, lemma=tv_bound,
              steps=300, T=1000):
    """Every Part. Formulas and bounds are arguments, so that wrong ones can be put in."""
    gen, betas = torch.Generator().manual_seed(seed), (0.1, 1.0, 3.0)
    parts = [check_derivatives(draws, torch.Generator().manual_seed(seed), formulas),
             check_bounds(draws, gen, bounds, steps), check_slopes(seed), check_growth(seed),
             check_lemma(lemma, gen, steps)]
    moved = [check_way(way, gen, steps // 2, T, betas) for way in ways]
    columns = ('random', 'constructed', *(f'adv. at {beta:g}' for beta in betas))
    return [*parts, Part('5. TV moved in T steps / bound <= 1', columns, moved), check_places(seed)]

def table(parts):
    """The parts as text: a line for each check."""
    lines = []
    for title, columns, checks in parts:
        lines += ['', f'{title:<66}' + ''.join(f'{column:>13}' for column in columns)]
        for statement, values, ok in checks:
            cells = [z if isinstance(z, str) else f'{z:.6g}' for z in values]
            verdict = {True: '  yes', False: '  NO', None: ''}[ok]
            lines.append(f'{statement:<66}' + ''.join(f'{cell:>13}' for cell in cells) + verdict)
    return '\n'.join(lines)

def write_text(path, text):
    """Atomic: a reader of `path` finds the old text or the new one, whole."""
    temporary = path.with_name(f'{path.name}.{uuid.uuid4().hex}.tmp')
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f'{path} cannot be written: {error.strerror}') from None

def main(argv=None, **checks):
    parser = argparse.ArgumentParser('theory.py', argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument('--draws', type=int, default=100000, help='at least so many random rows')
    parser.add_argument('--seed', type=int, default=0, help='of the random rows')
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'runs' / 'theory',
                        help='folder of the table')
    args = parser.parse_args(argv)
    if args.draws < 1 or not 0 <= args.seed < 2 ** 63:
        parser.error('--draws must be at least 1, --seed from 0 to 2^63 - 1')
    # before the work
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    parts = check_all(args.draws, args.seed, **checks)
    failed = [check.statement for part in parts for check in part.rows if not check.ok]
    record = {'device': 'cpu', 'draws': args.draws, 'seed': args.seed, 'torch': torch.__version__,
              'seconds': round(time.time() - start, 1), 'failed': failed, 'parts': []}
    for part in parts:
        rows = [check._asdict() for check in part.rows]
        record['parts'].append(part._asdict() | {'rows': rows})
    text = (f"{table(parts)}\n\n{len(failed)} failed. {record['seconds']} s, torch "
            f'{torch.__version__}, --draws {args.draws} --seed {args.seed}')
    files = {'theory.md': f'```{text}\n```\n', 'theory.json': json.dumps(record, indent=1) + '\n'}
    for name, content in files.items():
        write_text(args.out / name, content)
    print(text)
    return 1 if failed else 0


if __name__ == '__main__':
    # small tensors: a second thread of a shared CPU mostly waits (measured: 6x)
    torch.set_num_threads(1)
    try:
        sys.exit(main())
    except (OSError, KeyboardInterrupt) as error:
        sys.exit(f'theory.py: {str(error) or "interrupted"}')
