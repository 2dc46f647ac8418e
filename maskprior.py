"""Mask-based priors and their query-key rivals, for any Transformer that fits on a page.

    Attention(X) = softmax( X W_Q (X W_K)^T / sqrt(d) + log sigmoid(M) ) X W_V

M is a finite, learnable matrix, one per layer, [N, N] (shared by the heads) or [H, N, N]. Row i is
the query token, column j the key token. Large positive M[i, j]: free to attend (bias -> 0). Large
negative M[i, j]: suppressed (bias -> M).

Shape letters: B batch, N tokens, H heads, D width, d = D / H head width, L layers.
Order of the file: mask, attention, block, model, prior, arms, measures.
"""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


# ----------------------------------------------------------------------------------------- mask

def mask_bias(M, allowed=None):
    """Additive attention bias log sigmoid(M), of M's shape and type; -inf where `allowed` is False.

    `allowed`, bool [N, N], is a hard mask. logsigmoid, never log(sigmoid(M)): the latter is -inf
    with a NaN gradient from M = -18 in fp16 and M = -89 in fp32.
    """
    bias = F.logsigmoid(M)
    return bias if allowed is None else bias.masked_fill(~allowed, -math.inf)


def attention_weights(q, k, bias=None):
    """softmax(q k^T / sqrt(d) + bias), [B, H, N, N], for q and k [B, H, N, d].

    The bias is cast to the logits' type, so M may stay fp32 under autocast.
    """
    # Scaling q instead of the logits saves a pass over [B, H, N, N].
    logits = q / math.sqrt(q.shape[-1]) @ k.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits.softmax(-1)


def attend(q, k, v, bias=None, sdpa=False):
    """attention_weights(q, k, bias) v, [B, H, N, d].

    The explicit softmax is the reference, and on a CPU the faster path for a bias that needs a
    gradient. `sdpa` takes torch's fused kernel, for GPUs.
    """
    if not sdpa:
        return attention_weights(q, k, bias).to(v.dtype) @ v
    if bias is not None:
        # The fused kernels want the bias in q's type and with all four dimensions.
        bias = bias.to(q.dtype).expand(*q.shape[:2], -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


# ------------------------------------------------------------------------------------ the model

class Attention(nn.Module):
    """Multi-head attention. `M` is None until `init_mask` sets it.

    Separate projections without bias, so that W_Q and W_K are the paper's. `allowed` (bool [N, N])
    is a hard mask. `tied_mask`: M holds one entry for each distance i - j >= 0, [N] or [H, N].
    """

    def __init__(self, D, H, allowed=None, sdpa=False):
        super().__init__()
        if D % H:
            raise ValueError(f'the width {D} is not a multiple of the {H} heads')
        if allowed is not None and not allowed.is_meta and not allowed.any(-1).all():
            row = int((~allowed.any(-1)).nonzero()[0])
            raise ValueError(f'query token {row} has no open key: its softmax would be NaN')
        self.H = H
        self.sdpa = sdpa
        self.M = None
        self.tied_mask = False
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, D, bias=False)
        self.v = nn.Linear(D, D, bias=False)
        self.proj = nn.Linear(D, D)
        self.register_buffer('allowed', allowed, persistent=False)

    def split(self, x):
        """[B, N, D] -> [B, H, N, d]"""
        return x.unflatten(-1, (self.H, -1)).transpose(1, 2)

    def bias(self, rows, N):
        """The bias of N tokens for the query tokens `rows`: [rows, N] or [H, rows, N], or None."""
        allowed = None if self.allowed is None else self.allowed[:N, :N][rows]
        if self.M is None:
            return None if allowed is None else torch.where(allowed, 0., -math.inf)
        if self.tied_mask:
            token = torch.arange(N, device=self.M.device)
            M = self.M[..., (token[:, None] - token).clamp(min=0)]
        else:
            M = self.M[..., :N, :N]
        return mask_bias(M[..., rows, :], allowed)

    def weights(self, x):
        """x [B, N, D] -> the attention [B, H, N, N]."""
        q = self.split(self.q(x))
        k = self.split(self.k(x))
        return attention_weights(q, k, self.bias(slice(None), x.shape[1]))

    def forward(self, x, rows=slice(None), qk_input=None):
        """x [B, N, D] -> [B, rows, D], for the query tokens in the slice `rows`.

        q and k read `qk_input` [B, N, D] instead of x, if it is given.
        """
        z = x if qk_input is None else qk_input
        q = self.split(self.q(z[:, rows]))
        k = self.split(self.k(z))
        v = self.split(self.v(x))
        out = attend(q, k, v, self.bias(rows, x.shape[1]), self.sdpa)    # [B, H, rows, d]
        return self.proj(out.transpose(1, 2).flatten(2))                 # [B, rows, D]


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then an MLP four times as wide."""

    def __init__(self, D, H, allowed=None, sdpa=False, drop_path=0., dropout=0.):
        super().__init__()
        self.norm1 = nn.LayerNorm(D)
        self.norm2 = nn.LayerNorm(D)
        self.attn = Attention(D, H, allowed, sdpa)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.drop_path = drop_path
        self.dropout = nn.Dropout(dropout)

    def drop_branch(self, branch):
        """Dropout, and stochastic depth: in training an input's branch is dropped or scaled up."""
        branch = self.dropout(branch)
        if not self.training or not self.drop_path:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)

    def forward(self, x, rows=slice(None), qk_input=None):
        """x [B, N, D] -> [B, rows, D]"""
        # Cast to x's type and added in place: saves 2 % of a step of images in bf16 (measured).
        branch = self.drop_branch(self.attn(self.norm1(x), rows, qk_input))
        x = branch.to(x.dtype).add_(x[:, rows])
        return self.drop_branch(self.mlp(self.norm2(x))).to(x.dtype).add_(x)


