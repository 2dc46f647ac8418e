"""Mask-based priors and their query-key rivals, for any Transformer that fits on a page.

    Attention(X) = softmax( X W_Q (X W_K)^T / sqrt(d) + log sigmoid(M) ) X W_V

M is a finite, learnable matrix, one per layer, [N, N] (shared by the heads) or [H, N, N]. Row i is the query token,
column j the key token. Large positive M[i, j]: free to attend (bias -> 0). Large negative: suppressed (bias -> M).

Shape letters: B batch, N tokens, H heads, D width, d = D / H head width, L layers.
Order of the file: mask, attention, block, model, priors (the arms), what is measured of them.
"""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


# ---------------------------------------------------------------------------------------------------------------- mask

def mask_bias(M, allowed=None):
    """Additive attention bias log sigmoid(M), -inf where `allowed` (bool, [N, N]) is False. Same shape and type as M.

    logsigmoid, never log(sigmoid(M)): that is -inf with a NaN gradient from M = -18 in fp16 and M = -89 in fp32.
    """
    bias = F.logsigmoid(M)
    return bias if allowed is None else bias.masked_fill(~allowed, -math.inf)


def attention_weights(q, k, bias=None):
    """softmax(q k^T / sqrt(d) + bias), [B, H, Nq, N], for q [B, H, Nq, d], k [B, H, N, d] and a bias broadcastable to it.

    The bias is cast to the logits' type, so M may stay fp32 under autocast; in bf16 attention sees it to three digits.
    """
    logits = q / math.sqrt(q.shape[-1]) @ k.mT         # q scaled and the bias added in place: 2 % (N = 64) to 20 % (512) of a layer
    if bias is not None:
        logits += bias.to(logits.dtype)
    return logits.softmax(-1)


def attend(q, k, v, bias=None, sdpa=False):
    """attention_weights(q, k, bias) v, [B, H, Nq, d], for v [B, H, N, d].

    The explicit softmax is the reference, and on CPUs the faster path for a bias that needs a gradient; `sdpa` takes
    torch's fused kernel, for GPUs.
    """
    if sdpa:                                 # its kernels want the bias in q's type and with all four dimensions
        bias = None if bias is None else bias.to(q.dtype).expand(*q.shape[:2], -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return attention_weights(q, k, bias).to(v.dtype) @ v


# --------------------------------------------------------------------------------------------------------------- model

class Attention(nn.Module):
    """Multi-head attention over at most N tokens, with room for a mask: `M` is None until `init_mask` sets it.

    `tied_mask`: M holds one entry for each distance i - j >= 0, [N] or [H, N], instead of [N, N] or [H, N, N]. Separate projections
    without bias, so that W_Q and W_K are the paper's. `allowed` (bool, [N, N]) is the hard mask.
    """

    def __init__(self, D, H, allowed=None, sdpa=False):
        super().__init__()
        if D % H:
            raise ValueError(f'the width {D} is not a multiple of the {H} heads')
        if allowed is not None and not allowed.any(-1).all():
            raise ValueError(f'query token {int((~allowed.any(-1)).nonzero()[0])} has no open key: '
                             'its softmax would be NaN')
        self.H, self.sdpa, self.M, self.tied_mask = H, sdpa, None, False
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in 'qkv')
        self.proj = nn.Linear(D, D)
        self.register_buffer('allowed', allowed, persistent=False)

    def split(self, x):
        return x.unflatten(-1, (self.H, -1)).transpose(1, 2)                       # [B, N, D] -> [B, H, N, d]

    def bias(self, rows, N):
        """The bias of the query tokens in the slice `rows`, [rows, N] or [H, rows, N], or None where there is none."""
        queries = range(N)[rows]
        rows = slice(queries.start, queries.stop)                  # N may be less than the mask is made for
        allowed = None if self.allowed is None else self.allowed[rows, :N]
        if self.tied_mask:
            device = self.M.device
            distance = torch.arange(queries.start, queries.stop, device=device)[:, None] - torch.arange(N, device=device)
            return mask_bias(self.M[..., distance.clamp(min=0)], allowed)
        if self.M is not None:
            return mask_bias(self.M[..., rows, :N], allowed)
        if allowed is not None:
            return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -math.inf)

    def weights(self, x):
        """x [B, N, D] -> the attention [B, H, N, N]."""
        return attention_weights(self.split(self.q(x)), self.split(self.k(x)), self.bias(slice(None), x.shape[1]))

    def forward(self, x, rows=slice(None), qk_input=None):
        """x [B, N, D] -> [B, len(rows), D], for the query tokens in the slice `rows`; q and k read `qk_input`, if given."""
        z = x if qk_input is None else qk_input
        q, k, v = self.split(self.q(z[:, rows])), self.split(self.k(z)), self.split(self.v(x))
        out = attend(q, k, v, self.bias(rows, x.shape[1]), self.sdpa)              # [B, H, len(rows), d]
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then an MLP four times as wide."""

    def __init__(self, D, H, allowed=None, sdpa=False, drop_path=0., dropout=0.):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention(D, H, allowed, sdpa)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.drop_path, self.dropout = drop_path, nn.Dropout(dropout)

    def keep(self, branch):
        """Dropout; and stochastic depth: in training an input's branch is dropped with probability drop_path, else scaled up."""
        branch = self.dropout(branch)
        if not self.training or not self.drop_path:
            return branch
        return branch * (torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path) / (1 - self.drop_path)

    def forward(self, x, rows=slice(None), qk_input=None):
        x = x[:, rows] + self.keep(self.attn(self.norm1(x), rows, qk_input))       # [B, N, D] -> [B, len(rows), D]
        return x + self.keep(self.mlp(self.norm2(x)))


