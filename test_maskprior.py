"""pytest -q: the identities and the hand-computed values first, then faults that people met."""
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import time
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

# One thread, here and in what is started from here: on a busy machine several wait for each other.
os.environ.setdefault('OMP_NUM_THREADS', '1')
import pytest
import torch
import torch.nn.functional as F

import maskprior
import tasks
import theory
import train
from maskprior import attend, attention_weights, mask_bias, prior_matrix, target_attention

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / 'results'))
import records
SMALL = ['--width', '16', '--heads', '2', '--layers', '2', '--batch', '32', '--steps', '20',
         '--eval-every', '10']


def qkv(B=2, H=3, N=5, d=4, dtype=torch.float64, seed=0):
    """q, k and v, [B, H, N, d] each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, H, N, d, generator=generator, dtype=torch.float64).to(dtype)


def tiny(arm='default', *options):
    """(task, model, target attention) of a small parity2 run."""
    return train.build(train.parse(['--task', 'parity2', '--init', arm, '--width', '32',
                                    '--heads', '2', *options]))


def refused(capsys, *options):
    """train.py in this process, on a command that must be refused -> (exit code, its one line)."""
    capsys.readouterr()
    argv = [str(option) for option in options]
    try:
        code = train.command(lambda: train.main(argv), 'train.py')
    # argparse's own.
    except SystemExit as end:
        code = end.code
    line, = capsys.readouterr().err.splitlines()
    return code, line


# The arms that are not only for images.
WORD_ARMS = [arm for arm, init in maskprior.ARMS.items()
             if not (init.__doc__ or '').startswith('images:')]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def words(**options):
    """A model of six tokens."""
    torch.manual_seed(0)
    return maskprior.Transformer(7, (6,), outputs=7, D=32, H=2, pool=None, pos_std=1., **options)


@pytest.fixture
def quick_arms(monkeypatch):
    """qk-opt takes few steps, and no arm need hold its prior."""
    monkeypatch.setattr(maskprior, 'check_held', lambda *_: None)
    opt = partial(maskprior.init_qk_opt, steps=5)
    monkeypatch.setitem(maskprior.ARMS, 'qk-opt', opt)


def trained(folder, *options):
    """(model, rows of the log, checkpoint) of a step, or more, of a small mask on parity2."""
    settings = train.parse([*SMALL, '--warmup', '0', '--steps', '1', '--eval-every', '1',
                            '--eval-early', '0', '--clip', '0', *options])
    task, model, target = train.build(settings)
    task.evaluate = lambda model, quick: task.evaluate_quick(model)
    train.train(settings, folder, {}, task, model, target)
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    return model, log, torch.load(folder / 'checkpoint.pt', weights_only=True)


# ------------------------------------------------------------------------------------ attention

def test_attention_of_two_tokens_by_hand():
    # d = 1: the logits are [[0, log 3], [0, 0]]; sigmoid(M) is [[1/2, 1/2], [1/2, 1/3]].
    q, k = torch.tensor([[[[1.], [0.]]], [[[0.], [math.log(3.)]]]])[:, None]
    p = attention_weights(q, k, mask_bias(torch.tensor([[0., 0.], [0., -math.log(2.)]])))
    assert torch.allclose(p[0, 0], torch.tensor([[1 / 4, 3 / 4], [3 / 5, 2 / 5]]))


def test_a_bias_that_is_constant_in_each_row_changes_nothing():
    q, k, v = qkv()
    plain = (q @ k.mT / 2).softmax(-1) @ v
    bias, constant = torch.randn(5, 5).double(), torch.randn(5, 1).double()
    assert torch.equal(attend(q, k, v), plain)
    assert torch.equal(attend(q, k, v, mask_bias(torch.full((5, 5), 800.).double())), plain)
    assert torch.allclose(attend(q, k, v, bias), attend(q, k, v, bias + constant))


def test_vmap_over_the_mask_alone_equals_a_loop():
    q, k, _ = qkv()
    weights = lambda M: attention_weights(q, k, mask_bias(M))
    masks = torch.randn(4, 5, 5).double()
    assert torch.allclose(torch.vmap(weights)(masks), torch.stack([weights(M) for M in masks]))


MASKS = {'shared': lambda M: M, 'per head': lambda M: M * torch.arange(1., 4)[:, None, None],
         'transposed': lambda M: M.T, 'stride 0': lambda M: M[:1].expand(17, 17),
         'one token': lambda M: M[:1, :1]}


@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('sdpa', [False, True])
@pytest.mark.parametrize('compiled', [False, True])
def test_value_and_gradient_of_odd_masks(mask, sdpa, compiled):
    def by_hand(q, k, v, bias, sdpa):
        e = (q @ k.mT / q.shape[-1] ** 0.5 + bias).exp()
        return e / e.sum(-1, keepdim=True) @ v
    outs, grads = [], []
    for function in (by_hand, attend):
        M = torch.randn(17, 17, generator=seeded()).requires_grad_()
        bias = mask_bias(MASKS[mask](M))
        if compiled and function is attend:
            function = torch.compile(attend, backend='aot_eager')
        outs.append(function(*qkv(N=bias.shape[-1], dtype=torch.float32), bias, sdpa))
        outs[-1].square().sum().backward()
        grads.append(M.grad)
    assert torch.allclose(*outs, atol=1e-5) and torch.allclose(*grads, atol=1e-4)
    # With one key softmax is 1, whatever M.
    assert grads[1].abs().max() > 1e-3 or mask == 'one token'


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_bias_and_gradient_stay_finite_far_down(dtype):
    M = torch.tensor([-10., -18., -90., -300.], dtype=dtype, requires_grad=True)
    bias = mask_bias(M)
    bias.sum().backward()
    assert torch.allclose(bias, M, rtol=1e-2) and torch.allclose(M.grad, M * 0 + 1, rtol=1e-2)


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('sdpa', [False, True])
def test_autocast_leaves_the_mask_in_its_own_type(half, dtype, sdpa):
    attn = maskprior.Attention(16, 2, sdpa=sdpa)
    attn.M = torch.nn.Parameter(torch.randn(5, 5, dtype=dtype))
    x = torch.randn(2, 5, 16)
    with torch.autocast('cpu', half):
        out = attn(x)
    out.float().square().sum().backward()
    assert out.dtype == half and attn.M.dtype == attn.M.grad.dtype == dtype
    assert attn.M.grad.abs().max() > 0
    q, k, _ = qkv(dtype=half)
    assert attention_weights(q, k, mask_bias(attn.M)).dtype == half
    assert torch.allclose(out.float(), attn.to(torch.float32)(x), atol=0.05)


# ------------------------------------------------------------------------------------ the model

@pytest.mark.parametrize('arm', WORD_ARMS)
@pytest.mark.parametrize('sdpa', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_a_causal_model_does_not_see_what_comes_next(arm, sdpa, tied, quick_arms):
    model = words(causal=True, sdpa=sdpa, tied=tied)
    x = torch.randint(7, (8, 6), generator=seeded())
    maskprior.ARMS[arm](model, prior_matrix(1 - torch.eye(6), 2, 2), x, seeded())
    changed = x.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 7
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3], after[:, 3])
    # A shorter text is the same model.
    assert torch.allclose(model(x[:, :4]), before[:, :4], atol=1e-5)


def test_a_causal_model_builds_on_the_meta_device():
    with torch.device('meta'):
        assert words(causal=True)(torch.zeros(4, 6, dtype=torch.long)).shape == (4, 6, 7)


@pytest.mark.parametrize('rate', ['dropout', 'drop_path'])
def test_dropout_keeps_the_mean_and_rests_in_evaluation(rate):
    branch = torch.ones(4000, 1, 8)
    block = maskprior.Block(8, 2, **{rate: 0.5}).train()
    kept = block.drop_branch(branch)
    assert set(kept.unique().tolist()) == {0., 2.} and abs(kept.mean() - 1) < 0.1
    # Stochastic depth drops the branch of a whole input.
    assert torch.equal(kept, kept[..., :1].expand_as(kept)) == (rate == 'drop_path')
    assert torch.equal(block.eval().drop_branch(branch), branch)


@pytest.mark.parametrize('options', [[], ['--hold-inputs']])
def test_layer_inputs_are_what_queries_and_keys_read(options):
    task, model, _ = tiny('mask', *options)
    # Held inputs are those of the model as it was.
    model.blocks[0].attn.v.weight.data.add_(1.)
    read = []
    for block in model.blocks:
        block.attn.k.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    outputs = model(task.probe)
    layers = list(zip(model.blocks, read.copy(), maskprior.layer_inputs(model, task.probe)))
    assert len(layers) == 2 and all(torch.equal(z, wanted) for _, z, (_, wanted) in layers)
    # The last block computes only the row that is read: the class token's.
    x = model.embed(task.probe)
    for block, z, _ in layers:
        x = block(x, qk_input=z)
    assert torch.allclose(outputs, model.head(model.norm(x[:, 0])), atol=1e-5)


# ------------------------------------------------------------------------------------ the prior

def test_the_level_is_m_at_distance_0_and_does_not_change_the_attention():
    distance = torch.tensor([[0., 0.5, 3.]])
    for level in (-6., 0., 4., 8., 20.):
        M0 = prior_matrix(distance, 2, level)
        assert M0[0, 0] == level
        assert torch.allclose(target_attention(M0), (-2 * distance).softmax(-1))
    # logsigmoid(4) - logsigmoid(-4) = 4
    assert prior_matrix(torch.ones(1), strength=4, level=4).item() == pytest.approx(-4, abs=1e-5)


def pairs(needed):
    return needed.nonzero().tolist()


@pytest.mark.parametrize('pattern, expected', [
    ('group', [[0, 3], [0, 6], [3, 3], [3, 6], [6, 3], [6, 6]]),
    ('cross', [[0, 3], [0, 6], [3, 6], [6, 3]]),
    ('sink', [[0, 3], [0, 6], [3, 0], [3, 6], [6, 0], [6, 3]]),
    ('chain', [[0, 3], [3, 6], [6, 6]]),
    # One matrix a head.
    ('split', [[0, 0, 3], [0, 3, 3], [0, 6, 3], [1, 0, 6], [1, 3, 6], [1, 6, 6]])])
def test_patterns_of_bits_2_and_5_by_hand(pattern, expected):
    assert pairs(tasks.boolean_structure([2, 5], pattern, heads=2)) == expected


@pytest.mark.parametrize('name, hole', [('parity2', None), ('parity2', '--'), ('maj3', None),
                                        ('parity3', None), ('diff2', None), ('cyclic3', None)])
def test_the_measured_structure_is_the_known_one(name, hole):
    known, measured = (tasks.Boolean(name, hole, structure=structure).distance == 0
                       for structure in ('known', 'measured'))
    if name == 'cyclic3':
        assert pairs(known)[-6:] == [[13, 0], [13, 13], [13, 14], [14, 0], [14, 1], [14, 14]]
        # Each window once, in a row of a bit of its own.
        assert measured.diagonal().all()
        known, measured = (sorted(needed.tolist()) for needed in (known, measured))
        assert known == measured
    else:
        assert torch.equal(measured, known)


@pytest.mark.parametrize('f, hole, expected', [
    # x1 has no influence; then x0 and x2 do not interact.
    (lambda x0, x1, x2: x0 * x2, '+++', [[0, 0], [0, 2], [2, 0], [2, 2]]),
    (lambda x0, x1, x2: x0 - x2, '+++', [[0, 0], [2, 2]]),
    # What cannot be seen stays open: all four values of x0 and x2; both values of x0.
    (lambda x0, x1, x2: x0 - x2, '+*-', [[0, 0], [0, 2], [2, 0], [2, 2]]),
    (lambda x0, x1, x2: x2, '+', [[0, 0], [0, 2], [2, 0], [2, 2]])])
def test_the_measured_structure_of_three_bits_by_hand(f, hole, expected):
    x = tasks.cube(3)
    unseen = tasks.in_hole(x, hole)
    # Labels of unseen inputs never matter.
    for y in (f(*x.T), torch.where(unseen, 10 * torch.randn(8), f(*x.T))):
        assert pairs(tasks.measured_pairs(y, ~unseen)) == expected


@pytest.mark.parametrize('terms, expected', [
    # A chain of two groups: no bit sees x0 and x3 together.
    ([(0, 1, 2), (1, 2, 3)], ['012', '123', '012', '123']),
    # A star: the middle bit takes the first of its groups.
    ([(0, 1), (0, 2), (0, 3)], ['01', '01', '02', '03']),
    # Each bit with each of three others: nine groups, six rows. So every pair stays.
    ([(i, j) for i in range(3) for j in range(3, 6)], ['0345', '1345', '2345',
                                                            '0123', '0124', '0125'])])
def test_each_bit_takes_one_of_its_largest_groups_by_hand(terms, expected):
    n = len(expected)
    x = tasks.cube(n)
    y = sum(x[:, list(term)].prod(1) for term in terms)
    needed = tasks.measured_structure(y, torch.ones(2 ** n, dtype=torch.bool))
    assert [''.join(map(str, row.nonzero()[:, 0].tolist())) for row in needed] == expected


def test_wrong_flipped_and_per_head_priors():
    M0 = lambda *options: tiny('mask', *options)[1].blocks[0].attn.M
    assert pairs(M0('--prior-bits', '2,3') > 0) == [[i, j] for i in (0, 3, 4) for j in (3, 4)]
    # Of 256; the mean is 51.
    assert 25 < ((M0('--flip', '0.2') > 0) != (M0() > 0)).sum() < 80
    assert torch.equal(M0('--flip', '1') > 0, M0() < 0)
    assert M0('--per-head').shape == M0('--pattern', 'split').shape == (2, 16, 16)


# ------------------------------------------------------------------------------------- the arms

@pytest.mark.parametrize('d', [1, 2, 8])
def test_svd_error_is_the_discarded_singular_values(d, quick_arms, N=6):
    """To a prior that is not symmetric (each token looks at the next), cut off and of full rank."""
    torch.manual_seed(0)
    D = max(8, 2 * d)
    model = maskprior.Transformer(3, (N,), outputs=1, D=D, H=D // d, L=1, pos_std=1.)
    M0, x = prior_matrix(1 - torch.eye(N).roll(1, 1), 4, 4), torch.randint(3, (64, N))
    maskprior.init_qk_svd(model, M0, x)
    (attn, X), = maskprior.layer_inputs(model, x)
    Xp = X.mean(0, keepdim=True)
    logits = (attn.split(attn.q(Xp)) @ attn.split(attn.k(Xp)).mT / math.sqrt(d))[0]
    wanted = F.logsigmoid(M0) - F.logsigmoid(M0).mean(-1, keepdim=True)
    discarded = torch.linalg.svdvals(wanted)[d:].square().sum().sqrt()
    assert torch.allclose((logits - wanted).norm(dim=(1, 2)), discarded, atol=1e-3)


@pytest.mark.parametrize('arm', WORD_ARMS)
def test_arms_of_a_seed_share_all_other_weights_and_all_batches(arm, quick_arms):
    task, default, _ = tiny()
    # What dropout, say, would draw next.
    drawn = torch.rand(3)
    other_task, model, _ = tiny(arm)
    assert torch.equal(drawn, torch.rand(3))
    assert all(map(torch.equal, task.batch(seeded(), 64), other_task.batch(seeded(), 64)))
    weights, shared = model.state_dict(), default.state_dict()
    changed = {name for name in weights
               if name not in shared or not torch.equal(weights[name], shared[name])}
    assert shared.keys() <= weights.keys() and all('.attn.' in name for name in changed)
    sets = {'default': set(), 'mask': {'M'}, 'qk-svd': {'q', 'k'}, 'qk-opt': {'q', 'k'}}
    # Of an arm that is not here, only that the rest stays.
    assert {name.split('.')[3] for name in changed} == sets.get(arm) or arm not in sets


@pytest.mark.parametrize('arm, at_most', [('mask', 0.02), ('qk-svd', 0.01), ('qk-opt', 0.03)])
@pytest.mark.parametrize('causal', [False, True])
def test_arms_hold_the_prior_on_inputs_they_were_not_fitted_to(arm, at_most, causal):
    model, x = words(causal=causal), torch.randint(7, (512, 6), generator=seeded())
    # Each token looks at the one before.
    M0 = prior_matrix(1 - torch.eye(6).roll(-1, 1), 4, 4)
    target = target_attention(M0, model.blocks[0].attn.allowed)
    assert maskprior.prior_tv(model, target, x[256:]) > 0.5
    maskprior.ARMS[arm](model, M0, x[:256], **{'steps': 100} if arm == 'qk-opt' else {})
    assert maskprior.prior_tv(model, target, x[256:]) < at_most


def vit(grid=(8, 8), **options):
    torch.manual_seed(0)
    return maskprior.Transformer((3, 4), grid, 10, **dict(D=96, H=3, L=1) | options)


IMAGES = torch.randn(32, 3, 32, 32, generator=seeded())


def test_impulse_is_the_published_formula(rows=2, cols=3, D=12, H=3, d=4):
    """By loops: P+ from the eigenvectors of P P^T; and products of factors, which have no signs."""
    model = vit((rows, cols), D=D, H=H, L=2, pos_std=0.36)
    maskprior.init_impulse(model, generator=seeded())
    P = F.layer_norm(model.positions.detach().double().flatten(0, 1), (D,))
    values, vectors = torch.linalg.eigh(P @ P.T)
    inverse = sum(torch.outer(P.T @ u, u) / value for value, u in zip(values[-d:], vectors.T[-d:]))
    for block in model.blocks:
        for h, (down, right) in enumerate([(0, 0), (-1, 0), (0, 1)]):
            wanted = torch.zeros(D, D, dtype=torch.float64)
            for y in range(rows):
                for x in range(cols):
                    # Beyond the edge is a zero row.
                    if 0 <= y + down < rows and 0 <= x + right < cols:
                        key = inverse[:, (y + down) * cols + x + right]
                        wanted += torch.outer(inverse[:, y * cols + x], key)
            heads = slice(h * d, (h + 1) * d)
            W_Q, W_K = (w.weight[heads].detach().double().T for w in (block.attn.q, block.attn.k))
            norm = 7 * math.sqrt(d / 64)
            assert W_Q.norm().item() == pytest.approx(norm) == pytest.approx(W_K.norm().item())
            # Each factor has the root of the singular values.
            wanted *= norm ** 2 / torch.linalg.svdvals(wanted).sum()
            assert torch.allclose(W_Q @ W_K.T, wanted, atol=1e-4 * wanted.abs().max())
    # The rest is as mimetic has it.
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    maskprior.init_mimetic(model, generator=seeded(), qk=False)
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())


def test_impulse_of_the_authors_size_looks_at_the_shifted_patch_most():
    model = vit(D=192, L=2, pos_std=0.36)
    target = maskprior.init_impulse(model, generator=seeded())
    assert model.positions.std().item() == pytest.approx(0.36, rel=0.03)
    inside = target.amax(-1) == 1
    assert inside.sum(-1).tolist() == [64, 56, 56] and (target[~inside] == 1 / 64).all()
    for attn, X in maskprior.layer_inputs(model, IMAGES):
        p = attn.weights(X).mean(0)
        assert ((p * target).sum(-1) > (p * (1 - target)).amax(-1))[inside].all()


def test_impulse_of_one_head_leaves_out_the_direction_that_layer_norm_removes():
    model = vit(D=48, H=1, L=1, pos_std=0.36)
    target = maskprior.init_impulse(model, generator=seeded())
    # Divided by a singular value of 0 it was 0.98.
    assert maskprior.prior_tv(model, target, IMAGES) < 0.8


@pytest.mark.parametrize('attempt, reason', [
    (lambda: maskprior.Attention(8, 2, torch.ones(4, 4).tril(-1).bool()), 'query token 0 has no'),
    (lambda: vit()(torch.zeros(1, 3, 16, 64)), '4 x 16 patches for a model of 8 x 8 patches'),
    (lambda: vit()(torch.zeros(1, 3, 24, 24)), '6 x 6 patches for a model of 8 x 8 patches'),
    (lambda: prior_matrix(-torch.ones(1), 1, 0), 'a distance is below 0'),
    (lambda: prior_matrix(torch.ones(1), math.inf, 0), 'positive and finite'),
    (lambda: prior_matrix(torch.ones(1), 1e39, 0), 'not finite in fp32'),
    *[(lambda M0=M0: maskprior.init_mask(words(), M0), 'not finite') for M0 in (
        torch.full((6, 6), -math.inf), torch.full((2, 6, 6), math.nan),
        torch.full((6, 6), -1e300, dtype=torch.float64))],
    *[(lambda size=size: maskprior.init_mask(words(), torch.zeros(size)), 'N = 6 and H = 2')
      for size in ((5, 5), (3, 6, 6), (6,), (1, 2, 6, 6))],
    (lambda: maskprior.init_impulse(vit(positions='sincos')), '--positions learned'),
    (lambda: maskprior.init_impulse(vit(class_token=True)), 'without a class token'),
    (lambda: maskprior.init_qk_svd(vit(positions='sincos'), prior_matrix(
        tasks.locality(8, 8, 3), 0.5, 2.), IMAGES), r'cannot hold .* prior_tv 0.* \|W_Q\| \de\+0')])
def test_what_cannot_work_is_refused_with_the_reason(attempt, reason):
    with pytest.raises(ValueError, match=reason):
        attempt()


# --------------------------------------------------------------------------------- the measures

def test_prior_tv_is_of_the_mean_attention_over_layers_heads_and_informative_rows():
    model = maskprior.Transformer(2, (2,), outputs=1, D=4, H=2, L=2)
    # Of two inputs, the same in each head and row; on average 1/2, 1/2 and 3/4, 1/4.
    for block, p in zip(model.blocks, ([[1., 0.], [0., 1.]], [[0.75, 0.25], [0.75, 0.25]])):
        p = torch.tensor(p)[:, None, None].expand(2, 2, 2, 2)
        block.attn.weights = lambda X, p=p: p
    # Row 1 of head 0 asks nothing.
    target = torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[1., 0.], [0.9, 0.1]]])
    layers = (1 / 4 + 1 / 2 + 0.4) / 3, (0 + 1 / 4 + 0.15) / 3
    found = maskprior.prior_tv(model, target, torch.tensor([[0, 1], [1, 0]]))
    assert found == pytest.approx(sum(layers) / 2)
    # Under a hard mask, a row asks nothing if it is uniform over what it may see.
    for block in model.blocks:
        block.attn.allowed = torch.ones(2, 2).tril().bool()
    target = torch.tensor([[1., 0.], [0.75, 0.25]])
    assert maskprior.prior_tv(model, target, torch.tensor([[0, 1], [1, 0]])) == pytest.approx(1 / 8)


def test_an_attention_of_nan_holds_no_prior():
    task, model, target = tiny('mask')
    model.blocks[0].attn.q.weight.data.fill_(math.nan)
    assert math.isnan(maskprior.prior_tv(model, target, task.probe))
    with pytest.raises(ValueError, match='cannot hold this prior .* prior_tv nan'):
        maskprior.check_held(model, prior_matrix(task.distance, 8., 4.), task.probe, 'qk-svd')


def test_relative_change_by_hand():
    _, model, _ = tiny('mask')
    model.blocks[0].attn.k.weight.data.zero_()
    model.blocks[1].attn.k.weight.data.zero_()
    initial = maskprior.prior_weights(model)
    for block in model.blocks:
        block.attn.M.data *= 1.5
    # From zero, the change is the norm: of 32 x 32 weights.
    model.blocks[0].attn.k.weight.data += 0.25
    assert maskprior.relative_change(model, initial) == {'M': 0.5, 'W_Q': 0., 'W_K': 0.25 * 32}


def test_an_arm_of_ones_own_may_set_the_queries_to_zero(tmp_path, monkeypatch, capsys):
    def init_zero(model, M0, x, generator):
        for block in model.blocks:
            block.attn.q.weight.data.zero_()
    monkeypatch.setitem(maskprior.ARMS, 'zero', init_zero)
    options = [*SMALL, '--steps', '3', '--layers', '1', '--init', 'zero', '--out', tmp_path]
    train.main([str(option) for option in options])
    result = json.loads((tmp_path / 'parity2-zero-s0' / 'result.json').read_text())
    assert 0 < result['change_W_Q'] < 10
    code, line = refused(capsys, *options, '--name', 'far', '--lr', '1e17')
    assert code == 1 and line.startswith('train.py: diverged: loss is ')
    train.main(['--list'])
    assert '\n  zero ' in capsys.readouterr().out


def test_a_task_or_arm_of_ones_own_of_another_size_is_refused(monkeypatch, capsys):
    class Wide(tasks.Boolean):
        def __init__(self, name):
            super().__init__(name)
            self.distance = torch.ones(7, 7)
    monkeypatch.setitem(maskprior.ARMS, 'small', lambda *_: torch.ones(3, 3))
    assert 'its target is [3, 3]; it must' in refused(capsys, *SMALL, '--init', 'small')[1]
    monkeypatch.setitem(tasks.TASKS, 'parity2', Wide)
    assert 'M0 is [7, 7]; it must' in refused(capsys, *SMALL, '--init', 'qk-svd')[1]


# ------------------------------------------------------------------------ the settings of a run

def test_learning_rate_by_hand():
    settings = train.parse(['--steps', '100', '--warmup', '10', '--lr', '2'])
    for step, rate in ((4, (1 + math.cos(math.pi * 0.04)) / 2), (50, 1), (100, 0)):
        assert train.learning_rate(step, settings) == pytest.approx(rate)


@pytest.mark.parametrize('clip', ['0', '0.01'])
def test_the_gradient_is_cut(clip, tmp_path):
    model, _, _ = trained(tmp_path, '--clip', clip)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert norm == pytest.approx(0.01, rel=1e-5) if clip == '0.01' else norm > 0.1


@pytest.mark.parametrize('bf16', [False, True])
def test_bf16_is_the_type_of_the_products_and_not_of_the_weights(bf16, tmp_path, monkeypatch):
    types = set()
    def spy(q, *others):
        if torch.is_grad_enabled():
            # The type of the products, and whether the fused kernel is asked for.
            types.add((q.dtype, others[-1]))
        return attend(q, *others)
    monkeypatch.setattr(maskprior, 'attend', spy)
    model, _, checkpoint = trained(tmp_path, '--bf16', str(bf16), '--sdpa', str(bf16))
    assert types == {(torch.bfloat16 if bf16 else torch.float32, bf16)}
    moments = [m for state in checkpoint['optimiser']['state'].values() for m in state.values()]
    assert {w.dtype for w in [*model.parameters(), *moments]} == {torch.float32}


@pytest.mark.parametrize('options, learns', [
    ([], 'M q k v'), (['--freeze-mask'], 'q k v'), (['--freeze-mask', 'false'], 'M q k v'),
    (['--freeze-qk'], 'M v'), (['--freeze-qk', '--freeze-mask'], 'v')])
def test_what_is_frozen_does_not_learn(options, learns, tmp_path):
    before = train.build(train.parse([*SMALL, *options]))[1].state_dict()
    after = trained(tmp_path, *options)[0].state_dict()
    changed = {name.split('.')[3] for name, w in after.items()
               if '.attn.' in name and not torch.equal(w, before[name])}
    assert changed - {'proj'} == set(learns.split())


def test_mask_lr_is_how_many_times_as_far_m_moves(tmp_path):
    start = train.build(train.parse(SMALL))[1].state_dict()
    once, five, never = ({name: w - start[name] for name, w in trained(
        tmp_path, '--mask-lr', times, '--lr', '0.01')[0].state_dict().items()} for times in '150')
    for name in start:
        times = 5 if name.endswith('M') else 1
        assert torch.allclose(five[name], times * once[name], atol=1e-5)
        assert torch.equal(never[name], once[name]) or times == 5 and not never[name].any()
    # A step of Adam is the learning rate, whatever the size of the gradient.
    assert once['blocks.0.attn.M'].abs().max().item() == pytest.approx(0.01, rel=0.02)


def attentions(task, model):
    return torch.stack([attn.weights(z) for attn, z in maskprior.layer_inputs(model, task.probe)])


def test_held_inputs_leave_the_attention_to_q_k_and_m_alone():
    task, model, _ = tiny('mask', '--hold-inputs')
    before, outputs = attentions(task, model), model(task.probe)
    assert torch.equal(before, attentions(*tiny('mask')[:2]))
    own = {'q', 'k', 'M'}
    for name, p in model.named_parameters():
        if p.requires_grad and not own & set(name.split('.')):
            p.data += torch.randn_like(p)
    assert torch.equal(attentions(task, model), before)
    assert not torch.allclose(model(task.probe), outputs)
    for name, p in model.blocks[1].attn.named_parameters():
        if own & set(name.split('.')):
            before = attentions(task, model)
            p.data += torch.randn_like(p)
            assert not torch.allclose(attentions(task, model), before)
    # No dropout in what is held.
    model.untrained.dropout.p = 0.5
    model.train()
    assert torch.equal(model(task.probe), model(task.probe))


def test_held_inputs_and_frozen_queries_keep_prior_tv(tmp_path, quick_arms):
    log = trained(tmp_path, '--hold-inputs', '--freeze-qk', '--init', 'qk-svd', '--steps', '3')[1]
    assert len({row['loss'] for row in log}) == 4 and len({row['prior_tv'] for row in log}) == 1


@pytest.mark.parametrize('options', [[], ['--mask-lr', '3'], ['--hold-inputs']])
def test_every_parameter_is_in_one_group_and_m_takes_no_weight_decay(options):
    settings = train.parse([*SMALL, '--lr', '1e-2', '--weight-decay', '0.1', *options])
    _, model, _ = train.build(settings)
    optimiser = train.make_optimiser(model, settings)
    decayed, *free = ([id(p) for p in group['params']] for group in optimiser.param_groups)
    learnable = [p for p in model.parameters() if p.requires_grad]
    assert sorted(decayed + sum(free, [])) == sorted(map(id, learnable))
    # The linear layers: six a block, and the head.
    assert len(decayed) == 2 * 6 + 1 and all(p.ndim == 2 for p in learnable if id(p) in decayed)
    M, W = model.blocks[0].attn.M, model.head.weight
    before = M.detach().clone(), W.norm().item()
    for p in learnable:
        p.grad = torch.zeros_like(p)
    for _ in range(1000):
        optimiser.step()
    assert torch.equal(M, before[0]) and W.norm() < 0.5 * before[1]


# ------------------------------------------------------------------------------------- Boolean

def test_fourier_coefficients_by_hand():
    x = tasks.cube(4)
    assert x[[0, 5]].tolist() == [[1, 1, 1, 1], [-1, 1, -1, 1]]
    f = 3 + 2 * x[:, 1] - x[:, 0] * x[:, 3]
    assert tasks.fourier(f).tolist() == [3, 0, 2, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize('name, hole, on_hole, accuracy, squared_error', [
    ('parity2', '+-', lambda x, f: 3 + 0 * f, 0.75, 4),
    ('parity2', '--', lambda x, f: -3 + 0 * f, 0.75, 4),
    ('maj3', '++-', lambda x, f: -3 + 0 * f, 0.875, 2),
    ('maj3', '--*', lambda x, f: -1 + 2 * x[:, 2], 0.875, 1),
    ('cyclic3', '---', lambda x, f: f + 8, 0.875, 8),
    ('parity3', '++-', lambda x, f: 7 + 0 * f, 0.875, 8), ('diff2', '+-', lambda x, f: f, 1, 0)])
def test_mdi_equals_the_values_worked_out_by_hand(name, hole, on_hole, accuracy, squared_error):
    x = tasks.cube(15)
    f = tasks.BOOLEAN_TARGETS[name][0](x)
    wanted = torch.where(tasks.in_hole(x, hole), on_hole(x, f), f)
    assert torch.allclose(tasks.minimum_degree_interpolator(f, hole), wanted, atol=1e-4)
    reference = tasks.Boolean(name, hole).reference
    assert reference['mdi_accuracy'] == accuracy
    assert reference['mdi_loss'] == pytest.approx(squared_error, abs=1e-6)


@pytest.mark.parametrize('hole', ['+-', '-*+', '*-', '---'])
def test_mdi_equals_least_squares_from_the_highest_degree_down(hole, n=4):
    """An independent solver on a random function: minimise a degree's mass, keep the minimisers."""
    g = f = torch.randn(2 ** n, generator=seeded(), dtype=torch.float64)
    x = tasks.cube(n).double()
    # What an interpolant may add to f.
    free = torch.eye(2 ** n, dtype=torch.float64)[:, tasks.in_hole(x, hole)]
    for degree in range(n, -1, -1):
        monomials = [x[:, list(s)].prod(1) for s in combinations(range(n), degree)]
        rows = torch.stack(monomials) / 2 ** n
        A = rows @ free
        g = g - free @ torch.linalg.pinv(A, rtol=1e-9) @ rows @ g
        _, S, Vh = torch.linalg.svd(A)
        free = free @ Vh[(S > 1e-9).sum():].T
    assert torch.allclose(tasks.minimum_degree_interpolator(f, hole), g)