class PatchEmbedding(nn.Module):
    """Images [B, C, rows * P, cols * P] -> tokens [B, rows * cols, D], row by row."""

    def __init__(self, C, P, D, grid):
        super().__init__()
        self.P = P
        self.grid = grid
        self.proj = nn.Linear(C * P * P, D)

    def forward(self, x):
        rows, cols = x.shape[2] / self.P, x.shape[3] / self.P
        if (rows, cols) != self.grid:
            raise ValueError(f'images of {rows:g} x {cols:g} patches for a model of '
                             f'{self.grid[0]} x {self.grid[1]} patches')
        return self.proj(F.pixel_unshuffle(x, self.P).flatten(2).mT)


def sincos(rows, cols, D):
    """Fixed positional embedding of a grid, [rows, cols, D]: D / 4 frequencies a coordinate."""
    if D % 4:
        raise ValueError(f'sin-cos positions need a width that 4 divides; it is {D}')
    frequency = 10000. ** -torch.linspace(0, 1, D // 4)
    y = torch.arange(rows)[:, None] * frequency                          # [rows, D / 4]
    x = torch.arange(cols)[:, None] * frequency                          # [cols, D / 4]
    y = torch.cat([y.sin(), y.cos()], 1)[:, None].expand(-1, cols, -1)
    x = torch.cat([x.sin(), x.cos()], 1).expand(rows, -1, -1)
    return torch.cat([x, y], 2)


class Transformer(nn.Module):
    """Token ids [B, N] or images -> [B, outputs] if pooled, else [B, rows, outputs].

    `inputs`: the size of the vocabulary, or (channels, patch side): a ViT. `grid`: (N,) or (rows,
    cols) of the tokens; fewer words than N may be in use. `class_token`: one more, learned, before
    the others. `causal`: no token sees a later one. `readout`: the slice of tokens that are read.
    `pool`: 'sum' or 'mean' of these, or None. `tied`: the embedding is the output layer too.
    Token embedding N(0, 1), or N(0, init_std^2) if tied. `positions`: 'learned', N(0, pos_std^2):
    by these alone the residual stream tells two places apart; fixed, 'sincos'; or 'none'. Linear
    layers N(0, init_std^2) with zero bias; patches as torch has it. `drop_path`: stochastic depth,
    from 0 in the first block to this in the last.
    """

    def __init__(self, inputs, grid, outputs, D=64, H=4, L=2, pos_std=0.1, init_std=0.02,
                 positions='learned', class_token=False, readout=slice(None), pool='sum',
                 causal=False, tied=False, dropout=0., drop_path=0., sdpa=False):
        super().__init__()
        words = isinstance(inputs, int)
        self.tokens = nn.Embedding(inputs, D) if words else PatchEmbedding(*inputs, D, grid)
        if positions == 'sincos':
            self.register_buffer('positions', sincos(*grid, D))
        elif positions == 'learned':
            self.positions = nn.Parameter(pos_std * torch.randn(*grid, D))
        else:
            self.positions = None
        self.class_token = nn.Parameter(torch.randn(D)) if class_token else None
        self.N = math.prod(grid) + class_token
        allowed = torch.ones(self.N, self.N, dtype=torch.bool).tril() if causal else None
        rates = [drop_path * (i / (L - 1) if L > 1 else 1) for i in range(L)]
        self.blocks = nn.ModuleList(Block(D, H, allowed, sdpa, rate, dropout) for rate in rates)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, outputs, bias=not tied)
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.head.weight = self.tokens.weight
        for layer in [*self.blocks.modules(), self.head]:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=init_std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        # The last block computes only the rows that are read: with a class token and L = 2 that
        # saves 28 % of a step (measured).
        self.readout = readout
        self.pool = pool
        # A frozen copy whose layer inputs q and k read, once hold_inputs() is called.
        self.untrained = None

    def embed(self, x):
        """Token ids or images -> [B, N, D]"""
        x = self.tokens(x)
        if self.positions is not None:
            x = x + self.positions.flatten(0, -2)[:x.shape[1]]
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        return self.dropout(x)

    def forward(self, x, head=None):
        """`head(tokens [B, rows, D], self.head)`, if given, takes the place of pooling and head."""
        qk_inputs = [None] * len(self.blocks)
        if self.untrained is not None:
            # Without dropout, whatever mode this model is in.
            self.untrained.eval()
            with torch.no_grad():
                qk_inputs = [z for _, z in layer_inputs(self.untrained, x)]
        x = self.embed(x)
        for block, qk_input in zip(self.blocks[:-1], qk_inputs):
            x = block(x, qk_input=qk_input)
        x = self.norm(self.blocks[-1](x, self.readout, qk_inputs[-1]))   # [B, rows, D]
        if head is not None:
            return head(x, self.head)
        if self.pool:
            x = x.mean(1) if self.pool == 'mean' else x.sum(1)
        return self.head(x)