class Patches(nn.Module):
    """Images [B, C, rows * P, cols * P] -> tokens [B, rows * cols, D], row by row: one linear map of each P x P patch."""

    def __init__(self, C, P, D):
        super().__init__()
        self.P, self.proj = P, nn.Linear(C * P * P, D)

    def forward(self, x):
        return self.proj(F.pixel_unshuffle(x, self.P).flatten(2).mT)


def sincos(rows, cols, D):
    """Fixed positional embedding of a grid, [rows, cols, D]: sine and cosine of each coordinate at D / 4 frequencies."""
    if D % 4:
        raise ValueError(f'sin-cos positions need a width that 4 divides; it is {D}')
    frequency = 10000. ** -torch.linspace(0, 1, D // 4)
    waves = [torch.arange(n)[:, None] * frequency for n in (rows, cols)]           # [n, D / 4]
    y, x = (torch.cat([w.sin(), w.cos()], 1) for w in waves)                       # [n, D / 2]
    return torch.cat([x.expand(rows, -1, -1), y[:, None].expand(-1, cols, -1)], 2)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits x W^T against target [T], for x [T, D] and W [V, D], `chunk` rows of logits at a time.

    The gradients are formed with the loss (`gradients`; torch doesn't say here whether they are wanted), so nothing is computed
    twice, and the logits never exist as a whole: 4,096 positions of 33,278 words are half a gigabyte in fp32. The softmax keeps the
    type of the logits (its kernel sums in fp32): no copies, twice as fast in bf16 on a CPU, and the mean over 4,096 words is
    within 3e-6 (measured).
    """

    @staticmethod
    def forward(ctx, x, W, target, gradients=True, chunk=128):
        device, loss = x.device.type, 0.
        grad_x, grad_W = (torch.empty_like(x), torch.zeros_like(W)) if gradients else (None, None)
        if torch.is_autocast_enabled(device):
            x, W = (t.to(torch.get_autocast_dtype(device)) for t in (x, W))
        with torch.autocast(device, enabled=False):                                # the types are chosen here
            for rows in (slice(low, low + chunk) for low in range(0, len(x), chunk)):
                grad = (x[rows] @ W.T).softmax(-1)
                own = torch.arange(len(grad), device=x.device), target[rows]
                p = grad[own].to(torch.promote_types(x.dtype, torch.float32))
                loss = loss - p.clamp_min(torch.finfo(p.dtype).tiny).log().sum()
                if gradients:
                    grad[own] -= 1.
                    grad_x[rows] = grad @ W
                    grad_W += grad.T @ x[rows]                                     # an fp32 sum of what is bf16 under autocast
        ctx.save_for_backward(grad_x, grad_W)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():                                                # create_graph: it would be wrong without a word
            raise RuntimeError('the cross-entropy in chunks has no second derivative')
        grad_x, grad_W = ctx.saved_tensors
        return grad_x * (grad / len(grad_x)), grad_W * (grad / len(grad_x)), None, None, None


class Transformer(nn.Module):
    """Token ids [B, N], or images, -> [B, rows, outputs], read from the tokens in the slice `rows`; [B, outputs] if pooled.

    `inputs`: the size of the vocabulary, or (channels, patch side) of images: a ViT. `grid`: (N,) or (rows, cols) of the tokens;
    N may be less in use. `class_token`: a learned one more before the others. `causal`: a token sees no later one.
    `pool`: 'sum' or 'mean' of the tokens read, or None.
    Token embedding N(0, 1); positional embedding 'learned', N(0, pos_std^2): how far the residual stream can tell two tokens
    apart other than by attention; fixed, 'sincos'; or 'none'. Linear layers N(0, init_std^2), zero biases; patches as torch has it. `tied`: the
    embedding is the output layer too, and begins like one. `drop_path`: stochastic depth, from 0 in the first block to this in the last.
    """

    def __init__(self, inputs, grid, outputs, D=64, H=4, L=2, pos_std=0.1, init_std=0.02, positions='learned', class_token=False,
                 rows=slice(None), pool='sum', causal=False, tied=False, dropout=0., drop_path=0., sdpa=False):
        super().__init__()
        self.tokens = nn.Embedding(inputs, D) if isinstance(inputs, int) else Patches(*inputs, D)
        if positions == 'sincos':
            self.register_buffer('positions', sincos(*grid, D))
        else:                                                                      # [N, D] or [rows, cols, D]
            self.positions = nn.Parameter(pos_std * torch.randn(*grid, D)) if positions == 'learned' else None
        self.class_token = nn.Parameter(torch.randn(D)) if class_token else None
        self.N = N = math.prod(grid) + class_token
        allowed = torch.ones(N, N, dtype=torch.bool).tril() if causal else None
        self.blocks = nn.ModuleList(Block(D, H, allowed, sdpa, drop_path * (i / (L - 1) if L > 1 else 1), dropout) for i in range(L))
        self.norm, self.head, self.dropout = nn.LayerNorm(D), nn.Linear(D, outputs, bias=not tied), nn.Dropout(dropout)
        if tied:
            self.head.weight = self.tokens.weight
        for layer in [*self.blocks.modules(), self.head]:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=init_std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        # The last block computes only the rows that are read: of a class token and L = 2 that saves 28 % of a step (measured).
        self.rows, self.pool = rows, pool
        self.untrained = None                                                      # hold_inputs() sets it

    def embed(self, x):
        x = self.tokens(x)
        if self.positions is not None:
            x = x + self.positions.flatten(0, -2)[:x.shape[1]]                     # [B, N, D]
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        return self.dropout(x)

    def forward(self, x, target=None):
        """The outputs; or, given target [B, rows], their mean cross-entropy, for a large vocabulary and no bias (`tied`)."""
        qk_inputs = [None] * len(self.blocks)
        if self.untrained is not None:
            with torch.no_grad():
                qk_inputs = [z for _, z in layer_inputs(self.untrained, x)]
        x = self.embed(x)
        for block, qk_input in zip(self.blocks[:-1], qk_inputs):
            x = block(x, qk_input=qk_input)
        x = self.norm(self.blocks[-1](x, self.rows, qk_inputs[-1]))                # [B, rows, D]
        if target is not None:
            assert self.head.bias is None, 'the loss in chunks is for an output layer without bias: tied=True'
            return LinearCrossEntropy.apply(x.flatten(0, 1), self.head.weight, target.flatten(), torch.is_grad_enabled())
        if self.pool:
            x = x.mean(1) if self.pool == 'mean' else x.sum(1)
        return self.head(x)


def hold_inputs(model):
    """From now on q and k of every layer read what that layer gets in the model as it is now, whatever V and the MLPs learn."""
    model.untrained = copy.deepcopy(model).requires_grad_(False)


def layer_inputs(model, x):
    """Yields each layer's Attention and the layer-normed input [B, N, D] of its q and k, in order: the earlier layers as they are now."""
    if model.untrained is not None:
        for block, (_, z) in zip(model.blocks, layer_inputs(model.untrained, x)):
            yield block.attn, z
        return
    x = model.embed(x)
    for block in model.blocks:
        yield block.attn, block.norm1(x)
        if block is not model.blocks[-1]:
            x = block(x).detach()                                                  # qk-opt needs no gradient beyond a layer


# -------------------------------------------------------------------------------------------------------------- priors

def prior_matrix(distance, strength, level):
    """M0 whose attention is softmax(-strength * distance), from the interaction structure.

    `distance` >= 0, [N, N] or [H, N, N]: 0 where query i needs key j, and the more the less it does. `level` is M at
    distance 0; `strength`, in nats, is how far below that the bias lies at distance 1. The two are separate choices because
    softmax sees only the strength, while the gradient carries sigmoid(-M): 28 times less at level 4 than at 0. (SGD is slower
    by that; Adam rescales it away.) strength = level = 4 gives M0 = +4 and -4.
    """
    if not (0 < strength < math.inf and math.isfinite(level)):
        raise ValueError(f'the strength {strength} must be positive and finite, the level {level} finite')
    if not (distance >= 0).all():
        raise ValueError('a distance is below 0 or NaN')
    level = torch.tensor(float(level), dtype=torch.float64, device=distance.device)
    log_p = F.logsigmoid(level) - strength * distance.double()
    M0 = torch.where(distance == 0, level, log_p - torch.log1p(-log_p.exp())).float()        # logit(exp(log_p))
    if not M0.isfinite().all():
        raise ValueError(f'the strength {strength} and level {level:g} give an M0 that is not finite in fp32')
    return M0


def target_attention(M0, allowed=None):
    """The attention the prior asks for, softmax(log sigmoid(M0)): [N, N] or [H, N, N]; what the QK arms aim at."""
    return mask_bias(M0, allowed).softmax(-1)


def init_mask(model, M0, freeze=False, tie=False):
    """Arm `mask` (the paper's method): every layer's M starts at M0, learnable unless `freeze`; Q and K stay random.

    `tie`: one entry for each distance i - j, for an M0 that is constant along its diagonals.
    """
    H, M0 = model.blocks[0].attn.H, M0.to(model.blocks[0].attn.q.weight)
    if M0.shape not in ((model.N, model.N), (H, model.N, model.N)):
        raise ValueError(f'M0 is {list(M0.shape)}; it must be [N, N] or [H, N, N], with N = {model.N} and H = {H}')
    if not M0.isfinite().all():
        raise ValueError('M0 has an entry that is not finite; a hard ban belongs in `allowed`')
    if tie:
        if model.blocks[0].attn.allowed is None:
            raise ValueError('a tied M is for causal models: it has no entry for a distance below 0')
        if not torch.equal(M0[..., 1:, 1:].tril(), M0[..., :-1, :-1].tril()):
            raise ValueError('M0 is not constant along its diagonals, so it can not be tied')
        M0 = M0[..., 0]                                                            # row i, column 0: distance i
    for block in model.blocks:
        block.attn.M = nn.Parameter(M0.clone(), requires_grad=not freeze)
        block.attn.tied_mask = tie


def factors(A, rank):
    """left, right [..., n, rank] with left right^T the closest matrix of this rank to A [..., n, n]; its SVD, split evenly.

    The Frobenius error is the root of the sum of the squared singular values left out.
    """
    U, S, Vh = torch.linalg.svd(A)
    root = S[..., None, :rank].sqrt()
    return U[..., :rank] * root, Vh.mT[..., :rank] * root


@torch.no_grad()
def init_qk_svd(model, M0, x):
    """Arm `qk-svd`: W_Q, W_K of every layer and head such that Xp W_Q (Xp W_K)^T / sqrt(d) is the closest rank-d matrix
    to the target logits, centred over each row (softmax ignores the rest). Frobenius error: the discarded singular values.

    Xp [N, D] is the layer-normed input, averaged over the inputs x [B, N]: at layer 0 nearly that of the positional plus
    mean token embedding. R is the right inverse of Xp, Xp R = I, that the tokens' deviation from Xp disturbs least (covariance C):
    R = C^-1 Xp^T (Xp C^-1 Xp^T)^-1. A plain pseudo-inverse (C = I) holds for the mean input alone: on real ones it starts at
    a prior_tv of 0.42, 0.01, 0.30 on parity2, maj3, cyclic3, this one below 0.003 (ours, measured). Needs D >= N.
    """
    for attn, X in layer_inputs(model, x):
        X = X.double()
        Xp = X.mean(0)                                                                       # [N, D]
        D, N, d = Xp.shape[1], Xp.shape[0], Xp.shape[1] // attn.H
        if D < N:
            raise ValueError(f'qk-svd needs a width of at least the number of tokens, {N}; it is {D}')
        deviation = (X - Xp).flatten(0, 1)
        C = deviation.T @ deviation / len(deviation)
        C += 1e-6 * C.trace() / D * torch.eye(D, dtype=C.dtype, device=C.device)
        R = torch.linalg.solve(C, Xp.T)
        R = R @ torch.linalg.inv(Xp @ R)                                                     # [D, N]
        open_keys = (torch.ones_like(M0[-1:]) if attn.allowed is None else attn.allowed.to(X))[..., :N, :N]
        logits = F.logsigmoid(M0.to(X))[..., :N, :N].expand(attn.H, N, N)
        logits = (logits - (logits * open_keys).sum(-1, keepdim=True) / open_keys.sum(-1, keepdim=True)) * open_keys
        for linear, factor in zip((attn.q, attn.k), factors(logits * math.sqrt(d), d)):
            weight = linear.weight.zero_().unflatten(0, (attn.H, d))                         # [H, d, D], a view
            weight[:, :N] = (R @ factor).mT.to(weight)


def init_qk_opt(model, M0, x, steps=1000, lr=1e-2):
    """Arm `qk-opt`: W_Q, W_K by Adam, so that each layer's attention on the real inputs x [B, N] matches the target.

    Layer by layer, since a layer's input depends on the attention below it; the loss is KL(target || attention).
    """
    for attn, X in layer_inputs(model, x):
        X, target = X.detach(), target_attention(M0.to(x.device), attn.allowed)[..., :X.shape[1], :X.shape[1]]
        weights = [attn.q.weight, attn.k.weight]
        optimiser = torch.optim.Adam(weights, lr)
        for step in range(steps):
            optimiser.param_groups[0]['lr'] = lr * (1 - step / steps)
            p = attn.weights(X[step % 4::4])                                       # [B / 4, H, N, N]
            loss = F.kl_div(p.clamp_min(1e-12).log(), target.expand_as(p), reduction='sum') / p[..., 0].numel()
            for w, grad in zip(weights, torch.autograd.grad(loss, weights)):
                w.grad = grad
            optimiser.step()
        for w in weights:
            w.grad = None


@torch.no_grad()
def init_mimetic(model, generator, qk=True):
    """Arm `mimetic` (Trockman and Kolter 2023, arXiv 2305.09828): what pretrained ViTs look like.

    Per head W_Q W_K^T is the closest rank-d matrix to 0.7 Z + 0.7 I, per layer W_V W_proj = 0.4 Z - 0.4 I, each Z fresh with
    entries N(0, 1 / D). `qk=False`: the second alone. (nn.Linear keeps the transposes of these W.)
    """
    for block in model.blocks:
        attn, D = block.attn, block.attn.q.in_features
        Z = torch.randn(attn.H + 1, D, D, generator=generator).to(attn.q.weight) / math.sqrt(D)
        I = torch.eye(D, device=Z.device)
        if qk:
            for linear, factor in zip((attn.q, attn.k), factors(0.7 * Z[1:] + 0.7 * I, D // attn.H)):
                linear.weight.copy_(factor.mT.flatten(0, 1))                                 # [H, d, D] -> [D, D]
        left, right = factors(0.4 * Z[0] - 0.4 * I, D)
        attn.v.weight.copy_(left.T)
        attn.proj.weight.copy_(right)


@torch.no_grad()
def init_impulse(model, target, generator, gain=320.):
    """Arm `impulse` (Zheng et al., arXiv 2404.01139 and 2505.19985): every head's attention starts as a one-patch shift.

    `target` [H, N, N] holds the shifts, one-hot rows. Per head W_Q W_K^T / sqrt(d) is the closest rank-d matrix to
    gain * P^+ target (P^+)^T, with P [N, D] the layer-normed positional embedding, which stands for the input of every
    layer; V and projection as in mimetic. P^+ has the lowest rank at which, on P, every row peaks at its shifted patch, and
    the gain is large, because the content of the patches disturbs the shift: on 8 x 8 patches of CIFAR-10 the shifted patch gets
    0.35 of the attention so, 0.04 by the full rank (ours, measured).
    """
    if model.class_token is not None or model.positions is None or model.positions.ndim != 3:
        raise ValueError('impulse shifts patches of a grid: it needs mean pooling, without a class token')
    init_mimetic(model, generator, qk=False)
    P = model.positions.flatten(0, 1).double()                                               # [N, D]
    P = F.layer_norm(P, P.shape[1:])
    N, D = P.shape
    d = D // len(target)
    U, S, Vh = torch.linalg.svd(P, full_matrices=False)
    for rank in range(1, min(N, D) + 1):
        inverse = (Vh[:rank].T / S[:rank]) @ U[:, :rank].T                                   # [D, N]
        left, right = factors(gain * math.sqrt(d) * inverse @ target.double() @ inverse.mT, d)
        if torch.equal(((P @ left) @ (P @ right).mT).argmax(-1), target.argmax(-1)):
            break
    else:
        raise ValueError(f'no rank of the positions holds the shifts at a width of {D} with {len(target)} heads: a larger --width')
    for block in model.blocks:
        block.attn.q.weight.copy_(left.mT.flatten(0, 1))                                     # [H, d, D] -> [D, D]
        block.attn.k.weight.copy_(right.mT.flatten(0, 1))


ARMS = {
    'default': 'no prior',
    'mask': 'M of every layer; W_Q and W_K stay random',
    'qk-svd': 'W_Q and W_K, in closed form',
    'qk-opt': 'W_Q and W_K, by optimisation',
    'mimetic': 'images: W_Q, W_K, W_V, W_proj (Trockman and Kolter 2023)',
    'impulse': 'images: W_Q, W_K, a shift for each head (Zheng et al. 2024, 2025); W_V, W_proj as mimetic',
}


def init_arm(model, arm, M0, x, freeze=False, tie=False, shifts=None, seed=0, mimetic_v=False):
    """Writes the prior M0 into a built model by the way of `arm`; x are training inputs, [B, N] or images, for the QK arms.

    `shifts` is the target of impulse; `mimetic_v` gives any arm the W_V and W_proj that mimetic and impulse have. No arm draws
    from the global random state or touches a weight that is not its own: the rest stays bit-identical.
    """
    generator = torch.Generator().manual_seed(seed)
    if mimetic_v:
        init_mimetic(model, generator, qk=False)
    if arm == 'mask':
        init_mask(model, M0, freeze, tie)
    elif arm == 'qk-svd':
        init_qk_svd(model, M0, x)
    elif arm == 'qk-opt':
        init_qk_opt(model, M0, x)
    elif arm == 'mimetic':
        init_mimetic(model, generator)
    elif arm == 'impulse':
        init_impulse(model, shifts, generator)
    elif arm != 'default':
        raise ValueError(f'unknown arm {arm!r}: one of {", ".join(ARMS)}')


# ------------------------------------------------------------------------------------------------------------ measures

def asking_rows(target, allowed=None):
    """bool [N] or [H, N]: the rows in which the target attention isn't uniform over what is allowed, so asks for something."""
    allowed = torch.ones_like(target) if allowed is None else allowed.to(target)
    return ((target - allowed / allowed.sum(-1, keepdim=True)).abs() > 1e-6).any(-1)


@torch.no_grad()
def prior_tv(model, target, x):
    """Total-variation distance in [0, 1] between the attention, averaged over the inputs x [B, N], and the target's.

    Mean over layers, heads and the rows that ask for something.
    """
    total = 0.
    for attn, X in layer_inputs(model, x):
        N = X.shape[1]                                                             # may be less than the model is made for
        tv = (attn.weights(X).mean(0) - target[..., :N, :N]).abs().sum(-1) / 2     # [H, N]
        total += tv[asking_rows(target, attn.allowed)[..., :N].expand_as(tv)].mean().item()
    return total / len(model.blocks)


def prior_weights(model):
    """{'M': ..., 'W_Q': ..., 'W_K': ...}: a flat copy over all layers, to measure what training does to them."""
    attns = [block.attn for block in model.blocks]
    groups = {'M': [a.M for a in attns if a.M is not None],
              'W_Q': [a.q.weight for a in attns], 'W_K': [a.k.weight for a in attns]}
    return {name: torch.cat([w.detach().flatten() for w in ws]) for name, ws in groups.items() if ws}


def relative_change(model, initial):
    """||W - W_0|| / ||W_0|| for each of M, W_Q, W_K; `initial` is an earlier `prior_weights(model)`."""
    return {name: ((w - initial[name]).norm() / initial[name].norm()).item()
            for name, w in prior_weights(model).items()}
