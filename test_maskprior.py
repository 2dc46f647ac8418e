"""pytest -q: attention, priors, tasks, data, theory, runs; of each the identities and hand-computed values first."""
import dataclasses
import functools
import hashlib
import http.server
import importlib.util
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from itertools import combinations
from pathlib import Path

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
import bench
import report


def qkv(B=2, H=3, N=5, d=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, H, N, d, generator=generator, dtype=torch.float64).to(dtype)


def tiny(arm='default', *options):
    """(task, model, target attention) of a small parity2 run."""
    settings = train.parse(['--task', 'parity2', '--init', arm, '--width', '32', '--heads', '2', *options])
    return train.build(settings)


def refused(capsys, *options):
    """train.py's last line in this process, on a command that must be refused -> (exit code, what its one line says)."""
    capsys.readouterr()
    code = tasks.command(lambda: train.main([*map(str, options)]), 'train.py')
    line, = capsys.readouterr().err.splitlines()
    return code, line


def cli(*options, cwd=HERE):
    """train.py as a user starts it -> (exit code, stdout, the lines on stderr)."""
    done = subprocess.run([sys.executable, HERE / 'train.py', *map(str, options)], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.splitlines()


SMALL = ['--width', '16', '--heads', '2', '--layers', '2', '--batch', '32', '--steps', '20', '--eval-every', '10']


# ----------------------------------------------------------------------------------------------------------- attention

def test_attention_of_two_tokens_by_hand():
    q, k = torch.tensor([[1.], [0.]]), torch.tensor([[0.], [math.log(3.)]])       # d = 1; logits [[0, log 3], [0, 0]]
    M = torch.tensor([[0., 0.], [0., -math.log(2.)]])                              # sigmoid: 1/2, 1/2; 1/2, 1/3
    p = attention_weights(q[None, None], k[None, None], mask_bias(M))[0, 0]
    assert torch.allclose(p, torch.tensor([[1 / 4, 3 / 4], [3 / 5, 2 / 5]]))


def test_a_mask_at_plus_infinity_is_plain_attention():
    q, k, v = qkv()
    plain = (q @ k.mT / 2).softmax(-1) @ v
    assert torch.equal(attend(q, k, v), plain)
    assert torch.equal(attend(q, k, v, mask_bias(torch.full((5, 5), 800., dtype=torch.float64))), plain)
    assert torch.allclose(attend(q, k, v, mask_bias(torch.zeros(5, 5, dtype=torch.float64))), plain)


def test_a_constant_added_to_a_row_of_the_bias_changes_nothing():
    q, k, v = qkv()
    bias = torch.randn(5, 5, dtype=torch.float64)
    assert torch.allclose(attend(q, k, v, bias), attend(q, k, v, bias + torch.randn(5, 1, dtype=torch.float64)))


@pytest.mark.parametrize('shape', [(5, 5), (3, 5, 5)])
def test_sdpa_equals_the_explicit_softmax_in_value_and_gradient(shape):
    q, k, v = qkv()
    results = []
    for sdpa in (False, True):
        M = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = attend(q, k, v, mask_bias(M), sdpa)
        out.square().sum().backward()
        results.append((out.detach(), M.grad))
    assert all(torch.allclose(a, b) for a, b in zip(*results)) and results[0][1].abs().max() > 1e-3


@pytest.mark.parametrize('sdpa', [False, True])
@pytest.mark.parametrize('compiled', [False, True])
def test_gradient_of_odd_masks(sdpa, compiled, N=17):
    """One token, transposed M, expanded M (stride 0), eager and compiled: the gradient of softmax written out by hand."""
    def by_hand(q, k, v, bias):
        e = (q @ k.mT / q.shape[-1] ** 0.5 + bias).exp()
        return e / e.sum(-1, keepdim=True) @ v
    function = torch.compile(attend) if compiled else attend
    for layout in (lambda M: M, lambda M: M.T, lambda M: M[:1].expand(N, N), lambda M: M[:1, :1]):
        grads = []
        for path in (by_hand, lambda q, k, v, b: function(q, k, v, b, sdpa)):
            M = torch.randn(N, N, generator=torch.Generator().manual_seed(1)).requires_grad_()
            view = layout(M)
            q, k, v = qkv(N=view.shape[-1], dtype=torch.float32)
            path(q, k, v, mask_bias(view)).square().sum().backward()
            grads.append(M.grad)
        assert torch.allclose(*grads, atol=1e-5)
        assert grads[1].abs().max() > 1e-3 or view.numel() == 1                    # one key: softmax is 1, whatever M


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_bias_and_gradient_stay_finite_far_down(dtype):
    M = torch.tensor([-10., -18., -90., -300.], dtype=dtype, requires_grad=True)
    bias = mask_bias(M)
    bias.sum().backward()
    assert torch.allclose(bias.float(), M.float(), rtol=1e-2) and torch.allclose(M.grad.float(), torch.ones(4), rtol=1e-2)


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
    assert torch.allclose(out.float(), attn.to(torch.float32)(x), atol=0.05) and attn.M.grad.abs().max() > 0


def test_a_row_with_no_open_key_is_refused():
    allowed = torch.ones(4, 4).tril(-1).bool()
    with pytest.raises(ValueError, match='query token 0 has no open key'):
        maskprior.Attention(8, 2, allowed)
    with pytest.raises(ValueError, match='not finite'):
        maskprior.init_mask(tiny()[1], torch.full((16, 16), -math.inf))


@pytest.mark.parametrize('arm', list(maskprior.ARMS)[:-1])                             # impulse needs a grid of patches
@pytest.mark.parametrize('sdpa', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_a_causal_model_does_not_see_what_comes_next(arm, sdpa, tied, N=6):
    torch.manual_seed(0)
    model = maskprior.Transformer(7, (N,), outputs=7, D=16, H=2, pool=None, causal=True, tied=tied, sdpa=sdpa)
    x = torch.randint(7, (4, N))
    maskprior.init_arm(model, arm, prior_matrix(1 - torch.eye(N), 2, 2), x)
    changed = x.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 7
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3:], after[:, 3:])
    assert torch.allclose(model(x[:, :4]), before[:, :4], atol=1e-6)               # a shorter text is the same model


def test_the_last_blocks_shortcut_equals_reading_the_class_token_of_all_rows():
    task, model, _ = tiny('mask')
    x = model.embed(task.probe)
    for block in model.blocks:
        x = block(x)
    assert torch.allclose(model(task.probe), model.head(model.norm(x[:, 0])), atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- priors

def test_strength_and_level_of_a_prior():
    distance = torch.tensor([[0., 1.]])
    M0 = prior_matrix(distance, strength=4, level=4)
    assert torch.allclose(M0, torch.tensor([[4., -4.]]), atol=1e-5)                # logsigmoid(4) - logsigmoid(-4) = 4
    for level in (-6., 0., 8., 20.):                                               # the same attention at every level
        p = target_attention(prior_matrix(distance, 4, level))
        assert torch.allclose(p, torch.tensor([[1., math.exp(-4)]]) / (1 + math.exp(-4)))
    distance = torch.tensor([[0., 0.5, 3.]])
    assert torch.allclose(target_attention(prior_matrix(distance, 2, 1.)), (-2 * distance).softmax(-1))


def test_structure_of_the_boolean_tasks_by_hand():
    opened = lambda name: tasks.boolean(name).distance == 0
    assert opened('parity2').nonzero().tolist() == [[i, j] for i in (0, 1, 2) for j in (1, 2)]
    assert opened('cyclic3')[14].nonzero().flatten().tolist() == [0, 1, 14]
    pairs = lambda opened: opened.nonzero().tolist()
    assert pairs(tasks.boolean_structure([2, 5], 'cross')) == [[0, 3], [0, 6], [3, 6], [6, 3]]
    assert pairs(tasks.boolean_structure([2, 5], 'chain')) == [[0, 3], [3, 6], [6, 6]]
    assert [pairs(head) for head in tasks.boolean_structure([2, 5], 'split', heads=3)] == [
        [[0, 3], [3, 3], [6, 3]], [[0, 6], [3, 6], [6, 6]], [[0, 3], [3, 3], [6, 3]]]
    assert pairs(tasks.boolean_structure([2, 5], 'sink')) == [[0, 3], [0, 6], [3, 0], [3, 6], [6, 0], [6, 3]]


@pytest.mark.parametrize('d', [1, 2, 8])
def test_svd_error_is_the_discarded_singular_values(d, N=6):
    """To a prior that is not symmetric (each token looks at the next), truncated and at full rank."""
    torch.manual_seed(0)
    model = maskprior.Transformer(3, (N,), outputs=1, D=max(8, 2 * d), H=max(8, 2 * d) // d, L=1, pos_std=1.)
    M0, x = prior_matrix(1 - torch.eye(N).roll(1, 1), 4, 4), torch.randint(3, (64, N))
    maskprior.init_qk_svd(model, M0, x)
    (attn, X), = maskprior.layer_inputs(model, x)
    Xp = X.mean(0, keepdim=True)
    logits = (attn.split(attn.q(Xp)) @ attn.split(attn.k(Xp)).mT / math.sqrt(d))[0]
    wanted = F.logsigmoid(M0) - F.logsigmoid(M0).mean(-1, keepdim=True)
    discarded = torch.linalg.svdvals(wanted)[d:].square().sum().sqrt()
    for head in logits:
        assert torch.allclose((head - wanted).norm(), discarded, atol=1e-3)


@pytest.mark.parametrize('arm', list(maskprior.ARMS)[:4])
def test_arms_of_a_seed_share_all_other_weights_and_all_batches(arm):
    task, default, _ = tiny()
    drawn = torch.rand(3)                                                          # what dropout, say, would draw next
    other_task, model, _ = tiny(arm)
    assert torch.equal(drawn, torch.rand(3))
    batches = [t.batch(torch.Generator().manual_seed(0), 64) for t in (task, other_task)]
    assert all(torch.equal(a, b) for a, b in zip(*batches))
    own = {'mask': ('attn.M',), 'qk-svd': ('attn.q.weight', 'attn.k.weight'), 'default': (),
           'qk-opt': ('attn.q.weight', 'attn.k.weight')}[arm]
    weights, shared = model.state_dict(), default.state_dict()
    assert set(weights) ^ set(shared) == ({f'blocks.{i}.attn.M' for i in (0, 1)} if arm == 'mask' else set())
    changed = {name for name in shared if not torch.equal(weights[name], shared[name])}
    assert changed == {name for name in shared if name.endswith(own or 'nothing')}


@pytest.mark.parametrize('arm', ['mask', 'qk-svd', 'qk-opt'])
def test_arms_hold_the_prior_before_training(arm):
    task, model, target = tiny(arm, '--pos-std', '0.2')
    fresh = task.batch(torch.Generator().manual_seed(1), 512)[0]                   # not the inputs it was fitted to
    assert maskprior.prior_tv(model, target, fresh) < (0.01 if arm == 'qk-svd' else 0.03) < 0.5 < maskprior.prior_tv(tiny()[1], target, fresh)


@pytest.mark.parametrize('arm', ['mask', 'qk-svd', 'qk-opt'])
def test_arms_hold_the_prior_of_a_causal_task(arm):
    task, model, target = train.build(train.parse(['--task', 'add3', '--init', arm, '--frac', '0.001', '--width', '64', '--layers', '2']))
    assert (target.triu(1) == 0).all() and maskprior.prior_tv(model, target, task.batch(torch.Generator().manual_seed(1), 256)[0]) < 0.03


def test_prior_tv_by_hand():
    model = maskprior.Transformer(2, (2,), outputs=1, D=4, H=2, L=1)
    model.blocks[0].attn.q.weight.data.zero_()                                     # attention 1/2, 1/2 in both rows
    target = target_attention(torch.tensor([[0., 0.], [0., -math.log(5.)]]))       # sigmoid 1/2, 1/2; 1/2, 1/6 -> 3/4, 1/4
    assert maskprior.prior_tv(model, target, torch.zeros(1, 2, dtype=torch.long)) == pytest.approx(1 / 4)  # row 0 asks nothing
    # Of the mean attention, not the mean of distances: each of two inputs looks at its 0 alone, which stands in another place.
    model.positions.data.zero_()
    sign = torch.tensor([1., -1., 1., -1.])
    model.tokens.weight.data, attn = torch.stack([sign, -sign]), model.blocks[0].attn
    model.blocks[0].norm1.bias.data.fill_(1.)
    attn.q.weight.data.fill_(1.), attn.k.weight.data.copy_(sign.expand(4, 4))
    assert maskprior.prior_tv(model, target, torch.tensor([[0, 1], [1, 0]])) == pytest.approx(1 / 4)
    assert maskprior.asking_rows(torch.tensor([[1., 0.], [0.5, 0.5]]), torch.ones(2, 2).tril().bool()).tolist() == [False, False]


def test_prior_tv_is_the_mean_over_layers_heads_and_asking_rows():
    model = maskprior.Transformer(2, (2,), outputs=1, D=4, H=2, L=2)
    for block in model.blocks:
        block.attn.q.weight.data.zero_()                                           # attention 1/2, 1/2
    model.blocks[1].attn.M = torch.nn.Parameter(torch.tensor([[0., -math.log(5.)]] * 2))         # sigmoid 1/2, 1/6 -> 3/4, 1/4
    target = torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[1., 0.], [0.9, 0.1]]])    # [H, N, N]; row 1 of head 0 asks nothing
    layers = (1 / 4 + 1 / 2 + 0.4) / 3, (0 + 1 / 4 + 0.15) / 3
    assert maskprior.prior_tv(model, target, torch.zeros(1, 2, dtype=torch.long)) == pytest.approx(sum(layers) / 2)


def test_layer_inputs_are_what_each_attention_gets():
    for model, x in ((tiny('mask')[1], tiny()[0].probe), (vit('cls'), torch.randn(3, 3, 16, 16)), (lm(arm='mask'), torch.randint(11, (3, 6)))):
        got = []
        for block in model.blocks:
            block.attn.register_forward_pre_hook(lambda _, inputs: got.append(inputs[0]))
        model(x)
        whole = got.copy()                                                         # layer_inputs calls the blocks too
        assert len(whole) == len(model.blocks) == sum(torch.equal(a, b) for a, (_, b) in zip(whole, maskprior.layer_inputs(model, x)))


def test_relative_change_by_hand():
    _, model, _ = tiny('mask')
    initial = maskprior.prior_weights(model)
    for block in model.blocks:
        block.attn.M.data *= 1.5
    assert maskprior.relative_change(model, initial) == {'M': pytest.approx(0.5), 'W_Q': 0., 'W_K': 0.}


@pytest.mark.parametrize('bf16', [False, True])
def test_bf16_is_the_type_of_the_products_and_not_of_the_weights(bf16):
    task, model, _ = tiny('mask')
    settings, types = train.parse(['--bf16', str(bf16)]), []
    optimiser = train.make_optimiser(model, settings)
    model.blocks[0].attn.q.register_forward_hook(lambda _, inputs, out: types.append(out.dtype))
    train.update(model, optimiser, task, settings, *task.batch(torch.Generator().manual_seed(0), 8))
    assert types == [torch.bfloat16 if bf16 else torch.float32]
    assert {p.dtype for p in model.parameters()} == {m.dtype for s in optimiser.state.values() for m in s.values()} == {torch.float32}


def test_frozen_mask_does_not_learn():
    for options, learns in (([], True), (['--freeze-mask'], False), (['--freeze-mask', 'false'], True)):
        task, model, _ = tiny('mask', *options)
        settings, before = train.parse([]), model.blocks[0].attn.M.detach().clone()
        train.update(model, train.make_optimiser(model, settings), task, settings, *task.batch(torch.Generator().manual_seed(0), 64))
        assert torch.equal(model.blocks[0].attn.M, before) != learns


def test_the_gradient_is_cut_and_dropout_drops():
    for clip in ('0.01', '0'):
        task, model, _ = tiny()
        settings = train.parse(['--task', 'parity2', '--clip', clip])
        train.update(model, train.make_optimiser(model, settings), task, settings, *task.batch(torch.Generator().manual_seed(0), 64))
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        assert norm == pytest.approx(0.01, rel=1e-3) if clip == '0.01' else norm > 1
    block = maskprior.Block(8, 2, dropout=0.5).train()
    assert set(block.keep(torch.ones(100, 8)).unique().tolist()) == {0., 2.} and block.eval().keep(torch.ones(3)).tolist() == [1, 1, 1]