def layer_inputs(model, x):
    """Yields each layer's Attention and what its q and k read, [B, N, D], for the inputs x.

    In order, and layer by layer: a change made to one layer is seen by the next.
    """
    if model.untrained is not None:
        for block, (_, z) in zip(model.blocks, layer_inputs(model.untrained, x)):
            yield block.attn, z
        return
    x = model.embed(x)
    for block in model.blocks:
        yield block.attn, block.norm1(x)
        if block is not model.blocks[-1]:
            # No caller needs a gradient through more than one layer.
            x = block(x).detach()


def hold_inputs(model):
    """From now on q and k of each layer read what that layer gets in the model as it is now.

    An intervention (ours): the values and the MLPs still read what training makes of the inputs.
    """
    model.untrained = copy.deepcopy(model).requires_grad_(False)


# ------------------------------------------------------------------------------------ the prior

def prior_matrix(distance, strength, level):
    """M0 with softmax(log sigmoid(M0)) = softmax(-strength * distance).

    `distance` >= 0, [N, N] or [H, N, N]: 0 where query i needs key j, larger the less it does.
    `level` is M at distance 0. `strength`, in nats, is how far below that the bias lies at distance
    1. They are separate choices: softmax sees only the strength, while the gradient carries
    sigmoid(-M), 28 times less at level 4 than at level 0. (SGD is slower by that, Adam rescales it
    away.) strength = level = 4 gives M0 = +4 and -4. ValueError where M0 is not finite in fp32.
    """
    if not (0 < strength < math.inf and math.isfinite(level)):
        raise ValueError(f'the strength {strength} must be positive and finite, '
                         f'the level {level} finite')
    if not (distance >= 0).all():
        raise ValueError('a distance is below 0 or NaN')
    top = torch.tensor(float(level), dtype=torch.float64)
    log_p = F.logsigmoid(top) - strength * distance.double()
    M0 = torch.where(distance == 0, top, log_p - torch.log1p(-log_p.exp())).float()
    if not M0.isfinite().all():
        raise ValueError(f'the strength {strength} and level {level:g} give an M0 that is not '
                         'finite in fp32')
    return M0


