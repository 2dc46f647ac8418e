"""Theorem 1 and Corollary 1 of "Mask-Based Priors Are More Persistent than Query-Key Initializations", checked in float64.

    python theory.py        # under a minute on a CPU; prints one table, writes results/theory/; exit 1 if a statement fails

One row of attention: N keys, head width d, model width D, query token x, key tokens x_j, g = dloss/do,

    q = x W_Q,  k_j = x_j W_K,  s_j = q.k_j/sqrt(d) + log sigmoid(m_j)  (-inf where hard-masked),
    p = softmax(s),  o = sum_j p_j v_j,  a_j = g.(v_j - o).

Norms: Euclidean of vectors, Frobenius of d./dW, spectral of dp/d. and do/d.; diam(z) = max_jl ||z_j - z_l||.

1. Derivatives. ds_j/dm_j = sigmoid(-m_j), ds_j/dk_j = q/sqrt(d), ds_j/dq = k_j/sqrt(d), dp_i/ds_j = p_i (delta_ij - p_j):
     dp_i/dm_j = p_i (delta_ij - p_j) sigmoid(-m_j),  dp_i/dk_j = p_i (delta_ij - p_j) q/sqrt(d),
     dp_i/dq = p_i (k_i - sum_l p_l k_l)/sqrt(d).
   Any f(p) sees s_j by e_j = df/ds_j = p_j (c_j - sum_l p_l c_l), c = df/dp; the e_j sum to 0. For the loss c_j = g.v_j:
     dl/dm_j = p_j a_j sigmoid(-m_j),  dl/dk_j = p_j a_j q/sqrt(d),  dl/dq = sum_j p_j a_j k_j/sqrt(d);
   the output is the same with v_j - o for a_j. Weights: d./dW_Q = x^T (d./dq), d./dW_K = sum_j x_j^T (d./dk_j).

2. Bounds, for every row, hard-masked keys included.
   p_i: |delta_ij - p_j| <= 1, and p_i p_j and p_i (1 - p_i) are at most 1/4. k_i - sum_l p_l k_l averages the k_i - k_l.
   Whole row, J = diag(p) - p p^T: u^T J u = Var_p(u) <= (max u - min u)^2/4 <= 1/2 for a unit u, so ||J|| <= 1/2, and
   dp/dm = J diag(sigmoid(-m)), dp/dk = J (x) q/sqrt(d). dp/dq: for a unit y let z_j = k_j.y, of range at most diam(k);
   ||J z|| is convex in z, so largest where z has two values, of mass P and 1-P: ||J z||^2 <= 2 (P (1-P) diam(k))^2.
   Output and loss: v_j - o = sum_{l != j} p_l (v_j - v_l), so ||v_j - o|| <= (1-p_j) diam(v), and |a_j| <= ||g|| times it.
   Through q: sum_j p_j a_j k_j = Cov_p(a, k), along any direction at most sd(a) sd(k) <= (||g|| diam(v)/2) (diam(k)/2).
   Weights: ||d./dW_Q|| = ||x|| ||d./dq||; sum_j x_j^T e_j q = Cov_p(c, x)^T q. As q = x W_Q and k = x W_K, both are
   quadratic in the inputs. No bound through m has q, k or x in it (diam(v) is in all those of the output and the loss).

3. Tight. In the limit p_i -> 0, i = j, keys k and -k, or for two keys with p = 1/2, every inequality above is an equality.

4. Scaling. q -> a q, k -> k/a leaves p as it is: dl/dk_j gains a factor a, dl/dq 1/a, dl/dm none. In every row
   ||dl/dk_j|| / |dl/dm_j| = ||q||/(sqrt(d) sigmoid(-m_j)) >= ||q||/sqrt(d). So when q and k grow together and the row
   saturates, all gradients fade, the mask's too, and it is their ratio that goes on growing.

5. T steps of SGD of size h (ours, not the paper's). Assume ||g|| <= G at each step and everything else fixed; R = diam(v).
   Lemma: TV(softmax(s), softmax(s + D)) <= tanh(osc(D)/4), osc = max - min. TV = max_A |p'(A) - p(A)|, D changes the odds
   of a set A of keys by at most e^osc, and sigmoid(y + osc) - sigmoid(y) peaks at y = -osc/2. Tight for two keys.
   M alone: m_j moves at most h p_j (1-p_j) sigmoid(-m_j) G R a step, and log sigmoid(m_j), of slope sigmoid(-m) < 1, no
   more. As p_j (1-p_j) + p_l (1-p_l) <= 1/2, osc grows at most h G R/2 a step, whatever the signs: TV <= tanh(T h G R/8).
   sigmoid(-m) counts twice, and no m_j falls by more than T h G R/4, so with S = sigmoid(T h G R/4 - min m) even
   TV <= tanh(S^2 T h G R/8).
   q alone: q moves at most h G R kappa/(4 sqrt(d)) a step, kappa = diam(k), and osc(s) kappa/sqrt(d) times that:
   TV <= tanh(kappa^2/(2d) T h G R/8). W_Q alone: h ||x||^2 in place of h, for x (W_Q - h x^T dq) = q - h ||x||^2 dq.
   So one number, the gain before T h G R/8, compares the places: 1 or S^2 for M, kappa^2/(2d) for q, ||x||^2 times that for
   W_Q. Keys with N(0, 1) coordinates have E||k - k'||^2 = 2d, where q breaks even with M; W_Q does at keys smaller by ||x||.
   These are worst cases, met while T h G R is small; later p_j (1-p_j) falls and the row slows down.
"""
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Row