def test_a_wrong_and_a_noisy_prior():
    M0 = lambda *options: tiny('mask', *options)[1].blocks[0].attn.M
    assert (M0('--prior-bits', '2,3') > 0).nonzero().tolist() == [[i, j] for i in (0, 3, 4) for j in (3, 4)]
    for seed in ('0', '1'):
        flipped = (M0('--flip', '0.2', '--seed', seed) > 0) != (M0() > 0)
        assert 25 < flipped.sum() < 80                                             # of 256; the mean is 51
    assert torch.equal(M0('--flip', '1') > 0, M0() < 0)


def test_learning_rate_by_hand():
    settings = train.parse(['--steps', '100', '--warmup', '10', '--lr', '2'])
    assert train.learning_rate(4, settings) == pytest.approx(1 * (1 + math.cos(math.pi * 0.04)) / 2)
    assert train.learning_rate(50, settings) == pytest.approx(1) and train.learning_rate(99, settings) < 1e-3


def test_per_head_mask_has_a_matrix_for_each_head():
    for option in (['--per-head'], ['--pattern', 'split']):
        _, model, target = tiny('mask', *option)
        assert target.shape == model.blocks[0].attn.M.shape == (2, 16, 16)


@pytest.mark.parametrize('compiled', [False, True])
def test_every_parameter_is_in_one_group_and_m_takes_no_weight_decay(compiled):
    settings = train.parse(['--lr', '1e-2', '--weight-decay', '0.1', '--width', '8', '--heads', '2'])
    _, model, _ = train.build(settings)
    optimiser = train.make_optimiser(torch.compile(model) if compiled else model, settings)
    decayed, free = ([id(p) for p in group['params']] for group in optimiser.param_groups)
    assert sorted(decayed + free) == sorted(id(p) for p in model.parameters())
    assert all(p.ndim == 2 for p in optimiser.param_groups[0]['params']) and len(decayed) == 2 * 6 + 1
    M, before = model.blocks[0].attn.M, model.blocks[0].attn.M.detach().clone()
    W, W_before = model.head.weight, model.head.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(1000):
        optimiser.step()
    assert torch.equal(M, before) and W.norm() < 0.5 * W_before.norm()


# --------------------------------------------------------------------------------------------------------------- tasks

def test_fourier_coefficients_by_hand():
    x = tasks.cube(4)
    assert x[0].tolist() == [1, 1, 1, 1] and x[5].tolist() == [-1, 1, -1, 1]
    f = 3 + 2 * x[:, 1] - x[:, 0] * x[:, 3]
    assert tasks.fourier(f).tolist() == [3, 0, 2, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize('name, hole, on_hole, accuracy, squared_error', [
    ('parity2', '+-', lambda x, f: 3 + 0 * f, 0.75, 4), ('parity2', '--', lambda x, f: -3 + 0 * f, 0.75, 4),
    ('maj3', '++-', lambda x, f: -3 + 0 * f, 0.875, 2), ('maj3', '--*', lambda x, f: -1 + 2 * x[:, 2], 0.875, 1),
    ('cyclic3', '---', lambda x, f: f + 8, 0.875, 8), ('parity3', '++-', lambda x, f: 7 + 0 * f, 0.875, 8),
    ('diff2', '+-', lambda x, f: f, 1, 0)])
def test_mdi_equals_the_values_worked_out_by_hand(name, hole, on_hole, accuracy, squared_error):
    x = tasks.cube(15)
    f = tasks.BOOLEAN[name][0](x).double()
    unseen = tasks.in_hole(x, hole)
    mdi = tasks.minimum_degree_interpolator(f, hole)
    assert torch.allclose(mdi[unseen], on_hole(x, f).double()[unseen]) and torch.allclose(mdi[~unseen], f[~unseen])
    known = tasks.boolean(name, hole).known
    assert known['mdi_accuracy'] == accuracy and known['mdi_loss'] == pytest.approx(squared_error, abs=1e-6)


@pytest.mark.parametrize('hole', ['+-', '-*+', '*-', '---'])
def test_mdi_equals_least_squares_from_the_highest_degree_down(hole, n=4):
    """An independent solver on a random function: from the top degree down, minimise the mass, keep the minimisers."""
    f = torch.randn(2 ** n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = tasks.cube(n).double()
    free = torch.eye(2 ** n, dtype=torch.float64)[:, tasks.in_hole(x, hole)]       # what an interpolant may add to f
    subsets = [s for r in range(n, -1, -1) for s in combinations(range(n), r)]
    g = f
    for degree in range(n, -1, -1):
        rows = torch.stack([x[:, list(s)].prod(1) for s in subsets if len(s) == degree]) / 2 ** n
        A = rows @ free
        g = g + free @ torch.linalg.lstsq(A, -(rows @ g)[:, None], driver='gelsd').solution[:, 0]
        _, S, Vh = torch.linalg.svd(A)
        free = free @ Vh[(S > 1e-9).sum():].T
        if not free.shape[1]:
            break
    assert torch.allclose(tasks.minimum_degree_interpolator(f, hole), g)


def test_targets_by_hand():
    x = torch.ones(3, 15)
    x[1, [0, 1]] = x[2, 0] = -1
    expected = {'parity2': [1, 1, -1], 'maj3': [1, -1, 1], 'cyclic3': [15, 15 - 2 * 2, 15 - 2 * 3], 'parity3': [1, 1, -1], 'diff2': [0, 0, -1]}
    # flipping x0 and x1 flips the windows that hold one of the two: (14,0,1) and (0,1,2) hold both; (13,14,0), (1,2,3) flip
    assert {name: f(x).tolist() for name, (f, _, _) in tasks.BOOLEAN.items()} == expected


@pytest.mark.parametrize('name, variance', [('parity2', 1), ('cyclic3', 15)])      # of a sum of 15 uncorrelated signs
def test_fitted_is_a_hundredth_of_the_targets_variance(name, variance):
    fitted = tasks.boolean(name).fitted
    assert fitted({'loss_seen': 0.0099 * variance}) and not fitted({'loss_seen': 0.0101 * variance})


def test_accuracy_counts_ties_as_wrong_and_asserts_shapes():
    values, target = torch.tensor([-1., 1.]), torch.tensor([1., -1., 1.])
    right = tasks.nearest_is_right(torch.tensor([0., -0.1, -9.]), target, values)
    assert right.tolist() == [False, True, False]
    uneven = torch.tensor([-3., 1., 3.])
    assert tasks.nearest_is_right(torch.tensor([-1., -0.9, 2.]), torch.tensor([1., 1., 3.]), uneven).tolist() == [False, True, False]
    with pytest.raises(AssertionError):
        tasks.nearest_is_right(torch.zeros(3, 1), target, values)
    with pytest.raises(AssertionError):
        tasks.boolean('parity2').loss(torch.zeros(3), target)


def test_all_zero_predictions_are_all_wrong():
    task = tasks.boolean('parity2')
    metrics = task.evaluate(lambda x: torch.zeros(len(x), 1))
    assert metrics['accuracy'] == 0 and metrics['loss'] == 1 and set(metrics['fourier'].values()) == {0}


def test_the_measures_of_a_model_that_is_the_mdi():
    bits = lambda tokens: 1. - 2 * tokens[:, 1:]
    found = tasks.boolean('parity2').evaluate(lambda tokens: 1 + bits(tokens)[:, :1] - bits(tokens)[:, 1:2])
    wanted = dict(accuracy=0.75, accuracy_seen=1., accuracy_unseen=0., loss=4., loss_seen=0., prediction_unseen=3.)       # -1 is right there
    assert {name: found[name] for name in wanted} == wanted and found['fourier'] == {'1': 1., 'x0': 1., 'x1': -1., 'x0*x1': 0.}


def test_training_never_sees_the_hole():
    task = tasks.boolean('maj3', '+*-')
    x, y = task.batch(torch.Generator().manual_seed(0), 20000)
    bits = 1 - 2 * x[:, 1:]
    assert not ((bits[:, 0] == 1) & (bits[:, 2] == -1)).any()
    assert torch.equal(bits[:, :3].sum(1).sign().float(), y) and len(x.unique(dim=0)) > 12000


# ---------------------------------------------------------------------------------------------------------- arithmetic

def text(ids):
    return [''.join(tasks.VOCAB[t] for t in row) for row in ids]


def test_arithmetic_texts_by_hand():
    a, b = torch.tensor([7, 999]), torch.tensor([5, 999])
    assert text(tasks.arithmetic_text(a, b, '+', 3, 'msb')) == ['007+005=0012', '999+999=1998']
    assert text(tasks.arithmetic_text(a, b, '+', 3)) == ['007+005=2100', '999+999=8991']
    assert text(tasks.arithmetic_text(a, b, '*', 3, 'msb')) == ['007*005=000035', '999*999=998001']
    assert text(tasks.arithmetic_text(a, b, '*', 3)) == ['007*005=530000', '999*999=100899']


def needs(opened, layout):
    """{(head, token): the tokens it needs} by name, without the rows that ask nothing."""
    return {(h, layout[i]): ' '.join(layout[j] for j in row.nonzero()[:, 0])
            for h, head in enumerate(opened) for i, row in enumerate(head) if row.any()}


def test_the_priors_rows_by_hand():
    # '=' emits the first digit that is written, and each digit's row the next one
    layout = 'a2 a1 a0 + b2 b1 b0 = c0 c1 c2'.split()
    digits = {'=': 'a0 b0', 'c0': 'a1 b1', 'c1': 'a2 b2', 'c2': 'c2'}
    carry = {'=': '=', 'c0': '= c0', 'c1': 'c0 c1', 'c2': 'c1 c2'}
    add3 = {(h, row): key for h in range(3) for row, key in digits.items()}
    assert needs(tasks.arithmetic_structure('+', 3, 4), layout) == add3 | {(3, row): key for row, key in carry.items()}
    assert needs(tasks.arithmetic_structure('+', 3, 4, without='carry'), layout) == add3
    assert needs(tasks.arithmetic_structure('+', 3, 4, without='digits'), layout) == {(3, row): key for row, key in carry.items()}
    layout = 'a1 a0 + b1 b0 = c2 c1'.split()                                       # most significant digit first
    assert needs(tasks.arithmetic_structure('+', 2, 2, 'msb'), layout) == {
        (0, '='): '=', (0, 'c2'): 'a1 b1', (0, 'c1'): 'a0 b0', (1, '='): 'a1 a0 b1 b0', (1, 'c2'): 'a0 b0', (1, 'c1'): 'c1'}

    layout = 'a2 a1 a0 * b2 b1 b0 = c0 c1 c2 c3 c4'.split()
    products = {(h, f'b{j}'): f'a{h} b{j}' for h in range(3) for j in range(3)}
    sums = {(0, '='): 'a0 b0', (0, 'c0'): 'a0 b1', (0, 'c1'): 'a0 b2', (0, 'c2'): 'c2', (0, 'c3'): 'c3', (0, 'c4'): 'c4',
            (1, '='): '=', (1, 'c0'): 'a1 b0', (1, 'c1'): 'a1 b1', (1, 'c2'): 'a1 b2', (1, 'c3'): 'c3', (1, 'c4'): 'c4',
            (2, '='): '=', (2, 'c0'): 'c0', (2, 'c1'): 'a2 b0', (2, 'c2'): 'a2 b1', (2, 'c3'): 'a2 b2', (2, 'c4'): 'c4'}
    carry = {(3, '='): '=', (3, 'c0'): '= c0', (3, 'c1'): 'c0 c1', (3, 'c2'): 'c1 c2', (3, 'c3'): 'c2 c3', (3, 'c4'): 'c3 c4'}
    assert needs(tasks.arithmetic_structure('*', 3, 4), layout) == products | sums | carry
    assert needs(tasks.arithmetic_structure('*', 3, 4, without='products'), layout) == sums | carry
    assert needs(tasks.arithmetic_structure('*', 3, 4, without='digits'), layout) == products | carry
    shared = tasks.arithmetic('mul3', 0.001, per_head=False).distance == 0         # the union over the heads
    assert needs(shared[None], layout)[0, 'c1'] == 'a2 a1 a0 b2 b1 b0 c0 c1' and needs(shared[None], layout)[0, 'b1'] == 'a2 a1 a0 b1'


@pytest.mark.parametrize('sign, n', [('+', 3), ('+', 5), ('*', 3)])
@pytest.mark.parametrize('order', ['lsb', 'msb'])
def test_what_the_prior_opens_is_enough_for_the_answer(sign, n, order):
    """Through 4 layers a row reaches every digit that its answer digit depends on, and no row looks at a later token."""
    opened = tasks.arithmetic_structure(sign, n, n + 1, order)
    N = opened.shape[1]
    assert not (opened & ~torch.ones(N, N).tril().bool()).any()
    reach = (opened.any(0) | torch.eye(N).bool()).float()
    reach = torch.linalg.matrix_power(reach, 4) > 0
    answers = N - 2 * n - 1
    for row in range(2 * n + 1, N):
        k = row - 2 * n - 1 if order == 'lsb' else N - 1 - row
        for i in range(min(k, n - 1) + 1):
            if order == 'msb' or i > k - 4:                                        # lsb: c_(k-1) stands for what is further below
                assert reach[row, n - 1 - i] and reach[row, 2 * n - i], f'row {row} of {answers} answer digits, digit {i}'


@pytest.mark.parametrize('frac', [0.03, 0.3, 0.7])
def test_split_is_exact_and_no_test_pair_is_a_training_pair_exchanged(frac):
    for n in (1, 2, 3):
        train_pairs, test_pairs = tasks.arithmetic_split(n, frac, seed=0)
        seen, unseen = ({tuple(p) for p in pairs.tolist()} for pairs in (train_pairs, test_pairs))
        assert len(seen) == len(train_pairs) == round(frac * 100 ** n) and len(unseen) == len(test_pairs) <= 10_000
        assert not seen & unseen and not seen & {(b, a) for a, b in unseen}
        if n == 1:                                                                 # few enough that all the rest is tested
            assert unseen == {(a, b) for a in range(10) for b in range(10)} - seen - {(b, a) for a, b in seen}
        assert max(max(p) for p in seen | unseen) < 10 ** n
    assert not torch.equal(train_pairs, tasks.arithmetic_split(n, frac, seed=1)[0])


class School:
    """Predicts from the question and the digits written so far; `spoil` gets the last digit wrong."""
    def __init__(self, sign, n, spoil=False):
        self.sign, self.n, self.spoil, self.seen = sign, n, spoil, []

    def __call__(self, x):
        n, first = self.n, 2 * self.n + 2
        self.seen.append(x.shape[1])
        power = 10 ** torch.arange(n - 1, -1, -1)
        answer = tasks.arithmetic_text((x[:, :n] * power).sum(1), (x[:, n + 1:first - 1] * power).sum(1), self.sign, n)[:, first:]
        if self.spoil:
            answer[:, -1] = (answer[:, -1] + 1) % 10
        return F.one_hot(answer[:, :x.shape[1] - first + 1], len(tasks.VOCAB)).float()


def test_evaluation_is_greedy_and_counts_whole_answers():
    task = tasks.arithmetic('add3', 0.0001)
    right, spoilt = School('+', 3), School('+', 3, spoil=True)
    metrics = task.evaluate(right)
    assert metrics['sequence_accuracy'] == metrics['digit_accuracy'] == metrics['sequence_accuracy_seen'] == 1
    assert not metrics['wrong'] and set(right.seen[:4]) == {8, 9, 10, 11}         # no call holds a digit it didn't write itself
    metrics = task.evaluate(spoilt)
    assert metrics['sequence_accuracy'] == 0 and metrics['digit_accuracy'] == 0.75
    assert metrics['accuracy_of_digit'] == [1, 1, 1, 0] and len(metrics['wrong']) == 5
    question, answered = metrics['wrong'][0].split(', answered ')
    question, truth = question.split('=')
    assert sum(map(int, question.split('+'))) == int(truth) == int(answered) - 1000


def test_garbage_in_the_answers_of_the_evaluation_changes_no_prediction(monkeypatch):
    """What stands where the answer's digits will come is never looked at, so only the score changes."""
    task, model, _ = train.build(train.parse(['--task', 'add3', '--frac', '0.0001', '--width', '16']))
    def calls(task):
        seen = []
        with torch.no_grad():
            task.evaluate(lambda x: seen.append(model(x).argmax(-1)) or model(x))
        return [s for s in seen if len(s) == 2000]
    before = calls(task)
    real = tasks.arithmetic_text
    monkeypatch.setattr(tasks, 'arithmetic_text', lambda a, b, *rest: real(a, b, *rest)[:, :8].repeat(1, 2)[:, :12])
    after = calls(tasks.arithmetic('add3', 0.0001))
    assert len(before) == 20 and all(torch.equal(x, y) for x, y in zip(before, after))


def test_arithmetic_batches_are_training_pairs_and_the_loss_is_the_answers():
    task = tasks.arithmetic('mul3', 0.0001)
    x, y = task.batch(torch.Generator().manual_seed(0), 500)
    pairs = {''.join(t) for t in text(torch.cat([x, y[:, -1:]], 1))}
    all_pairs = set(text(tasks.arithmetic_text(*tasks.arithmetic_split(3, 0.0001, 0)[0].T, '*', 3)))
    assert len(pairs) > 90 and pairs <= all_pairs
    assert text(x[:1])[0][8:] + str(int(y[0, -1])) == text(y[:1])[0]
    outputs = torch.zeros(500, 6, 13).scatter(2, y[..., None], math.log(12.))      # 12 of 24 on the right one
    assert task.loss(outputs, y).item() == pytest.approx(math.log(2), abs=1e-6)


# -------------------------------------------------------------------------------------------------------------- vision

def make_cifar(folder, batches=2, n=20, layout='python', keys=str, name='cifar10', style='numpy.core'):
    """A hand-made archive: image s of a batch is all s, with its label s % 10 (or 77) and one marked corner; the test's are in reverse."""
    images = torch.arange(n, dtype=torch.uint8).repeat_interleave(3072).view(n, 3072).clone()
    images[:, 0] = 255                                                             # red plane, pixel (0, 0)
    labels = [77 if name == 'cifar100' else s % 10 for s in range(n)]
    folder.mkdir(parents=True, exist_ok=True)
    files = {'cifar10': [f'data_batch_{b + 1}' for b in range(batches)] + ['test_batch'], 'cifar100': ['train', 'test']}[name]
    for file in files:
        own, own_labels = (images.flip(0), labels[::-1]) if file.startswith('test') else (images, labels)
        if layout == 'binary':
            coarse = [[3]] * n if name == 'cifar100' else [[]] * n
            data = b''.join(bytes(c + [y]) + bytes(i.tolist()) for c, y, i in zip(coarse, own_labels, own))
            (folder / f'{file}.bin').write_bytes(data)
        else:
            entries = {'batch_label': f'training batch {file[-1]} of {batches}', 'data': FakeArray(own, style),
                       'fine_labels' if name == 'cifar100' else 'labels': own_labels}
            convert = (lambda t: t) if keys is str else (lambda t: t.encode() if isinstance(t, str) else t)
            (folder / file).write_bytes(pickle.dumps({convert(k): convert(v) for k, v in entries.items()}, protocol=2))
    return images.view(n, 3, 32, 32), torch.tensor(labels)


class FakeArray:
    """Pickles as numpy writes an array of uint8, without numpy."""
    def __init__(self, tensor, style='numpy.core', by_columns=False):
        self.tensor, self.style, self.by_columns = tensor, style, by_columns

    def __reduce__(self):
        def named(module, name):
            fake = type(name, (), {})
            fake.__module__, fake.__qualname__ = module, name
            sys.modules.setdefault(module, type(sys)(module))
            setattr(sys.modules[module], name, fake)
            return fake
        reconstruct, ndarray = named(f'{self.style}.multiarray', '_reconstruct'), named('numpy', 'ndarray')
        dtype = named('numpy', 'dtype')
        kind = dtype()
        dtype.__reduce__ = lambda self: (dtype, ('u1', 0, 1), (3, '|', None, None, None, -1, -1, 0))
        return reconstruct, (ndarray, (0,), b'b'), (1, tuple(self.tensor.shape), kind, self.by_columns, bytes(self.tensor.flatten().tolist()))


@pytest.fixture
def no_fakes():
    """What FakeArray needs while it pickles is gone before anything is read."""
    before = dict(sys.modules)
    yield lambda: [sys.modules.pop(m) for m in list(sys.modules) if m.split('.')[0] == 'numpy' and m not in before]
    for module in [m for m in sys.modules if m not in before and m.split('.')[0] == 'numpy']:
        del sys.modules[module]


@pytest.mark.parametrize('style', ['numpy.core', 'numpy._core'])
@pytest.mark.parametrize('keys', [str, bytes])
def test_cifar_pickles_are_read_without_numpy(tmp_path, no_fakes, style, keys):
    images, labels = make_cifar(tmp_path / 'cifar-10-batches-py', style=style, keys=keys)
    no_fakes()
    (x, y), (test_x, test_y) = tasks.cifar('cifar10', tmp_path)
    assert torch.equal(x, torch.cat([images, images])) and torch.equal(test_x, images.flip(0))
    assert y.tolist() == labels.tolist() * 2 and test_y.tolist() == labels.tolist()[::-1]
    assert x[3, 0, 0, 0] == 255 and x[3, 1, 0, 0] == 3 and 'numpy' not in sys.modules


def test_cifar_binaries_and_archives_hold_the_same(tmp_path, no_fakes):
    images, labels = make_cifar(tmp_path / 'cifar-10-batches-bin', 5, layout='binary')
    (x, y), _ = tasks.cifar('cifar10', tmp_path)
    assert torch.equal(x[20:40], images) and y.tolist() == labels.tolist() * 5
    # CIFAR-100: coarse label 3, fine label 77, planes in the order red, green, blue
    (tmp_path / 'cifar-100-binary').mkdir()
    pixels = bytes([255] + [10] * 1023 + [20] * 1024 + [30] * 1024)
    for file in ('train.bin', 'test.bin'):
        (tmp_path / 'cifar-100-binary' / file).write_bytes(bytes([3, 77]) + pixels)
    (x, y), _ = tasks.cifar('cifar100', tmp_path)
    assert y.tolist() == [77] and x[0, 0, 0, 0] == 255 and x[0, 0, 0, 1] == 10 and (x[0, 1] == 20).all() and (x[0, 2] == 30).all()
    make_cifar(tmp_path / 'b' / 'cifar-10-batches-py')
    no_fakes()
    with tarfile.open(tmp_path / 'cifar-10-python.tar.gz', 'w:gz') as tar:
        tar.add(tmp_path / 'b' / 'cifar-10-batches-py', 'cifar-10-batches-py')
    assert torch.equal(tasks.cifar('cifar10', tmp_path)[0][0], tasks.cifar('cifar10', tmp_path / 'b')[0][0])


class Gadget:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_pickle_with_a_gadget_is_refused_and_does_not_run(tmp_path):
    folder, marker = tmp_path / 'cifar-10-batches-py', tmp_path / 'marker'
    folder.mkdir()
    (folder / 'data_batch_1').write_bytes(pickle.dumps({'data': Gadget(marker), 'labels': [0]}, protocol=2))
    with pytest.raises(tasks.DataError, match='data_batch_1 is no CIFAR batch .it asks for') as error:
        tasks.cifar('cifar10', tmp_path)
    assert not marker.exists() and '\n' not in str(error.value)


@pytest.mark.parametrize('damage, says', [
    (lambda f: (f / 'data_batch_2').write_bytes((f / 'data_batch_2').read_bytes()[:5000]), 'data_batch_2'),
    (lambda f: (f / 'test_batch').write_bytes(b''), 'test_batch is empty'),
    (lambda f: (f / 'data_batch_3').unlink(), 'data_batch_3 is missing'),
    (lambda f: (f / 'data_batch_1').write_bytes(pickle.dumps({'labels': [1]})), 'data_batch_1'),
    (lambda f: (f / 'data_batch_1').write_bytes(pickle.dumps({'data': b'x' * 3072, 'labels': [1]})), 'images that are no array'),
    (lambda f: (f / 'data_batch_2').write_bytes(pickle.dumps({'data': FakeArray(torch.zeros(2, 3072).byte()), 'labels': [1]}, protocol=2)),
     'data_batch_2 holds 1 labels for images of shape'),
    (lambda f: (f / 'data_batch_2').write_bytes(pickle.dumps({'data': FakeArray(torch.zeros(2, 3072).byte(), by_columns=True), 'labels': [1, 1]},
                                                             protocol=2)), 'data_batch_2 .* by columns'),
    (lambda f: (f / 'data_batch_1').write_bytes(pickle.dumps({'data': [[0] * 3072], 'labels': 1})), 'data_batch_1')])
def test_damaged_cifar_is_named(tmp_path, no_fakes, damage, says):
    make_cifar(tmp_path / 'cifar-10-batches-py', batches=4)
    no_fakes()
    damage(tmp_path / 'cifar-10-batches-py')
    with pytest.raises(tasks.DataError, match=says):
        tasks.cifar('cifar10', tmp_path)


@pytest.mark.parametrize('damage, says', [
    (lambda f: (f / 'data_batch_3.bin').unlink(), 'data_batch_3.bin is missing'),
    (lambda f: (f / 'test_batch.bin').write_bytes(b'x' * 100), 'test_batch.bin is cut off'),
    (lambda f: (f / 'data_batch_1.bin').write_bytes(bytes([11]) + bytes(3072)), 'beyond the 10 classes')])
def test_damaged_binary_cifar_is_named(tmp_path, damage, says):
    make_cifar(tmp_path / 'cifar-10-batches-bin', batches=5, layout='binary')
    damage(tmp_path / 'cifar-10-batches-bin')
    with pytest.raises(tasks.DataError, match=says):
        tasks.cifar('cifar10', tmp_path)


@pytest.mark.parametrize('member', ['../evil', '/tmp/evil', 'link'])
def test_an_archive_with_a_foreign_member_is_refused(tmp_path, member):
    with tarfile.open(tmp_path / 'cifar-10-python.tar.gz', 'w:gz') as tar:
        info = tarfile.TarInfo(member)
        if member == 'link':
            info.type, info.linkname = tarfile.SYMTYPE, '/etc/passwd'
        tar.addfile(info)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(tasks.DataError, match=member):
        tasks.cifar('cifar10', tmp_path)
    assert sorted(tmp_path.rglob('*')) == before
    for content in ((tmp_path / 'cifar-10-python.tar.gz').read_bytes()[:40], b'', b'<html>no such file</html>'):
        (tmp_path / 'cifar-10-python.tar.gz').write_bytes(content)
        with pytest.raises(tasks.DataError, match='cifar-10-python.tar.gz can not be read') as refusal:
            tasks.cifar('cifar10', tmp_path)
        assert '\n' not in str(refusal.value)


def test_download_is_checked_and_atomic(tmp_path, monkeypatch, capsys):
    (tmp_path / 'web').mkdir()
    content = os.urandom(3_000_000)
    (tmp_path / 'web' / 'x.tar.gz').write_bytes(content)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / 'web'))
    monkeypatch.setattr(handler.func, 'log_message', lambda *_: None)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fetch = lambda: tasks.command(lambda: tasks.main(['download', 'cifar10', '--data-dir', str(tmp_path / 'data')]), 'tasks.py')
        address = f'http://127.0.0.1:{server.server_port}/x.tar.gz'
        for size, md5, code in ((1, 'x', 1), (len(content), 'x', 1), (len(content), hashlib.md5(content).hexdigest(), 0)):
            monkeypatch.setitem(tasks.DOWNLOADS, 'cifar10', [(address, 'x.tar.gz', size, md5)])
            assert (fetch() or 0) == code
            assert [p.name for p in (tmp_path / 'data').iterdir()] == (['x.tar.gz'] if code == 0 else [])
        assert 'already there' not in capsys.readouterr().out
        assert not fetch() and 'already' in capsys.readouterr().out
        (tmp_path / 'data' / 'x.tar.gz').write_bytes(content[:99])                 # cut off: "download it again" has to work
        assert not fetch() and 'already' not in capsys.readouterr().out
        (tmp_path / 'data' / 'x.tar.gz').write_bytes(b'')                          # likewise where no one says how long it has to be
        monkeypatch.setitem(tasks.DOWNLOADS, 'cifar10', [(address, 'x.tar.gz', None, None)])
        assert not fetch() and 'already' not in capsys.readouterr().out
        monkeypatch.setitem(tasks.DOWNLOADS, 'cifar10', [(address + '.gone', 'y.tar.gz', 1, 'x')])
        assert fetch() == 1
        assert '404' in capsys.readouterr().err
        server.shutdown()
    assert (tmp_path / 'data' / 'x.tar.gz').read_bytes() == content