def check_shape(name, matrix, model):
    """ValueError unless the matrix is [N, N] or [H, N, N], by the model's N and H."""
    N, H = model.N, model.blocks[0].attn.H
    if matrix.shape not in ((N, N), (H, N, N)):
        raise ValueError(f'{name} is {list(matrix.shape)}; it must be [N, N] or [H, N, N], with '
                         f'N = {N} and H = {H}')


def target_attention(M0, allowed=None):
    """The attention that the prior asks for, softmax(log sigmoid(M0)): [N, N] or [H, N, N]."""
    return mask_bias(M0, allowed).softmax(-1)


# ------------------------------------------------------------- the arms: where a prior is written
#
# Each is a function (model, M0, x, generator) that changes a fresh model on the CPU: M0 the prior,
# x real inputs ([B, N] token ids or images), generator for what it draws. None draws from the
# global random state or touches a weight that is not its own. An arm that aims at an attention
# other than target_attention(M0) returns that.

def init_default(model, M0=None, x=None, generator=None):
    """no prior: the usual random initialisation"""


def init_mask(model, M0, x=None, generator=None):
    """M of every layer starts at M0; W_Q and W_K stay random (the paper's method)"""
    check_shape('M0', M0, model)
    M0 = M0.to(model.blocks[0].attn.q.weight)
    if not M0.isfinite().all():
        raise ValueError('M0 has an entry that is not finite; a hard ban belongs in `allowed`')
    for block in model.blocks:
        block.attn.M = nn.Parameter(M0.clone())


def tie_mask(model):
    """Leaves M one entry for each distance i - j >= 0: [N] or [H, N]. It then has no length limit.

    ValueError unless the model is causal and M is constant along its diagonals.
    """
    for block in model.blocks:
        M = block.attn.M.detach()
        if block.attn.allowed is None:
            raise ValueError('a tied M is only for causal models: it has no entry for a distance '
                             'below 0')
        if not torch.equal(M[..., 1:, 1:].tril(), M[..., :-1, :-1].tril()):
            raise ValueError('M is not constant along its diagonals, so it cannot be tied')
        block.attn.M = nn.Parameter(M[..., 0].clone())
        block.attn.tied_mask = True


def factors(A, rank):
    """left, right [..., n, rank]: left right^T is the matrix of that rank closest to A [..., n, n].

    By A's SVD, with the root of the singular values on each side. The Frobenius error is the root
    of the sum of the squared singular values left out.
    """
    U, S, Vh = torch.linalg.svd(A)
    root = S[..., None, :rank].sqrt()
    return U[..., :rank] * root, Vh.mT[..., :rank] * root


def check_held(model, M0, x, arm):
    """ValueError if the arm could not write its prior: arms are compared from the same one."""
    target = target_attention(M0, model.blocks[0].attn.allowed)
    distance = prior_tv(model, target, x)
    size = max(block.attn.q.weight.norm().item() for block in model.blocks)
    if not distance < 0.25:
        raise ValueError(f'{arm} cannot hold this prior on these inputs: prior_tv {distance:.2f} '
                         f'with |W_Q| {size:.0e}')


