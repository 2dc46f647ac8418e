"""pytest -q: identities and hand-computed values first, then known faults of such code, then short training runs."""
import json
import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import maskprior
import tasks
import train
from maskprior import attend, attention_weights, mask_bias, prior_matrix, target_attention

HERE = Path(__file__).parent


def qkv(B=2, H=3, N=5, d=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, H, N, d, generator=generator, dtype=torch.float64).to(dtype)


def tiny(arm='default', *options):
    """(task, model, M0) of a small parity2 run."""
    settings = train.parse(['--task', 'parity2', '--init', arm, '--width', '32', '--heads', '2', *options])
    return train.build(settings)


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
    """One token, transposed M, expanded M (stride 0), eager and compiled: the gradient is that of a plain copy."""
    function = torch.compile(attend) if compiled else attend
    for layout in (lambda M: M, lambda M: M.T, lambda M: M[:1].expand(N, N), lambda M: M[:1, :1]):
        grads = []
        for path in (lambda q, k, v, b: attend(q, k, v, b), lambda q, k, v, b: function(q, k, v, b, sdpa)):
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


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('sdpa', [False, True])
def test_autocast_leaves_the_mask_in_its_own_type(dtype, sdpa):
    attn = maskprior.Attention(16, 2, sdpa=sdpa)
    attn.M = torch.nn.Parameter(torch.randn(5, 5, dtype=dtype))
    x = torch.randn(2, 5, 16)
    with torch.autocast('cpu', torch.bfloat16):
        out = attn(x)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and attn.M.dtype == attn.M.grad.dtype == dtype
    assert torch.allclose(out.float(), attn.to(torch.float32)(x), atol=0.05) and attn.M.grad.abs().max() > 0


def test_a_row_with_no_open_key_is_refused():
    allowed = torch.ones(4, 4).tril(-1).bool()
    with pytest.raises(ValueError, match='query token 0 has no open key'):
        maskprior.Attention(8, 2, allowed)
    with pytest.raises(ValueError, match='not finite'):
        maskprior.init_mask(tiny()[1], torch.full((16, 16), -math.inf))


@pytest.mark.parametrize('arm', maskprior.ARMS)
@pytest.mark.parametrize('sdpa', [False, True])
def test_a_causal_model_does_not_see_what_comes_next(arm, sdpa, N=6):
    torch.manual_seed(0)
    model = maskprior.Transformer(vocab=7, N=N, outputs=3, D=16, H=2, sdpa=sdpa)
    for block in model.blocks:
        block.attn.allowed = torch.ones(N, N).tril().bool()
    x = torch.randint(7, (4, N))
    M0 = prior_matrix(torch.eye(N).bool(), 2, 2)
    maskprior.init_arm(model, arm, M0, x)
    changed = x.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 7
    before, after = ([X for _, X in maskprior.layer_inputs(model, t)] + [model.embed(t)] for t in (x, changed))
    assert all(torch.equal(a[:, :3], b[:, :3]) for a, b in zip(before, after)) and not torch.equal(before[1], after[1])