from tasks import Parser, UsageError, check_device, command, write_json, write_text  # before torch, whose warning it silences
import torch
import torch.nn.functional as F

from maskprior import attention_weights, mask_bias

ROUND = 1e-12  # allowed for rounding, relative to what was added up
KEYS, WIDTHS = (1, 2, 3, 5, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64, 128)  # N and d of the random rows
PLACES = ('m', 'k', 'q', 'W_Q', 'W_K')
FUNCTIONS = {'p_i': PLACES, 'u.p': PLACES[:3], 'w.o': PLACES[:3], 'loss': PLACES}  # what is differentiated, by what


# -------------------------------------------------------------------------------------- one row and its derivatives

def row(x, X, W_Q, W_K, m, v, g, allowed=None):
    """B rows: x [B, 1, D], X [B, N, D], W_Q and W_K [B, D, d], m [B, 1, N], v [B, N, d], g [B, 1, d], allowed [B, 1, N] (bool,
    False is hard-masked). Adds q [B, 1, d], k [B, N, d], p [B, 1, N], o [B, 1, d]; p by the code that trains."""
    r = Row(**locals(), d=W_Q.shape[-1])
    r.q, r.k = x @ W_Q, X @ W_K
    r.p = attention_weights(r.q, r.k, mask_bias(m, allowed))
    r.o = r.p @ v
    return r


def norm(z):
    return z.flatten(1).norm(dim=1, keepdim=True)


def diam(z):
    """[B, N, d] -> [B, 1]. Centred on z_0, so that the Gram matrix gives the largest distance to rounding."""
    z = z - z[:, :1]
    square = (z * z).sum(-1)
    return (square[:, :, None] + square[:, None] - 2 * z @ z.mT).flatten(1).amax(1, keepdim=True).clamp_min(0.0).sqrt()


def measure(r, i=None, u=0.0, w=0.0):
    """Adds which p_i is meant (i [B, 1, 1]; default 0), directions u [B, 1, N] of p and w [B, 1, d] of o, of norm at most 1,
    and the sizes in the bounds, those of q and k divided by sqrt(d): [B, 1], or [B, N] where they depend on the key j."""
    r.i, r.u, r.w = torch.zeros_like(r.m[..., :1], dtype=torch.long) if i is None else i, u, w
    at = lambda z: z.gather(1, r.i.expand(-1, 1, z.shape[-1]))
    top = lambda z: z.norm(dim=-1).amax(1, keepdim=True)
    r.p_i, r.p_j, r.gate, root = r.p.gather(2, r.i)[:, 0], r.p[:, 0], torch.sigmoid(-r.m)[:, 0], r.d ** 0.5
    r.spread_k, r.spread_x = top(r.k - at(r.k)) / root, top(r.X - at(r.X))
    r.max_k, r.max_x, r.max_v = top(r.k) / root, top(r.X), top(r.v)
    r.diam_k, r.diam_x, r.diam_v = diam(r.k) / root, diam(r.X), diam(r.v)
    r.norm_q, r.norm_x, r.G = norm(r.q) / root, norm(r.x), norm(r.g)
    return r