@torch.no_grad()
def init_qk_svd(model, M0, x, generator=None):
    """W_Q and W_K, in closed form: the rank-d matrix closest to the target logits, by SVD

    For every layer and head, Xp W_Q (Xp W_K)^T / sqrt(d) is the closest rank-d matrix to the target
    logits, centred over each row (softmax ignores the rest). Xp [N, D] is the layer-normed input
    averaged over x: at layer 0 nearly that of the positional plus mean token embedding. R is the
    right inverse of Xp, Xp R = I, that the tokens' deviation from Xp disturbs least (covariance C):
    R = C^-1 Xp^T (Xp C^-1 Xp^T)^-1. A plain pseudo-inverse (C = I) holds for the mean input alone:
    on real ones it starts at a prior_tv of 0.42, 0.01, 0.30 on parity2, maj3, cyclic3, this one
    below 0.003 (ours, measured). ValueError if D < N or if the prior is not held.
    """
    for attn, X in layer_inputs(model, x):
        X = X.double()
        Xp = X.mean(0)                                                   # [N, D]
        N, D = Xp.shape
        d = D // attn.H
        if D < N:
            raise ValueError(f'qk-svd needs a width of at least the number of tokens, {N}; '
                             f'it is {D}')
        deviation = (X - Xp).flatten(0, 1)
        C = deviation.T @ deviation / len(deviation)
        C += 1e-6 * C.trace() / D * torch.eye(D, dtype=C.dtype)
        R = torch.linalg.solve(C, Xp.T)
        R = R @ torch.linalg.inv(Xp @ R)                                 # [D, N]
        open_keys = X.new_ones(N, N) if attn.allowed is None else attn.allowed[:N, :N].to(X)
        logits = F.logsigmoid(M0.to(X))[..., :N, :N].expand(attn.H, N, N)
        mean = (logits * open_keys).sum(-1, keepdim=True) / open_keys.sum(-1, keepdim=True)
        logits = (logits - mean) * open_keys
        for linear, factor in zip((attn.q, attn.k), factors(logits * math.sqrt(d), d)):
            weight = linear.weight.zero_().unflatten(0, (attn.H, d))     # [H, d, D], a view
            weight[:, :N] = (R @ factor).mT.to(weight)
    check_held(model, M0, x, 'qk-svd')


def init_qk_opt(model, M0, x, generator=None, steps=1000, lr=1e-2):
    """W_Q and W_K, by Adam: the attention on real inputs matches the target

    Layer by layer, since a layer's input depends on the attention below it. The loss is
    KL(target || attention). ValueError if the prior is not held.
    """
    for attn, X in layer_inputs(model, x):
        X = X.detach()
        N = X.shape[1]
        target = target_attention(M0, attn.allowed)[..., :N, :N]
        optimiser = torch.optim.Adam([attn.q.weight, attn.k.weight], lr)
        for step in range(steps):
            optimiser.param_groups[0]['lr'] = lr * (1 - step / steps)
            p = attn.weights(X[step % 4::4])                             # [B / 4, H, N, N]
            log_p = p.clamp_min(1e-12).log()
            loss = F.kl_div(log_p, target.expand_as(p), reduction='sum') / p[..., 0].numel()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        optimiser.zero_grad()
    check_held(model, M0, x, 'qk-opt')