def test_missing_data_is_one_line_that_says_how_to_get_it(tmp_path):
    for task, says in (('cifar10', 'python tasks.py download cifar10'), ('imagenet100', 'image-net.org')):
        code, _, err = cli('--task', task, '--data-dir', tmp_path, '--out', tmp_path)
        assert code == 1 and len(err) == 1 and says in err[0]


def make_imagenet(root):
    Image = pytest.importorskip('PIL.Image', reason='Pillow is not installed: JPEG files are not tested')
    for split in ('train', 'val'):
        for i, name in enumerate(('n01', 'n02')):
            folder = root / 'imagenet100' / split / name
            folder.mkdir(parents=True)
            Image.new('RGB', (60, 40), (200 * i, 100, 50)).save(folder / 'a.JPEG')
            Image.new('L', (40, 40), 90).save(folder / 'b.JPG', exif=b'Exif\0\0MM\0*\xff\xff\xff\xff')    # no place for its entries
            Image.new('CMYK', (40, 90)).save(folder / 'c.jpeg')
            Image.new('RGB', (40, 40)).save(folder / 'd.JPEG', format='PNG')
            Image.new('RGB', (40, 40)).save(folder / 'f.jpg')
        (root / 'imagenet100' / split / '.ipynb_checkpoints').mkdir()
        (root / 'imagenet100' / split / '.DS_Store').write_bytes(b'x')
        (root / 'imagenet100' / split / 'n03').mkdir()
    return root / 'imagenet100' / 'train' / 'n02' / 'e.JPEG'


def test_imagenet_folders_with_what_people_have_in_them(tmp_path):
    bad = make_imagenet(tmp_path)
    (x, y), (test_x, test_y) = tasks.imagenet100(tmp_path, 32, tmp_path / 'cache')
    assert x.shape == test_x.shape == (10, 3, 32, 32) and y.tolist() == test_y.tolist() == [0] * 5 + [1] * 5
    assert (x[0].float().mean((1, 2)) - torch.tensor([0., 100, 50])).abs().max() < 3 and (x[1].float() - 90).abs().max() < 3
    kept = sorted(p.name for p in (tmp_path / 'cache').iterdir())
    assert torch.equal(tasks.imagenet100(tmp_path, 32, tmp_path / 'cache')[0][0], x)
    assert kept == sorted(p.name for p in (tmp_path / 'cache').iterdir())
    bad.write_bytes((bad.parent / 'a.JPEG').read_bytes()[:300])
    with pytest.raises(tasks.DataError, match='n02/e.JPEG can not be decoded'):
        tasks.imagenet100(tmp_path, 32, tmp_path / 'cache')
    assert kept == sorted(p.name for p in (tmp_path / 'cache').iterdir())         # nothing half made
    (tmp_path / 'imagenet100_classes.txt').write_text('n01\nn09\n')
    assert len(tasks.imagenet100(tmp_path, 32, tmp_path / 'cache')[0][1]) == 5