@pytest.mark.parametrize('name, values', [
    ('parity2', [1, 1, -1]), ('maj3', [1, -1, 1]), ('parity3', [1, 1, -1]), ('diff2', [0, 0, -1]),
    # x0 and x1 flipped: the windows (14,0,1) and (0,1,2) hold both; (13,14,0) and (1,2,3) flip.
    ('cyclic3', [15, 15 - 2 * 2, 15 - 2 * 3])])
def test_targets_by_hand(name, values):
    x = torch.ones(3, 15)
    x[1, :2] = x[2, 0] = -1
    assert tasks.BOOLEAN_TARGETS[name][0](x).tolist() == values


# The second is the variance of a sum of 15 uncorrelated signs.
@pytest.mark.parametrize('name, variance', [('parity2', 1), ('cyclic3', 15)])
def test_fitted_is_a_hundredth_of_the_targets_variance(name, variance):
    task = tasks.Boolean(name)
    fitted = [task.fitted({'loss_seen': share * variance}) for share in (0.0099, 0.0101)]
    assert fitted == [True, False]


def test_the_nearest_value_is_the_answer_a_tie_is_wrong_and_shapes_must_agree():
    right = lambda *of: tasks.nearest_is_right(*map(torch.tensor, of)).tolist()
    assert right([0., -0.1, -9.], [1., -1., 1.], [-1., 1.]) == [False, True, False]
    assert right([-1., -0.9, 2.], [1., 1., 3.], [-3., 1., 3.]) == [False, True, False]
    with pytest.raises(AssertionError):
        right([[0.], [0.]], [1., 1.], [-1., 1.])
    with pytest.raises(AssertionError):
        tasks.Boolean('parity2').loss(lambda x: torch.zeros(3), None, torch.ones(3))