def autograd(r):
    """{(function, place): derivative} by backpropagation."""
    value = {'p_i': r.p_i, 'u.p': r.u * r.p, 'w.o': r.w * r.o, 'loss': r.g * r.o}
    grad = lambda f: torch.autograd.grad(value[f].sum(), [getattr(r, n) for n in FUNCTIONS[f]], retain_graph=True)
    return {(f, n): D for f in FUNCTIONS for n, D in zip(FUNCTIONS[f], grad(f))}


def closed_form(r):
    """The same by the formulas of part 1."""
    delta, p_i, root, away = torch.zeros_like(r.p).scatter(2, r.i, 1.0), r.p_i[..., None], r.d ** 0.5, (r.v - r.o).mT
    e = {'p_i': p_i * (delta - r.p), 'u.p': r.p * (r.u - (r.u * r.p).sum(-1, keepdim=True)),
         'w.o': r.p * (r.w @ away), 'loss': r.p * (r.g @ away)}
    D = {f: dict(m=e[f] * torch.sigmoid(-r.m), k=e[f].mT @ r.q / root, q=e[f] @ r.k / root) for f in e}
    D['p_i']['q'] = p_i * (r.k.gather(1, r.i.expand(-1, 1, r.d)) - r.p @ r.k) / root
    for f in D.values():
        f |= dict(W_Q=r.x.mT @ f['q'], W_K=r.X.mT @ f['k'])
    return {(f, n): D[f][n] for f in FUNCTIONS for n in FUNCTIONS[f]}


def size(f, place, D):
    """The norm that a bound speaks of: through m and k per key, [B, N]; through the rest, and for u.p, as a whole, [B, 1]."""
    if f == 'u.p' or place in ('q', 'W_Q', 'W_K'):
        return norm(D)
    return D.norm(dim=-1) if place == 'k' else D[:, 0].abs()


def unit(r, f, place):
    """The size of the terms that a derivative adds up, which rounding is relative to. Shaped as size()."""
    one = torch.ones_like(r.p_i)
    value = (r.p_j if place in ('m', 'k') else one) * r.max_v
    return {'p_i': r.p_i, 'u.p': one, 'w.o': value, 'loss': value * r.G}[f] * {
        'm': r.gate.amax(1, keepdim=True) if f == 'u.p' else r.gate, 'k': r.norm_q, 'q': r.max_k,
        'W_Q': r.norm_x * r.max_k, 'W_K': r.max_x * r.norm_q}[place]


BOUNDS = [  # statement, function, place, bound of a measured row
    ('|dp_i/dm_j| <= p_i sigmoid(-m_j)', 'p_i', 'm', lambda r: r.p_i * r.gate),
    ('|dp_i/dm_j| <= p_i', 'p_i', 'm', lambda r: r.p_i),
    ('|dp_i/dm_j| <= sigmoid(-m_j)/4', 'p_i', 'm', lambda r: r.gate / 4),
    ('||dp_i/dk_j|| <= p_i ||q||/sqrt(d)', 'p_i', 'k', lambda r: r.p_i * r.norm_q),
    ('||dp_i/dq|| <= p_i max_l ||k_i-k_l||/sqrt(d)', 'p_i', 'q', lambda r: r.p_i * r.spread_k),
    ('||dp_i/dq|| <= 2 p_i max ||k||/sqrt(d)', 'p_i', 'q', lambda r: 2 * r.p_i * r.max_k),
    ('||dp_i/dW_Q|| <= ||x|| p_i max_l ||k_i-k_l||/sqrt(d)', 'p_i', 'W_Q', lambda r: r.norm_x * r.p_i * r.spread_k),
    ('||dp_i/dW_K|| <= max_l ||x_i-x_l|| p_i ||q||/sqrt(d)', 'p_i', 'W_K', lambda r: r.spread_x * r.p_i * r.norm_q),
    ('||dp/dm|| <= max sigmoid(-m)/2 <= 1/2', 'u.p', 'm', lambda r: r.gate.amax(1, keepdim=True) / 2),
    ('||dp/dk|| <= ||q||/(2 sqrt(d))', 'u.p', 'k', lambda r: r.norm_q / 2),
    ('||dp/dq|| <= diam(k)/sqrt(8d)', 'u.p', 'q', lambda r: r.diam_k / 8 ** 0.5),
    ('||do/dm_j|| <= p_j(1-p_j) sigmoid(-m_j) R', 'w.o', 'm', lambda r: r.p_j * (1 - r.p_j) * r.gate * r.diam_v),
    ('||do/dk_j|| <= p_j(1-p_j) R ||q||/sqrt(d)', 'w.o', 'k', lambda r: r.p_j * (1 - r.p_j) * r.diam_v * r.norm_q),
    ('||do/dq|| <= R diam(k)/(4 sqrt(d))', 'w.o', 'q', lambda r: r.diam_v * r.diam_k / 4),
    ('|dl/dm_j| <= p_j(1-p_j) sigmoid(-m_j) GR', 'loss', 'm', lambda r: r.p_j * (1 - r.p_j) * r.gate * r.G * r.diam_v),
    ('||dl/dk_j|| <= p_j(1-p_j) GR ||q||/sqrt(d)', 'loss', 'k', lambda r: r.p_j * (1 - r.p_j) * r.G * r.diam_v * r.norm_q),
    ('||dl/dq|| <= GR diam(k)/(4 sqrt(d))', 'loss', 'q', lambda r: r.G * r.diam_v * r.diam_k / 4),
    ('||dl/dW_Q|| <= ||x|| GR diam(k)/(4 sqrt(d))', 'loss', 'W_Q', lambda r: r.norm_x * r.G * r.diam_v * r.diam_k / 4),
    ('||dl/dW_K|| <= diam(x) GR ||q||/(4 sqrt(d))', 'loss', 'W_K', lambda r: r.diam_x * r.G * r.diam_v * r.norm_q / 4),
]  # R = diam(v), G = ||g||