def test_imagenet_that_is_not_all_there_is_named(tmp_path):
    load = lambda: tasks.imagenet100(tmp_path, 32, tmp_path / 'cache')
    for folder, says in (('imagenet100', 'image-net.org'), ('imagenet100/train', '0 classes'), ('imagenet100/train/n01', '0 classes'),
                         ('imagenet100/val/n02', '0 classes')):
        (tmp_path / folder).mkdir(parents=True)
        with pytest.raises(tasks.DataError, match=says):
            load()
    (tmp_path / 'imagenet100/train/n01/a.JPEG').write_text('no image')
    with pytest.raises(tasks.DataError, match='1 classes, val of 0'):
        load()
    (tmp_path / 'imagenet100/val/n02/b.JPEG').write_text('no image')
    with pytest.raises(tasks.DataError, match='must be the same'):
        load()
    (tmp_path / 'imagenet100/val/n01').mkdir()
    (tmp_path / 'imagenet100/val/n01/b.JPEG').write_text('no image')
    (tmp_path / 'imagenet100_classes.txt').write_text('n01')
    if importlib.util.find_spec('PIL'):
        with pytest.raises(tasks.DataError, match='a.JPEG can not be decoded'):
            load()
    assert not (tmp_path / 'cache').exists() or not list((tmp_path / 'cache').iterdir())


def test_absent_pillow_is_named(tmp_path, monkeypatch):
    (tmp_path / 'a.jpg').write_bytes(b'x')
    monkeypatch.setitem(sys.modules, 'PIL', None)
    with pytest.raises(tasks.DataError, match='pip install pillow'):
        tasks.decoded([tmp_path / 'a.jpg'], 8, tmp_path / 'cache')


def test_normalisation_constants():
    assert tasks.VISION['cifar10'][3:5] == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert tasks.VISION['cifar100'][3:5] == ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


@pytest.mark.parametrize('name, stored, side', [('cifar10', 32, 32), ('imagenet100', 32, 28)])
def test_images_are_evaluated_normalised_cropped_and_by_their_own_labels(monkeypatch, name, stored, side):
    x, test_x = torch.randint(256, (2, 6, 3, stored, stored), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y, test_y = torch.arange(6) % 2, torch.tensor([0, 0, 1, 1, 1, 1])
    monkeypatch.setattr(tasks, 'cifar' if name == 'cifar10' else name, lambda *_: ((x, y), (test_x, test_y)))
    task = tasks.vision(name, '', image_size=side, patch=side // 2)
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in tasks.VISION[name][3:5])
    edge = (stored - side) // 2
    plain = lambda x: (x[..., edge:edge + side, edge:edge + side] / 255 - mean) / std
    known, answers = plain(torch.cat([x, test_x])), torch.cat([y, test_y])
    answers[-1], classes = 0, 10 if name == 'cifar10' else 2
    def predict(images):                                                           # right on all but the last test image
        same = (images[:, None] - known).flatten(2).abs().amax(2) < 1e-5
        assert (same.sum(1) == 1).all()
        return 5. * F.one_hot(answers[same.nonzero()[:, 1]], classes)
    found, right = task.evaluate(predict), math.log(1 + (classes - 1) * math.exp(-5))
    assert found == pytest.approx(dict(accuracy=5 / 6, accuracy_seen=1., loss=right + 5 / 6, loss_seen=right), abs=1e-5)
    assert torch.allclose(task.probe, plain(x)[tasks.permutation(6, 0, 0)])


def test_a_batch_of_images_is_normalised_and_its_labels_are_soft(monkeypatch):
    grey, y = torch.arange(0, 250, 25), torch.arange(10)
    x = grey.byte().view(10, 1, 1, 1).expand(10, 3, 32, 32)
    monkeypatch.setattr(tasks, 'cifar', lambda *_: ((x, y), (x, y)))
    task = tasks.vision('cifar10', '', pool='cls')
    images, target = task.batch(torch.Generator().manual_seed(0), 10)
    mean, std = (torch.tensor(c) for c in tasks.VISION['cifar10'][3:5])
    label = target.argmax(1)
    assert sorted(label.tolist()) == y.tolist() and torch.allclose(target, 0.01 + 0.9 * torch.eye(10)[label])
    assert torch.allclose((images[:, :, 16, 16] * std + mean) * 255, grey[label, None].expand(10, 3).float(), atol=1e-3)
    assert torch.equal(task.distance[:, 1:, 1:], tasks.locality(8, 8, 3)) and task.model['rows'] == slice(0, 1)
    assert not task.distance[:, 0].any() and not task.distance[:, :, 0].any()      # the class token is first, and free


@pytest.mark.parametrize('rows, cols', [(4, 4), (2, 3)])
def test_patches_come_row_by_row(rows, cols, P=4):
    number = torch.arange(rows * cols).view(rows, cols)
    image = number.repeat_interleave(P, 0).repeat_interleave(P, 1).float().expand(1, 3, -1, -1)
    patches = maskprior.Patches(3, P, 8)
    patches.proj.weight.data.fill_(1.), patches.proj.bias.data.zero_()
    assert torch.equal(patches(image)[0, :, 0], 48 * torch.arange(rows * cols))
    right = tasks.locality(rows, cols, 3)[2].argmin(-1)                            # head 2: the patch on the right
    for i in range(rows * cols):
        assert right[i] == (i + 1 if i % cols < cols - 1 else i)                   # at the edge it stays: no wrap
        assert tasks.shift_targets(rows, cols, 3)[2, i].argmax() == right[i]


def test_locality_by_hand():
    near = tasks.locality(3, 4) == 0
    assert near[0].nonzero().flatten().tolist() == [0, 1, 4, 5] and near[5].sum() == 9 and not near[3, 4]
    assert tasks.locality(3, 4).unique().tolist() == [0, 4] and tasks.locality(3, 4, 1).max() == 9
    up = tasks.locality(3, 4, 3)[1]                                                # squared distance to the patch above
    assert up[5, 1] == 0 and up[5, 5] == 1 and up[5, 0] == 1 and up[5, 9] == 4 and up[5, 10] == 5 and up[1, 1] == 1
    assert torch.equal(tasks.locality(2, 2, 10)[9], tasks.locality(2, 2, 1)[0])    # ten heads: the first shift again


def vit(pool='mean', rows=4, cols=4, D=48, H=3, L=2, **more):
    torch.manual_seed(0)
    return maskprior.Transformer((3, 4), (rows, cols), 10, D=D, H=H, L=L, positions='sincos', class_token=pool == 'cls',
                                 rows=slice(0, 1 if pool == 'cls' else None), pool='mean', **more).eval()


@pytest.mark.parametrize('pool', ['mean', 'cls'])
@pytest.mark.parametrize('arm', ['mask', 'mimetic', 'impulse', 'qk-opt'])
def test_spatial_priors_leave_no_parameter_without_gradient(pool, arm):
    model, M0 = vit(pool), prior_matrix(F.pad(tasks.locality(4, 4, 3), (1, 0, 1, 0) if pool == 'cls' else (0, 0)), 1., 2.)
    x = torch.randn(8, 3, 16, 16)
    write = lambda: maskprior.init_arm(model, arm, M0, x, shifts=tasks.shift_targets(4, 4, 3))
    if pool == 'cls' and arm == 'impulse':
        with pytest.raises(ValueError, match='class token'):
            write()
        return
    write()
    F.cross_entropy(model(x), torch.arange(8)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_checkpoint_of_another_grid_is_an_error_even_at_equal_size():
    for positions in ('sincos', 'learned'):
        other, model = (maskprior.Transformer((3, 4), grid, 10, D=48, H=3, positions=positions) for grid in ((2, 8), (4, 4)))
        with pytest.raises(RuntimeError, match='positions'):
            model.load_state_dict(other.state_dict())


@pytest.mark.parametrize('rows, cols, H', [(8, 8, 3), (4, 6, 9)])
def test_impulse_attends_to_the_shifted_patch(rows, cols, H):
    model, shifts = vit(rows=rows, cols=cols, D=64 * H, H=H), tasks.shift_targets(rows, cols, H)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    maskprior.init_impulse(model, shifts, torch.Generator().manual_seed(0))
    P = F.layer_norm(model.positions.flatten(0, 1), (64 * H,))
    for block in model.blocks:
        attn = block.attn.weights(P[None])[0]                                      # [H, N, N]
        assert torch.equal(attn.argmax(-1), shifts.argmax(-1)) and torch.allclose(attn.sum(-1), torch.ones(H, rows * cols))
        assert attn.gather(-1, shifts.argmax(-1, keepdim=True)).mean() > 0.15                 # of 64 patches
    changed = {n for n, p in model.state_dict().items() if not torch.equal(p, before[n])}
    assert changed == {f'blocks.{i}.attn.{w}.weight' for i in (0, 1) for w in ('q', 'k', 'v', 'proj')}


def test_mimetic_products_have_their_diagonals():
    model = vit(D=192, H=3)
    maskprior.init_mimetic(model, torch.Generator().manual_seed(0))
    attn = model.blocks[0].attn
    x = torch.randn(5, 192)
    for q, k in zip(attn.q.weight.unflatten(0, (3, 64)), attn.k.weight.unflatten(0, (3, 64))):
        assert 0.35 < (q.T @ k).diagonal().mean() < 0.45                           # rank 64 of 192 of 0.7 Z + 0.7 I
    product = attn.v.weight.T @ attn.proj.weight.T
    assert abs(product.diagonal().mean() + 0.4) < 0.01 and abs((product + 0.4 * torch.eye(192)).std() - 0.4 / math.sqrt(192)) < 0.005
    assert torch.allclose(F.linear(F.linear(x, attn.v.weight), attn.proj.weight), x @ product, atol=1e-4)


def test_an_arm_with_mimetics_v_differs_from_mimetic_in_q_and_k_alone(no_fakes, tmp_path):
    make_cifar(tmp_path / 'cifar-10-batches-py')
    no_fakes()
    weights, drawn = {}, []
    for name, options in {'mimetic': ['mimetic'], 'impulse': ['impulse'], 'mask': ['mask', '--mimetic-v']}.items():
        _, model, _ = train.build(train.parse(['--task', 'cifar10', '--data-dir', str(tmp_path), '--layers', '2', '--init', *options]))
        drawn.append(torch.rand(1).item())                                         # no arm draws from the global state
        weights[name] = {n: p for n, p in model.named_parameters() if not n.endswith(('M', 'q.weight', 'k.weight'))}
    for other in (weights['impulse'], weights['mask']):
        assert other.keys() == weights['mimetic'].keys() and all(torch.equal(p, other[n]) for n, p in weights['mimetic'].items())
    train.build(train.parse(['--task', 'cifar10', '--data-dir', str(tmp_path), '--layers', '2', '--init', 'default']))
    assert {*drawn} == {torch.rand(1).item()}


def test_factors_error_is_the_discarded_singular_values():
    A = torch.eye(6).roll(1, 1) * torch.arange(1., 7)                              # a shift by one: not symmetric
    for rank in (2, 6):
        left, right = maskprior.factors(A, rank)
        error = torch.linalg.svdvals(A)[rank:].square().sum().sqrt()
        assert torch.allclose((left @ right.T - A).norm(), error, atol=1e-4)


def test_a_vit_equals_an_independently_written_one():
    """The same weights through torch's own modules: a convolution for the patches, MultiheadAttention, a Sequential."""
    model, x = vit(), torch.randn(2, 3, 16, 16)
    maskprior.init_mask(model, prior_matrix(tasks.locality(4, 4, 3), 1., 2.))
    P = model.tokens.proj
    h = F.conv2d(x, P.weight.view(-1, 3, 4, 4), P.bias, stride=4).flatten(2).transpose(1, 2) + model.positions.view(16, -1)
    for block in model.blocks:
        mha = torch.nn.MultiheadAttention(48, 3, batch_first=True)
        a = block.attn
        mha.in_proj_weight.data = torch.cat([a.q.weight, a.k.weight, a.v.weight])
        mha.in_proj_bias.data.zero_()
        mha.out_proj.load_state_dict(a.proj.state_dict())
        n = block.norm1(h)
        h = h + mha(n, n, n, attn_mask=a.M.sigmoid().log().repeat(2, 1, 1), need_weights=False)[0]
        h = h + block.mlp(block.norm2(h))
    assert torch.allclose(model(x), model.head(model.norm(h).mean(1)), atol=1e-5)


def test_stochastic_depth_keeps_the_mean_and_rests_in_evaluation():
    model, x = vit(drop_path=0.5, L=3), torch.ones(4000, 1, 1)
    block = model.blocks[2].train()
    kept = block.keep(x)
    assert set(kept.unique().tolist()) == {0., 2.} and abs(kept.mean() - 1) < 0.1
    assert torch.equal(block.eval().keep(x), x)
    assert [b.drop_path for b in model.blocks] == [0, 0.25, 0.5] and vit(drop_path=0.5, L=1).blocks[0].drop_path == 0.5


# -------------------------------------------------------------------------------------------------------- augmentation

def parameters(B=1, **given):
    p = dict(geometry=tasks.affine(B)[:, :2], brightness=torch.ones(B), contrast=torch.ones(B), saturation=torch.ones(B),
             posterize=torch.ones(B), solarize=torch.full((B,), 2.), erase=torch.zeros(B, 4))
    return p | given


def plain_augment(x, p, side=8):
    return tasks.augment(x, p, side, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)) * 255


def test_augmentations_by_hand():
    x = torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    f = x.float()
    near = lambda got, wanted: torch.allclose(got, wanted, atol=1e-2)
    assert near(plain_augment(x, parameters()), f)                                 # nothing drawn, nothing done
    assert near(plain_augment(x, parameters(geometry=tasks.affine(1, xx=-1.)[:, :2])), f.flip(3))
    shifted = plain_augment(x, parameters(geometry=tasks.affine(1, x1=2 * 2 / 8, y1=-2 / 8)[:, :2]))   # 2 to the left, 1 down
    assert near(shifted[..., 1:, :6], f[..., :7, 2:]) and (shifted[..., 0, :] == 0).all() and (shifted[..., 6:] == 0).all()
    quarter = plain_augment(x, parameters(geometry=tasks.affine(1, xx=0., xy=-1., yx=1., yy=0.)[:, :2]))
    assert near(quarter, f.rot90(1, (2, 3))) or near(quarter, f.rot90(-1, (2, 3)))
    assert near(plain_augment(x, parameters(brightness=torch.tensor([0.5]))), f / 2)
    assert near(plain_augment(x, parameters(saturation=torch.tensor([0.]))), f.mean(1, keepdim=True).expand_as(f))
    assert near(plain_augment(x, parameters(contrast=torch.tensor([0.]))), f.mean().expand_as(f))
    assert near(plain_augment(x, parameters(solarize=torch.tensor([128 / 255]))), torch.where(f >= 128, 255 - f, f))
    assert near(plain_augment(x, parameters(posterize=torch.tensor([64.]))), (f / 64).floor() * 64)
    erased = plain_augment(x, parameters(erase=torch.tensor([[0.25, 0.5, 0.75, 1.]])))
    assert (erased[..., 2:6, 4:] == 0).all() and near(erased[..., :4], f[..., :4]) and near(erased[..., 6:, :], f[..., 6:, :])
    zoomed = tasks.augment(x, parameters(geometry=tasks.affine(1, xx=0.5, yy=0.5, x1=-0.5, y1=0.5)[:, :2]), 4,
                           torch.zeros(3, 1, 1), torch.ones(3, 1, 1)) * 255        # the lower left quarter
    assert near(zoomed, f[..., 4:, :4])


def test_drawn_augmentations_stay_in_their_ranges():
    draw = lambda **kw: tasks.draw_augmentation(torch.Generator().manual_seed(0), 4000, 32, **kw)
    p = draw()
    shifts = p['geometry'][:, :, 2] * 16
    assert set(shifts.unique().tolist()) == set(range(-4, 5)) and abs((p['geometry'][:, 0, 0] < 0).float().mean() - 0.5) < 0.03
    assert (p['brightness'] == 1).all() and (p['erase'] == 0).all()
    area = draw(crop='resized')['geometry'][:, [0, 1], [0, 1]].abs().prod(1)
    assert 0.07 < area.min() < 0.12 and 0.9 < area.max() <= 1
    p = draw(operations=2, erasing=0.25)
    assert abs((p['erase'][:, 2] > 0).float().mean() - 0.25) < 0.03
    touched = (p['brightness'] != 1).float().mean()
    assert abs(touched - (1 - 0.9 ** 2)) < 0.03 and p['solarize'].min() < 0.5
    assert 0.03 < p['brightness'].min() and p['brightness'].max() < 3.3 and 8 <= p['posterize'].max() <= 64 and p['geometry'].abs().max() < 3


def test_mixup_and_cutmix_by_hand():
    x, y = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)] * 2), torch.eye(4)
    mixed, soft = tasks.mix(x, y, torch.Generator().manual_seed(0), mixup=1., cutmix=0.)
    share = 1 - mixed[0, 0, 0, 0]
    assert 0 < share < 1 and torch.allclose(mixed[1], share.expand(3, 8, 8)) and torch.allclose(soft[0], torch.tensor([share, 1 - share, 0, 0]))
    for seed in range(5):
        cut, soft = tasks.mix(x, y, torch.Generator().manual_seed(seed), mixup=0., cutmix=1.)
        assert set(cut.unique().tolist()) <= {0., 1.}
        assert torch.allclose(cut[0].mean(), soft[0, 1]) and torch.allclose(soft.sum(1), torch.ones(4))
    assert tasks.mix(x, y, torch.Generator(), 0., 0.) == (x, y)
    both = [tasks.mix(x, y, torch.Generator().manual_seed(seed), 1., 1.)[0] for seed in range(20)]
    assert 5 <= sum(set(image.unique().tolist()) <= {0., 1.} for image in both) <= 15        # CutMix about every other time