def of_bits(function):
    """A model that is a function of x in {-1, +1}^15, from the tokens after the class token."""
    return lambda tokens: function(1. - 2 * tokens[:, 1:])[:, None]


# +3 on the hole, where -1 is right.
MDI = of_bits(lambda x: 1 + x[:, 0] - x[:, 1])


def test_the_measures_of_a_model_that_is_the_mdi_and_of_one_that_is_zero():
    task = tasks.Boolean('parity2')
    assert task.evaluate(MDI) == dict(
        accuracy=0.75, accuracy_seen=1., accuracy_unseen=0., loss=4., loss_seen=0.,
        prediction_unseen=3., fourier={'1': 1., 'x0': 1., 'x1': -1., 'x0*x1': 0.})
    zero = task.evaluate(of_bits(lambda x: 0 * x[:, 0]))
    assert zero['accuracy'] == 0 and zero['loss'] == 1 and not any(zero['fourier'].values())


@pytest.mark.parametrize('model', [MDI, of_bits(lambda x: x[:, 0] * x[:, 1])])
def test_a_quick_evaluation_agrees_with_the_full_one(model):
    task = tasks.Boolean('parity2')
    quick, full = task.evaluate(model, quick=True), task.evaluate(model)
    assert quick.pop('inputs') == 2048 and quick == {name: full[name] for name in quick}
    assert quick.keys() == {'accuracy', 'accuracy_seen', 'accuracy_unseen', 'loss', 'loss_seen'}


def test_training_never_sees_the_hole():
    x, y = tasks.Boolean('maj3', '+*-').batch(seeded(), 20000)
    bits = 1 - 2 * x[:, 1:]
    assert not ((bits[:, 0] == 1) & (bits[:, 2] == -1)).any() and len(x.unique(dim=0)) > 12000
    assert torch.equal(bits[:, :3].sum(1).sign().float(), y)


@pytest.mark.parametrize('bits, monomial', [((3, 4, 5, 6), 'x3*x4*x5*x6'), ((2, 3), 'x2*x3')])
def test_the_table_of_a_task_of_ones_own_ends_with_its_monomial(bits, monomial, monkeypatch):
    own = (lambda x: x[:, bits].prod(1), bits, '+-')
    monkeypatch.setitem(tasks.BOOLEAN_TARGETS, 'own', own)
    task = tasks.Boolean('own')
    header, *rows = task.summary(task.measure(task.y) | task.reference | {'init': 'mask'})
    assert header.split()[-1] == monomial
    assert [row.split()[-1] for row in rows] == ['+1.00'] * 3


# ---------------------------------------------------------------------------------- arithmetic

def text(ids):
    return [''.join(tasks.VOCABULARY[t] for t in row) for row in ids]


@pytest.mark.parametrize('sign, order, texts', [
    ('+', 'msb', ['007+005=0012', '999+999=1998']), ('+', 'lsb', ['007+005=2100', '999+999=8991']),
    ('*', 'msb', ['007*005=000035', '999*999=998001']),
    ('*', 'lsb', ['007*005=530000', '999*999=100899'])])
def test_arithmetic_texts_by_hand(sign, order, texts):
    a, b = torch.tensor([[7, 999], [5, 999]])
    assert text(tasks.arithmetic_text(a, b, sign, 3, order)) == texts


def needs(needed, layout):
    """For each head {token: the tokens it needs} by name, without the rows that ask nothing."""
    layout = layout.split()
    return [{layout[i]: ' '.join(layout[j] for j in row.nonzero()[:, 0])
             for i, row in enumerate(head) if row.any()} for head in needed]


def test_the_prior_of_addition_by_hand():
    # '=' emits the first digit that is written, and each digit's row the next one.
    layout = 'a2 a1 a0 + b2 b1 b0 = c0 c1 c2'
    digits = {'=': 'a0 b0', 'c0': 'a1 b1', 'c1': 'a2 b2', 'c2': 'c2'}
    carry = {'=': '=', 'c0': '= c0', 'c1': 'c0 c1', 'c2': 'c1 c2'}
    for without, wanted in {None: (digits, carry), 'carry': (digits, {}),
                            'digits': ({}, carry)}.items():
        found = needs(tasks.arithmetic_structure('+', 3, 4, without=without), layout)
        assert found == [wanted[0]] * 3 + [wanted[1]]
    # Most significant digit first: the carry needs all the lower digits.
    assert needs(tasks.arithmetic_structure('+', 2, 2, 'msb'), 'a1 a0 + b1 b0 = c2 c1') == [
        {'=': '=', 'c2': 'a1 b1', 'c1': 'a0 b0'}, {'=': 'a1 a0 b1 b0', 'c2': 'a0 b0', 'c1': 'c1'}]


def test_the_prior_of_multiplication_by_hand():
    layout = 'a2 a1 a0 * b2 b1 b0 = c0 c1 c2 c3 c4'
    *digits, carry = [dict(zip('= c0 c1 c2 c3 c4'.split(), keys.split(', '))) for keys in (
        'a0 b0, a0 b1, a0 b2, c2, c3, c4', '=, a1 b0, a1 b1, a1 b2, c3, c4',
        '=, c0, a2 b0, a2 b1, a2 b2, c4', '=, = c0, c0 c1, c1 c2, c2 c3, c3 c4')]
    products = [{f'b{j}': f'a{h} b{j}' for j in range(3)} for h in range(3)]
    both = [d | p for d, p in zip(digits, products)]
    for without, wanted in {None: [*both, carry], 'products': [*digits, carry],
                            'digits': [*products, carry], 'carry': [*both, {}]}.items():
        assert needs(tasks.arithmetic_structure('*', 3, 4, without=without), layout) == wanted
    # The union over the heads.
    shared, = needs(tasks.Arithmetic('mul3', 0.001, per_head=False).distance[None] == 0, layout)
    assert shared['c1'] == 'a2 a1 a0 b2 b1 b0 c0 c1' and shared['b1'] == 'a2 a1 a0 b1'


@pytest.mark.parametrize('sign, n', [('+', 3), ('+', 5), ('*', 3)])
@pytest.mark.parametrize('order', ['lsb', 'msb'])
def test_what_the_prior_opens_is_enough_for_the_answer(sign, n, order):
    """Through 4 layers a row reaches every digit that its answer digit depends on."""
    needed = tasks.arithmetic_structure(sign, n, n + 1, order)
    N = needed.shape[1]
    assert not needed.triu(1).any()
    reach = torch.linalg.matrix_power((needed.any(0) | torch.eye(N).bool()).float(), 4) > 0
    for row in range(2 * n + 1, N):
        k = row - 2 * n - 1 if order == 'lsb' else N - 1 - row
        # lsb: the digit before stands for what is further below.
        for i in range(max(0, k - 3) if order == 'lsb' else 0, min(k, n - 1) + 1):
            assert reach[row, n - 1 - i] and reach[row, 2 * n - i], (row, i)


@pytest.mark.parametrize('n, frac', [(1, 0.3), (1, 0.7), (2, 0.03), (2, 0.7), (3, 0.03)])
def test_no_test_pair_is_a_training_pair_exchanged(n, frac):
    split = tasks.arithmetic_split(n, frac, seed=0)
    seen, unseen = ({tuple(pair) for pair in pairs.tolist()} for pairs in split)
    exchanged = {(b, a) for a, b in seen}
    assert len(seen) == len(split[0]) == round(frac * 100 ** n)
    assert len(unseen) == len(split[1]) <= 10_000 and not unseen & (seen | exchanged)
    assert max(max(pair) for pair in seen | unseen) < 10 ** n
    # Of one digit there are so few that all the rest is tested.
    every = {divmod(pair, 10) for pair in range(100)}
    assert n > 1 or unseen == every - seen - exchanged
    assert not torch.equal(split[0], tasks.arithmetic_split(n, frac, seed=1)[0])


def school(x, spoilt=0):
    """Answers the questions x of three-digit addition, the last digit off by `spoilt`."""
    a, b = (x[:, start:start + 3] @ torch.tensor([100, 10, 1]) for start in (0, 4))
    answer = tasks.arithmetic_text(a, b, '+', 3)[:, 8:]
    answer[:, -1] = (answer[:, -1] + spoilt) % 10
    return F.one_hot(answer, 13).float()


def test_evaluation_counts_digits_and_exact_matches():
    task = tasks.Arithmetic('add3', 0.0001)
    names = 'sequence_accuracy', 'sequence_accuracy_seen', 'digit_accuracy', 'accuracy_of_digit'
    right, spoilt = task.evaluate(school), task.evaluate(partial(school, spoilt=1))
    assert [right[name] for name in names] == [1, 1, 1, [1, 1, 1, 1]] and right['wrong'] == []
    assert [spoilt[name] for name in names] == [0, 0, 0.75, [1, 1, 1, 0]]
    assert len(spoilt['wrong']) == 5
    a, b, truth, answer = map(int, spoilt['wrong'][0].replace('=', '+').replace(
        ', answered ', '+').split('+'))
    assert a + b == truth == answer - 1000


def test_decoding_is_greedy_whatever_stands_in_the_answers_place():
    task, model, _ = train.build(train.parse(
        [*SMALL, '--task', 'add3', '--frac', '0.0001', '--init-std', '0.5']))
    growing = task.test[:200, :8]
    for i in range(4):
        growing = torch.cat([growing, model(growing)[:, i].argmax(-1, keepdim=True)], 1)
    garbage = torch.cat([growing[:, :8], torch.full((200, 4), 9)], 1)
    for place in (task.test[:200], garbage):
        assert torch.equal(task.decode(model, place), growing[:, 8:])
    assert len(growing[:, 8:].unique(dim=0)) > 1


def test_arithmetic_trains_on_the_answers_of_training_pairs():
    task = tasks.Arithmetic('mul3', 0.0001)
    x, y = task.batch(seeded(), 500)
    found = set(text(torch.cat([x, y[:, -1:]], 1)))
    a, b = tasks.arithmetic_split(3, 0.0001, 0)[0].T
    assert len(found) > 90 and found <= set(text(tasks.arithmetic_text(a, b, '*', 3)))
    assert torch.equal(x[:, 8:], y[:, :-1])
    # 12 of 24 on the right one.
    outputs = torch.zeros(500, 6, 13).scatter(2, y[..., None], math.log(12.))
    assert task.loss(lambda x: outputs, x, y).item() == pytest.approx(math.log(2), abs=1e-6)


# ------------------------------------------------------------------------------------- data files

LABELS = [*range(10)] * 2


# Image s is all s, but for its corner: 255 in red at (0, 0).
MARKED = torch.arange(20, dtype=torch.uint8).repeat_interleave(3072).view(20, 3072)
MARKED[:, 0] = 255


def pickled(images, labels, batches=2, module=b'numpy.core', by_columns=False):
    """A batch as Python 2 pickles it with numpy; by hand, so that no numpy is needed."""
    pixels = bytes(images.flatten().tolist())
    return b''.join([
        b'(U\x0bbatch_labelU\x15training batch 1 of %d' % batches,
        b'U\x04datac%b.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS"b"\ntR' % module,
        b'(I1\n(I%d\nI3072\ntcnumpy\ndtype\n(S"u1"\nI0\nI1\ntR(I3\nS"|"\n' % len(images),
        b'NNNI-1\nI-1\nI0\ntbI0%d\nT' % by_columns, struct.pack('<I', len(pixels)), pixels, b'tb',
        b'U\x06labels(', *(b'I%d\n' % label for label in labels), b'ld.'])


def make_cifar(root, batches=2, binary=False, **how):
    """CIFAR-10 in `root`: the marked images in each batch, and in reverse in the test's."""
    folder = root / ('cifar-10-batches-bin' if binary else 'cifar-10-batches-py')
    folder.mkdir(parents=True)
    for i in range(batches + 1):
        name, step = (f'data_batch_{i + 1}', 1) if i < batches else ('test_batch', -1)
        records = [bytes([y, *x.tolist()]) for x, y in zip(MARKED, LABELS)][::step]
        images = MARKED if step == 1 else MARKED.flip(0)
        data = b''.join(records) if binary else pickled(images, LABELS[::step], batches, **how)
        (folder / (f'{name}.bin' if binary else name)).write_bytes(data)
    return folder


@pytest.mark.parametrize('batches, how, archive', [
    (2, {}, False), (2, {}, True), (3, dict(module=b'numpy._core'), False),
    (5, dict(binary=True), False)])
def test_every_layout_of_cifar_gives_its_images_and_labels(tmp_path, batches, how, archive):
    folder = make_cifar(tmp_path / 'unpacked' if archive else tmp_path, batches, **how)
    if archive:
        with tarfile.open(tmp_path / 'cifar-10-python.tar.gz', 'w:gz') as tar:
            tar.add(folder, folder.name)
    (x, y), (test_x, test_y) = tasks.cifar('cifar10', tmp_path)
    images = MARKED.view(-1, 3, 32, 32)
    assert torch.equal(x, images.repeat(batches, 1, 1, 1)) and y.tolist() == LABELS * batches
    assert torch.equal(test_x, images.flip(0)) and test_y.tolist() == LABELS[::-1]


def test_a_binary_record_of_cifar100_has_a_coarse_and_a_fine_label_and_three_planes(tmp_path):
    (tmp_path / 'cifar-100-binary').mkdir()
    for file in ('train.bin', 'test.bin'):
        record = [3, 77, 255] + [10] * 1023 + [20] * 1024 + [30] * 1024
        (tmp_path / 'cifar-100-binary' / file).write_bytes(bytes(record))
    (x, y), _ = tasks.cifar('cifar100', tmp_path)
    assert y.tolist() == [77] and x[0, 0, 0, :2].tolist() == [255, 10]
    assert (x[0, 1] == 20).all() and (x[0, 2] == 30).all()


class Gadget:
    def __reduce__(self):
        return os.mkdir, ('marker',)


TWO = torch.zeros(2, 3072, dtype=torch.uint8)


@pytest.mark.parametrize('file, content, says', [
    ('data_batch_1', pickle.dumps({'data': Gadget()}, 2), 'data_batch_1 is no CIFAR.*it asks for'),
    ('data_batch_2', pickled(TWO, [1, 1])[:5000], 'data_batch_2 is no CIFAR batch'),
    ('test_batch', b'', 'test_batch is empty'), ('data_batch_3', None, 'data_batch_3 is missing'),
    ('data_batch_1', pickle.dumps({'labels': [1]}), 'data_batch_1 is no CIFAR batch'),
    ('data_batch_1', pickle.dumps({'data': b'x' * 3072, 'labels': [1]}), 'that are no array'),
    ('data_batch_1', pickle.dumps({'data': [[0] * 3072], 'labels': 1}), 'data_batch_1 is no CIFAR'),
    ('data_batch_2', pickled(TWO, [1]), 'data_batch_2 holds 1 labels for images of shape'),
    ('data_batch_2', pickled(TWO, [1, 1], by_columns=True), 'data_batch_2 .*by columns'),
    ('data_batch_3.bin', None, 'data_batch_3.bin is missing'),
    ('test_batch.bin', b'x' * 100, 'test_batch.bin is cut off'),
    ('data_batch_1.bin', bytes([11]) + bytes(3072), 'beyond the 10 classes')],
    ids=lambda value: repr(value)[:20])
def test_a_damaged_batch_is_named_and_runs_no_code(tmp_path, monkeypatch, file, content, says):
    folder = make_cifar(tmp_path, batches=5, binary=file.endswith('.bin'))
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tasks.DataError, match=says) as error:
        tasks.cifar('cifar10', tmp_path)
    assert '\n' not in str(error.value) and list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize('member, content', [
    ('../evil', None), ('/tmp/evil', None), ('link', None), ('cannot be read', b''),
    ('cannot be read', b'\x1f\x8b\x08\x00\x00'), ('cannot be read', b'<html>no such file</html>')])
def test_a_damaged_or_foreign_archive_is_named_and_nothing_is_unpacked(tmp_path, member, content):
    path = tmp_path / 'data' / 'cifar-10-python.tar.gz'
    path.parent.mkdir()
    with tarfile.open(path, 'w:gz') as tar:
        info = tarfile.TarInfo(member)
        info.type = tarfile.SYMTYPE if member == 'link' else tarfile.REGTYPE
        tar.addfile(info)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(tasks.DataError, match=f'cifar-10-python.tar.gz .*{member}') as error:
        tasks.cifar('cifar10', tmp_path / 'data')
    assert '\n' not in str(error.value) and [*tmp_path.rglob('*')] == [path.parent, path]