def ratio(seen, bound, rounding):
    """observed / bound, once what rounding may have added is taken off; 0 / 0 counts as 0, a NaN as infinite."""
    return ((seen - rounding).clamp_min(0.0) / bound.clamp_min(1e-300)).nan_to_num(nan=math.inf)


def tightness(bound, r, D):
    """[B] observed / bound at the worst key, and [B] whether the bound of every key is 0 to rounding: one key, saturation, or
    underflow (below 1e-140 the squares in a norm underflow). There the ratio says no more than that the observed is 0 too."""
    _, f, place, formula = bound
    limit, rounding = formula(r), ROUND * unit(r, f, place) + 1e-140
    return ratio(size(f, place, D[f, place]), limit, rounding).amax(1), (limit <= rounding).all(1)


# -------------------------------------------------------------- parts 1 to 3: random rows, an adversary, built rows

def normals(B, N, d, gen, dev, **factor):
    """B random rows as arguments of row(): N(0, 1) features (D = d), M uniform on -2..2, the named parts times a factor.
    The rows share the directions of their weights, as B d^2 normals are dear."""
    shape = dict(x=(B, 1, d), X=(B, N, d), W_Q=(1, d, d), W_K=(1, d, d), v=(B, N, d), g=(B, 1, d))
    part = {n: torch.randn(*s, generator=gen, dtype=torch.float64).expand(B, -1, -1) for n, s in shape.items()}
    part['W_Q'], part['W_K'] = part['W_Q'] / d ** 0.5, part['W_K'] / d ** 0.5
    part['m'] = 4 * torch.rand(B, 1, N, generator=gen, dtype=torch.float64) - 2
    return {n: (z * factor.get(n, 1.0)).to(dev).requires_grad_() for n, z in part.items()}


def draw(B, N, d, gen, dev):
    """B random rows: q, k, inputs, v and g at scales 1e-3..1e3 each; per row one of five masks: M uniform on -50..50, or on
    -2..2, one key open and the others at -50, or hard-masked, or causal. i is the largest entry in half of them."""
    uniform = lambda *shape: torch.rand(*shape, generator=gen, dtype=torch.float64)
    c_x, c_q, c_k, c_v, c_g = 10 ** (6 * uniform(5, B, 1, 1) - 3)
    part = normals(B, N, d, gen, dev, x=c_x, X=c_x, W_Q=c_q / c_x, W_K=c_k / c_x, v=c_v, g=c_g)
    kind, last, key = (5 * uniform(B, 1, 1)).long(), (N * uniform(B, 1, 1)).long(), torch.arange(N)
    m = 100 * uniform(B, 1, N) - 50
    m = torch.where(kind == 1, m / 25, torch.where((kind == 2) & (key != last), -50.0, m))
    hidden = (kind == 3) & (key != last) | (kind == 4) & (key > last)
    r = row(**part | dict(m=m.to(dev).requires_grad_()), allowed=~hidden.to(dev))
    half, other, u = uniform(B, 1, 1).to(dev) < 0.5, (N * uniform(B, 1, 1)).long().to(dev), (uniform(B, 1, N) - 0.5).to(dev)
    with torch.no_grad():
        i = torch.where(half, r.p.argmax(-1, keepdim=True), other)
        J = lambda z: r.p * (z - (r.p * z).sum(-1, keepdim=True))
        for _ in range(5):  # power iteration: u.p then sees nearly the spectral norm of dp/dm
            u = F.normalize(J(torch.sigmoid(-r.m) ** 2 * J(u)), dim=-1)
        w = F.normalize((r.v - r.o).gather(1, i.expand(B, 1, d)), dim=-1)  # w.o sees the whole of do/dm_i
    return measure(r, i, u, w)