def test_shuffled_epochs_are_permutations():
    seen = torch.cat([tasks.shuffled(10, 4, step, seed=3) for step in range(5)])   # two epochs in five batches
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10)) and not torch.equal(seen[:10], seen[10:])


VIT = ['--task', 'cifar10', '--width', '24', '--layers', '2', '--epochs', '2', '--batch', '16', '--eval-every', '1', '--warmup', '0']


def test_a_vision_run_resumes_bit_for_bit(tmp_path, monkeypatch, no_fakes):
    make_cifar(tmp_path / 'cifar-10-batches-py', n=40)
    no_fakes()
    options = [*VIT, '--data-dir', str(tmp_path), '--out', str(tmp_path), '--drop-path', '0.3', '--randaugment', '2', '--mixup', '0.8',
               '--cutmix', '1', '--erasing', '0.25']
    train.main([*options, '--name', 'whole'])
    real = train.learning_rate
    monkeypatch.setattr(train, 'learning_rate', lambda step, s: real(step, s) if step < 8 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main([*options, '--name', 'cut'])
    monkeypatch.undo()
    torch.rand(7)                                                                  # another process, another random state
    train.main([*options, '--name', 'cut', '--resume'])
    whole, cut = (torch.load(tmp_path / n / 'checkpoint.pt', weights_only=True) for n in ('whole', 'cut'))
    assert whole['step'] == 10 and all(torch.equal(w, cut['model'][name]) for name, w in whole['model'].items())


def test_the_figure_of_the_priors_shows_each_heads_shift(tmp_path, no_fakes, monkeypatch, capsys):
    import vision_priors
    make_cifar(tmp_path / 'cifar-10-batches-py')
    no_fakes()
    with pytest.raises(tasks.DataError, match='cifar10-mask-s0'):
        vision_priors.main([str(tmp_path)])
    for arm in ('mask', 'impulse'):
        train.main(['--task', 'cifar10', '--init', arm, '--data-dir', str(tmp_path), '--out', str(tmp_path), '--width', '48', '--layers', '2',
                    '--epochs', '1', '--batch', '20', '--warmup', '0'])
    monkeypatch.setenv('MASKPRIOR_DATA', str(tmp_path))
    assert not vision_priors.main([str(tmp_path)])
    found = {what: torch.tensor(of) for what, of in json.loads((tmp_path / 'priors.json').read_text()).items()}
    assert sorted(found) == [f'{what}, {when}' for what in ('impulse: attention', 'mask: attention', 'mask: sigmoid(M)')
                             for when in ('after', 'before')]
    for what in ('impulse: attention', 'mask: attention', 'mask: sigmoid(M)'):
        assert found[f'{what}, before'].shape == (3, 8, 8)
        if 'mask' in what:                                                         # impulse: roughly, on images of noise
            assert [divmod(int(head.argmax()), 8) for head in found[f'{what}, before']] == [(4, 4), (3, 4), (4, 5)]
    assert not torch.equal(found['impulse: attention, before'], found['impulse: attention, after'])
    monkeypatch.setenv('MASKPRIOR_DATA', str(tmp_path / 'moved'))                  # what is made needs no data
    assert not vision_priors.main([str(tmp_path)]) and 'already' in capsys.readouterr().out
    os.utime(tmp_path / 'cifar10-mask-s0' / 'checkpoint.pt', (time.time() + 9,) * 2)         # a newer run, of something else
    config = (tmp_path / 'cifar10-mask-s0' / 'config.json').read_text()
    (tmp_path / 'cifar10-mask-s0' / 'config.json').write_text(config.replace('"cifar10"', '"parity2"'))
    with pytest.raises(tasks.RunError, match='config.json.*a run of parity2'):
        vision_priors.main([str(tmp_path)])
    (tmp_path / 'cifar10-mask-s0' / 'checkpoint.pt').unlink()
    assert not vision_priors.main([str(tmp_path)]) and 'already' in capsys.readouterr().out


def test_two_processes_train_as_one(tmp_path, no_fakes):
    make_cifar(tmp_path / 'cifar-10-batches-py', n=40)
    no_fakes()
    options = [*VIT, '--data-dir', str(tmp_path), '--out', str(tmp_path), '--randaugment', '2', '--mixup', '0.8', '--bf16', 'false',
               '--lr', '0.01']
    train.main([*options, '--name', 'one'])
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', str(HERE / 'train.py'), *options,
                           '--name', 'two'], capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr
    one, two = ([json.loads(line) for line in (tmp_path / n / 'log.jsonl').read_text().splitlines()] for n in ('one', 'two'))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two):
        assert a['loss'] == pytest.approx(b['loss'], abs=1e-5) and a['change_M'] == pytest.approx(b['change_M'], abs=1e-6)
    assert one[0]['loss'] != pytest.approx(one[-1]['loss'], abs=1e-3)


# ------------------------------------------------------------------------------------------------------------ language

DATA = os.environ.get('MASKPRIOR_DATA')
def real_data(name):
    there = DATA and any(any(Path(DATA).glob(place)) for place in tasks.PLACES[name])
    return pytest.mark.skipif(not there, reason=f'MASKPRIOR_DATA is {DATA or "not set"}: nothing is tested on the real {name}')


def lm(V=11, N=6, H=2, arm='default', **more):
    torch.manual_seed(0)
    model = maskprior.Transformer(V, (N,), V, D=16, H=H, pool=None, causal=True, tied=True, **more)
    maskprior.init_arm(model, arm, prior_matrix(tasks.relative_distance(N, H), 1., 0.), torch.randint(V, (8, N)))
    return model.eval()


def test_a_tied_embedding_takes_no_weight_decay():
    model = lm(arm='mask')
    decayed, free = ({id(p) for p in group['params']} for group in train.make_optimiser(model, train.Settings()).param_groups)
    assert model.head.weight is model.tokens.weight and id(model.head.weight) in free - decayed and len(decayed) == 6 * len(model.blocks)


@pytest.mark.parametrize('batch', [1, 3, 64])
def test_perplexity_by_hand_for_every_evaluation_batch_size(batch):
    losses = torch.tensor([1., 1., 1., 5.])                                        # two windows, the second a short one
    predict = lambda x, target: losses[target - 10].mean()
    ids = torch.arange(10, 14)
    for N in (1, 2, 3, 4, 9):
        assert math.exp(tasks.total_loss(predict, ids, 0, N, batch) / 4) == pytest.approx(math.exp(2), rel=1e-6)   # 7.389


def test_every_word_is_predicted_once_from_those_before_it():
    seen = []
    def predict(x, target):
        assert x.shape == target.shape
        seen.extend(zip(x.flatten().tolist(), target.flatten().tolist()))
        return torch.zeros(())
    tasks.total_loss(predict, torch.arange(1, 8), 0, N=3, batch=2)
    assert seen == [(i - 1, i) for i in range(1, 8)]


@pytest.mark.parametrize('bf16', [False, True])
def test_the_models_own_loss_is_the_cross_entropy_of_its_logits(bf16):
    model, x, y = lm(arm='mask'), torch.randint(11, (5, 6)), torch.randint(11, (5, 6))
    grads, losses = [], []
    for own in (True, False):
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
            loss = model(x, y) if own else F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    tolerance = 2e-2 if bf16 else 1e-5
    assert losses[0] == pytest.approx(losses[1], abs=tolerance)
    for name, grad in grads[0].items():
        assert (grad - grads[1][name]).norm() <= tolerance * max(1e-2, grad.norm()), name


def test_chunks_of_the_cross_entropy_do_not_change_it():
    x, W, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64), torch.randint(9, (7,))
    for chunk in (1, 3, 100):
        assert torch.autograd.gradcheck(lambda x, W: maskprior.LinearCrossEntropy.apply(x, W, y, True, chunk),
                                        (x.requires_grad_(), W.requires_grad_()))
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(maskprior.LinearCrossEntropy.apply(x, W, y), x, create_graph=True)


def test_the_distance_prior_is_alibi_at_a_constant_of_one():
    distance = tasks.relative_distance(5, 8)
    assert distance[0, 4].tolist() == [2., 1.5, 1., 0.5, 0.] and distance[7, 4, 0] == 4 / 256      # ALiBi's slopes for 8 heads
    alibi = mask_bias(prior_matrix(distance, 1., 30.)).tril()
    assert torch.allclose(alibi, -distance.tril(), atol=1e-6)
    allowed = torch.ones(5, 5).tril().bool()
    half = prior_matrix(distance, 1., 0.)
    assert torch.allclose(target_attention(half, allowed), alibi.masked_fill(~allowed, -math.inf).softmax(-1), atol=1e-6)
    assert (half <= 0).all() and half.sigmoid().max() == 0.5                       # so its gradient, sigmoid(-M), is a half at least
    frozen = train.parse(['--task', 'wikitext2', '--init', 'mask', '--freeze-mask', '--level', '30'])
    assert frozen.freeze_mask and frozen.strength == 1 and frozen.per_head         # the row 'alibi'


def test_a_tied_mask_equals_the_full_one_it_stands_for():
    M0 = prior_matrix(tasks.relative_distance(6, 2), 1., 0.)
    full, tied = lm(), lm()
    maskprior.init_mask(full, M0)
    maskprior.init_mask(tied, M0, tie=True)
    assert tied.blocks[0].attn.M.shape == (2, 6)
    x = torch.randint(11, (4, 6))
    assert torch.equal(full(x), tied(x)) and torch.allclose(full(x[:, :3]), tied(x[:, :3]))
    for model in (full, tied):
        model(x, x).backward()
    i, j = torch.arange(6)[:, None], torch.arange(6)
    grad = full.blocks[0].attn.M.grad
    for distance in range(6):                                                      # the sum along the diagonal
        assert torch.allclose(tied.blocks[0].attn.M.grad[:, distance], (grad * (i - j == distance)).sum((1, 2)), atol=1e-7)
    with pytest.raises(ValueError, match='causal'):
        maskprior.init_mask(maskprior.Transformer(11, (6,), 11, D=16, H=2), M0, tie=True)
    with pytest.raises(ValueError, match='diagonals'):
        maskprior.init_mask(lm(), torch.randn(6, 6), tie=True)


def test_without_positions_the_context_can_grow():
    model = lm(N=12, arm='mask', positions='none')
    x = torch.randint(11, (2, 12))
    assert model.positions is None and torch.allclose(model(x)[:, :6], model(x[:, :6]), atol=1e-6)
    M0 = prior_matrix(tasks.relative_distance(12, 2), 1., 0.)
    assert maskprior.prior_tv(model, target_attention(M0, model.blocks[0].attn.allowed), x[:, :6]) < 0.2


def write_wikitext(folder, train='a b\n\n c a\n', valid='a z\n', test='b\n', **how):
    (folder / 'wikitext-2').mkdir(parents=True)
    for split, text in (('train', train), ('valid', valid), ('test', test)):
        (folder / 'wikitext-2' / f'{split}.txt').write_bytes(text.encode(**how) if isinstance(text, str) else text)


def test_words_of_both_data_sets_by_hand(tmp_path, monkeypatch):
    write_wikitext(tmp_path)
    ids, vocabulary = tasks.corpus('wikitext2', tmp_path)
    assert vocabulary == ['<unk>', '<eos>', 'a', 'b', 'c']                         # of the training words alone
    assert ids['train'].tolist() == [2, 3, 1, 1, 4, 2, 1] and ids['valid'].tolist() == [2, 0, 1] and ids['test'].tolist() == [3, 1]
    words = lambda text: list(tasks.story_words(text))
    assert words("Lily's 2 cats!<|endoftext|>Don't.<|endoftext|>cut of") == [
        ["lily's", '2', 'cats', '!', '<eos>'], ["don't", '.', '<eos>']]
    one = [['a', '<eos>'], ['b', '<eos>']]
    for text in ('A<|endoftext|>B<|endoftext|>', 'A\n<|endoftext|>\nB\n<|endoftext|>\n',
                 '<|endoftext|>A<|endoftext|><|endoftext|>\n<|endoftext|>B<|endoftext|>'):
        assert words(text) == one
    assert words('A') == [['a', '<eos>']] and words(' \n') == []
    (tmp_path / 'tinystories').mkdir()
    (tmp_path / 'tinystories' / 'TinyStories-train.txt').write_text('A b.<|endoftext|>B<|endoftext|>b c<|endoftext|>')
    ids, vocabulary = tasks.corpus('tinystories', tmp_path)
    assert vocabulary == ['<unk>', 'a', 'b', '.', '<eos>']
    assert [ids[s].tolist() for s in ('train', 'valid', 'test')] == [[1, 2, 3, 4], [2, 4], [2, 0, 4]]
    for size in (2, 3, 4, 5, 6):                                                   # <eos> is the fourth word of the training story
        monkeypatch.setattr(tasks, 'STORIES_VOCABULARY', size)
        vocabulary = tasks.corpus('tinystories', tmp_path)[1]
        assert len(set(vocabulary)) == len(vocabulary) == min(size, 5) and {'<unk>', '<eos>'} <= {*vocabulary}