SIZE = 1_280_000
DATA_FILE = bytes(range(256)) * (SIZE // 256)
MD5 = hashlib.md5(DATA_FILE).hexdigest()


# The first `before` bytes are there already.
@pytest.mark.parametrize('before, source, size, md5, says', [
    (None, 'x', 1, MD5, 'nothing is kept'), (None, 'x', SIZE, '0', 'nothing is kept'),
    (None, 'gone', SIZE, MD5, 'cannot be fetched'), (None, 'x', SIZE, MD5, 'MB  md5'),
    (9, 'x', SIZE, MD5, 'md5'), (0, 'x', None, None, 'md5'), (SIZE, 'x', SIZE, MD5, 'is already')])
def test_a_download_is_checked_and_kept_and_a_damaged_file_fetched_again(
        tmp_path, monkeypatch, capsys, before, source, size, md5, says):
    (tmp_path / 'x').write_bytes(DATA_FILE)
    where = tmp_path.as_uri()
    monkeypatch.setitem(tasks.DOWNLOADS, 'cifar10', [(where, f'data/{source}', size, md5)])
    (tmp_path / 'data').mkdir()
    if before is not None:
        (tmp_path / 'data' / source).write_bytes(DATA_FILE[:before])
    argv = ['download', 'cifar10', '--data-dir', str(tmp_path)]
    failed = train.command(lambda: tasks.main(argv), 'tasks.py')
    captured = capsys.readouterr()
    assert says in (captured.err if failed else captured.out)
    kept = {path.name: path.read_bytes() for path in (tmp_path / 'data').iterdir()}
    assert kept == ({} if failed else {source: DATA_FILE})


@pytest.mark.parametrize('task, says', [('imagenet100', 'image-net.org'), *[
    (name, f'python tasks.py download {name}') for name in ('cifar10', 'wikitext2')]])
def test_data_that_is_not_there_is_one_line_that_says_how_to_get_it(tmp_path, capsys, task, says):
    code, line = refused(capsys, '--task', task, '--data-dir', tmp_path, '--out', tmp_path)
    assert code == 1 and says in line and not list(tmp_path.iterdir())


def test_two_writers_of_one_file_have_temporary_files_of_their_own(tmp_path):
    with tasks.replacing(tmp_path / 'x') as first, tasks.replacing(tmp_path / 'x') as second:
        first.write_text('first')
        assert not second.exists()
        second.write_text('second')
    # The outer block ends last.
    assert (tmp_path / 'x').read_text() == 'first'


@pytest.fixture
def imagenet(tmp_path):
    """Folders with what people have in them: five images a class in each split."""
    Image = pytest.importorskip('PIL.Image', reason='Pillow is not installed')
    for split in ('train', 'val'):
        root = tmp_path / 'imagenet100' / split
        for i, name in enumerate(('n01', 'n02')):
            (root / name).mkdir(parents=True)
            Image.new('RGB', (60, 40), (200 * i, 100, 50)).save(root / name / 'a.JPEG')
            # There is no place for the entries of this EXIF.
            exif = b'Exif\0\0MM\0*\xff\xff\xff\xff'
            Image.new('L', (40, 40), 90).save(root / name / 'b.JPG', exif=exif)
            Image.new('CMYK', (40, 90)).save(root / name / 'c.jpeg')
            Image.new('RGB', (40, 40)).save(root / name / 'd.JPEG', format='PNG')
            Image.new('RGB', (40, 40)).save(root / name / 'f.jpg')
        (root / '.ipynb_checkpoints').mkdir()
        (root / '.DS_Store').write_bytes(b'x')
        (root / 'n03').mkdir()
    return tmp_path


@pytest.mark.filterwarnings('ignore:Corrupt EXIF')
def test_imagenet_folders_give_each_image_once_and_damaged_ones_are_named(imagenet):
    load = partial(tasks.imagenet100, imagenet, 32, imagenet / 'cache')
    (x, y), (test_x, test_y) = load()
    assert x.shape == test_x.shape == (10, 3, 32, 32)
    assert y.tolist() == test_y.tolist() == [0] * 5 + [1] * 5
    means = x.float().mean((2, 3))
    assert (means[:2] - torch.tensor([[0., 100, 50], [90, 90, 90]])).abs().max() < 3
    kept = sorted(imagenet.glob('cache/*.u8'))
    assert torch.equal(load()[0][0], x)
    folder = imagenet / 'imagenet100' / 'train' / 'n02'
    (folder / 'e.JPEG').write_bytes((folder / 'a.JPEG').read_bytes()[:300])
    with pytest.raises(tasks.DataError, match='n02/e.JPEG cannot be decoded'):
        load()
    # Nothing half made.
    assert sorted(imagenet.glob('cache/*.[!l]*')) == kept
    (imagenet / 'imagenet100_classes.txt').write_text('n01\nn09\n')
    assert load()[0][1].tolist() == [0] * 5


@pytest.mark.parametrize('files, says', [
    (['/'], 'image-net.org'), (['train/n01/'], '0 classes'),
    (['train/n01/a.JPEG', 'val/n01/'], '1 classes, val of 0'),
    (['train/n01/a.JPEG', 'val/n02/a.JPEG'], 'must be the same'),
    (['train/n01/a.JPEG', 'val/n01/a.JPEG'], 'pip install pillow')])
def test_what_imagenet_lacks_is_named(tmp_path, monkeypatch, files, says):
    monkeypatch.setitem(sys.modules, 'PIL', None)
    for file in files:
        folder, _, name = file.rpartition('/')
        (tmp_path / 'imagenet100' / folder).mkdir(parents=True)
        if name:
            (tmp_path / 'imagenet100' / file).write_text('no image')
    with pytest.raises(tasks.DataError, match=says):
        tasks.imagenet100(tmp_path, 32, tmp_path / 'cache')


def test_of_two_on_a_fresh_cache_one_decodes_and_both_load_every_image(imagenet, monkeypatch):
    """Two threads have one process id, as two containers may."""
    decode, decoded = tasks.decode_image, []

    def slowly(file, side):
        decoded.append(file)
        time.sleep(0.1)
        return decode(file, side)
    monkeypatch.setattr(tasks, 'decode_image', slowly)
    files = sorted(imagenet.rglob('*.JPEG'))
    with tasks.ThreadPoolExecutor() as pool:
        both = [pool.submit(tasks.decode_images, files, 32, imagenet / 'cache') for _ in range(2)]
    first, second = (future.result() for future in both)
    assert sorted(decoded) == files and torch.equal(first, second)
    assert first[0].float().mean((1, 2)).tolist() == pytest.approx([0, 100, 50], abs=3)


def test_what_killed_decoding_left_is_removed_by_the_next(imagenet, monkeypatch):
    arguments = sorted(imagenet.rglob('*.JPEG')), 32, imagenet / 'cache'
    with monkeypatch.context() as patch:
        patch.setattr(tasks, 'decode_image', lambda file, side: time.sleep(60))
        fork = multiprocessing.get_context('fork')
        killed = fork.Process(target=tasks.decode_images, args=arguments)
        killed.start()
    deadline = time.time() + 60
    while not list(imagenet.glob('cache/*.tmp')) and time.time() < deadline:
        time.sleep(0.01)
    killed.terminate()
    killed.join()
    assert len(list(imagenet.glob('cache/*.tmp'))) == 1
    assert len(tasks.decode_images(*arguments)) == 8
    assert sorted(path.suffix for path in imagenet.glob('cache/*')) == ['.lock', '.u8']


# ------------------------------------------------------------------------------------------ images

def image_task(monkeypatch, name, *data, **options):
    """The task `name` of (images, labels) to train and (images, labels) to test on."""
    loader = name if name == 'imagenet100' else 'cifar'
    monkeypatch.setattr(tasks, loader, lambda *_: data)
    return tasks.Images(name, '', **options)


CONSTANTS = {'cifar10': ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
             'cifar100': ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
             'imagenet100': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@pytest.mark.parametrize('name, side, classes', [
    ('cifar10', 32, 10), ('cifar100', 32, 100), ('imagenet100', 28, 2)])
def test_images_are_evaluated_normalised_cropped_and_by_their_own_labels(
        monkeypatch, name, side, classes):
    x, test_x = torch.randint(256, (2, 6, 3, 32, 32), generator=seeded()).byte()
    y, test_y = torch.tensor([[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1]])
    task = image_task(monkeypatch, name, (x, y), (test_x, test_y), image_size=side,
                      patch=side // 2, batch=4)
    mean, std = torch.tensor(CONSTANTS[name]).view(2, 3, 1, 1)
    inside = slice((32 - side) // 2, (32 + side) // 2)
    known = (torch.cat([x, test_x])[..., inside, inside] / 255 - mean) / std
    # The model is right on all but the last test image.
    answers = torch.cat([y, test_y[:-1], torch.tensor([0])])
    sizes = []

    def model(images):
        sizes.append(len(images))
        found = (images[:, None] - known).flatten(2).abs().amax(2) < 1e-5
        return 5. * F.one_hot(answers[found.int().argmax(1)], classes)
    right = math.log(1 + (classes - 1) * math.exp(-5))
    assert task.evaluate(model) == pytest.approx(dict(
        accuracy=5 / 6, accuracy_seen=1., loss=right + 5 / 6, loss_seen=right), abs=1e-5)
    # 111110, of six images.
    assert task.final(model) == {'right_images': '3e'}
    assert torch.allclose(task.probe, known[tasks.permutation(6, 0, 0)])
    # No more at a time than a step trains on: what fits in training fits in evaluation.
    assert sizes == [4, 2, 4, 2, 4, 2]


@pytest.mark.parametrize('side, patch, n_probe', [(32, 4, 256), (56, 8, 256), (56, 2, 20)])
def test_the_probe_has_no_more_patches_than_256_images_of_cifar(monkeypatch, side, patch, n_probe):
    data = torch.zeros(300, 3, 64, 64).byte(), torch.zeros(300).long()
    task = image_task(monkeypatch, 'imagenet100', data, data, image_size=side, patch=patch)
    assert len(task.probe) == n_probe


def test_a_batch_of_images_is_normalised_its_labels_soft_and_the_class_token_free(monkeypatch):
    grey, y = torch.arange(0, 250, 25), torch.arange(10)
    x = grey.byte().view(10, 1, 1, 1).expand(10, 3, 32, 32)
    task = image_task(monkeypatch, 'cifar10', (x, y), (x, y), pool='cls')
    # The two halves of an epoch.
    halves = [task.batch(seeded(), 5, step) for step in (0, 1)]
    images, target = map(torch.cat, zip(*halves))
    # A process takes its share of a batch.
    whole = task.batch(seeded(), 10)[0]
    assert torch.equal(task.batch(seeded(), 10, 0, slice(5, 10))[0], whole[5:])
    mean, std = torch.tensor(CONSTANTS['cifar10'])
    label = target.argmax(1)
    assert torch.equal(label.sort()[0], y)
    assert torch.allclose(target, 0.01 + 0.9 * torch.eye(10)[label])
    centre = (images[:, :, 16, 16] * std + mean) * 255
    assert torch.allclose(centre, grey[label, None].expand(10, 3).float(), atol=1e-3)
    assert task.model['class_token'] and task.model['readout'] == slice(0, 1)
    assert torch.equal(task.distance, F.pad(tasks.locality(8, 8, 3), (1, 0, 1, 0)))


@pytest.mark.parametrize('rows, cols', [(4, 4), (2, 3)])
def test_patches_come_row_by_row_and_the_last_of_a_row_has_none_on_its_right(rows, cols):
    number = torch.arange(rows * cols)
    image = number.view(rows, cols).repeat_interleave(4, 0).repeat_interleave(4, 1).float()
    patches = maskprior.PatchEmbedding(3, 4, 8, (rows, cols))
    patches.proj.weight.data.fill_(1.)
    patches.proj.bias.data.zero_()
    assert torch.equal(patches(image.expand(1, 3, -1, -1))[0, :, 0], 48. * number)
    inside = number % cols < cols - 1
    # Head 2 looks right; there, a patch at the edge is nearest to itself.
    nearest = tasks.locality(rows, cols, 3)[2].argmin(-1)
    assert torch.equal(nearest, number + inside)
    shift = maskprior.shift_targets(rows, cols, 3)[2]
    assert torch.equal(shift, F.one_hot(nearest, rows * cols) * inside[:, None].float())


def test_locality_by_hand():
    near = tasks.locality(3, 4) == 0
    assert near[0].nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert near[5].sum() == 9 and not near[3, 4]
    assert tasks.locality(3, 4).unique().tolist() == [0, 4] and tasks.locality(3, 4, 1).max() == 9
    # Head 1: the squared distance to the patch above.
    above = tasks.locality(3, 4, 3)[1]
    assert above[5, [1, 5, 0, 9, 10]].tolist() == [0, 1, 1, 4, 5] and above[1, 1] == 1
    # Ten heads: the first shift again.
    assert torch.equal(tasks.locality(2, 2, 10)[9], tasks.locality(2, 2, 1)[0])


@pytest.mark.parametrize('arm, options', [
    ('impulse', {}), *[(arm, dict(class_token=token)) for arm in ('mask', 'mimetic', 'qk-opt')
                       for token in (False, True)]])
def test_spatial_priors_leave_no_parameter_without_gradient(arm, options, quick_arms):
    model = vit((4, 4), L=2, pool='mean', **options)
    distance = F.pad(tasks.locality(4, 4, 3), (1, 0, 1, 0) if model.N == 17 else (0, 0))
    x = torch.randn(8, 3, 16, 16)
    maskprior.ARMS[arm](model, prior_matrix(distance, 1., 2.), x, seeded())
    F.cross_entropy(model(x), torch.arange(8)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize('positions', ['sincos', 'learned'])
def test_a_checkpoint_of_another_grid_is_an_error_even_at_equal_size(positions):
    other = vit((2, 8), positions=positions)
    with pytest.raises(RuntimeError, match='positions'):
        vit((4, 4), positions=positions).load_state_dict(other.state_dict())


def test_mimetic_products_have_their_diagonals():
    model = vit(D=192)
    maskprior.init_mimetic(model, generator=seeded())
    attn = model.blocks[0].attn
    for q, k in zip(attn.q.weight.split(64), attn.k.weight.split(64)):
        # Rank 64 of 192 of 0.7 Z + 0.7 I.
        assert 0.35 < (q.T @ k).diagonal().mean() < 0.45
    product = attn.v.weight.T @ attn.proj.weight.T
    assert product.diagonal().mean().item() == pytest.approx(-0.4, abs=0.01)
    rest = product + 0.4 * torch.eye(192)
    assert rest.std().item() == pytest.approx(0.4 / math.sqrt(192), abs=0.005)


def test_mimetic_v_sets_all_that_mimetic_sets_but_q_and_k(tmp_path):
    make_cifar(tmp_path)
    weights = []
    for options in ('mimetic', 'impulse', 'mask --mimetic-v', 'default --mimetic-v'):
        settings = f'--task cifar10 --data-dir {tmp_path} --positions learned --init {options}'
        model = train.build(train.parse(settings.split()))[1]
        # Nor does an arm draw from the global state: here, what dropout, say, would draw next.
        weights.append({'drawn': torch.rand(1)} | {
            name: p for name, p in model.named_parameters()
            if not name.endswith(('.M', '.q.weight', '.k.weight'))})
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(w, other[name]) for name, w in weights[0].items())


def test_sincos_by_hand():
    # Row 1, column 2; frequencies 1 and 1e-4.
    wanted = [f(place * frequency) for place in (2, 1) for f in (math.sin, math.cos)
              for frequency in (1, 1e-4)]
    assert torch.allclose(maskprior.sincos(2, 3, 8)[1, 2], torch.tensor(wanted))


def test_a_vit_equals_one_made_of_torchs_own_modules():
    model, x = vit((4, 4), L=2, positions='sincos', pool='mean'), torch.randn(2, 3, 16, 16)
    maskprior.init_mask(model, prior_matrix(tasks.locality(4, 4, 3), 1., 2.))
    patches = model.tokens.proj
    h = F.conv2d(x, patches.weight.view(-1, 3, 4, 4), patches.bias, stride=4)
    h = h.flatten(2).mT + model.positions.view(16, -1)
    for block in model.blocks:
        attn = block.attn
        mha = torch.nn.MultiheadAttention(96, 3, batch_first=True)
        mha.in_proj_weight.data = torch.cat([attn.q.weight, attn.k.weight, attn.v.weight])
        mha.in_proj_bias.data.zero_()
        mha.out_proj.load_state_dict(attn.proj.state_dict())
        n = block.norm1(h)
        h = h + mha(n, n, n, attn_mask=attn.M.sigmoid().log().repeat(2, 1, 1))[0]
        h = h + block.mlp(block.norm2(h))
    assert torch.allclose(model(x), model.head(model.norm(h).mean(1)), atol=1e-5)


@pytest.mark.parametrize('L, rates', [(3, [0, 0.25, 0.5]), (1, [0.5])])
def test_stochastic_depth_rises_to_its_rate(L, rates):
    assert [block.drop_path for block in vit(drop_path=0.5, L=L).blocks] == rates


# ------------------------------------------------------------------------------------ augmentation

PICTURE = torch.randint(256, (1, 3, 8, 8), generator=seeded()).float()
GREY = 0.299 * PICTURE[:, :1] + 0.587 * PICTURE[:, 1:2] + 0.114 * PICTURE[:, 2:]


def augmented(side=8, geometry={}, **given):
    """PICTURE after augment(), in grey values; what is not given does nothing."""
    p = dict(brightness=1., contrast=1., saturation=1., posterize=1., solarize=2., erase=[0.] * 4)
    p = {name: torch.tensor(value)[None] for name, value in (p | given).items()}
    p['geometry'] = tasks.affine(1, **geometry)[:, :2]
    return 255 * tasks.augment(PICTURE.byte(), p, side, torch.tensor(0.), torch.tensor(1.))


@pytest.mark.parametrize('given, wanted', [
    ({}, PICTURE), (dict(brightness=0.5), PICTURE / 2),
    (dict(saturation=0.), GREY.expand(1, 3, 8, 8)), (dict(saturation=0.5), (GREY + PICTURE) / 2),
    (dict(contrast=0.), GREY.mean().expand(1, 3, 8, 8)),
    (dict(contrast=1.5), (1.5 * PICTURE - 0.5 * GREY.mean()).clamp(0, 255)),
    (dict(solarize=0.1), torch.where(PICTURE >= 25.5, 255 - PICTURE, PICTURE)),
    (dict(posterize=16.), (PICTURE.byte() & 0b11110000).float()),
    (dict(geometry=dict(xx=-1.)), PICTURE.flip(3)),
    (dict(geometry=dict(xx=0., xy=-1., yx=1., yy=0.)), PICTURE.rot90(1, (2, 3))),
    # Two to the left, one down; the lower left quarter.
    (dict(geometry=dict(x1=0.5, y1=-0.25)), F.pad(PICTURE[..., :7, 2:], (0, 2, 1, 0))),
    (dict(side=4, geometry=dict(xx=0.5, yy=0.5, x1=-0.5, y1=0.5)), PICTURE[..., 4:, :4]),
    (dict(erase=[0.25, 0.5, 0.75, 1.]), torch.cat([
        PICTURE[..., :2, :], F.pad(PICTURE[..., 2:6, :4], (0, 4)), PICTURE[..., 6:, :]], 2))])
def test_augmentations_by_hand(given, wanted):
    assert torch.allclose(augmented(**given), wanted, atol=1e-2)


def test_operations_at_magnitude_9_of_10():
    p, _ = tasks.draw_operations(seeded(), 4000, 2, 9)
    # Drawn twice, too, it is this threshold, and four bits.
    assert p['solarize'].unique().tolist() == pytest.approx([25.5 / 255, 2])
    assert p['posterize'].unique().tolist() == [1, 16]
    for name in ('brightness', 'contrast', 'saturation'):
        assert p[name].unique().tolist() == pytest.approx(
            [0.19 ** 2, 0.19, 0.19 * 1.81, 1, 1.81, 1.81 ** 2])
        assert abs((p[name] != 1).float().mean() - (1 - 0.9 ** 2)) < 0.03


def test_geometry_at_magnitude_10():
    found = tasks.draw_operations(seeded(), 4000, 1, 10)[1][:, :2].reshape(-1, 6)
    wanted = {(1, 0, 0, 0, 1, 0)}
    for s in (1, -1):
        wanted |= {(0.866, -s / 2, 0, s / 2, 0.866, 0), (1, 0.3 * s, 0.3 * s, 0, 1, 0),
                   (1, 0, 0, 0.3 * s, 1, 0.3 * s), (1, 0, 0.906 * s, 0, 1, 0),
                   (1, 0, 0, 0, 1, 0.906 * s)}
    assert {tuple(round(n, 3) for n in image) for image in found.tolist()} == wanted


def test_the_draws_of_the_recorded_runs_stay_as_they_are():
    generator, other = seeded(), seeded()
    p = tasks.draw_augmentation(generator, 64, 32)
    flipped = torch.rand(64, generator=other) < 0.5
    shift = torch.randint(-4, 5, (2, 64), generator=other)
    torch.rand(64 * 5, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
    assert torch.equal(p['geometry'][:, 0, 0] < 0, flipped)
    assert torch.equal(p['geometry'][:, :, 2].T * 16, shift.float())
    assert (p['brightness'] == 1).all() and (p['erase'] == 0).all()


def test_the_resized_crop_and_erasing_have_torchvisions_distributions():
    p = tasks.draw_augmentation(seeded(), 20_000, 256, crop='resized', erasing=0.25)
    size, centre = p['geometry'][:, [0, 1], [0, 1]].abs(), p['geometry'][:, :, 2]
    area, aspect = size.prod(1), size[:, 0] / size[:, 1]
    assert area.mean().item() == pytest.approx(0.479, abs=0.005)
    assert (size == 1).any(1).float().mean().item() == pytest.approx(0.009, abs=0.0025)
    assert 0.078 < area.min() < 0.09 and area.max() > 0.95
    assert 0.74 < aspect.min() and aspect.max() < 1.35 and abs(aspect.log().mean()) < 0.005
    assert (centre.abs() + size).max() <= 1 + 1e-6 and centre.std() > 0.2
    erased = p['erase'][p['erase'][:, 2] > 0]
    area = (erased[:, 2:] - erased[:, :2]).prod(1)
    area = area[area > 0]
    assert abs(len(area) / 20_000 - 0.25) < 0.01 and erased.max() <= 1
    assert 0.018 < area.min() < 0.022 and 0.32 < area.max() < 0.34


@pytest.mark.parametrize('seed', range(5))
def test_mixup_and_cutmix_mix_labels_as_they_mix_pixels(seed):
    # Black, white, black, white.
    x, y = torch.arange(4.).view(4, 1, 1, 1).expand(4, 3, 8, 8) % 2, torch.eye(4)
    for mixup, cutmix in ((1., 0.), (0., 1.)):
        mixed, soft = tasks.mix(x, y, tasks.draw_mix(seeded(seed), 4, mixup, cutmix))
        white = mixed.mean((1, 2, 3))
        assert torch.allclose(white, soft[:, 1] + soft[:, 3])
        assert torch.allclose(soft.sum(1), torch.ones(4)) and 0 < soft[0, 1] < 1
        assert len(mixed[0].unique()) == 1 + bool(cutmix)
    mixed, soft = tasks.mix(x, y, tasks.draw_mix(seeded(seed), 4, 0., 0.))
    assert torch.equal(mixed, x) and torch.equal(soft, y)
    boxes = [tasks.draw_mix(seeded(20 * seed + i), 4, 1., 1.)['box'].any() for i in range(20)]
    assert 4 <= sum(boxes) <= 16


def test_shuffled_epochs_are_permutations():
    # Two epochs in five batches.
    seen = torch.cat([tasks.shuffled(10, 4, step, seed=3) for step in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert not torch.equal(seen[:10], seen[10:])


# ---------------------------------------------------------------------------------------- language

def lm(N=6, **options):
    """A language model of eleven words, with its prior in M."""
    torch.manual_seed(0)
    model = maskprior.Transformer(11, (N,), 11, D=16, H=2, pool=None, causal=True, tied=True,
                                  **options)
    maskprior.init_mask(model, prior_matrix(tasks.relative_distance(N, 2), 1., 0.))
    return model


def lm_loss(model, x, y):
    """The task's loss, which asks nothing of the task."""
    return tasks.Language.loss(None, model, x, y)


def test_a_tied_embedding_takes_no_weight_decay():
    model = lm()
    decayed, free = train.make_optimiser(model, train.Settings()).param_groups
    assert model.head.weight is model.tokens.weight
    assert any(p is model.head.weight for p in free['params']) and len(decayed['params']) == 6 * 2


@pytest.mark.parametrize('batch', [1, 3, 64])
@pytest.mark.parametrize('N', [1, 2, 3, 4, 9])
def test_every_word_is_predicted_once_and_counts_once_in_any_window_and_batch(N, batch):
    losses, seen = torch.tensor([1., 1., 1., 5.]), []

    def mean_loss(x, y):
        seen.extend(zip(x.flatten().tolist(), y.flatten().tolist()))
        return losses[y - 10].mean()
    loss = tasks.text_loss(mean_loss, torch.arange(10, 14), 9, N, batch)
    # 7.389
    assert math.exp(loss) == pytest.approx(math.exp(2), rel=1e-6)
    assert seen == [(i - 1, i) for i in range(10, 14)]


@pytest.mark.parametrize('bf16, tolerance', [(False, 1e-5), (True, 2e-2)])
def test_the_loss_in_chunks_is_the_cross_entropy_of_the_models_logits(bf16, tolerance):
    x, y = torch.randint(11, (2, 5, 6), generator=seeded())
    models = lm(), lm()
    with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
        loss = lm_loss(models[0], x, y)
        wanted = F.cross_entropy(models[1](x).float().flatten(0, 1), y.flatten())
    (loss + wanted).backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=tolerance)
    for (name, p), other in zip(models[0].named_parameters(), models[1].parameters()):
        assert (p.grad - other.grad).norm() <= tolerance * max(1e-2, p.grad.norm()), name


def test_cross_entropy_in_chunks_has_its_gradient_refuses_a_second_and_skips_padding():
    x, W = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (7, 9))
    y, loss = torch.arange(7), tasks.LinearCrossEntropy.apply
    for chunk in (1, 3, 100):
        assert torch.autograd.gradcheck(lambda x, W: loss(x, W, y, True, chunk), (x, W))
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(loss(x, W, y), x, create_graph=True)
    y[::2] = -100
    # Large logits, as of embeddings that have grown.
    found, wanted = loss(x, 30 * W, y), F.cross_entropy(x @ (30 * W).T, y)
    assert found.item() == pytest.approx(wanted.item())
    for a, b in zip(torch.autograd.grad(found, (x, W)), torch.autograd.grad(wanted, (x, W))):
        assert torch.allclose(a, b)
    y[0] = -1
    for function in (loss, lambda x, W, y: F.cross_entropy(x @ W.T, y)):
        with pytest.raises((IndexError, RuntimeError), match='-1 is out of bounds'):
            function(x, W, y)


def test_the_distance_prior_is_alibi_at_a_constant_of_one():
    distance = tasks.relative_distance(5, 8)
    # ALiBi's slopes for 8 heads.
    assert distance[0, 4].tolist() == [2., 1.5, 1., 0.5, 0.] and distance[7, 4, 0] == 4 / 256
    assert torch.allclose(mask_bias(prior_matrix(distance, 1., 30.)), -distance, atol=1e-6)
    s = train.parse('--task wikitext2 --init mask --freeze-mask --level 30'.split())
    assert s.freeze_mask and s.strength == 1 and s.per_head
    # At 1/2 the attention is the same, and M's gradient, sigmoid(-M), a half at least.
    allowed, half = torch.ones(5, 5).tril().bool(), prior_matrix(distance, 1., 0.)
    alibi = (-distance).masked_fill(~allowed, -math.inf).softmax(-1)
    assert torch.allclose(target_attention(half, allowed), alibi, atol=1e-6) and (half <= 0).all()


def test_a_tied_mask_equals_the_full_one_it_stands_for():
    full, tied = lm(), lm()
    maskprior.tie_mask(tied)
    assert tied.blocks[0].attn.M.shape == (2, 6)
    x = torch.randint(11, (4, 6), generator=seeded())
    assert torch.equal(full(x), tied(x)) and torch.allclose(full(x[:, :3]), tied(x[:, :3]))
    (lm_loss(full, x, x) + lm_loss(tied, x, x)).backward()
    for distance, grad in enumerate(tied.blocks[0].attn.M.grad.unbind(1)):
        along = full.blocks[0].attn.M.grad.diagonal(-distance, 1, 2).sum(-1)
        assert torch.allclose(grad, along, atol=1e-7)


@pytest.mark.parametrize('causal, M0, says', [
    (False, torch.zeros(6, 6), 'only for causal'), (True, torch.arange(6.).diag(), 'diagonals')])
def test_a_mask_that_cannot_be_tied_is_refused(causal, M0, says):
    model = maskprior.Transformer(11, (6,), 11, D=16, H=2, causal=causal)
    maskprior.init_mask(model, M0)
    with pytest.raises(ValueError, match=says):
        maskprior.tie_mask(model)


def test_without_positions_the_context_can_grow():
    model, x = lm(N=12, positions='none'), torch.randint(11, (2, 12), generator=seeded())
    assert model.positions is None
    assert torch.allclose(model(x)[:, :6], model(x[:, :6]), atol=1e-6)
    target = target_attention(model.blocks[0].attn.M.detach(), model.blocks[0].attn.allowed)
    assert maskprior.prior_tv(model, target, x[:, :6]) < 0.2


def write_texts(root, train='a b\n\n c a\n', valid='a z\n', test='b\n', stories=''):
    """Both data sets."""
    for name, text in (('wikitext-2/train', train), ('wikitext-2/valid', valid),
                       ('wikitext-2/test', test), ('tinystories/TinyStories-train', stories)):
        path = root / f'{name}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_words_of_wikitext_by_hand(tmp_path):
    write_texts(tmp_path)
    ids, vocabulary = tasks.corpus('wikitext2', tmp_path)
    # Of the training words alone.
    assert vocabulary == ['<unk>', '<eos>', 'a', 'b', 'c']
    assert [i.tolist() for i in ids.values()] == [[2, 3, 1, 1, 4, 2, 1], [2, 0, 1], [3, 1]]


@pytest.mark.parametrize('text, stories', [
    ("Lily's 2 cats!<|endoftext|>Don't.<|endoftext|>cut of", ["lily's 2 cats !", "don't ."]),
    ('A<|endoftext|>B<|endoftext|>', ['a', 'b']), ('A', ['a']), (' \n', []),
    ('A\n<|endoftext|>\nB\n<|endoftext|>\n', ['a', 'b']),
    ('<|endoftext|>A<|endoftext|><|endoftext|>\n<|endoftext|>B<|endoftext|>', ['a', 'b'])])
def test_words_of_stories_by_hand(text, stories):
    assert list(tasks.story_words(text)) == [[*story.split(), '<eos>'] for story in stories]


def test_the_last_stories_are_held_out_and_a_cut_vocabulary_keeps_unk_and_eos(
        tmp_path, monkeypatch):
    write_texts(tmp_path, stories='A b.<|endoftext|>B<|endoftext|>b c<|endoftext|>')
    ids, vocabulary = tasks.corpus('tinystories', tmp_path)
    assert vocabulary == ['<unk>', 'a', 'b', '.', '<eos>']
    assert [i.tolist() for i in ids.values()] == [[1, 2, 3, 4], [2, 4], [2, 0, 4]]
    for size in (2, 3, 4, 5, 6):
        monkeypatch.setattr(tasks, 'STORIES_VOCABULARY', size)
        vocabulary = tasks.corpus('tinystories', tmp_path)[1]
        assert len(set(vocabulary)) == len(vocabulary) == min(size, 5)
        assert {'<unk>', '<eos>'} <= set(vocabulary)


def test_without_numpy_and_in_another_locale_files_are_read_as_they_are_here(tmp_path):
    text = 'caf\u00e9 b\n\n c <unk>\n'.encode()
    for name, content in (('clean', text), ('mark', b'\xef\xbb\xbf' + text),
                          ('windows', text.replace(b'\n', b'\r\n'))):
        write_texts(tmp_path / name, train=content)
    make_cifar(tmp_path)
    code = ('import sys\nsys.modules["numpy"] = None\nimport tasks\n'
            'for name in ("clean", "mark", "windows"):\n'
            '    print(ascii(tasks.corpus("wikitext2", name)))\n'
            'print(tasks.cifar("cifar10", ".")[0][0].sum().item())')
    environment = dict(os.environ, PYTHONPATH=str(HERE), LC_ALL='C', PYTHONUTF8='0',
                       PYTHONCOERCECLOCALE='0', OMP_NUM_THREADS='1')
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True,
                          text=True, env=environment)
    here = ascii(tasks.corpus('wikitext2', tmp_path / 'clean'))
    assert done.stdout.splitlines() == [here] * 3 + [str(2 * MARKED.sum().item())], done.stderr
    assert 'caf\\xe9' in here and not done.stderr


LM = ('--task wikitext2 --width 16 --heads 2 --layers 1 --context 8 --batch 4 --steps 4 '
      '--eval-every 2').split()


@pytest.mark.parametrize('task, texts, says', [
    ('wikitext2', dict(valid=''), 'nothing is left for valid'),
    ('wikitext2', dict(train=b'\xff\xfe\x00'), 'not UTF-8'),
    ('wikitext2', dict(train='a b'), 'too few for a context'),
    ('tinystories', dict(stories='<|endoftext|>\n<|endoftext|>'), 'nothing is left for train')])
def test_bad_text_is_one_line(tmp_path, capsys, task, texts, says):
    write_texts(tmp_path, **texts)
    code, line = refused(capsys, *LM, '--task', task, '--data-dir', tmp_path, '--out', tmp_path)
    assert code == 1 and says in line and not list(tmp_path.rglob('config.json'))


@pytest.mark.parametrize('options', ['default', 'qk-opt',
                                     'mask --tie-mask --positions none --dropout 0.1'])
def test_a_run_on_files_shorter_than_the_context(tmp_path, options, quick_arms):
    write_texts(tmp_path, train='the cat sat on the mat\n' * 30)
    folders = ['--data-dir', str(tmp_path), '--out', str(tmp_path), '--name', 'x']
    train.main([*LM, *folders, '--init', *options.split()])
    result = json.loads((tmp_path / 'x' / 'result.json').read_text())
    assert 1 < result['perplexity'] < 20 and 1 < result['perplexity_test'] < 20
    assert len(result['sample'].split()) == 40
    assert ('perplexity_4x' in result) == ('none' in options)


def test_language_is_measured_on_its_own_splits_and_contexts(tmp_path):
    write_texts(tmp_path, train='a b c d e f g\n' * 5, valid='a b c\n' * 4, test='e f g a\n')
    task = tasks.Language('wikitext2', tmp_path, context=2, positions='none')
    # The loss says which words are predicted, and in windows of how many.
    task.loss = lambda model, x, y: 0.1 * y.float().mean() + x.shape[1]
    found = task.evaluate(None) | task.final(lambda x: torch.zeros(*x.shape, 9))
    seen, valid, test = (0.1 * ids.float().mean().item() for ids in task.ids.values())
    assert [len(ids) for ids in task.ids.values()] == [40, 16, 5]
    wanted = dict(perplexity=valid + 2, perplexity_2x=valid + 4, perplexity_4x=valid + 8,
                  # Two windows of 2, one of 1.
                  perplexity_test=test + (4 * 2 + 1 * 1) / 5)
    assert {name: math.log(found[name]) for name in wanted} == pytest.approx(wanted)
    assert (found['loss'], found['loss_seen']) == pytest.approx((valid + 2, seen + 2))


def test_batches_are_windows_of_the_training_text_and_the_next_words(tmp_path):
    write_texts(tmp_path, train='a b c d a c\nb d\n')
    task = tasks.Language('wikitext2', tmp_path, context=4)
    x, y = task.batch(seeded(), 200)
    assert torch.equal(x[:, 1:], y[:, :-1]) and task.model['grid'] == (4,)
    windows = torch.cat([x, y[:, -1:]], 1).unique(dim=0)
    # All of them.
    assert torch.equal(windows, task.ids['train'].unfold(0, 5, 1).unique(dim=0))


def test_decoding_and_samples_give_a_compiled_model_one_length(tmp_path):
    shapes = set()

    def model(x, answer=None):
        shapes.add(tuple(x.shape))
        return torch.zeros(len(x), answer or x.shape[1], 13 if answer else 5)
    tasks.Arithmetic('add3', 0.001).evaluate(lambda x: model(x, 4))
    assert shapes == {(2000, 11), (1000, 11)}
    shapes.clear()
    write_texts(tmp_path, train='a b c\n' * 100, valid='a b\n' * 101, test='a b\n' * 101)
    task = tasks.Language('wikitext2', tmp_path, context=4)
    task.loss = lambda model, x, y: model(x).sum()
    task.evaluate(model)
    task.final(model)
    # 303 words are 64 + 11 windows of 4 and one of 3; a sample has windows of 4.
    assert shapes == {(64, 4), (11, 4), (1, 3), (1, 4)}


# --------------------------------------------------------------------------------------- real data

DATA = os.environ.get('MASKPRIOR_DATA')


def real_data(name):
    there = DATA and any(any(Path(DATA).glob(path)) for path in tasks.DATA_PATHS[name])
    reason = f'MASKPRIOR_DATA is {DATA or "not set"}: nothing is tested on the real {name}'
    return pytest.mark.skipif(not there, reason=reason)


@real_data('wikitext2')
def test_the_real_wikitext2_has_its_published_sizes_and_sums():
    ids, vocabulary = tasks.corpus('wikitext2', DATA)
    assert [len(i) for i in ids.values()] == [2_088_628, 217_646, 245_569]
    assert len(torch.cat([*ids.values()]).unique()) == len(vocabulary) == 33_278
    for _, file, size, md5 in tasks.DOWNLOADS['wikitext2']:
        data = (Path(DATA) / file).read_bytes()
        assert len(data) == size and hashlib.md5(data).hexdigest() == md5


@real_data('tinystories')
def test_the_real_tinystories():
    ids, vocabulary = tasks.corpus('tinystories', DATA)
    ends = [(i == vocabulary.index('<eos>')).sum().item() for i in ids.values()]
    assert len(vocabulary) == 4096 and ends[1:] == [min(1000, sum(ends) // 20)] * 2
    assert sum(ends) == 2316 or 'first2MiB' not in tasks.find_dataset('tinystories', DATA).name


@pytest.mark.parametrize('name, sizes', [
    pytest.param('cifar10', [(50_000, 10_000), (10_000, 2_000)], marks=real_data('cifar10')),
    pytest.param('cifar100', [(50_000, 10_000), (5, 5)], marks=real_data('cifar100'))])
def test_the_real_cifar(name, sizes):
    (x, y), (_, test_y) = tasks.cifar(name, DATA)
    assert (len(y), len(test_y)) in sizes and x.shape == (len(y), 3, 32, 32)
    if len(y) > 5:
        assert y.bincount().unique().tolist() == [len(y) // tasks.IMAGES[name][0]]
        mean = x.float().div(255).mean((0, 2, 3))
        assert (mean - torch.tensor(CONSTANTS[name][0])).abs().max() < 0.01


@real_data('imagenet100')
def test_real_imagenet_files_of_any_size(tmp_path):
    pytest.importorskip('PIL')
    # A file of each class as ImageNet has it.
    root = Path(DATA) / 'imagenet100_fullsize'
    root = root if root.exists() else root.with_name('imagenet100')
    files = [of_class[0] for of_class in tasks.image_files(root, 'train', None).values()]
    assert len(tasks.decode_images(files, 64, tmp_path)) == len(files) > 1


# --------------------------------------------------------------------------------------- theory

SHORT = dict(steps=40, T=100)


def double(values):
    return torch.tensor([values], dtype=torch.float64)


def first(value):
    return [value, 0.0, 0.0, 0.0]


def hand_row():
    """N = 2, d = 4, D = 1: q = (2, 0, 0, 0), k = (ln 3, 0, 0, 0) and 0, sigmoid(m) = 1/4 and 3/4,
    so s_0 = ln 3 + ln 1/4 = s_1, p = 1/2, 1/2. v = (2, 0, 0, 0) and 0, so o = (1, 0, 0, 0);
    g = (3, 0, 0, 0), so e = 3/2, -3/2."""
    x, X, W_Q, m = [[2.0]], [[1.0], [0.0]], [first(1.0)], [[-math.log(3), math.log(3)]]
    parts = (x, X, W_Q, [first(math.log(3))], m, [first(2.0), first(0.0)], [first(3.0)])
    return theory.Row(*map(double, parts)).measure(u=double([[1.0, 0.0]]), w=double([first(1.0)]))


@pytest.mark.parametrize('derivatives', [theory.autograd, theory.closed_form])
def test_derivatives_of_a_row_by_hand(derivatives):
    row, ln3 = hand_row(), math.log(3)
    expected = {
        # p_0 (1 - p_0) 3/4, -p_0 p_1 1/4; +- 1/4 q / 2; 1/2 (ln 3 - ln 3 / 2) / 2
        ('p_i', 'm'): [[3 / 16, -1 / 16]], ('p_i', 'k'): [first(1 / 4), first(-1 / 4)],
        ('p_i', 'q'): [first(ln3 / 8)], ('p_i', 'W_Q'): [first(ln3 / 4)],
        # u.p is p_0; w.o: p_j (v_j - o) sigmoid(-m_j); the loss: e_j sigmoid(-m_j)
        ('p_i', 'W_K'): [first(1 / 4)], ('u.p', 'm'): [[3 / 16, -1 / 16]],
        ('w.o', 'm'): [[3 / 8, -1 / 8]], ('w.o', 'q'): [first(ln3 / 4)],
        ('loss', 'm'): [[9 / 8, -3 / 8]], ('loss', 'k'): [first(3 / 2), first(-3 / 2)],
        ('loss', 'q'): [first(3 / 4 * ln3)], ('loss', 'W_Q'): [first(3 / 2 * ln3)],
        ('loss', 'W_K'): [first(3 / 2)], ('loss', 'x'): [[3 / 4 * ln3]],
        ('loss', 'X'): [[3 / 2 * ln3], [-3 / 2 * ln3]]}
    found = derivatives(row)
    for place in 'xX':
        found['loss', place] = theory.THROUGH[place](row, double([[3 / 2, -3 / 2]]))
    for key, values in expected.items():
        torch.testing.assert_close(found[key], double(values))
    one_open_key = theory.replace(row, allowed=torch.tensor([[[True, False]]])).measure()
    assert all(grad.abs().max() == 0 for grad in derivatives(one_open_key).values())


def test_the_sizes_in_the_bounds_by_hand():
    row = hand_row()
    sizes = (row.G, row.R, row.norm_q, row.norm_x, row.diam_X, row.diam_k, theory.sharpness(row))
    assert [z.item() for z in sizes] == pytest.approx([3, 2, 1, 2, 1, *[math.log(3) / 2] * 2])
    # of p_i through m, and of the loss through m and q: |e_j| = p_j (1 - p_j) G R for two keys
    for n, ratio in (0, 1 / 2), (14, 1), (16, 1):
        found, _ = theory.tightness(theory.BOUNDS[n], row, theory.autograd(row))
        assert found.item() == pytest.approx(ratio)


def test_one_step_by_hand(h=0.8, eps=0.3):
    """Two keys at p = 1/2, v = +-1, g = 1, R = 2. M at 0: e = +-1/2, so m = -+ h/4 afterwards. The
    inputs: x = 1 and X = +-1 grow by eps where g = -1, s_0 - s_1 from 1 to (1 + eps)^2."""
    row = theory.two_keys((0.0, 0.0))
    moved, bound = theory.sgd_path(theory.WAYS[0], row, row.g[None], double([2 * h]), 1)
    assert moved.item() == pytest.approx(0.5 - 1 / (1 + math.exp(h / 4)))
    assert bound.item() == pytest.approx(math.tanh(2 * h / 8))
    row = theory.two_keys((-51.0, -50.0), weight=1.0)
    moved, bound = theory.sgd_path(theory.WAYS[-1], row, -row.g[None], double([eps]), 1)
    assert moved.item() == pytest.approx(1 / (1 + math.exp(-2 * eps - eps ** 2)) - 0.5)
    assert bound.item() == pytest.approx(math.tanh((2 * eps + eps ** 2) / 4))


def test_moves_of_the_inputs_and_of_the_weights_for_themselves():
    """The third way's bounds for ||dx||, ||dX|| and dA of any size: met by two keys whose parts
    double, s_0 - s_1 from -3/2 to 3/2; a prior in M alone stays."""
    gen, tight = torch.Generator().manual_seed(0), theory.two_keys((-52.5, -50.0), weight=1.0)
    some = theory.Row(**theory.normals(500, 6, 4, gen)).measure()
    for row, moves in (some, theory.normals(500, 6, 4, gen, x=3.0)), (tight, vars(tight)):
        by_inputs = theory.replace(row, x=row.x + moves['x'], X=row.X + moves['X'])
        dx, dX = theory.norm(moves['x']), theory.longest(moves['X'])
        osc = theory.sharpness(row) * (dx * row.diam_X + 2 * dX * (row.norm_x + dx))
        by_weights = theory.replace(row, W_Q=row.W_Q + moves['W_Q'], W_K=row.W_K + moves['W_K'])
        A, B = (z.W_Q @ z.W_K.mT / z.root for z in (row, by_weights))
        dA = torch.linalg.matrix_norm(B - A, 2)[:, None]
        for new, limit in (by_inputs, osc), (by_weights, dA * row.norm_x * row.diam_X):
            ratio = theory.ratio(theory.tv(new.p, row.p), theory.tv_bound(limit)).max()
            assert 0 < ratio <= 1 and (row is some or ratio > 0.999)
        in_M = theory.replace(row, W_Q=0 * row.W_Q)
        assert torch.equal(theory.replace(in_M, x=by_inputs.x, X=by_inputs.X).p, in_M.p)


def test_short_run_holds_and_writes_strict_json(tmp_path, capsys):
    assert theory.main(['--draws', '2000', '--seed', '3', '--out', str(tmp_path)], **SHORT) == 0
    printed, table = capsys.readouterr().out, (tmp_path / 'theory.md').read_text()
    record = json.loads((tmp_path / 'theory.json').read_text(), parse_constant=pytest.fail)
    assert (record['failed'], record['draws'], record['seed']) == ([], 2000, 3)
    rows = [row for part in record['parts'] for row in part['rows']]
    assert len(rows) > 40 and printed.strip() in table
    assert all(row['statement'] in table and row['ok'] is True for row in rows)


def test_wrong_statements_are_caught_and_only_they(tmp_path):
    """Bounds 0.9 or 1.1 times what holds (1.1: not tight), a derivative without sigmoid(-m), ways
    and a lemma that are too small: each fails, the rest holds."""
    bounds, ways = list(theory.BOUNDS), list(theory.WAYS)
    for n, factor in {0: 0.9, 1: 1.1, 4: 0.9, 10: 0.9, 14: 0.9, 16: 0.9}.items():
        limit = bounds[n].limit
        bounds[n] = bounds[n]._replace(limit=lambda r, f=factor, limit=limit: f * limit(r))
    for n in (2, -1):
        ways[n] = ways[n]._replace(osc=lambda r, z, osc=ways[n].osc: 0.8 * osc(r, z))

    def formulas(row):
        grads = theory.closed_form(row)
        return grads | {('loss', 'm'): grads['loss', 'm'] / torch.sigmoid(-row.m)}

    code = theory.main(['--draws', '2000', '--out', str(tmp_path)], bounds=bounds, ways=ways,
                       formulas=formulas, lemma=lambda osc: torch.tanh(osc / 4.5), **SHORT)
    wrong = ['d loss / d m', *(bounds[n].statement for n in (0, 1, 4, 10, 14, 16)),
             'TV <= tanh(osc(ds)/4)', ways[2].statement, ways[-1].statement]
    assert code == 1 and json.loads((tmp_path / 'theory.json').read_text())['failed'] == wrong


@pytest.mark.parametrize('argv, word', [
    (['--draws', '0'], 'draws'), (['--draws', '-5'], 'draws'), (['--draws', 'many'], 'many'),
    (['--seed', '-1'], 'seed'), (['--device', 'cpu'], '--device')])
def test_bad_arguments_exit_2_with_one_line(argv, word, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        theory.main([*argv, '--out', str(tmp_path)])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and err.startswith('theory.py: ') and word in err
    assert err.count('\n') == 1 and not out and not list(tmp_path.iterdir())


def test_failures_are_one_line_and_no_table_is_half_written(tmp_path, monkeypatch):
    """A full disk; a folder that is a file; Ctrl-C. SystemExit with a text: exit code 1."""
    (tmp_path / 'theory.md').write_text('recorded')
    with monkeypatch.context() as patch, pytest.raises(OSError, match='theory.md cannot be'):
        patch.setattr(Path, 'replace', Mock(side_effect=OSError(28, 'No space left')))
        theory.main(['--draws', '80', '--out', str(tmp_path)], steps=2, T=3)
    assert [path.read_text() for path in tmp_path.iterdir()] == ['recorded']
    monkeypatch.setattr(torch.optim, 'Adam', Mock(side_effect=KeyboardInterrupt))
    for out, message in ('theory.md', 'theory.md'), ('new', 'interrupted'):
        monkeypatch.setattr(sys, 'argv', ['', '--draws', '80', '--out', str(tmp_path / out)])
        with pytest.raises(SystemExit, match=f'^theory.py: [^\n]*{message}[^\n]*$'):
            runpy.run_path(theory.__file__, run_name='__main__')


def test_the_link_to_training_attributes_the_moves(tmp_path, monkeypatch):
    """Three steps: at step 0 nothing has moved; then each part moves the attention, none twice."""
    monkeypatch.syspath_prepend(Path(theory.__file__).parent / 'results')
    import theory_training
    monkeypatch.setattr(theory_training, 'OPTIMISERS', {'Adam': (1e-2, 3)})
    monkeypatch.setattr(theory_training, 'ARMS', ('mask',))
    theory_training.main(['--out', str(tmp_path)])
    log = json.loads((tmp_path / 'theory_training.json').read_text())['runs']['Adam mask']
    moves = [log[f'moved by {part}'] for part in ('M', 'QK', 'rest', 'all')]
    for (start, before), *_, (end, after) in moves:
        assert (start, before, end) == (0, 0, 3) and after > 0
    assert len({move[-1][1] for move in moves}) == 4
    assert len(log['gradient M']) == 3 and log['prior_tv'][0][1] < 0.05
    model = theory_training.train.build(theory_training.train.parse(['--init', 'mask']))[1]
    owners = [theory_training.owner(name) for name, _ in model.named_parameters()]
    assert (owners.count('M'), owners.count('QK')) == (2, 4)


VIT = ['--task', 'cifar10', '--width', '24', '--layers', '2', '--epochs', '2', '--batch', '32',
       '--eval-every', '1', '--warmup', '0']
LM_RUN = ['--task', 'wikitext2', '--layers', '1', '--context', '8', '--batch', '4', '--steps', '40',
          '--eval-every', '1', '--threads', '1']


# ----------------------------------------------------------------------------- the command line

# Each must be refused, by a line with the name of its last option.
BAD_ARGUMENTS = """
--task parity9 | --init masks | --steeps 3 | --learn-mask false | --freeze-mask perhaps | --seed x
--seed 99999999999999999999 | --steps 0 | --batch 999999999999999999999999 | --threads 99999999999
--threads -1 | --lr nan | --lr 1e300 | --flip 2 | --pos-std -1 | --strength -1 | --level inf
--level 1e39 | --strength 1e-9 --init mask | --heads 3 | --name ../x | --name . | --name ''
--foo --list | --overwrite --resume | --init default --freeze-mask | --width 8 --init qk-svd
--pos-std 0 --init qk-svd | --hole +-+-+-+-+-+-+-+- | --hole ** | --hole= | --hole +x
--task add3 --hole +- | --prior-bits 2,77 | --prior-bits 2,2 | --prior-bits ''
--task cyclic3 --prior-bits 1,2 | --frac 0.1 | --task add3 --frac 0 | --task mul3 --frac 1
--task add5 --frac 1e-11 | --task mul3 --heads 2 | --task add3 --order left
--task add3 --without products | --task add3 --without carry --per-head false
--task cifar10 --steps 9 | --task cifar10 --pos-std 1 | --task cifar10 --heads 3 --width 18
--task cifar10 --init mimetic --mimetic-v | --task imagenet100 --crop pad
--device meta | --device cuda:99"""
BAD_ARGUMENTS = [text.strip() for text in BAD_ARGUMENTS.replace('\n', '|').split('|')[1:]]
BAD_ARGUMENTS += [] if torch.cuda.is_available() else ['--device cuda']
BAD_ARGUMENTS += [] if torch.backends.mps.is_available() else ['--device mps']


@pytest.fixture
def folder(tmp_path):
    """The folder of a run. The cube has 256 inputs meanwhile: a run takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, 'BITS', 8)
        yield tmp_path / 'x'


@pytest.mark.parametrize('options', BAD_ARGUMENTS)
def test_bad_arguments_are_one_line_and_exit_2(folder, capsys, options):
    code, line = refused(capsys, *shlex.split(options), '--out', folder)
    assert code == 2 and re.findall('--([a-z-]+)', options)[-1] in line and not folder.exists()


def test_the_list_names_every_task_and_arm(capsys):
    train.main(['--list'])
    out = capsys.readouterr().out
    assert all(f'  {name} ' in out for name in (*tasks.TASKS, *maskprior.ARMS))
    assert 'download cifar10' in out


def test_help_shows_the_values_of_the_task_and_hides_what_is_not_for_it(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(['--help', '--task', 'cifar10'])
    out = capsys.readouterr().out
    assert not end.value.code and re.search(r'--width WIDTH .*\[96\]', out)
    assert '--randaugment' in out and '--hole' not in out and '--frac' not in out


@pytest.mark.parametrize('cuda, mps, chosen', [
    (True, True, 'cuda'), (False, True, 'mps'), (False, False, 'cpu')])
def test_the_device_is_cuda_or_else_mps_or_else_the_cpu(monkeypatch, cuda, mps, chosen):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    monkeypatch.setattr(torch, 'zeros', lambda *size, device: torch.ones(size))
    assert train.parse([]).device == chosen


@pytest.mark.parametrize('options, threads', [
    (['--task', 'parity2'], 1), (['--task', 'parity2', '--threads', '3'], 3),
    (['--task', 'add3'], 2), (['--task', 'add3', '--threads', '1'], 1)])
def test_boolean_tasks_take_one_thread_unless_told_otherwise(monkeypatch, options, threads):
    chosen = []
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(torch, 'set_num_threads', chosen.append)
    monkeypatch.setattr(train, 'run', lambda *_: None)
    monkeypatch.setattr(train, 'check_folder', lambda _: False)
    train.main(options)
    # At the end it is what it was.
    assert chosen == [threads, 2]


@pytest.mark.parametrize('fast, options, bf16', [
    (True, [], True), (False, [], False), (False, ['--bf16'], True),
    (True, ['--bf16=false'], False)])
def test_a_recipe_is_in_bf16_where_the_device_is_fast_in_it(monkeypatch, fast, options, bf16):
    chosen = []
    monkeypatch.setattr(train, 'fast_in_bf16', lambda device: fast)
    monkeypatch.setattr(train, 'run', lambda settings, _: chosen.append(settings.bf16))
    monkeypatch.setattr(train, 'check_folder', lambda _: False)
    train.main(['--task', 'add3', *options])
    assert train.RECIPES['add3']['bf16'] and chosen == [bf16]


def test_output_goes_through_a_terminal_without_unicode(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    monkeypatch.setattr(sys, 'stdout', terminal)
    assert train.command(lambda: print('caf\u00e9', flush=True), 'train.py') is None
    assert terminal.buffer.getvalue() == b'caf\\xe9\n'


def test_an_empty_variable_is_no_folder_of_data():
    shown = subprocess.run([sys.executable, '-c', 'import tasks; print(tasks.DATA_DIR)'], cwd=HERE,
                           env=dict(os.environ, MASKPRIOR_DATA=''), capture_output=True, text=True)
    assert shown.stdout == 'data\n'


def test_no_compiler_is_one_line(tmp_path):
    write_texts(tmp_path, train='the cat sat on the mat\n' * 5)
    # The workers of torch 2.6 speak of numpy; a graph in the cache needs no compiler.
    environment = {'CXX': '/nope', 'PYTHONWARNINGS': 'ignore', 'TORCHINDUCTOR_CACHE_DIR': 'cache'}
    command = [sys.executable, HERE / 'train.py', *LM_RUN, '--compile', '--data-dir', '.']
    done = subprocess.run(command,
                          cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | environment)
    line, = done.stderr.splitlines()
    assert done.returncode == 1 and 'C++ compiler' in line


# -------------------------------------------------------------------------- the contract of a run

def argv_of(folder, *options):
    """The command line of a small run in this folder."""
    return [*SMALL, '--out', str(folder.parent), '--name', folder.name, *map(str, options)]


def run(folder, *options):
    train.main(argv_of(folder, *options))


def read_json(path):
    return json.loads(path.read_text())


def log_of(folder):
    return [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]


def checkpoint_of(folder):
    return torch.load(folder / 'checkpoint.pt', weights_only=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_keeps_its_contract(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    # Without torchrun's other variables it says nothing.
    monkeypatch.setenv('RANK', '0')
    run(folder, '--eval-early', '4')
    config, result = read_json(folder / 'config.json'), read_json(folder / 'result.json')
    names = ('task init seed steps accuracy accuracy_unseen loss loss_seen mdi_accuracy mdi_loss '
             'prior_tv_init prior_tv_final seconds parameters device torch')
    assert 'on cpu' in capsys.readouterr().out.splitlines()[0]
    assert {*names.split()} <= result.keys() and result['device'] == config['device'] == 'cpu'
    assert config['settings']['width'] == 16 and config['torch'] == torch.__version__
    assert config['processes'] == 1
    # Quick evaluations of so many inputs in between.
    assert [row['step'] for row in log_of(folder)] == [0, 4, 8, 10, 12, 16, 20]
    assert [row['step'] for row in log_of(folder) if 'inputs' in row] == [4, 8, 12, 16]
    assert checkpoint_of(folder)['step'] == 20


def test_a_finished_run_is_not_run_again_nor_mixed_up_with_another(folder, capsys):
    run(folder)
    before = contents(folder)
    run(folder)
    assert 'is finished' in capsys.readouterr().out
    code, line = refused(capsys, *argv_of(folder, '--lr', '0.1'))
    assert code == 2 and 'another --lr' in line and contents(folder) == before
    run(folder, '--lr', '0.1', '--overwrite')
    assert read_json(folder / 'config.json')['settings']['lr'] == 0.1


def test_a_finished_run_of_older_code_is_recognised(folder, capsys):
    run(folder, '--eval-early', '0')
    config = read_json(folder / 'config.json')
    config['settings'] |= {'device': 'cpu', 'compile': False, 'frac': 0.004}
    for name in ('structure', 'eval_early', 'mask_lr', 'freeze_qk', 'hold_inputs'):
        del config['settings'][name]
    (folder / 'config.json').write_text(json.dumps(config))
    run(folder, '--eval-early', '0')
    assert 'is finished' in capsys.readouterr().out


def test_a_divergence_is_one_line_and_leaves_strict_json(folder, capsys):
    code, line = refused(capsys, *argv_of(folder, '--lr', '1e6'))
    assert code == 1 and 'diverged' in line and not (folder / 'result.json').exists()
    for row in (folder / 'log.jsonl').read_text().splitlines():
        json.loads(row, parse_constant=lambda text: pytest.fail(f'{text} is no JSON'))


def test_what_lies_in_the_folder_and_is_not_the_runs_stays(folder, capsys):
    folder.mkdir()
    (folder / 'thesis.tmp').write_text('mine')
    run(folder)
    assert (folder / 'thesis.tmp').read_text() == 'mine'
    (folder / 'config.json').unlink()
    (folder / 'log.jsonl').write_text('mine')
    code, line = refused(capsys, *argv_of(folder))
    assert code == 1 and 'config.json' in line and (folder / 'log.jsonl').read_text() == 'mine'


def test_a_file_in_the_place_of_a_folder_and_a_folder_in_that_of_a_file(folder, capsys):
    folder.write_text('')
    code, line = refused(capsys, *argv_of(folder / 'y'))
    assert code == 1 and str(folder) in line
    run(folder.parent / 'z')
    (folder.parent / 'z' / 'result.json').unlink()
    (folder.parent / 'z' / 'checkpoint.pt').unlink()
    (folder.parent / 'z' / 'checkpoint.pt').mkdir()
    assert refused(capsys, *argv_of(folder.parent / 'z', '--resume'))[0] == 1


def test_a_second_run_in_the_same_folder_is_refused(folder, capsys):
    folder.mkdir()
    with tasks.lock(folder):
        code, line = refused(capsys, *argv_of(folder))
    assert code == 1 and 'another run' in line and not contents(folder)
    run(folder)
    assert (folder / 'result.json').exists()


@pytest.mark.parametrize('resume', [[], ['--resume']])
def test_a_run_that_another_has_finished_meanwhile_is_kept(folder, capsys, monkeypatch, resume):
    real = train.build

    def slow_build(settings):
        monkeypatch.setattr(train, 'build', real)
        run(folder)
        return real(settings)
    monkeypatch.setattr(train, 'build', slow_build)
    code, line = refused(capsys, *argv_of(folder, *resume))
    assert code == 1 and 'meanwhile' in line and contents(folder).keys() == {*train.FILES}


def test_a_line_comes_at_least_every_ten_seconds_with_the_time_left(folder, capsys, monkeypatch):
    def four_seconds(step, settings):
        clock[0] = 4. * (step + 1)
        return 1e-3
    clock = [0.]
    monkeypatch.setattr(train, 'learning_rate', four_seconds)
    monkeypatch.setattr(train.time, 'perf_counter', lambda: clock[0])
    run(folder, '--eval-every', '100')
    lines = re.findall('^step .*', capsys.readouterr().out, re.MULTILINE)
    assert [int(line.split()[1]) for line in lines] == [0, 3, 6, 9, 12, 15, 18, 20]
    assert 'loss of the batch' in lines[1] and '68 s left' in lines[1]
    assert 'untrained' in lines[0] and 'accuracy' not in lines[0] and '%' not in lines[0]


def test_a_warm_up_that_is_not_shorter_than_the_run_is_said_in_one_line(tmp_path, capsys):
    """CASES.md 40: one epoch, with the recipe of images, whose warm-up is two."""
    make_cifar(tmp_path, 5, binary=True)
    one_epoch = ['--task', 'cifar10', '--epochs', '1', '--batch', '50', '--layers', '1',
                 '--data-dir', str(tmp_path), '--out', str(tmp_path)]
    train.main([*one_epoch, '--name', 'recipe'])
    assert len(re.findall('the warm-up of .* is not shorter', capsys.readouterr().out)) == 1
    assert [row['step'] for row in log_of(tmp_path / 'recipe')] == [0, 2]
    train.main([*one_epoch, '--name', 'none', '--warmup', '0'])
    assert 'warm-up' not in capsys.readouterr().out


def test_the_first_run_in_small_extrapolates_and_the_default_does_not(folder, capsys):
    """README: the mask is right on the whole cube; the default fits, and is wrong on the hole."""
    results = {}
    options = '--width 32 --steps 250 --lr 0.003 --batch 64 --eval-early 0'.split()
    for init in ('mask', 'default'):
        run(folder / init, '--init', init, *options)
        results[init] = read_json(folder / init / 'result.json')
    assert results['mask']['accuracy'] == 1 and results['mask']['loss'] < 0.01
    assert 'right on the whole cube' in capsys.readouterr().out
    assert results['default']['fitted'] and results['default']['accuracy'] == 0.75
    assert results['default']['fourier']['x0*x1'] < 0.6


# ------------------------------------------------------------------- interrupted, resumed, damaged

@contextmanager
def cut_at(step):
    """In here a run dies before this step."""
    real = train.learning_rate
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, 'learning_rate',
                      lambda at, settings: real(at, settings) if at < step else 1 / 0)
        yield


def assert_same_end(one, two):
    """The runs in these folders ended at the same weights and the same loss."""
    one_end, two_end = checkpoint_of(one), checkpoint_of(two)
    assert one_end['step'] == two_end['step'] and torch.equal(one_end['generator'],
                                                              two_end['generator'])
    assert one_end['model'].keys() == two_end['model'].keys()
    assert all(torch.equal(w, two_end['model'][name]) for name, w in one_end['model'].items())
    assert log_of(one)[-1]['loss'] == log_of(two)[-1]['loss']


def test_evaluating_more_often_changes_no_batch_and_no_weight(folder):
    run(folder / 'often', '--eval-every', '5')
    run(folder / 'seldom', '--eval-every', '20')
    assert_same_end(folder / 'often', folder / 'seldom')


@pytest.mark.parametrize('options, step', [
    (SMALL, 13), ([*VIT, *'--randaugment 2 --mixup 0.8 --cutmix 1'.split(),
                   *'--erasing 0.25 --drop-path 0.3'.split()], 5)], ids=['parity2', 'cifar10'])
def test_resume_equals_an_undisturbed_run(folder, capsys, monkeypatch, options, step):
    if 'cifar10' in options:
        make_cifar(folder.parent, 5, binary=True)
        options = [*options, '--data-dir', str(folder.parent)]
    options = [*options, '--out', str(folder)]
    train.main([*options, '--name', 'whole'])
    with cut_at(step):
        train.main([*options, '--name', 'cut'])
    code, line = refused(capsys, *options, '--name', 'cut')
    assert code == 2 and '--resume goes on with it' in line
    # Another process, another random state; other code; what a killed save has left.
    torch.rand(7)
    monkeypatch.setattr(train, 'git_commit', lambda: 'later')
    (folder / 'cut' / 'checkpoint.pt.17.tmp').write_text('half')
    train.main([*options, '--name', 'cut', '--resume'])
    assert_same_end(folder / 'cut', folder / 'whole')
    assert len(log_of(folder / 'cut')) == len(log_of(folder / 'whole')) == 3
    assert read_json(folder / 'cut' / 'config.json')['commit'].endswith('later')
    assert contents(folder / 'cut').keys() == {*train.FILES}


def test_compiled_and_eager_runs_go_on_from_each_others_checkpoints(folder, monkeypatch):
    options = ['--eval-every', '5', '--layers', '1']
    run(folder / 'eager', *options)
    # What is compiled is the same on any backend; this one needs no C++ compiler and no minute.
    monkeypatch.setattr(torch.nn.Module, 'compile',
                        partialmethod(torch.nn.Module.compile, backend='eager'))
    with cut_at(7):
        run(folder, *options)
    with cut_at(13):
        run(folder, *options, '--compile', '--resume')
    run(folder, *options, '--resume')
    eager, mixed = checkpoint_of(folder / 'eager')['model'], checkpoint_of(folder)['model']
    assert eager.keys() == mixed.keys()
    assert all((w - mixed[name]).abs().max() < 1e-4 for name, w in eager.items())


def test_two_processes_train_as_one(tmp_path):
    make_cifar(tmp_path, 5, binary=True)
    options = [*VIT, '--data-dir', str(tmp_path), '--out', str(tmp_path), '--randaugment', '2',
               '--mixup', '0.8', '--bf16', 'false', '--lr', '0.01']
    train.main([*options, '--name', 'one'])
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    done = subprocess.run([*torchrun, HERE / 'train.py', *options, '--name', 'two'],
                          capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    one, two = log_of(tmp_path / 'one'), log_of(tmp_path / 'two')
    assert len(one) == len(two) == 3
    for a, b in zip(one, two):
        assert a['loss'] == pytest.approx(b['loss'], abs=1e-5)
        assert a['change_M'] == pytest.approx(b['change_M'], abs=1e-6)
    assert one[0]['loss'] != pytest.approx(one[-1]['loss'], abs=1e-3)


def test_a_process_that_ends_at_any_moment_loses_nothing_and_says_at_most_a_line(folder):
    write_texts(folder, train='the cat sat on the mat\n' * 30)
    # It writes all the time.
    options = [*LM_RUN, '--data-dir', str(folder), '--resume']
    for ended_by, lines in ((signal.SIGKILL, 3), (signal.SIGTERM, 9), (signal.SIGINT, 9)):
        process = subprocess.Popen([sys.executable, HERE / 'train.py', *argv_of(folder, *options)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(ended_by)
        errors = process.communicate()[1].splitlines()
        assert len(errors) == (ended_by == signal.SIGINT)
    assert process.returncode == 1 and 'interrupted; --resume goes on' in errors[0]
    assert 0 < checkpoint_of(folder)['step'] < 40
    for path in (folder, folder / 'whole'):
        run(path, *options)
    assert_same_end(folder, folder / 'whole')
    assert len(log_of(folder)) == 41


def test_ctrl_c_while_torch_is_imported_prints_no_traceback():
    # Python says on stderr what it has imported.
    process = subprocess.Popen([sys.executable, '-X', 'importtime', HERE / 'train.py'],
                               stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if ' torch.' in line:
            break
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1].splitlines()
    assert process.returncode == -signal.SIGINT
    assert not [line for line in errors if not line.startswith('import time:')]


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(folder, capsys):
    resource = pytest.importorskip('resource', reason='no limit on the size of a file here')
    with cut_at(13):
        run(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Enough for config.json and log.jsonl.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code, line = refused(capsys, *argv_of(folder, '--resume'))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and 'checkpoint.pt' in line and checkpoint_of(folder)['step'] == 10
    assert contents(folder).keys() == {'config.json', 'log.jsonl', 'checkpoint.pt'}


def saved(content):
    """The bytes of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize('file, content', [
    ('config.json', None), ('config.json', b'{"settings": []}'), ('config.json', b'{"settings": '),
    ('result.json', b'{"accura'), *[('checkpoint.pt', content) for content in (
        b'', b'no checkpoint', saved({})[:300], saved({}), saved([1]), saved(Gadget()),
        pickle.dumps(Gadget(), 2))]])
def test_a_damaged_or_foreign_file_is_named_and_kept_and_runs_no_code(
        folder, capsys, monkeypatch, file, content):
    monkeypatch.chdir(folder.parent)
    run(folder)
    (folder / ('result.json' if file == 'checkpoint.pt' else file)).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    before = contents(folder)
    code, line = refused(capsys, *argv_of(folder, '--resume'))
    assert code == 1 and str(folder / file) in line and '--overwrite' in line
    assert contents(folder) == before and not Path('marker').exists()


@pytest.mark.parametrize('change, reason', [
    *[(change, 'cannot be read') for change in (
        lambda c: c.update(model={}), lambda c: c.update(optimiser={}), lambda c: c.pop('log'),
        lambda c: c.update(generator=torch.zeros(3)), lambda c: c.update(step='3'),
        lambda c: c.update(log=[1]), lambda c: c.update(seconds='long'), lambda c: c.pop('run'))],
    (lambda c: c.update(step=99), 'step 99 of 20'), (lambda c: c['log'][0].clear(), 'a metric'),
    (lambda c: c['optimiser']['state'][0].update(exp_avg=torch.zeros(3)), 'another model'),
    (lambda c: c['optimiser']['param_groups'][0].pop('factor'), 'another version'),
    (lambda c: c['run'].update(seed=1), 'another --seed'),
    (lambda c: c.update(step=10) or c['model']['norm.weight'].mul_(math.nan), 'diverged')])
def test_a_checkpoint_that_is_not_of_this_run_is_refused(folder, capsys, change, reason):
    run(folder)
    (folder / 'result.json').unlink()
    content = checkpoint_of(folder)
    change(content)
    torch.save(content, folder / 'checkpoint.pt')
    code, line = refused(capsys, *argv_of(folder, '--resume'))
    assert code == (2 if '--seed' in reason else 1) and reason in line
    assert ('checkpoint.pt' in line or 'diverged' in line) and not (folder / 'result.json').exists()


def test_a_checkpoint_of_other_data_is_refused(tmp_path, capsys):
    files = make_cifar(tmp_path / 'data', 5, binary=True)
    options = [*VIT, '--out', tmp_path, '--name', 'x', '--data-dir', tmp_path / 'data', '--resume']
    train.main([str(option) for option in options])
    (tmp_path / 'x' / 'result.json').unlink()
    before = contents(tmp_path / 'x')
    for file in files.glob('data_batch_*'):
        file.write_bytes(file.read_bytes() * 2)
    code, line = refused(capsys, *options)
    assert code == 2 and 'from other training data (examples then: 100, now: 200)' in line
    # As many images as at first, one of them another.
    for file in files.glob('data_batch_*'):
        file.write_bytes(file.read_bytes()[:20 * 3073])
    pixels = (files / 'data_batch_1.bin').read_bytes()
    (files / 'data_batch_1.bin').write_bytes(pixels[:7] + b'\xff' * 3000 + pixels[3007:])
    code, line = refused(capsys, *options)
    assert code == 2 and 'from other training data' in line and contents(tmp_path / 'x') == before


# ---------------------------------------------------------------------------------- other devices

class Elsewhere(torch.Tensor):
    """Stands in for a tensor on a device: it is an ordinary one when it comes to the CPU."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_checkpoints_hold_cpu_tensors_whatever_the_device():
    """CASES.md 50."""
    far = torch.ones(2).as_subclass(Elsewhere).requires_grad_()
    near = train.to_cpu({'model': {'w': far}, 'state': [{'moment': far, 'step': 3}], 'other': far})
    tensors = [near['model']['w'], near['state'][0]['moment'], near['other']]
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in tensors)
    assert near['state'][0]['step'] == 3


def test_priors_are_written_on_the_cpu_and_the_model_is_moved_then(monkeypatch):
    """CASES.md 49: not every device has float64."""
    def arm(model, M0, x, generator):
        seen.extend([*model.parameters(), M0, x])
    seen = []
    settings = train.parse(SMALL)
    settings.device = 'meta'
    monkeypatch.setitem(tasks.TASKS, 'parity2', lambda name, hole: tasks.Boolean(name))
    monkeypatch.setitem(maskprior.ARMS, 'mask', arm)
    _, model, target = train.build(settings)
    assert len(seen) > 10 and all(tensor.device.type == 'cpu' for tensor in seen)
    assert all(tensor.is_meta for tensor in [*model.parameters(), target])


PRETEND = HERE.parent / 'shared' / 'tools' / 'pretend.py'
TORCH = tuple(int(part) for part in torch.__version__.split('.')[:2])


# Evaluated at step 2, and resumed from there.
FOUR = '--steps 4 --eval-every 2 --batch 8'
FAMILIES = {
    'boolean': '--task parity2 --width 16 --layers 1 --eval-early 0 --structure measured --clip 1 '
               f'--flip 0.1 --hold-inputs {FOUR}',
    'arithmetic': f'--task add3 --frac 1e-4 --width 16 --layers 1 {FOUR}',
    'images': '--task cifar10 --positions learned --pos-std 0.36 --patch 8 --width 36 --layers 1 '
              '--epochs 2 --batch 50 --eval-every 1 --randaugment 2 --mixup 0.8 --cutmix 1 '
              '--erasing 0.5 --drop-path 0.1',
    'language': f'--task wikitext2 --width 16 --layers 1 --context 8 --dropout 0.1 '
                f'--bf16 {FOUR}',
}


def train_on_the_pretended_device(folder):
    """Trains every family and arm, cut at step 2 and resumed; prints the waits in a step."""
    import pretend
    pretend.install()
    pretend.no_float64 = True
    tasks.BITS = 8
    tasks.arithmetic_split = partial(tasks.arithmetic_split, n_test=50)
    # The prior is not held after so few steps.
    maskprior.ARMS['qk-opt'] = partial(maskprior.init_qk_opt, steps=20)
    maskprior.check_held = lambda *_: None
    tasks.Language.sample = partialmethod(tasks.Language.sample, n_words=3)
    folder = Path(folder)
    make_cifar(folder, 5, binary=True)
    write_texts(folder, train='the cat sat on the mat\n' * 5)
    real = train.learning_rate

    def count(step, settings):
        waits[step] = sum(pretend.waits.values())
        return real(step, settings)
    train.learning_rate = count
    for family, options in FAMILIES.items():
        options = [*options.split(), '--device', 'pretend', '--out', str(folder)]
        if family in ('images', 'language'):
            options += ['--data-dir', str(folder)]
        for arm in maskprior.ARMS:
            if arm in ('mimetic', 'impulse') and family != 'images':
                continue
            waits = {}
            argv = [*options, '--init', arm, '--name', f'{family}-{arm}']
            with cut_at(2):
                train.main(argv)
            train.main([*argv, '--resume'])
            print('waits', family, arm, max(waits[1] - waits[0], waits[3] - waits[2]))


@pytest.mark.skipif(not PRETEND.exists(), reason=f'{PRETEND} is not there: no device to try')
@pytest.mark.skipif(TORCH < (2, 13), reason='the pretended device needs torch 2.13')
def test_every_family_and_arm_trains_and_resumes_on_a_device_without_float64(tmp_path):
    """CASES.md 49 and 50: every checkpoint loads here, and a training step waits once at most."""
    code = f'import {Path(__file__).stem} as t, sys; t.train_on_the_pretended_device(sys.argv[1])'
    done = subprocess.run([sys.executable, '-c', code, tmp_path], cwd=HERE, text=True,
                          capture_output=True, env=os.environ | {'PYTHONPATH': str(PRETEND.parent)})
    assert done.returncode == 0, done.stderr
    runs = re.findall(r'waits (\S+) (\S+) (\d+)', done.stdout)
    assert {family for family, arm, _ in runs} == {*FAMILIES} and len(runs) >= 4 * len(FAMILIES)
    for family, arm, waits in runs:
        assert int(waits) <= 1, (family, arm)
        assert checkpoint_of(tmp_path / f'{family}-{arm}')['step'] == 4
        assert read_json(tmp_path / f'{family}-{arm}' / 'result.json')['device'] == 'pretend'


# ----------------------------------------------------------------------------------- run_all.sh

def stand_in(folder, train='touch "$5/result.json"'):
    """A folder with run_all.sh, whose python notes the runs and does `train` in the place of each.

    $1 is --out's folder, $2 the run's name, $5 both; any other python is the real one.
    """
    for name in ('run_all.sh', 'maskprior.py', 'tasks.py', 'train.py'):
        (folder / name).write_bytes((HERE / name).read_bytes())
    (folder / 'results').mkdir()
    (folder / 'results' / 'report.py').write_text('import sys; print("table", *sys.argv[1:])')
    (folder / 'python').write_text(f'''#!/usr/bin/env bash
if [ "$1" != train.py ]; then exec {sys.executable} "$@"; fi
echo "$*" >> asked
shift
arguments=$*
while [ $# -gt 0 ]; do
    case $1 in --out) out=$2 ;; --name) name=$2 ;; esac
    shift
done
set -- "$out" "$name" "" "" "$out/$name"
mkdir -p "$5"
echo "{{\\"command\\": \\"python train.py $arguments\\"}}" > "$5/config.json"
{train}
''')
    (folder / 'python').chmod(0o755)


def environment(**own):
    """What run_all.sh sees of this one."""
    outside = {name: value for name, value in os.environ.items()
               if name not in ('OUT', 'DEVICE', 'JOBS')}
    return outside | dict(PYTHON='./python', JOBS='2') | own


def run_all(folder, *arguments, **own):
    own = environment(MASKPRIOR_DATA=str(folder / 'none'), **own)
    return subprocess.run(['bash', 'run_all.sh', *arguments], cwd=folder, env=own,
                          capture_output=True, text=True)


def test_run_all_trains_what_is_not_finished_and_ends_with_the_tables(tmp_path):
    stand_in(tmp_path)
    done = run_all(tmp_path, 'quick', 'boolean')
    assert done.returncode == 0 and '18 runs to do, 2 at once on cpu' in done.stdout
    assert '[18 of 18' in done.stdout and done.stdout.endswith('table --runs runs/quick\n')
    asked = (tmp_path / 'asked').read_text().splitlines()
    assert len(asked) == len(set(asked)) == 18
    (tmp_path / 'runs/quick/boolean/maj3-mask-s0/result.json').unlink()
    # Of other arguments, so not this row's.
    config = tmp_path / 'runs/quick/boolean/maj3-default-s0/config.json'
    config.write_text(config.read_text().replace('maj3', 'maj4'))
    run_all(tmp_path, 'quick', 'boolean')
    again = (tmp_path / 'asked').read_text().splitlines()[18:]
    assert {line.split('--name ')[1].split()[0] for line in again} == {
        'boolean/maj3-mask-s0', 'boolean/maj3-default-s0'}


def test_run_all_stops_at_a_failing_run_and_names_it(tmp_path):
    stand_in(tmp_path, 'echo "train.py: no luck" >&2; exit 1')
    done = run_all(tmp_path, 'boolean', JOBS='1')
    assert done.returncode == 1 and 'table' not in done.stdout
    line, = [line for line in done.stderr.splitlines() if line.startswith('run_all.sh')]
    assert 'failed: train.py --seed 0 --task parity2' in line and line.endswith('no luck')
    assert len((tmp_path / 'asked').read_text().splitlines()) == 1


@pytest.mark.parametrize('arguments, own, code, message', [
    (['booleans'], {}, 2, "no section 'booleans'"),
    (['boolean'], {'DEVICE': 'nvidia'}, 2, '--device nvidia'),
    (['quick', 'ablations'], {}, 2, 'quick has no ablations'),
    (['quick', 'language'], {}, 1, 'left out, no data'),
])
def test_run_all_refuses_in_one_line(tmp_path, arguments, own, code, message):
    stand_in(tmp_path)
    done = run_all(tmp_path, *arguments, **own)
    assert done.returncode == code and not (tmp_path / 'asked').exists()
    line, = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_run_all_ends_every_process(tmp_path, number):
    stand_in(tmp_path, 'echo $$ >> pids; sleep 60')
    process = subprocess.Popen(['bash', 'run_all.sh', 'boolean'], cwd=tmp_path, text=True,
                               env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               # Ignored where the tests themselves are in the background.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    pids = tmp_path / 'pids'
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    # All have let go of stderr: long before the minute that each sleeps.
    assert process.communicate(timeout=30)[1] == 'run_all.sh: stopped; the same command goes on\n'
    assert process.returncode == 130


def rows_of(*sections):
    """The rows that run_all.sh lists: {name: the arguments of train.py}."""
    text = (HERE / 'run_all.sh').read_text().split('\n# Every derivative')[0]
    text = '\n'.join([text.replace('"$(dirname "$0")"', f'"{HERE}"'), *sections])
    lines = subprocess.run(['bash', '-c', text], env=environment(PYTHON=sys.executable), check=True,
                           capture_output=True, text=True).stdout.splitlines()
    rows = {name: arguments for name, *arguments in map(str.split, lines)}
    assert len(rows) == len(lines)
    return rows


def test_every_recorded_run_is_a_row_of_run_all_with_its_settings():
    rows = rows_of('boolean', 'arithmetic', 'images', 'language', 'ablations')
    for section in records.SECTIONS:
        for run in records.records(section):
            settings = train.parse(rows[f'{section}/{run.name}'])
            was = train.run_config(run.settings)
            assert not train.changed_settings(train.run_config(settings), was), run.name


def test_the_papers_sizes_are_vit_tiny():
    rows = rows_of('paper')
    assert len(rows) == 4 * len(tasks.IMAGES)
    for settings in map(train.parse, rows.values()):
        classes, side, patch, *_ = tasks.IMAGES[settings.task]
        model = maskprior.Transformer((3, patch), (side // patch,) * 2, classes, D=settings.width,
                                      H=settings.heads, L=settings.layers, pool='mean')
        assert 5e6 < sum(p.numel() for p in model.parameters()) < 7e6


# ------------------------------------------------------------ the mask in other people's models

PAGES = [(HERE / 'results' / 'own_model.md').read_text(encoding='utf-8'),
         (HERE / 'README.md').read_text(encoding='utf-8').split('## The mask in your own model')[1]
         .split('\n## ')[0]]


@pytest.fixture
def blocks_of():
    """Runs a page's blocks of Python that need only torch -> what they define; each one's y."""
    def run_blocks(page):
        torch.manual_seed(0)
        names, outputs = {}, []
        for block in page.split('```python\n')[1:]:
            code = block.split('```')[0]
            if 'import timm' not in code and 'transformers' not in code:
                exec(code, names)
                outputs.append(names['y'])
        return names, outputs
    fast_path = torch.backends.mha.get_fastpath_enabled()
    yield run_blocks
    torch.backends.mha.set_fastpath_enabled(fast_path)


def explicit(layer, x, allowed=None):
    """A pre-norm layer of torch's, by the explicit attention."""
    attention = layer.self_attn
    z = layer.norm1(x) @ attention.in_proj_weight.T + attention.in_proj_bias
    q, k, v = z.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    out = attend(q, k, v, mask_bias(layer.M, allowed))
    x = x + attention.out_proj(out.transpose(1, 2).flatten(2))
    return x + layer.linear2(layer.linear1(layer.norm2(x)).relu())


@pytest.mark.parametrize('name', ['model', 'model_heads'])
def test_the_blocks_of_own_model_are_the_explicit_attention(blocks_of, name):
    names, outputs = blocks_of(PAGES[0])
    q, k, v, causal = names['q'], names['k'], names['v'], names['causal']
    plain = attend(q, k, v, mask_bias(names['M']))
    heads = attend(q, k, v, mask_bias(names['M_heads'], causal))
    torch.testing.assert_close(outputs[:2], [plain, heads])
    model, x = names[name], names['x']
    for layer in model.layers:
        torch.nn.init.normal_(layer.M)
        layer.self_attn.dropout = layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.
    float_mask = torch.zeros(16, 16).masked_fill(~causal, -math.inf)
    for mask, allowed in ((None, None), (~causal, causal), (float_mask, causal)):
        y = x
        for layer in model.layers:
            y = explicit(layer, y, allowed)
        torch.testing.assert_close(model.train()(x, mask=mask), y)
        # In evaluation without gradients torch would take its fast path, and give NaN.
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x, mask=mask), y)
    y = model(x, src_key_padding_mask=names['padding'])
    x[:, 12:] = torch.randn(8, 4, 64)
    assert torch.equal(model(x, src_key_padding_mask=names['padding'])[:, :12], y[:, :12])


@pytest.mark.parametrize('page', PAGES, ids=['own_model.md', 'README.md'])
def test_M_of_these_blocks_learns_is_saved_and_does_not_decay(blocks_of, page):
    names, _ = blocks_of(page)
    model, optimiser, x = names['model'], names['optimiser'], torch.randn(8, 16, 64)
    masks = {name: p for name, p in model.named_parameters() if name.endswith('.M')}
    assert len(masks) == 4 and masks.keys() <= model.state_dict().keys()
    start = [M.detach().clone() for M in masks.values()]
    for _ in range(10):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    assert all((M != M_start).all() for M, M_start in zip(masks.values(), start))
    # A step from rest without gradients leaves only the weight decay.
    optimiser.state.clear()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert kept == masks.keys()