@torch.no_grad()
def init_mimetic(model, M0=None, x=None, generator=None, qk=True):
    """images: W_Q, W_K, W_V and W_proj as pretrained ViTs have them (Trockman and Kolter 2023)

    arXiv 2305.09828. Per head W_Q W_K^T is the closest rank-d matrix to 0.7 Z + 0.7 I, per layer
    W_V W_proj = 0.4 Z - 0.4 I, each Z fresh with entries N(0, 1 / D). `qk=False`: only the second.
    """
    for block in model.blocks:
        attn = block.attn
        D = attn.q.in_features
        Z = torch.randn(attn.H + 1, D, D, generator=generator).to(attn.q.weight) / math.sqrt(D)
        I = torch.eye(D)
        # nn.Linear keeps the transposes of these W.
        if qk:
            left, right = factors(0.7 * Z[1:] + 0.7 * I, D // attn.H)    # [H, D, d]
            attn.q.weight.copy_(left.mT.flatten(0, 1))
            attn.k.weight.copy_(right.mT.flatten(0, 1))
        left, right = factors(0.4 * Z[0] - 0.4 * I, D)
        attn.v.weight.copy_(left.T)
        attn.proj.weight.copy_(right)


# The places of a 3 x 3 filter, in the order in which heads take them; (rows, columns) from a patch.
SHIFTS = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def shift_targets(rows, cols, H):
    """[H, N, N]: one-hot rows, the patch a head's shift leads to; zero rows beyond the edge."""
    place = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    offset = place[None] - place[:, None]                                # [N, N, 2], query to key
    shifts = [torch.tensor(SHIFTS[h % len(SHIFTS)]) for h in range(H)]
    return torch.stack([(offset == shift).all(-1).float() for shift in shifts])


@torch.no_grad()
def init_impulse(model, M0=None, x=None, generator=None):
    """images: W_Q and W_K start as a one-patch shift a head, W_V and W_proj as mimetic

    Zheng, Li, Saratchandran, Lucey, arXiv 2505.19985. Per head, with P [N, D] the layer-normed
    positions and P+ its pseudo-inverse of rank d, W_Q W_K^T is the closest rank-d matrix to
    P+ T (P+)^T, T the shift of shift_targets(), each factor scaled to a Frobenius norm of
    7 sqrt(d / 64). Made for learned positions that start at N(0, 0.36^2). More heads than nine
    begin again with the first shift. Returns its target; a row beyond the edge asks for nothing.
    """
    learned = isinstance(model.positions, nn.Parameter) and model.positions.ndim == 3
    if model.class_token is not None or not learned:
        raise ValueError('impulse shifts the patches of a grid by learned positions: it needs '
                         '--positions learned and mean pooling, without a class token')
    init_mimetic(model, generator=generator, qk=False)
    rows, cols, D = model.positions.shape
    H = model.blocks[0].attn.H
    d = D // H
    T = shift_targets(rows, cols, H).double()
    P = F.layer_norm(model.positions.flatten(0, 1).double(), (D,))       # [N, D]
    U, S, Vh = torch.linalg.svd(P, full_matrices=False)
    # P's rank is below D, since a layer norm's outputs sum to 0.
    rank = min(d, int(torch.linalg.matrix_rank(P)))
    pinv = (Vh[:rank].T / S[:rank]) @ U[:, :rank].T                      # [D, N]
    left, right = factors(pinv @ T @ pinv.mT, d)                         # [H, D, d]
    for block in model.blocks:
        for linear, factor in ((block.attn.q, left), (block.attn.k, right)):
            factor = factor * 7 * math.sqrt(d / 64) / factor.norm(dim=(1, 2), keepdim=True)
            linear.weight.copy_(factor.mT.flatten(0, 1))                 # [H, d, D] -> [D, D]
    beyond_edge = T.sum(-1, keepdim=True) == 0
    return torch.where(beyond_edge, 1 / T.shape[-1], T).float()


ARMS = {
    'default': init_default,
    'mask': init_mask,
    'qk-svd': init_qk_svd,
    'qk-opt': init_qk_opt,
    'mimetic': init_mimetic,
    'impulse': init_impulse,
}


# --------------------------------------------------------------------------------- the measures

def informative_rows(target, allowed=None):
    """bool [N] or [H, N]: the rows whose target is not uniform over what is allowed."""
    uniform = target_attention(torch.zeros_like(target), allowed)
    return ((target - uniform).abs() > 1e-6).any(-1)


@torch.no_grad()
def prior_tv(model, target, x):
    """Total-variation distance in [0, 1] between the attention, averaged over the inputs x, and
    the target [N, N] or [H, N, N]: the mean over layers, heads and informative rows.
    """
    total = 0.
    for attn, X in layer_inputs(model, x):
        # N may be less than the model is made for.
        N = X.shape[1]
        distance = (attn.weights(X).mean(0) - target[..., :N, :N]).abs().sum(-1) / 2     # [H, N]
        rows = informative_rows(target, attn.allowed)[..., :N].expand_as(distance)
        # With fewer tokens than the model is made for, none may be left.
        total += distance[rows].mean().item() if rows.any() else 0.
    return total / len(model.blocks)


def prior_weights(model):
    """{'M': ..., 'W_Q': ..., 'W_K': ...}: a flat copy over all layers; no M where there is none."""
    attentions = [block.attn for block in model.blocks]
    groups = {'M': [attn.M for attn in attentions if attn.M is not None],
              'W_Q': [attn.q.weight for attn in attentions],
              'W_K': [attn.k.weight for attn in attentions]}
    return {name: torch.cat([w.detach().flatten() for w in weights])
            for name, weights in groups.items() if weights}


def relative_change(model, initial):
    """{name: ||W - W_0|| / ||W_0||}, or ||W|| where W_0 = 0; `initial`: earlier prior_weights()."""
    changes = {}
    for name, weights in prior_weights(model).items():
        size = initial[name].norm()
        change = (weights - initial[name]).norm()
        changes[name] = torch.where(size > 0, change / size, change).item()
    return changes