@pytest.mark.parametrize('change', [lambda b: b'\xef\xbb\xbf' + b, lambda b: b.replace(b'\n', b'\r\n')])
def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path, change):
    text = 'caf\u00e9 b\n\n c <unk>\n'.encode()
    for name, content in (('clean', text), ('odd', change(text))):
        write_wikitext(tmp_path / name, train=content)
    code = f'import tasks; print(len({{str(tasks.corpus("wikitext2", rf"{tmp_path}/{{name}}")) for name in ("odd", "clean")}}) == 1)'
    done = subprocess.run([sys.executable, '-c', code], cwd=HERE, capture_output=True, text=True,
                          env=dict(os.environ, LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0'))
    assert done.stdout.strip() == 'True', done.stderr


LM = ['--task', 'wikitext2', '--width', '16', '--heads', '2', '--layers', '1', '--context', '8', '--batch', '4', '--steps', '4', '--eval-every', '2']


def test_bad_text_is_one_line(tmp_path, capsys):
    for i, (split, content, says) in enumerate((('valid', b'', 'nothing is left for valid'), ('train', b'\xff\xfe\x00', 'not UTF-8'),
                                                ('train', b'a b', 'too few for a context'))):
        write_wikitext(tmp_path / str(i), **{split: content})
        code, line = refused(capsys, *LM, '--data-dir', tmp_path / str(i), '--out', tmp_path)
        assert code == 1 and says in line
    code, line = refused(capsys, *LM, '--data-dir', tmp_path, '--out', tmp_path)
    assert code == 1 and 'python tasks.py download wikitext2' in line
    (tmp_path / 'wikitext-2' / 'train.txt').mkdir(parents=True)                    # a folder in a file's place
    assert refused(capsys, *LM, '--data-dir', tmp_path, '--out', tmp_path)[0] == 1
    (tmp_path / 'tinystories').mkdir()
    (tmp_path / 'tinystories' / 'TinyStories-train.txt').write_text('<|endoftext|>\n<|endoftext|>')
    code, line = refused(capsys, *LM, '--task', 'tinystories', '--data-dir', tmp_path, '--out', tmp_path)
    assert code == 1 and 'nothing is left for train' in line
    assert not list(tmp_path.rglob('config.json'))


@pytest.mark.parametrize('options', [['--init', 'default'], ['--init', 'mask', '--tie-mask', '--positions', 'none', '--dropout', '0.1'],
                                     ['--init', 'qk-opt']])
def test_a_language_run_on_files_shorter_than_the_context(tmp_path, options):
    write_wikitext(tmp_path, train='the cat sat on the mat\n' * 30)
    train.main([*LM, *options, '--data-dir', str(tmp_path), '--out', str(tmp_path), '--name', 'x'])
    result = json.loads((tmp_path / 'x' / 'result.json').read_text())
    assert 1 < result['perplexity'] < 20 and 1 < result['perplexity_test'] < 20 and len(result['sample'].split()) == 40
    assert ('perplexity_4x' in result) == ('none' in options)


def test_language_is_measured_on_its_own_splits_and_contexts(tmp_path):
    write_wikitext(tmp_path, train='a b c d e f g\n' * 5, valid='a b c\n' * 4, test='e f g a\n')
    ids, vocabulary = tasks.corpus('wikitext2', tmp_path)
    task = tasks.language('wikitext2', tmp_path, context=2, positions='none')
    def predict(x, target=None):                                                   # the loss says which words, and in windows of how many
        return torch.zeros(*x.shape, len(vocabulary)) if target is None else 0.1 * target.float().mean() + x.shape[1]
    found, of = task.evaluate(predict, last=True), lambda split: 0.1 * ids[split].float().mean().item()
    assert len(ids['valid']) == 16 and len(ids['test']) == 5 and of('valid') != pytest.approx(of('test'))
    assert [math.log(found[f'perplexity{k}']) for k in ('', '_2x', '_4x')] == pytest.approx([of('valid') + n for n in (2, 4, 8)])
    assert math.log(found['perplexity_test']) == pytest.approx(of('test') + (4 * 2 + 1 * 1) / 5)       # two windows of 2, one of 1
    assert found['loss'] == pytest.approx(of('valid') + 2) and found['loss_seen'] == pytest.approx(of('train') + 2)


def test_language_batches_are_windows_of_the_training_text_and_the_next_words(tmp_path):
    write_wikitext(tmp_path, train='a b c d a c\nb d\n')
    task, text = tasks.language('wikitext2', tmp_path, context=4), tasks.corpus('wikitext2', tmp_path)[0]['train']
    x, y = task.batch(torch.Generator().manual_seed(0), 200)
    assert torch.equal(x[:, 1:], y[:, :-1]) and task.model['grid'] == (4,)
    assert {*map(tuple, torch.cat([x, y[:, -1:]], 1).tolist())} == {*map(tuple, text.unfold(0, 5, 1).tolist())}      # all of them


@real_data('wikitext2')
def test_the_real_wikitext2_has_its_published_sizes():
    ids, vocabulary = tasks.corpus('wikitext2', DATA)
    assert {s: len(i) for s, i in ids.items()} == {'train': 2_088_628, 'valid': 217_646, 'test': 245_569}
    assert len(torch.cat([*ids.values()]).unique()) == len(vocabulary) == 33_278
    for file in ('train', 'valid', 'test'):                                        # what the download checks
        _, _, size, md5 = next(d for d in tasks.DOWNLOADS['wikitext2'] if d[1].endswith(f'{file}.txt'))
        data = (Path(DATA) / 'wikitext-2' / f'{file}.txt').read_bytes()
        assert len(data) == size and hashlib.md5(data).hexdigest() == md5


@real_data('tinystories')
def test_the_real_tinystories():
    ids, vocabulary = tasks.corpus('tinystories', DATA)
    ends = {split: (i == vocabulary.index('<eos>')).sum() for split, i in ids.items()}
    assert len(vocabulary) == 4096 and ends['test'] == ends['valid'] == min(1000, (sum(ends.values())) // 20)
    if 'first2MiB' in tasks.find('tinystories', DATA).name:
        assert sum(ends.values()) == 2316


@real_data('cifar10')
def test_the_real_cifar10():
    (x, y), (test_x, test_y) = tasks.cifar('cifar10', DATA)
    assert (len(y), len(test_y)) in ((50_000, 10_000), (10_000, 2_000)) and y.bincount().tolist() == [len(y) // 10] * 10
    mean = x.float().div(255).mean((0, 2, 3))
    assert (mean - torch.tensor(tasks.VISION['cifar10'][3])).abs().max() < 0.01 and x.float().std((0, 2, 3)).min() > 50


@real_data('cifar100')
def test_the_real_cifar100():
    (x, y), _ = tasks.cifar('cifar100', DATA)
    assert len(y) in (50_000, 5) and x.shape == (len(y), 3, 32, 32)


@real_data('imagenet100')
def test_real_imagenet_files_of_any_size(tmp_path):
    pytest.importorskip('PIL')
    root = Path(DATA) / 'imagenet100_fullsize'                                     # a file of each class as ImageNet has it
    files = tasks.image_files(root if root.exists() else root.with_name('imagenet100'), 'train', None)
    assert len(files) > 1 and tasks.decoded([f[0] for f in files.values()], 64, tmp_path).shape == (len(files), 3, 64, 64)


# -------------------------------------------------------------------------------------------------------------- theory

SHORT_THEORY = dict(steps=40, T=100)


def hand_row():
    """N = 2, d = 4, D = 1: q = (2, 0, 0, 0), k = (ln 3, 0, 0, 0) and 0, sigmoid(m) = 1/4 and 3/4, so s_0 = ln 3 + ln 1/4 = s_1, p = 1/2, 1/2.
    v = (2, 0, 0, 0) and 0, so o = (1, 0, 0, 0); g = (3, 0, 0, 0), so a = 3, -3."""
    t = lambda z: torch.tensor([z], dtype=torch.float64)
    first = lambda y: [y, 0.0, 0.0, 0.0]
    return theory.measure(theory.row(
        t([[2.0]]), t([[1.0], [0.0]]), t([first(1.0)]).requires_grad_(), t([first(math.log(3))]).requires_grad_(),
        t([[-math.log(3), math.log(3)]]).requires_grad_(), t([first(2.0), first(0.0)]), t([first(3.0)])),
        u=t([[1.0, 0.0]]), w=t([first(1.0)]))


@pytest.mark.parametrize('derivatives', [theory.autograd, theory.closed_form])
def test_derivatives_of_a_row_by_hand(derivatives):
    r, ln3 = hand_row(), math.log(3)
    D = derivatives(r)
    close = lambda z, y: torch.testing.assert_close(z[0].detach(), torch.tensor(y, dtype=torch.float64))
    close(r.p, [[0.5, 0.5]])
    first = lambda y: [y, 0.0, 0.0, 0.0]
    close(D['p_i', 'm'], [[3 / 16, -1 / 16]])  # p_0 (1 - p_0) 3/4, -p_0 p_1 1/4
    close(D['p_i', 'k'], [first(1 / 4), first(-1 / 4)])  # +- 1/4 q / 2
    close(D['p_i', 'q'], [first(ln3 / 8)])  # 1/2 (ln 3 - ln 3 / 2) / 2
    close(D['p_i', 'W_Q'], [first(ln3 / 4)])  # x = 2
    close(D['p_i', 'W_K'], [first(1 / 4)])  # x_0 = 1, x_1 = 0
    close(D['w.o', 'm'], [[3 / 8, -1 / 8]])  # p_j (v_j - o) sigmoid(-m_j)
    close(D['w.o', 'q'], [first(ln3 / 4)])
    close(D['loss', 'm'], [[9 / 8, -3 / 8]])  # p_j a_j sigmoid(-m_j)
    close(D['loss', 'k'], [first(3 / 2), first(-3 / 2)])
    close(D['loss', 'q'], [first(3 / 4 * ln3)])
    close(D['loss', 'W_Q'], [first(3 / 2 * ln3)])
    close(D['loss', 'W_K'], [first(3 / 2)])


def test_the_sizes_in_the_bounds_by_hand():
    r = hand_row()
    assert (r.G.item(), r.diam_v.item(), r.norm_q.item(), r.norm_x.item(), r.diam_x.item()) == (3.0, 2.0, 1.0, 2.0, 1.0)
    assert r.diam_k.item() == pytest.approx(math.log(3) / 2)
    D = theory.autograd(r)
    found = {b[0]: theory.tightness(b, r, D)[0].item() for b in theory.BOUNDS}
    assert found['|dp_i/dm_j| <= p_i sigmoid(-m_j)'] == pytest.approx(1 / 2)
    assert found['|dl/dm_j| <= p_j(1-p_j) sigmoid(-m_j) GR'] == pytest.approx(1)  # two keys: |a_j| = (1 - p_j) G R
    assert found['||dl/dq|| <= GR diam(k)/(4 sqrt(d))'] == pytest.approx(1)


def test_one_open_key_has_no_gradient():
    r = theory.two_keys(torch.device('cpu'), (0.0, 0.0))
    r = theory.measure(theory.row(r.x, r.X, r.W_Q, r.W_K, r.m, r.v, r.g, allowed=torch.tensor([[[True, False]]])), u=r.u, w=r.w)
    for derivatives in (theory.autograd, theory.closed_form):
        assert all(D.abs().max() == 0 for D in derivatives(r).values())


def test_one_step_through_the_mask_by_hand():
    """Two keys at m = 0, v = +-1, g = 1: e = +-1/2, so m = -+ h/4 after a step, and p_0 = sigmoid(-h/4)/(sigmoid(-h/4) + sigmoid(h/4))."""
    r = theory.two_keys(torch.device('cpu'), (0.0, 0.0))
    h = 0.8
    moved, bound = next(theory.walk(theory.REACH[0], r, r.g[None], torch.tensor([[2 * h]], dtype=torch.float64), 1))  # T h G R, R = 2
    assert moved.item() == pytest.approx(0.5 - 1 / (1 + math.exp(h / 4)))
    assert bound.item() == pytest.approx(math.tanh(2 * h / 8))


def test_short_run_holds_and_writes_strict_json(tmp_path, capsys):
    assert theory.main(['--draws', '2000', '--seed', '3', '--out', str(tmp_path)], **SHORT_THEORY) == 0
    reject = lambda name: pytest.fail(f'{name} is not JSON')
    record = json.loads((tmp_path / 'theory.json').read_text(), parse_constant=reject)
    assert record['failed'] == [] and record['draws'] == 2000 and record['seed'] == 3 and record['device'] == 'cpu'
    rows, printed, table = [row for part in record['parts'] for row in part['rows']], capsys.readouterr().out, (tmp_path / 'theory.md').read_text()
    assert len(rows) > 40
    for row in rows:
        assert row['statement'] in printed and row['statement'].replace('|', "\\|") in table


def test_wrong_statements_are_caught_and_only_they(tmp_path):
    """A bound 0.9 times what holds, a derivative without sigmoid(-m), a reach and a lemma that are too small: each fails, the rest holds."""
    bounds, statements = list(theory.BOUNDS), list(theory.REACH)
    for n in (0, 4, 10, 14, 16):
        name, f, place, formula = bounds[n]
        bounds[n] = (name, f, place, lambda r, formula=formula: 0.9 * formula(r))
    name, place, gain = statements[2]
    statements[2] = (name, place, lambda r, z: 0.8 * gain(r, z))

    def formulas(r):
        D = theory.closed_form(r)
        return D | {('loss', 'm'): D['loss', 'k'].norm(dim=-1)[:, None] / theory.norm(r.q)[..., None] * r.d ** 0.5}

    code = theory.main(['--draws', '2000', '--out', str(tmp_path)], bounds=bounds, statements=statements, formulas=formulas,
                       osc_bound=lambda y: torch.tanh(y / 4.5), **SHORT_THEORY)
    failed = json.loads((tmp_path / 'theory.json').read_text())['failed']
    assert code == 1
    assert failed == ['d loss / d m', *(bounds[n][0] for n in (0, 4, 10, 14, 16)), 'TV <= tanh(osc(D)/4)', statements[2][0]]


def test_loose_bound_is_not_called_tight(tmp_path):
    name, f, place, formula = theory.BOUNDS[0]
    loose = [(name, f, place, lambda r: 1.1 * formula(r))]
    assert theory.main(['--draws', '80', '--out', str(tmp_path)], bounds=loose, statements=[], **SHORT_THEORY) == 1


@pytest.mark.parametrize('argv, word', [(['--draws', '0'], 'draws'), (['--draws', '-5'], 'draws'), (['--seed', '-1'], 'seed'),
                                        (['--device', 'abacus'], 'abacus'), (['--device', 'meta'], 'meta'), (['--device', 'hpu'], 'hpu'),
                                        (['--device', 'mps'], 'mps'),
                                        (['--draws', 'many'], 'many'), (['--depth', '3'], '--depth')])
def test_bad_arguments_exit_2_with_one_line(argv, word, tmp_path, capsys):
    assert tasks.command(lambda: theory.main([*argv, '--out', str(tmp_path)]), 'theory.py') == 2
    out, err = capsys.readouterr()
    assert word in err and err.count("\n") == 1 and not out and not list(tmp_path.iterdir())


def test_absent_cuda_and_a_device_without_float64_exit_2(monkeypatch, tmp_path, capsys):
    code = lambda *argv: tasks.command(lambda: theory.main([*argv, '--out', str(tmp_path)]), 'theory.py')
    if not torch.cuda.is_available():
        assert code('--device', 'cuda') == 2
    monkeypatch.setattr(torch, 'zeros', lambda *a, **k: (_ for _ in ()).throw(TypeError('MPS has no float64')))  # what mps raises
    assert code() == 2
    assert 'without float64' in capsys.readouterr().err


def test_the_link_to_training_attributes_the_moves(tmp_path, monkeypatch):
    """Three steps: at step 0 nothing has moved; afterwards each part moves the attention, and no part is counted twice."""
    monkeypatch.syspath_prepend(HERE / 'results')
    import theory_training
    monkeypatch.setattr(theory_training, 'OPTIMISERS', {'Adam': (1e-2, 3)})
    monkeypatch.setattr(theory_training, 'ARMS', {'mask': '-'})
    theory_training.main(['--out', str(tmp_path)])
    log = json.loads((tmp_path / 'training.json').read_text())['runs']['Adam mask']
    for part in ('M', 'QK', 'rest', 'all'):
        (first, before), *_, (last, after) = log[f'moved by {part}']
        assert (first, before, last) == (0, 0, 3) and after > 0
    assert len({log[f'moved by {part}'][-1][1] for part in ('M', 'QK', 'rest', 'all')}) == 4
    assert len(log['gradient M']) == 3 and log['prior_tv'][0][1] < 0.05
    model = tiny('mask')[1]
    names = [name for name, _ in model.named_parameters()]
    owned = [n for ends in theory_training.PARTS.values() for n in names if n.endswith(ends)]
    assert len(owned) == len(set(owned)) == 6


# ---------------------------------------------------------------------------------------------------------------- runs

@pytest.mark.parametrize('options, says', [
    (['--task', 'parity9'], 'parity9'), (['--init', 'masks'], 'masks'), (['--steeps', '3'], '--steeps'),
    (['--hole', '+-+-+-+-+-+-+-+-'], '--hole'), (['--hole', '**'], '--hole'), (['--hole='], '--hole'),
    (['--hole', '+x'], '--hole'), (['--heads', '3'], '--heads 3'), (['--steps', '0'], '--steps'),
    (['--device', 'cuda' if not torch.cuda.is_available() else 'cuda:99'], '--device'), (['--freeze-mask', 'perhaps'], 'perhaps'),
    (['--prior-bits', '2,77'], '--prior-bits'), (['--task', 'cyclic3', '--prior-bits', '1,2'], '--prior-bits'),
    (['--strength', '-1'], 'strength'), (['--width', '8', '--heads', '2', '--init', 'qk-svd'], 'width'), (['--lr', 'nan'], '--lr'),
    (['--level', 'inf'], 'level'), (['--flip', '2'], '--flip'), (['--pos-std', '0', '--init', 'qk-svd'], 'qk-svd'),
    (['--learn-mask', 'false'], '--learn-mask'), (['--seed', 'x'], '--seed'), (['--seed', '99999999999999999999'], '--seed'),
    (['--device', 'meta'], '--device'),
    (['--level', '1e39'], 'finite'), (['--strength', '1e-9'], 'prior'), (['--pos-std', '-1'], '--pos-std'),
    (['--prior-bits', '2,2'], '--prior-bits'), (['--init', 'default', '--freeze-mask'], '--freeze-mask'),
    (['--overwrite', '--resume'], '--overwrite'), (['--task', 'add3', '--hole', '+-'], '--hole'), (['--frac', '0.1'], '--frac'),
    (['--task', 'add3', '--frac', '0'], '--frac'), (['--task', 'mul3', '--frac', '1'], '--frac'), (['--task', 'add5', '--frac', '1e-11'], '--frac'),
    (['--task', 'mul3', '--heads', '2'], '--heads'), (['--task', 'add3', '--without', 'products'], '--without'),
    (['--task', 'add3', '--order', 'left'], '--order'), (['--task', 'cifar10', '--steps', '9'], '--epochs'),
    (['--task', 'cifar10', '--pos-std', '1'], '--pos-std'), (['--device', 'mps'], '--device'),
    (['--task', 'add3', '--without', 'carry', '--per-head', 'false'], '--per-head'), (['--lr', '1e300'], '--lr'), (['--batch', '9' * 30], '--batch'),
    (['--prior-bits', ''], 'such as 2,3'), (['--task', 'cifar10', '--width', '18', '--heads', '3'], '--width 18'),
    (['--list', '--foo'], '--list stands alone'),
    (['--name', '../x'], '--name'), (['--name', '.'], '--name'), (['--name', ''], '--name'), (['--task', 'parity2', '--bench'], '--task'),
    (['--task', 'imagenet100', '--crop', 'pad'], '--crop'), (['--task', 'cifar10', '--init', 'mimetic', '--mimetic-v'], '--mimetic-v'),
    (['--bench', '--threads', '0'], '--threads'), (['--bench', '--seconds', 'nan'], '--seconds'), (['--bench', '--device', 'meta'], '--device'),
    (['--bench', '--threads', '9' * 11], '--threads'), (['--bench', 'parity9'], 'parity9'), (['--bench', '--threads', 'x'], '--threads')])
def test_bad_arguments_are_one_line_and_exit_2(tmp_path, capsys, options, says):
    code, line = refused(capsys, *options, '--out', tmp_path)
    assert code == 2 and says in line
    assert not list(tmp_path.rglob('result.json')) and not list(tmp_path.rglob('checkpoint.pt'))


def test_a_run_keeps_its_contract(tmp_path):
    code, out, err = cli(*SMALL, '--out', tmp_path)
    assert code == 0 and not err
    folder = tmp_path / 'parity2-mask-s0'
    config, result = (json.loads((folder / f'{name}.json').read_text()) for name in ('config', 'result'))
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    assert [row['step'] for row in log] == [0, 10, 20]
    assert config['settings']['width'] == 16 and config['torch'] == torch.__version__
    for name in ('task init seed steps accuracy accuracy_unseen loss loss_seen mdi_accuracy mdi_loss prior_tv_init '
                 'prior_tv_final seconds parameters device torch').split():
        assert name in result
    assert torch.load(folder / 'checkpoint.pt', weights_only=True)['step'] == 20
    code, out, _ = cli(*SMALL, '--out', tmp_path)                                  # finished: not run again
    assert code == 0 and 'finished' in out
    code, _, err = cli(*SMALL, '--out', tmp_path, '--lr', '0.1')                   # other settings: never mixed up
    assert code == 2 and '--lr' in err[-1]


@pytest.mark.parametrize('damage', [
    lambda run: (run / 'config.json').unlink(), lambda run: (run / 'config.json').write_text('{"settings": []}'),
    lambda run: (run / 'result.json').write_text('{"accura')])
def test_a_damaged_finished_run_is_named_and_kept(tmp_path, damage):
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'x'])
    damage(tmp_path / 'x')
    before = {path: path.read_bytes() for path in (tmp_path / 'x').iterdir()}
    code, _, err = cli(*SMALL, '--out', tmp_path, '--name', 'x', '--resume')
    assert code == 1 and len(err) == 1 and str(tmp_path / 'x') in err[0]
    assert before == {path: path.read_bytes() for path in (tmp_path / 'x').iterdir()}


def test_a_checkpoint_of_other_data_is_refused(tmp_path, no_fakes):
    options = [*VIT, '--out', str(tmp_path), '--name', 'x', '--resume', '--data-dir', str(tmp_path / 'data')]
    make_cifar(tmp_path / 'data' / 'cifar-10-batches-py', n=40)
    no_fakes()
    train.main(options)
    (tmp_path / 'x' / 'result.json').unlink()
    before = {path: path.read_bytes() for path in (tmp_path / 'x').iterdir()}
    first = tmp_path / 'data' / 'cifar-10-batches-py' / 'data_batch_1'
    first.write_bytes(first.read_bytes().replace(b'\x05' * 1000, b'\x15' * 1000)) # as many images, one of them another
    with pytest.raises(tasks.UsageError, match='is from other training data'):
        train.main([*options, '--lr', '0.001'])
    for path in first.parent.iterdir():                                            # other data in its place
        path.unlink()
    make_cifar(first.parent, n=50)
    no_fakes()
    with pytest.raises(tasks.UsageError, match='other training data .examples then: 80, now: 100'):
        train.main([*options, '--lr', '0.001'])
    assert before == {path: path.read_bytes() for path in (tmp_path / 'x').iterdir()}        # config.json too


def test_evaluating_more_often_changes_no_batch_and_no_weight(tmp_path):
    ends = []
    for every in ('5', '20'):
        train.main([*SMALL, '--eval-every', every, '--out', str(tmp_path), '--name', every])
        ends.append(torch.load(tmp_path / every / 'checkpoint.pt', weights_only=True))
    assert all(torch.equal(w, ends[1]['model'][name]) for name, w in ends[0]['model'].items())
    assert torch.equal(ends[0]['generator'], ends[1]['generator'])


def test_resume_equals_an_undisturbed_run(tmp_path, monkeypatch):
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'whole'])
    real = train.learning_rate
    monkeypatch.setattr(train, 'learning_rate', lambda step, s: real(step, s) if step < 13 else 1 / 0)
    with pytest.raises(ZeroDivisionError):                                         # killed between two checkpoints
        train.main([*SMALL, '--out', str(tmp_path), '--name', 'cut'])
    monkeypatch.undo()
    with pytest.raises(tasks.UsageError, match='--resume'):
        train.main([*SMALL, '--out', str(tmp_path), '--name', 'cut'])
    monkeypatch.setattr(train, 'commit', lambda: 'later')
    (tmp_path / 'cut' / 'checkpoint.pt.17.tmp').write_text('half')                 # of a save that was killed
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'cut', '--resume'])
    assert not list((tmp_path / 'cut').glob('*.tmp'))
    assert json.loads((tmp_path / 'cut' / 'config.json').read_text())['commit'].endswith('later')
    whole, cut = (torch.load(tmp_path / n / 'checkpoint.pt', weights_only=True) for n in ('whole', 'cut'))
    assert all(torch.equal(w, cut['model'][name]) for name, w in whole['model'].items())
    assert [r['loss'] for r in whole['log']] == [r['loss'] for r in cut['log']]