def over_draws(draws, gen, dev, bounds, formulas):
    """Rows of every N and d, fewer of the large ones. Returns {(function, place): [scaled, absolute]}, the largest difference
    of formula and autograd; {statement: [largest ratio, rows with bound 0]}; the number of rows. The values reach 1e12, where
    float64 has no digit at 1e-10, so scaled is divided by unit() where that is above 1, and is the absolute one elsewhere."""
    error, worst, count = {(f, n): [0.0, 0.0] for f in FUNCTIONS for n in FUNCTIONS[f]}, {b[0]: [0.0, 0] for b in bounds}, 0
    share = {(N, d): (N * d) ** -0.5 for N in KEYS for d in WIDTHS}
    for (N, d), part in share.items():
        left = math.ceil(draws * part / sum(share.values()))
        while left:
            B = max(1, min(left, 2 ** 17 // (d * max(N, d))))
            left, count = left - B, count + B
            r = draw(B, N, d, gen, dev)
            D, E = autograd(r), formulas(r)
            with torch.no_grad():
                for (f, n), e in error.items():
                    gap = size(f, n, D[f, n] - E[f, n]).nan_to_num(nan=math.inf)
                    error[f, n] = [max(e[0], (gap / unit(r, f, n).clamp_min(1.0)).max().item()), max(e[1], gap.max().item())]
                for b in bounds:
                    y, zero = tightness(b, r, D)
                    worst[b[0]] = [max(worst[b[0]][0], y.max().item()), worst[b[0]][1] + zero.sum().item()]
    return error, worst, count


def ascend(leaves, objective, steps):
    """Adam uphill on the sum of objective(), one entry a restart."""
    opt = torch.optim.Adam(leaves, lr=0.05, maximize=True)
    for _ in range(steps):
        opt.zero_grad()
        objective().sum().backward()
        opt.step()


def adversary(bounds, gen, dev, steps, restarts=32, N=4, d=3):
    """{statement: observed / bound} after gradient ascent on its log over everything in a row, each bound with its own
    restarts. The ascent climbs the closed form; autograd measures where it arrives."""
    leaf = normals(len(bounds) * restarts, N, d, gen, dev)
    u, w = (leaf[n].detach().clone().requires_grad_() for n in ('m', 'g'))
    make = lambda: measure(row(**leaf), u=F.normalize(u, dim=-1), w=F.normalize(w, dim=-1))
    own = lambda z, n: z[n * restarts:(n + 1) * restarts]

    def climb():
        r = make()
        D, log = closed_form(r), lambda z, n: own(z, n).clamp_min(1e-300).log()
        return torch.stack([(log(size(f, place, D[f, place]), n) - log(formula(r), n)).amax(1)
                            for n, (_, f, place, formula) in enumerate(bounds)])

    ascend([*leaf.values(), u, w], climb, steps)
    r = make()
    D = autograd(r)
    return {b[0]: own(tightness(b, r, D)[0], n).max().item() for n, b in enumerate(bounds)}


def two_keys(dev, *m):
    """Rows with keys k, -k, values v, -v, d = 4 and next to no q, so p = softmax(log sigmoid(m)); m: one pair a row."""
    tensor = lambda z: torch.tensor(z, dtype=torch.float64, device=dev).expand(len(m), -1, -1)
    k, X = tensor([[1.0, 0.0, 0.0, 0.0]]), tensor([[1.0], [-1.0]])
    M = torch.tensor(m, dtype=torch.float64, device=dev)[:, None].requires_grad_()
    r = row(X[:, :1], X, (1e-9 * k).requires_grad_(), k.clone().requires_grad_(), M, X @ k, k)
    return measure(r, u=X.mT / 2 ** 0.5, w=k)


def constructed(bounds, dev):
    """Part 3: {statement: observed / bound} for p_i = e^-50 or p = (1/2, 1/2), whichever is larger."""
    r = two_keys(dev, (-50.0, 0.0), (-50.0, -50.0))
    D = autograd(r)
    return {b[0]: tightness(b, r, D)[0].max().item() for b in bounds}


# ------------------------------------------------------------------------------------------------- part 4: scaling

SCALINGS = [  # what is scaled by which power of a while p stays as it is; the slopes that follow
    ('q x a, k x 1/a', dict(W_Q=1, W_K=-1), dict(m=0, k=1, q=-1)),
    ('q x 1/a, k x a', dict(W_Q=-1, W_K=1), dict(m=0, k=-1, q=1)),
    ('inputs x a, weights x 1/a', dict(x=1, X=1, W_Q=-1, W_K=-1), dict(m=0, k=0, q=0, W_Q=1, W_K=1)),
    ('inputs x a, W_Q x 1/a^2', dict(x=1, X=1, W_Q=-2), dict(m=0, k=-1, q=1, W_Q=2)),
]


def scaled(B, seed, dev, **factor):
    """The same B rows at each call (N = d = 16), the named parts times their factors."""
    return measure(row(**normals(B, 16, 16, torch.Generator().manual_seed(seed), dev, **factor)))


def loss_norms(r):
    """{place: ||dloss/d place|| [B]}."""
    return {n: norm(D)[:, 0] for (f, n), D in autograd(r).items() if f == 'loss'}


LOG_A = [math.log(10) * t / 2 for t in range(-6, 7)]  # a from 1e-3 to 1e3


def gradients_over_a(seed, dev, powers):
    """[{place: ||dloss/d place|| [B]} for each a of LOG_A]."""
    return [loss_norms(scaled(64, seed, dev, **{n: math.exp(e * t) for n, e in powers.items()})) for t in LOG_A]


def slopes(seed, dev, powers):
    """{place: least-squares slope of log ||dloss/d place|| in log a [B]}."""
    y = gradients_over_a(seed, dev, powers)
    return {n: sum(t * z[n].log() for t, z in zip(LOG_A, y)) / sum(t * t for t in LOG_A) for n in PLACES}


# ----------------------------------------------------------------------------------- part 5: how far a row can move

REACH = [  # statement, what moves, gain(row, T h G R) in the bound tanh(gain T h G R/8)
    ('M alone: tanh(T h G R/8)', 'm', lambda r, z: torch.ones_like(z)),
    ('M alone: tanh(S^2 T h G R/8)', 'm', lambda r, z: torch.sigmoid(z / 4 - r.m.amin(-1)) ** 2),
    ('q alone: tanh(kappa^2/(2d) T h G R/8)', 'q', lambda r, z: r.diam_k ** 2 / 2),
    ('W_Q alone: tanh(||x||^2 kappa^2/(2d) T h G R/8)', 'W_Q', lambda r, z: r.norm_x ** 2 * r.diam_k ** 2 / 2),
]


def tv(p, p0):
    return (p - p0).abs().sum(-1) / 2


def walk(statement, r, g, z, T):
    """T steps of SGD on the loss g.o through m, q or W_Q alone, of the size h that makes T h G R gain = z [B, 1] (gain 1 for
    m). g [1 or T, B, 1, d]: fixed, or fresh each step. Yields TV(p_t, p_0) and its bound, both [B, 1]."""
    _, place, gain = statement
    hGR = z / T / (1.0 if place == 'm' else gain(r, z))
    h = (hGR / (g.norm(dim=-1).amax(0) * r.diam_v))[..., None]
    m, p, x, W = (r.m, r.p, r.x, r.W_Q) if place == 'W_Q' else (r.m, r.p, torch.ones_like(r.x[..., :1]), r.q)  # q: x = 1
    for t in range(1, T + 1):
        e = p * (g[t % len(g)] @ (r.v - p @ r.v).mT)
        if place == 'm':
            m = m - h * e * torch.sigmoid(-m)
        else:
            W = W - h * x.mT @ (e @ r.k) / r.d ** 0.5
        p = attention_weights(x @ W, r.k, mask_bias(m))
        yield tv(p, r.p), torch.tanh(gain(r, t * hGR) * t * hGR / 8)


def reach(statement, gen, dev, steps, T, betas):
    """TV / bound, the worst: over random rows and t <= T (N = 2, 16, 64, keys and inputs at scales 1e-2..1e2, q.k of order 1,
    g fixed or fresh); of two keys at p = 1/2 and T h G R gain/8 = 0.01; at each of betas, after gradient ascent through a
    walk of 20 steps over the row and a fixed g."""
    worst, uniform = 0.0, lambda *shape: torch.rand(*shape, generator=gen, dtype=torch.float64)
    for N in (2, 16, 64):
        for fresh in (1, T):
            c, b = 10 ** (4 * uniform(2, 64, 1, 1) - 2)
            r = measure(row(**normals(64, N, 8, gen, dev, x=b, X=c, W_Q=1 / (b * c))))
            z, g = 8 * 10 ** (3.5 * uniform(64, 1) - 3), torch.randn(fresh, 64, 1, 8, generator=gen, dtype=torch.float64)
            with torch.no_grad():
                worst = max(worst, *(ratio(*y, ROUND).max().item() for y in walk(statement, r, g.to(dev), z.to(dev), T)))
    last = lambda r, z: ratio(*list(walk(statement, r, r.g[None], z, 20))[-1], ROUND)
    two, leaf = two_keys(dev, (-50.0, -50.0)), normals(16 * len(betas), 3, 2, gen, dev)
    z = 8 * torch.tensor(betas, dtype=torch.float64, device=dev).repeat_interleave(16)[:, None]
    ascend(leaf.values(), lambda: last(measure(row(**leaf)), z), steps)
    climbed = last(measure(row(**leaf)), z).view(len(betas), 16).amax(1).tolist()
    return [worst, last(two, torch.full_like(two.p_i, 0.08)).item(), *climbed]


def lemma(bound, gen, dev, steps):
    """TV(softmax(s), softmax(s + D)) / bound(osc D), the worst: random s and D, after gradient ascent, two keys at -osc/2."""
    y = lambda s, D: ratio(tv((s + D).softmax(-1), s.softmax(-1)), bound(D.amax(-1) - D.amin(-1)), ROUND)
    c = 10 ** (2.5 * torch.rand(2, 20000, 1, generator=gen, dtype=torch.float64) - 1)
    s, D = (c * torch.randn(2, 20000, 8, generator=gen, dtype=torch.float64)).to(dev)
    leaf, two = [z[:64].clone().requires_grad_() for z in (s, D)], torch.tensor([[1.0, 0.0]], dtype=torch.float64, device=dev)
    ascend(leaf, lambda: y(*leaf), steps)
    return [z.max().item() for z in (y(s, D), y(*leaf), y(-two / 2, two))]


# ------------------------------------------------------------------------------------------------------- the report

def run(draws, seed, dev, bounds=BOUNDS, formulas=closed_form, statements=REACH, osc_bound=lambda y: torch.tanh(y / 4),
        steps=300, T=1000):
    """Every check: [(title, columns, [(statement, values, ok)])]. The formulas and bounds are data, so that wrong ones can be
    put in."""
    gen = torch.Generator().manual_seed(seed)  # on the CPU: the same rows on every device
    holds = lambda y, tight: max(y) <= 1 + ROUND and tight >= 0.99
    error, worst, count = over_draws(draws, gen, dev, bounds, formulas)
    climbed, built = adversary(bounds, gen, dev, steps), constructed(bounds, dev)
    parts = [(f'1. formula - autograd, {count} rows: scaled < 1e-10', ('scaled', 'absolute'),
              [(f'd {f} / d {n}', e, e[0] < 1e-10) for (f, n), e in error.items()])]
    parts += [('2, 3. observed/bound <= 1, constructed >= 0.99', ('draws', 'adversary', 'constructed', 'bound is 0'),
               [(n, [y, climbed[n], built[n], zero], holds((y, climbed[n], built[n]), built[n]))
                for n, (y, zero) in worst.items()])]
    rows = []
    for name, powers, expected in SCALINGS:
        found = slopes(seed, dev, powers)
        ok = all((found[n] - e).abs().max().item() < 0.01 for n, e in expected.items())
        name += ': ' + ', '.join(f'{n} {e:+d}' if e else f'{n} 0' for n, e in expected.items())
        rows.append((name, [found[n].mean().item() for n in PLACES], ok))
    parts += [('4. slope of log ||dl/d.|| in log a, row fixed, +- 0.01', PLACES, rows)]
    rows = []
    for a in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        r = scaled(2000, seed, dev, W_Q=a, W_K=a)
        y = loss_norms(r)
        ok = (y['k'] + 1e-140 >= y['m'] * r.norm_q[:, 0] * (1 - ROUND)).all().item()  # below, squares underflow
        m, k, q = (y[n].mean().item() for n in ('m', 'k', 'q'))
        rows.append((f'q and k x {a:g}', [r.p.amax(-1).mean().item(), m, k, q, k / m], ok))
    parts += [('4. both grow: ||dl/dk|| >= ||dl/dm|| ||q||/sqrt(d)',
               ('largest p', '||dl/dm||', '||dl/dk||', '||dl/dq||', 'k / m'), rows)]
    y, betas = lemma(osc_bound, gen, dev, steps), (0.1, 1.0, 3.0)
    parts += [('5. TV/bound <= 1 for any change D of the logits', ('random', 'adversary', 'constructed'),
               [('TV <= tanh(osc(D)/4)', y, holds(y, y[2]))])]
    rows = [(s[0], y, holds(y, y[1])) for s in statements for y in [reach(s, gen, dev, steps // 2, T, betas)]]
    parts += [('5. TV moved in T steps / bound <= 1', ('random', 'constructed', *(f'adv. at {b:g}' for b in betas)), rows)]
    rows = []
    for c in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        r = scaled(256, seed, dev, W_K=c, W_Q=1 / c)
        with torch.no_grad():
            gain, z = r.diam_k ** 2 / 2, torch.full_like(r.p_i, 0.8)
            ends = [list(walk(s, r, r.g[None], y, 100))[-1] for s, y in ((REACH[0], z), (REACH[2], z * gain))]
        ok = all((moved <= bound + ROUND).all().item() for moved, bound in ends)
        rows.append((f'k x {c:g}, q x {1 / c:.3g}', [y.mean().item() for y in (gain, *ends[0], *ends[1])], ok))
    parts += [('5. TV moved <= bound at T h G R/8 = 0.1, means', ('kappa^2/(2d)', 'by M', 'bound', 'by q', 'bound'), rows)]
    return parts


def table(parts, bar='|'):
    """One markdown table; each part starts with what must hold and the names of its columns. bar: a | in a cell."""
    show = lambda y: str(y) if isinstance(y, (int, str)) else f'{y:.6f}' if 0.01 <= abs(y) <= 2 else f'{y:.3g}'
    most = max(len(columns) for _, columns, _ in parts)
    lines = [['statement', *[''] * most, 'ok']]
    for title, columns, rows in parts:
        lines += [[f'**{title}**', *columns, *[''] * (most - len(columns)), '']]
        lines += [[f'`{n}`', *map(show, y), *[''] * (most - len(y)), {True: 'yes', False: 'NO', None: ''}[ok]] for n, y, ok in rows]
    lines = [[cell.replace('|', bar) for cell in line] for line in lines]
    width = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ['-' * w for w in width])
    return "\n".join('| ' + ' | '.join(cell.ljust(w) for cell, w in zip(line, width)) + ' |' for line in lines)


def main(argv=None, **checks):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cpu', help='any torch device with float64 (default %(default)s)')
    parser.add_argument('--draws', type=int, default=100000, help='at least so many random rows (default %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of the random rows (default %(default)s)')
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results' / 'theory', help='folder for the table')
    args = parser.parse_args(argv)
    if args.draws < 1 or not 0 <= args.seed < 2 ** 63:
        raise UsageError('--draws must be at least 1, --seed from 0 to 2^63 - 1')
    check_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)  # before the work
    start, threads = time.time(), torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: with a second thread on a shared CPU most of the time is waiting (measured: 6x)
    parts = run(args.draws, args.seed, torch.device(args.device), **checks)
    torch.set_num_threads(threads)
    failed = [n for _, _, rows in parts for n, _, ok in rows if not ok]
    finite = lambda y: y if math.isfinite(y) else str(y)
    record = dict(device=args.device, draws=args.draws, seed=args.seed, torch=torch.__version__, seconds=round(time.time() - start, 1),
                  failed=failed, parts=[
                      dict(title=title, columns=columns, rows=[dict(statement=n, values=[*map(finite, y)], ok=ok) for n, y, ok in rows])
                      for title, columns, rows in parts])
    last = (f"{len(failed)} failed. {record['seconds']} s on {args.device}, torch {torch.__version__}, "
            f'--draws {args.draws} --seed {args.seed}')
    write_text(args.out / 'theory.md', f"{table(parts, bar=chr(92) + '|')}\n\n{last}\n")
    write_json(args.out / 'theory.json', record)
    print(table(parts), last, sep='\n')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(command(main, 'theory.py'))