def test_the_last_blocks_shortcut_equals_reading_the_class_token_of_all_rows():
    task, model, _ = tiny('mask')
    fast = model(task.probe)
    model.rows = slice(None)
    *_, (attn, X) = maskprior.layer_inputs(model, task.probe)
    block, x = model.blocks[-1], model.embed(task.probe)
    for b in model.blocks:
        x = b(x)
    assert torch.allclose(fast, model.head(model.norm(x[:, 0])), atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- priors

def test_strength_and_level_of_a_prior():
    opened = torch.tensor([[True, False]])
    M0 = prior_matrix(opened, strength=4, level=4)
    assert torch.allclose(M0, torch.tensor([[4., -4.]]), atol=1e-5)                # logsigmoid(4) - logsigmoid(-4) = 4
    for level in (-6., 0., 8., 20.):                                               # the same attention at every level
        p = target_attention(prior_matrix(opened, 4, level))
        assert torch.allclose(p, torch.tensor([[1., math.exp(-4)]]) / (1 + math.exp(-4)))


def test_structure_of_the_boolean_tasks_by_hand():
    opened = tasks.boolean('parity2').opened
    assert opened.nonzero().tolist() == [[i, j] for i in (0, 1, 2) for j in (1, 2)]
    assert tasks.boolean('cyclic3').opened[14].nonzero().flatten().tolist() == [0, 1, 14]


@pytest.mark.parametrize('d', [1, 2, 8])
def test_svd_error_is_the_discarded_singular_values(d, N=6, H=2):
    """To a prior that is not symmetric (each token looks at the next), truncated and at full rank."""
    torch.manual_seed(0)
    model = maskprior.Transformer(vocab=3, N=N, outputs=1, D=max(8, H * d), H=max(8, H * d) // d, L=1, pos_std=1.)
    M0, x = prior_matrix(torch.eye(N).roll(1, 1).bool(), 4, 4), torch.randint(3, (64, N))
    maskprior.init_qk_svd(model, M0, x)
    (attn, X), = maskprior.layer_inputs(model, x)
    Xp = X.mean(0, keepdim=True)
    logits = (attn.split(attn.q(Xp)) @ attn.split(attn.k(Xp)).mT / math.sqrt(d))[0]
    wanted = F.logsigmoid(M0) - F.logsigmoid(M0).mean(-1, keepdim=True)
    discarded = torch.linalg.svdvals(wanted)[d:].square().sum().sqrt()
    for head in logits:
        assert torch.allclose((head - wanted).norm(), discarded, atol=1e-3)


@pytest.mark.parametrize('arm', maskprior.ARMS)
def test_arms_of_a_seed_share_all_other_weights_and_all_batches(arm):
    task, default, _ = tiny()
    _, model, _ = tiny(arm)
    own = {'mask': ('attn.M',), 'qk-svd': ('attn.q.weight', 'attn.k.weight'), 'default': (),
           'qk-opt': ('attn.q.weight', 'attn.k.weight')}[arm]
    weights, shared = model.state_dict(), default.state_dict()
    for name in weights:
        if not name.endswith(own or 'nothing'):
            assert torch.equal(weights[name], shared[name]), name
    assert set(weights) ^ set(shared) == ({f'blocks.{i}.attn.M' for i in (0, 1)} if arm == 'mask' else set())
    assert arm == 'default' or any(not torch.equal(w, shared[n]) for n, w in weights.items() if n in shared) or arm == 'mask'


@pytest.mark.parametrize('arm', ['mask', 'qk-svd', 'qk-opt'])
def test_arms_hold_the_prior_before_training(arm):
    task, model, M0 = tiny(arm, '--pos-std', '0.2')
    fresh = task.batch(torch.Generator().manual_seed(1), 512)[0]                   # not the inputs it was fitted to
    assert maskprior.prior_tv(model, M0, fresh) < 0.06 < 0.5 < maskprior.prior_tv(tiny()[1], M0, fresh)


def test_prior_tv_by_hand():
    model = maskprior.Transformer(vocab=2, N=2, outputs=1, D=4, H=2, L=1)
    model.blocks[0].attn.q.weight.data.zero_()                                     # attention 1/2, 1/2 in both rows
    M0 = torch.tensor([[0., 0.], [0., -math.log(5.)]])                             # sigmoid 1/2, 1/2; 1/2, 1/6 -> 3/4, 1/4
    assert maskprior.prior_tv(model, M0, torch.zeros(1, 2, dtype=torch.long)) == pytest.approx(1 / 4)  # row 0 asks nothing


def test_relative_change_by_hand():
    _, model, _ = tiny('mask')
    initial = maskprior.prior_weights(model)
    for block in model.blocks:
        block.attn.M.data *= 1.5
    assert maskprior.relative_change(model, initial) == {'M': pytest.approx(0.5), 'W_Q': 0., 'W_K': 0.}


def test_frozen_mask_does_not_learn():
    for options, learns in (([], True), (['--freeze-mask'], False), (['--freeze-mask', 'false'], True)):
        _, model, _ = tiny('mask', *options)
        assert model.blocks[0].attn.M.requires_grad == learns


def test_per_head_mask_has_a_matrix_for_each_head():
    _, model, M0 = tiny('mask', '--per-head')
    assert M0.shape == model.blocks[0].attn.M.shape == (2, 16, 16)


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
    x = torch.ones(2, 15)
    x[1, [0, 1]] = -1
    expected = {'parity2': [1, 1], 'maj3': [1, -1], 'cyclic3': [15, 15 - 2 * 2], 'parity3': [1, 1], 'diff2': [0, 0]}
    # flipping x0 and x1 flips the windows that hold one of the two: (14,0,1) and (0,1,2) hold both; (13,14,0), (1,2,3) flip
    assert {name: f(x).tolist() for name, (f, _, _) in tasks.BOOLEAN.items()} == expected


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


def test_training_never_sees_the_hole():
    task = tasks.boolean('maj3', '+*-')
    x, y = task.batch(torch.Generator().manual_seed(0), 20000)
    bits = 1 - 2 * x[:, 1:]
    assert not ((bits[:, 0] == 1) & (bits[:, 2] == -1)).any()
    assert torch.equal(bits[:, :3].sum(1).sign().float(), y) and len(x.unique(dim=0)) > 12000


# ---------------------------------------------------------------------------------------------------------------- runs

@pytest.mark.parametrize('options, says', [
    (['--task', 'parity9'], 'parity9'), (['--init', 'masks'], 'masks'), (['--steeps', '3'], '--steeps'),
    (['--hole', '+-+-+-+-+-+-+-+-'], '--hole'), (['--hole', '**'], '--hole'), (['--hole='], '--hole'),
    (['--hole', '+x'], '--hole'), (['--heads', '3'], '--heads 3'), (['--steps', '0'], '--steps'),
    (['--device', 'cuda' if not torch.cuda.is_available() else 'cuda:99'], '--device'), (['--freeze-mask', 'perhaps'], 'perhaps'),
    (['--prior-bits', '2,77'], '--prior-bits'), (['--task', 'cyclic3', '--prior-bits', '1,2'], '--prior-bits'),
    (['--strength', '-1'], 'strength'), (['--width', '8', '--heads', '2', '--init', 'qk-svd'], 'width'), (['--lr', 'nan'], '--lr')])
def test_bad_arguments_are_one_line_and_exit_2(tmp_path, options, says):
    code, _, err = cli(*options, '--out', tmp_path)
    assert code == 2 and says in err[-1] and 'Traceback' not in '\n'.join(err)
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
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'cut', '--resume'])
    whole, cut = (torch.load(tmp_path / n / 'checkpoint.pt', weights_only=True) for n in ('whole', 'cut'))
    assert all(torch.equal(w, cut['model'][name]) for name, w in whole['model'].items())
    assert [r['loss'] for r in whole['log']] == [r['loss'] for r in cut['log']]


def test_a_checkpoint_cut_in_half_is_one_line(tmp_path):
    train.main([*SMALL, '--out', str(tmp_path), '--name', 'x'])
    (tmp_path / 'x' / 'result.json').unlink()
    path = tmp_path / 'x' / 'checkpoint.pt'
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    code, _, err = cli(*SMALL, '--out', tmp_path, '--name', 'x', '--resume')
    assert code == 1 and len(err) == 1 and 'checkpoint.pt' in err[0]


def test_divergence_is_one_line_and_strict_json(tmp_path):
    code, _, err = cli(*SMALL, '--lr', '1e6', '--out', tmp_path)
    assert code == 1 and len(err) == 1 and 'diverged' in err[0]
    assert not list(tmp_path.rglob('result.json'))
    for line in (tmp_path / 'parity2-mask-s0' / 'log.jsonl').read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f'{c} is no JSON'))