def test_compiled_and_eager_runs_go_on_from_each_others_checkpoints(tmp_path, monkeypatch):
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'eager'])
    whole = torch.load(tmp_path / 'eager' / 'checkpoint.pt', weights_only=True)
    real = train.learning_rate
    for first, then in (([], ['--compile']), (['--compile'], [])):
        options = [*SMALL, '--out', str(tmp_path), '--name', f'then{"".join(then)}']
        monkeypatch.setattr(train, 'learning_rate', lambda step, s: real(step, s) if step < 13 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.main([*options, *first])
        monkeypatch.undo()
        train.main([*options, *then, '--resume'])
        mixed = torch.load(Path(*options[-3::2]) / 'checkpoint.pt', weights_only=True)
        assert mixed['step'] == 20 and mixed['model'].keys() == whole['model'].keys()
        assert all((w - mixed['model'][name]).abs().max() < 1e-4 for name, w in whole['model'].items())


def test_kills_at_any_moment_change_nothing(tmp_path):
    write_wikitext(tmp_path, train='the cat sat on the mat\n' * 30)
    options = [*LM, '--steps', '300', '--eval-every', '1', '--data-dir', str(tmp_path), '--out', str(tmp_path)]     # it writes all the time
    for wait in (0., 0.2, 0.4):
        run = subprocess.Popen([sys.executable, HERE / 'train.py', *options, '--name', 'killed', '--resume'], stdout=subprocess.PIPE)
        run.stdout.readline()                                                      # it is at work
        time.sleep(wait)
        run.kill()
        run.communicate()
    assert not (tmp_path / 'killed' / 'result.json').exists() and (tmp_path / 'killed' / 'checkpoint.pt').exists()
    for name in ('killed', 'whole'):
        train.main([*options, '--name', name, '--resume'])
    killed, whole = (torch.load(tmp_path / n / 'checkpoint.pt', weights_only=True) for n in ('killed', 'whole'))
    assert all(torch.equal(w, killed['model'][name]) for name, w in whole['model'].items())
    assert [r['perplexity'] for r in whole['log']] == [r['perplexity'] for r in killed['log']] and len(whole['log']) == 301


def test_a_checkpoint_cut_in_half_is_one_line(tmp_path):
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'x'])
    (tmp_path / 'x' / 'result.json').unlink()
    path = tmp_path / 'x' / 'checkpoint.pt'
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    code, _, err = cli(*SMALL, '--out', tmp_path, '--name', 'x', '--resume')
    assert code == 1 and len(err) == 1 and 'checkpoint.pt' in err[0]
    (tmp_path / 'x' / 'config.json').write_text('{"settings": ')
    code, _, err = cli(*SMALL, '--out', tmp_path, '--name', 'x', '--resume')
    assert code == 1 and len(err) == 1 and 'config.json' in err[0]


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path):
    (tmp_path / 'file').write_text('')
    code, _, err = cli(*SMALL, '--out', tmp_path / 'file')
    assert code == 1 and len(err) == 1 and 'file' in err[0]


def test_a_save_that_dies_half_way_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / 'checkpoint.pt'
    tasks.write(path, lambda p: torch.save({'step': 1}, p))
    def dies(p):
        p.write_bytes(b'half')
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tasks.write(path, dies)
    assert torch.load(path, weights_only=True) == {'step': 1}


def test_foreign_checkpoints_are_one_line_and_run_no_code(tmp_path, capsys):
    options = [*SMALL, '--out', str(tmp_path), '--name', 'x', '--resume']
    train.main(options)
    (tmp_path / 'x' / 'result.json').unlink()
    path = tmp_path / 'x' / 'checkpoint.pt'
    good = torch.load(path, weights_only=True)
    def saved(content):
        torch.save(content, path)
        return path.read_bytes()
    without = lambda name: {k: v for k, v in good.items() if k != name}
    other_state = {i: s | {'exp_avg': torch.zeros(3)} for i, s in good['optimiser']['state'].items()}
    contents = [b'', b'no checkpoint', pickle.dumps(Gadget(tmp_path / 'marker')), saved({}), saved([1]), saved(Gadget(tmp_path / 'marker')),
                saved(good | {'model': {}}), saved(good | {'optimiser': {}}), saved(good | {'generator': torch.zeros(3)}),
                saved(without('log')), saved(good | {'step': 99}), saved(good | {'step': '3'}), saved(good | {'log': [1]}),
                saved(good | {'log': [{}, *good['log'][1:]]}), saved(good | {'seconds': 'long'}), saved(without('run')),
                saved(good | {'optimiser': good['optimiser'] | {'state': other_state}})]
    for content in contents:
        path.write_bytes(content)
        code, line = refused(capsys, *options)
        assert code == 1 and 'checkpoint.pt' in line and '--overwrite' in line and path.read_bytes() == content
    saved(good | {'run': good['run'] | {'seed': 1}})                               # copied from the next seed's folder
    code, line = refused(capsys, *options)
    assert code == 2 and 'another --seed' in line
    path.unlink()
    path.mkdir()
    assert refused(capsys, *options)[0] == 1
    path.rmdir()
    broken = {name: w * math.nan for name, w in good['model'].items()}
    saved(good | {'model': broken, 'step': 10, 'log': good['log'][:2]})
    code, line = refused(capsys, *options)
    assert code == 1 and 'diverged' in line and not (tmp_path / 'x' / 'result.json').exists()
    assert not (tmp_path / 'marker').exists()


def test_no_result_is_lost_to_a_full_disk_or_a_closed_pipe(tmp_path):
    resource = pytest.importorskip('resource', reason='no limit on the size of a file here: a full disk is not tried')
    few = ('import sys, theory, tasks\n'
           'sys.exit(tasks.command(lambda: theory.main(["--draws", "80", "--out", sys.argv[1]], steps=2, T=3), "theory.py"))')
    full = 'import tasks, resource, torch._dynamo\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n'      # torch 2.6 writes as it is imported
    (tmp_path / 'theory.md').write_text('recorded')
    done = subprocess.run([sys.executable, '-c', full + few, str(tmp_path)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 1 and 'theory.md' in done.stderr and len(done.stderr.splitlines()) == 1
    assert [p.read_text() for p in tmp_path.iterdir()] == ['recorded']
    read, write = os.pipe()
    os.close(read)
    subprocess.run([sys.executable, '-c', few, str(tmp_path)], cwd=HERE, stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    assert json.loads((tmp_path / 'theory.json').read_text())['draws'] == 80 and (tmp_path / 'theory.md').read_text() != 'recorded'


def test_a_full_disk_is_one_line_and_leaves_nothing_half_made(tmp_path):
    resource = pytest.importorskip('resource', reason='no limit on the size of a file here: a full disk is not tried')
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))    # enough for config.json and log.jsonl
    done = subprocess.run([sys.executable, HERE / 'train.py', *SMALL, '--out', tmp_path, '--name', 'x'], capture_output=True, text=True,
                          preexec_fn=limit)
    assert done.returncode == 1 and 'checkpoint.pt' in done.stderr and len(done.stderr.splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / 'x').iterdir()) == ['config.json', 'log.jsonl']


def test_what_lies_in_the_folder_and_is_not_the_runs_stays(tmp_path, capsys):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x' / 'thesis.tmp').write_text('mine')
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'x'])
    assert (tmp_path / 'x' / 'thesis.tmp').read_text() == 'mine'
    (tmp_path / 'y').mkdir()
    (tmp_path / 'y' / 'log.jsonl').write_text('mine')
    code, line = refused(capsys, *SMALL, '--out', tmp_path, '--name', 'y')
    assert code == 1 and 'config.json' in line and (tmp_path / 'y' / 'log.jsonl').read_text() == 'mine'


@pytest.mark.parametrize('environment, options, says', [
    ({'CXX': '/nope', 'PYTHONWARNINGS': 'ignore'}, [*SMALL, '--compile'], 'C++ compiler'),     # torch 2.6's workers speak of numpy
    ({'MASKPRIOR_DATA': ''}, ['--task', 'cifar10'], 'not in data')])
def test_an_environment_that_lacks_something_is_one_line(tmp_path, environment, options, says):
    done = subprocess.run([sys.executable, HERE / 'train.py', *options, '--out', tmp_path], cwd=tmp_path, capture_output=True, text=True,
                          env=dict(os.environ, **environment))
    assert done.returncode == 1 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_tables_go_through_a_terminal_without_unicode():
    done = subprocess.run([sys.executable, HERE / 'results' / 'report.py'], capture_output=True, text=True,
                          env=dict(os.environ, PYTHONIOENCODING='ascii'))
    assert done.returncode == 0 and 'parity2' in done.stdout and not done.stderr


def test_a_rank_without_torchrun_is_one_process(tmp_path):
    done = subprocess.run([sys.executable, HERE / 'train.py', *SMALL, '--out', tmp_path], capture_output=True, text=True,
                          env=dict(os.environ, RANK='0'))
    assert done.returncode == 0 and not done.stderr


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, capsys):
    (tmp_path / 'x').mkdir()
    with train.held(tmp_path / 'x'):
        code, line = refused(capsys, *SMALL, '--out', tmp_path, '--name', 'x')
    assert code == 1 and 'another run' in line and not list((tmp_path / 'x').iterdir())
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'x'])


@pytest.mark.parametrize('resume', [[], ['--resume']])
def test_a_run_that_another_has_finished_meanwhile_is_not_lost(tmp_path, capsys, monkeypatch, resume):
    options, build = [*SMALL, '--out', str(tmp_path), '--name', 'x', *resume], train.build
    def slow(settings):
        monkeypatch.undo()
        train.main(options)
        return build(settings)
    monkeypatch.setattr(train, 'build', slow)
    code, line = refused(capsys, *options)
    assert code == 1 and 'meanwhile' in line and {path.name for path in (tmp_path / 'x').iterdir()} == {*train.FILES}


@pytest.mark.parametrize('M0, says', [
    (torch.zeros(5, 5), 'N = 16'), (torch.zeros(3, 16, 16), 'H = 4'), (torch.zeros(16), 'N = 16'), (torch.zeros(1, 4, 16, 16), 'N = 16'),
    (torch.full((16, 16), math.nan), 'finite'), (torch.full((16, 16), -math.inf), 'finite'), (torch.full((4, 16, 16), math.inf), 'finite'),
    (torch.full((16, 16), -1e300, dtype=torch.float64), 'finite')])
def test_masks_that_make_no_sense_are_refused(M0, says):
    model = maskprior.Transformer(3, (16,), 1)
    with pytest.raises(ValueError, match=says):
        maskprior.init_mask(model, M0)
    assert model.blocks[0].attn.M is None


def test_divergence_is_one_line_and_strict_json(tmp_path):
    code, _, err = cli(*SMALL, '--lr', '1e6', '--out', tmp_path)
    assert code == 1 and len(err) == 1 and 'diverged' in err[0]
    assert not list(tmp_path.rglob('result.json'))
    for line in (tmp_path / 'parity2-mask-s0' / 'log.jsonl').read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f'{c} is no JSON'))


def test_run_all_stops_at_a_failing_run_and_names_it(tmp_path):
    (tmp_path / 'run_all.sh').write_bytes((HERE / 'run_all.sh').read_bytes())
    (tmp_path / 'train.py').write_text('raise SystemExit(1)')
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results' / 'unfinished.py').write_text('import sys; print(sys.stdin.read(), end="")')
    environment = dict(os.environ, PYTHON=sys.executable)
    done = subprocess.run(['bash', 'run_all.sh', 'boolean'], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and 'failed: train.py --task parity2' in done.stderr
    done = subprocess.run(['bash', 'run_all.sh', 'booleans'], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and 'booleans' in done.stderr
    (tmp_path / 'results' / 'unfinished.py').write_text('raise SystemExit(3)')     # no data for any run
    (tmp_path / 'results' / 'report.py').write_text('import os, sys; print("table", os.listdir(sys.argv[1]))')
    done = subprocess.run(['bash', 'run_all.sh', 'quick', 'vision', 'boolean'], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and 'not wholly: vision boolean' in done.stderr and 'table []' in done.stdout
    (tmp_path / 'runs' / 'quick' / 'theory').mkdir()
    (tmp_path / 'runs' / 'quick' / 'theory' / 'theory.json').write_text('')
    (tmp_path / 'theory.py').write_text('raise SystemExit(1)')
    for draws, failed, code in ((10000, '"a bound"', 1), (80, '', 1), (10000, '', 0), (100000, '', 0)):      # all draws, none failed: finished
        (tmp_path / 'runs' / 'quick' / 'theory' / 'theory.json').write_text(f'{{\n "draws": {draws},\n "failed": [{failed}]}}')
        assert subprocess.run(['bash', 'run_all.sh', 'quick', 'theory'], cwd=tmp_path, capture_output=True, env=environment).returncode == code


def asked_of_train(folder, *arguments, **environment):
    """The command lines of train.py that run_all.sh would run: a stand-in for python notes what it is asked to do."""
    (folder / 'run_all.sh').write_bytes((HERE / 'run_all.sh').read_bytes())
    (folder / 'note').write_text('#!/bin/sh\necho "$@" >> asked\n[ "$1" != results/unfinished.py ] || cat\n')
    (folder / 'note').chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name not in ('OUT', 'DEVICE', 'JOBS')}
    subprocess.run(['bash', 'run_all.sh', *arguments], cwd=folder, check=True, capture_output=True, env=dict(own, PYTHON='./note', **environment))
    return [line.split()[1:] for line in (folder / 'asked').read_text().splitlines() if line.startswith('train.py')]


@pytest.mark.parametrize('size, runs', [('quick', 37), ('full', 340)])
def test_every_run_of_run_all_is_one_that_train_py_takes(tmp_path, size, runs):
    asked = asked_of_train(tmp_path, *(['quick'] if size == 'quick' else []), 'boolean', 'arithmetic', 'vision', 'language')
    folders = [(s.out, s.name or (s.task, s.init, s.seed)) for s in map(train.parse, asked)]
    assert runs == len(folders) == len(set(folders))                               # no two runs share a folder
    assert all(out.startswith('results' if size == 'full' else 'runs/quick') for out, _ in folders)


def test_every_recorded_run_is_a_row_of_run_all_and_finished(tmp_path):
    asked = asked_of_train(tmp_path, 'boolean', 'arithmetic', 'vision', 'language', DEVICE='cuda')          # a GPU has more rows
    rows = [train.parse([*options, '--device', 'cpu']) for options in asked]
    finished = [train.is_finished(dataclasses.replace(row, out=HERE / row.out), resume=True) for row in rows]
    assert sum(finished) == len([*(HERE / 'results').rglob('result.json')]) > 300


def test_a_finished_run_is_not_asked_for_again(tmp_path):
    options = [*SMALL, '--steps', '2', '--out', str(tmp_path)]
    train.main(options)
    lines = [' '.join([*options, '--seed', seed]) for seed in ('0', '1')]
    ask = lambda text: subprocess.run([sys.executable, HERE / 'results' / 'unfinished.py'], input=text, capture_output=True, text=True)
    assert ask('\n'.join(lines) + '\n').stdout.splitlines() == lines[1:]
    done = ask(f'--task wikitext2 --data-dir {tmp_path}\n{lines[1]}\n')
    assert done.returncode == 3 and done.stdout.splitlines() == lines[1:] and 'download wikitext2' in done.stderr
    done = ask(lines[0] + ' --lr 1\n')                                             # finished, with another setting
    assert done.returncode == 2 and '--lr' in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('task', tasks.VISION)
def test_the_papers_sizes_run_for_an_epoch_on_images_of_the_right_shape(task, tmp_path, no_fakes):
    asked = [a for a in asked_of_train(tmp_path, 'vision', DEVICE='cuda') if '--compile' in a]
    assert len(asked) == 12
    for name in ('cifar10', 'cifar100'):
        make_cifar(tmp_path / {'cifar10': 'cifar-10-batches-py', 'cifar100': 'cifar-100-python'}[name], name=name, n=8)
    no_fakes()
    if task == 'imagenet100':
        pytest.importorskip('PIL')
        make_imagenet(tmp_path)
    for i, options in enumerate(a for a in asked if task in a):
        train.main([*options, '--device', 'cpu', '--compile', 'false', '--epochs', '1', '--batch', '8', '--warmup', '0', '--eval-every', '1',
                    '--data-dir', str(tmp_path), '--out', str(tmp_path), '--cache', str(tmp_path / 'cache'), '--name', str(i)])
        result = json.loads((tmp_path / str(i) / 'result.json').read_text())
        assert 5e6 < result['parameters'] < 7e6 and math.isfinite(result['loss'])   # ViT-Tiny


def test_the_tables_are_what_report_makes_of_the_runs():
    tables, shown = report.sections(HERE / 'results'), []
    for path in (HERE / 'README.md', HERE / 'results' / 'README.md'):
        shown += re.findall(r'<!-- report: (\w+) -->', path.read_text())
        assert path.read_text() == report.filled(path.read_text(), tables)
    assert sorted(shown) == sorted(tables)


def test_the_share_that_is_needed_by_hand():
    runs = lambda *right: [(None, {'sequence_accuracy': r}, None) for r in right]
    curve = {0.001: runs(0., 0.2), 0.01: runs(0.9), 0.1: runs(1.)}
    assert report.needed(curve, 0.5) == ('', pytest.approx(0.001 * 10 ** 0.5))     # half-way between 0.1 and 0.9, in the log of the share
    assert report.needed(curve, 0.05) == ('<', 0.001) and report.needed({0.01: runs(0.9)}, 0.95) == ('>', 0.01)


def test_a_table_by_hand(tmp_path, capsys):
    for seed, (accuracy, fitted) in enumerate([(0.5, True), (0.7, False)]):
        folder = tmp_path / 'boolean' / f'maj3-mask-s{seed}'
        folder.mkdir(parents=True)
        result = dict(seed=seed, steps=7, accuracy=accuracy, fitted=fitted, prior_tv_init=0.125, prior_tv_final=0.25)
        (folder / 'result.json').write_text(json.dumps(result))
        (folder / 'log.jsonl').write_text('')
        (folder / 'config.json').write_text('{"settings": {}}')
    lines = '\n'.join(report.headline(tmp_path)).splitlines()
    assert lines[2] == '| maj3, accuracy % |  |  |  |  |  |  | 60.00 ± 14.14 (1/2 not fitted) | 2 | 87, 100 |'
    assert lines[-1] == '| maj3 |  |  |  |  |  |  | 0.12 → 0.25 |'
    assert report.filled('a\n<!-- report: x -->\nold\nold\n<!-- /report -->\nb', {'x': 'new'}) == 'a\n<!-- report: x -->\nnew\n<!-- /report -->\nb'
    empty = '<!-- report: x -->\n<!-- /report -->\ntext\n<!-- report: y -->\n<!-- /report -->'
    assert report.filled(empty, {'x': '1', 'y': '2'}) == '<!-- report: x -->\n1\n<!-- /report -->\ntext\n<!-- report: y -->\n2\n<!-- /report -->'
    with pytest.raises(tasks.RunError, match='table of x, and there is no .*results/x'):
        report.filled(empty, {'y': '2'})
    for name, settings, says in (('maj3-mask-s1.bak', {}, 'is of seed 1'), ('maj3-mask-s2', {'lr': 1.}, 'in --lr')):         # no seeds of one row
        shutil.copytree(folder, folder.parent / name)
        (folder.parent / name / 'result.json').write_text(json.dumps(result | {'seed': int(name[11])}))
        (folder.parent / name / 'config.json').write_text(json.dumps({'settings': settings}))
        assert tasks.command(lambda: report.main([str(tmp_path)]), 'report.py') == 1
        error = capsys.readouterr().err
        assert error.count('\n') == 1 and name in error and says in error
        shutil.rmtree(folder.parent / name)
    (folder / 'result.json').write_text('{"seed": 1')                              # a run copied by halves
    assert tasks.command(lambda: report.main([str(tmp_path)]), 'report.py') == 1
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and str(folder / 'result.json') in error
    assert tasks.command(lambda: report.main([str(tmp_path / 'none')]), 'report.py') == 2
    assert tasks.command(lambda: report.main([str(tmp_path), '--write']), 'report.py') == 2
    (tmp_path / 'empty' / 'bench').mkdir(parents=True)                             # as an interrupted --bench leaves it
    assert not report.main([str(tmp_path / 'empty')]) and 'no finished runs' in capsys.readouterr().err
    for content in ('{}', '[]', '{"seed": 1, "accuracy": "high"}'):                # not what a run writes
        (folder / 'result.json').write_text(content)
        capsys.readouterr()
        assert tasks.command(lambda: report.main([str(tmp_path)]), 'report.py') == 1 and capsys.readouterr().err.count('\n') == 1


def test_the_readmes_example_of_an_own_model():
    """It runs as it stands; M learns; the layer does the same in evaluation, and what the explicit attention does."""
    code = (HERE / 'README.md').read_text().split('```python\n')[1].split('```')[0]
    space, fast = {}, torch.backends.mha.get_fastpath_enabled()
    try:
        exec(code, space)
        assert not torch.backends.mha.get_fastpath_enabled()
        x, M, layer = space['x'], space['M'], space['layer'].eval()
        y = layer(x, src_mask=mask_bias(M))
        y.square().sum().backward()
        assert M.grad[0].abs().min() > 0
        with torch.no_grad():
            assert (layer(x, src_mask=mask_bias(M)) - y).abs().max() < 1e-5
        weights = space['weights']
        assert weights[:, 0, 1:3].sum(-1).min() > 0.4 and weights[:, 0, 3:].max() < 0.01 and weights[:, 5, 5].min() > 0.95
        q, k, v = (space[n] for n in 'qkv')
        assert (space['y'] - attend(q, k, v, mask_bias(M, space['causal']))).abs().max() < 1e-5
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def test_bench_times_what_it_says(tmp_path):
    slow, fast = bench.timed(0.1, 'cpu', lambda: time.sleep(0.02), lambda: None)
    assert 0.02 <= slow[1] <= slow[0] <= slow[2] < 0.1 and fast[0] < 0.01
    bench.made_up_data(tmp_path)
    assert len(tasks.corpus('wikitext2', tmp_path)[1]) == 33_278                   # the real vocabulary's size
    assert len(tasks.corpus('tinystories', tmp_path)[1]) == 4096 and len(tasks.cifar('cifar10', tmp_path)[0][1]) == 5000
    rows = list(bench.bench_task('parity2', ['--width', '16', '--heads', '2'], {False: 1e3, True: 1e3}, 0))
    flops = [1e6 * row['gflops_per_second'] * row['milliseconds'] for row in rows]
    B, N, D, L = 64, 16, 16, 2
    # Forward once and backward twice: k and v of all tokens, all else of all but, in the last block, of one token; d H = D.
    token = 2 * D * D * (2 + 8) + 2 * 2 * D * N
    assert flops == pytest.approx([3 * B * ((N + 1) * token + L * N * 2 * D * D * 2 + 2 * D)] * 2, rel=1e-6)
    assert all(row['mask_over_default'] > 0 and row['torch_layers_over_ours'] > 0 and '%' in row['costs'] for row in rows)
    model, x = maskprior.Transformer(11, (8,), 11, D=16, H=2, pool=None, causal=True, tied=True), torch.arange(16).view(2, 8) % 11
    assert bench.PeerLM(model)(x, x.flip(1)).item() == pytest.approx(model(x, x.flip(1)).item(), rel=1e-5)


def test_a_bench_of_some_tasks_leaves_what_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ('bench_task', 'bench_attention', 'bench_seeds', 'made_up_data'):
        monkeypatch.setattr(bench, name, lambda *_: [])
    monkeypatch.setattr(bench, 'product_rate', lambda *_: 1.)
    recorded = (HERE / 'results' / 'bench' / 'bench.json').read_bytes()
    bench.main(['parity2', '--threads', str(torch.get_num_threads())])
    assert (tmp_path / 'runs' / 'bench' / 'bench.json').exists() and (HERE / 'results' / 'bench' / 'bench.json').read_bytes() == recorded


def test_the_list_names_every_task_and_arm():
    code, out, _ = cli('--list')
    assert code == 0 and all(f'  {name} ' in out for name in (*train.TASKS, *maskprior.ARMS)) and 'download cifar10' in out


def test_the_readmes_first_run_extrapolates(tmp_path):
    """README: parity2 with the mask is right on the whole cube; the default fits as well and is wrong on the hole."""
    results = {}
    for init in ('mask', 'default'):
        train.main(['--task', 'parity2', '--init', init, '--out', str(tmp_path), '--eval-every', '1000'])
        results[init] = json.loads((tmp_path / f'parity2-{init}-s0' / 'result.json').read_text())
    mask, default = results['mask'], results['default']
    assert mask['accuracy'] == 1 and mask['loss'] < 0.0005 and mask['seconds'] < 60
    assert default['fitted'] and default['accuracy'] == 0.75 and default['fourier']['x0*x1'] < 0.6
