"""pytest -q: the figures, from tiny records, and the pictures of a run."""
import json
import shutil
import sys

import pytest

pytest.importorskip('matplotlib', reason='the figures need matplotlib')
# `runs` is a fixture.
from test_results import HERE, line, record, refusal, runs
import attention
import figures
import look
import records
import show
import train
import torch
from maskprior import prior_weights, relative_change

ROWS = {'boolean': [f'{task}-{arm}' for task in records.PAPER_TASKS
                    for arm in records.MAIN_ARMS]
        + ['interventions/parity2-mask-mask-lr-10', 'interventions/parity2-mask-both'],
        'arithmetic': ['add3-0.001-default', 'add3-0.001-mask', 'add3-0.002-mask'],
        'images': ['cifar10-mask', 'cifar10-mask-mimetic-v'],
        'language': ['wikitext2-mask', 'wikitext2-no-positions-alibi']}
LOG = dict(step=[0, 10, 300], prior_tv=[0., .25, .5], accuracy=[.1, .2, .3],
           accuracy_unseen=[1., 0., .5], perplexity=[90., 30., 20.])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Two seeds of each row; the recorded maps, and simple ones beside them."""
    folder = tmp_path_factory.mktemp('results')
    for section, names in ROWS.items():
        lines = []
        for name in names:
            task, *_, arm = name.rpartition('/')[2].split('-')
            frac = .002 if '.002' in name else .001
            settings = dict(task=task, init='default' if arm == 'default' else 'mask', epochs=4,
                            frac=frac)
            lines += [line(section, f'{name}-s{seed}', settings, LOG) for seed in (0, 1)]
        record(folder, section, *lines)
    maps, square = json.loads((HERE / 'attention.json').read_text()), torch.eye(15).tolist()
    maps = {name: entry for name, entry in maps.items() if entry['task'] != 'cyclic3'}
    for arm in ('default', 'mask'):
        maps[arm] = dict(task='cyclic3', init=arm, step=[0, 1000], attention=[square, square],
                         target=square)
    maps['M'] = dict(task='wikitext2', init='mask', bias=torch.zeros(2, 2, 4, 8).tolist())
    (folder / 'attention.json').write_text(json.dumps(maps))
    return folder


def texts(figure):
    """All that can be read in a figure."""
    return {artist.get_text() for artist in figure.findobj(lambda a: hasattr(a, 'get_text'))}


# The number of panels, colour bars among them, and what must be written there.
EXPECTED = {
    'claim': (22, {'qk-svd', 'mask', 'step 20', 'target: the prior', 'layer 2', '50 mask'}),
    'interventions': (2, {'mask: as it is', 'learning rate of M × 10', 'both'}),
    'boolean': (6, {'parity2', 'maj3', 'cyclic3', '50', '0.50', 'each seed', 'mask'}),
    'cyclic3': (7, {'target: the prior', 'default, before', 'mask, after',
                    'cyclic3, seed 0, 1,000 steps: mean over layers, heads and inputs'}),
    'arithmetic': (1, {'add3', '0.1', '0.2', 'training pairs, % of all'}),
    'arithmetic_masks': (17, {'the prior', 'mask\nafter', 'head 4', '+', '=', 'writes 0'}),
    'images': (2, {'cifar10, 100 training images', '30.0 mask, V of mimetic', 'epoch'}),
    'images_priors': (14, {'mask:\nsigmoid(M)', 'mask:\nattention', 'after, head 3'}),
    'language': (1, {'20.0 mask', '20.0 alibi, no positions', 'validation perplexity'}),
    'language_masks': (8, {'head 4', 'after, layer 2', 'before, all layers (on top)',
                           'its change'}),
    'theory_scaling': (4, {'k, W_K', 'm', 'q, W_Q'}),
    'theory_training': (8, {'SGD', 'Adam', 'qk-svd', 'W_Q and W_K', 'norm of the gradient'})}


@pytest.mark.parametrize('name', figures.FIGURES)
def test_a_figure_has_its_panels_and_words(folder, name):
    figure = figures.FIGURES[name](HERE if 'theory' in name else folder)
    assert len(figure.axes) == EXPECTED[name][0] and EXPECTED[name][1] <= texts(figure)


def test_a_seed_is_a_thin_line_or_a_dot_an_arm_one_colour(folder):
    axis = figures.boolean(folder).axes[0]
    for arm in records.MAIN_ARMS:
        lines = [line for line in axis.lines if line.get_color() == look.COLOURS[arm]]
        assert [line.get_linewidth() for line in lines] == [.6, .6, 2]
        assert list(lines[2].get_xdata()) == [0, 10, 300] and lines[2].get_ydata()[2] == 50
    dots = [line for line in figures.interventions(folder).axes[0].lines
            if line.get_marker() == '.' and len(line.get_xdata())]
    # The mask as it is, and its two interventions; no dot on another.
    assert [list(line.get_xdata()) for line in dots] == [[.25, .25]] * 3
    assert all(len(set(line.get_ydata())) == 2 for line in dots)
    assert look.look('no-positions-mask')['color'] == look.look('mask-both')['color']
    look.end_values(axis, [(y, str(y), 'red') for y in (99, 99, 98, 50, 0, 0)])
    places = sorted(text.xy[1] for text in axis.texts if text.get_color() == 'red')
    assert min(b - a for a, b in zip(places, places[1:])) > .0899 and places[-1] < 1.03


def test_the_command_says_what_it_wrote_and_what_is_not_recorded(folder, tmp_path, capsys):
    (tmp_path / 'boolean.jsonl').write_text((folder / 'boolean.jsonl').read_text())
    figures.main(['interventions', 'claim'], tmp_path)
    assert capsys.readouterr() == (f'{tmp_path}/interventions.png\n', 'figures.py: claim: nothing '
                                   'is recorded for it in attention.json\n')
    assert 5_000 < (tmp_path / 'interventions.png').stat().st_size < 120_000
    refusal(lambda: figures.main(['claims']), capsys, 2)


def test_recorded_maps_are_those_of_the_training_itself(runs, tmp_path, monkeypatch):
    run = runs / 'boolean' / 'parity2-mask-s0'
    settings, checkpoint = attention.load_run(run)
    task, model, _ = train.build(settings)
    steps = attention.replay(settings, task, model, train.make_optimiser(model, settings))
    assert list(steps) == [0, 1]
    trained = prior_weights(attention.load_model(settings, checkpoint, run)[1])
    assert max(relative_change(model, trained).values()) == 0
    monkeypatch.setattr(attention, 'SNAPSHOTS', {'parity2': (1,)})
    attention.main([str(run)], tmp_path / 'attention.json')
    entry = json.loads((tmp_path / 'attention.json').read_text())['parity2-mask-s0']
    assert entry['step'] == [0, 1, 2] and entry['queries'] == ['CLS', 'x0', 'x1']
    maps = torch.tensor(entry['attention'])
    assert maps.shape == (3, 2, 3, 16) and (maps.sum(-1) - 1).abs().max() < .01
    assert (maps[0] - torch.tensor(entry['target'])).abs().sum(-1).mean() < .1


def test_show_draws_a_run_that_goes_on_and_refuses_what_is_none(runs, tmp_path, capsys,
                                                                monkeypatch):
    run = shutil.copytree(runs, tmp_path / 'runs') / 'boolean' / 'parity2-mask-s0'
    (run / 'result.json').unlink()
    show.main([str(run)])
    assert capsys.readouterr().out == f'{run / "show.png"}\n' and (run / 'show.png').exists()
    figure = show.draw([run, run])
    # Four metrics; for each run two layers of two heads and of M, and two colour bars.
    assert len(figure.axes) == 4 + 2 * (4 + 2 + 2)
    assert {'prior_tv', 'head 2', 'all heads', 'layer 2', 'CLS', 'x14', 'parity2-mask-s0, step 2: '
            'attention (blue), sigmoid(M) (green)'} <= texts(figure)
    assert [len(axis.lines) for axis in figure.axes[:4]] == [2] * 4
    M = [axis.images[0].get_array() for axis in figure.axes[4:] if axis.get_title() == 'all heads']
    assert M[0].shape == (16, 16) and M[0][0, 1] > .9 and M[0][0, 3] < .1
    none = tmp_path / 'none'
    none.mkdir()
    assert 'is no run of train.py' in refusal(lambda: show.main([str(none)]), capsys, 2)
    (none / 'config.json').write_text('{"settings": {"colour": 1}}')
    assert 'no checkpoint.pt' in refusal(lambda: show.main([str(none)]), capsys, 2)
    (none / 'checkpoint.pt').write_text('PK')
    assert 'json cannot be read' in refusal(lambda: show.main([str(none)]), capsys)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert 'needs matplotlib: pip install' in refusal(lambda: show.main([str(run)]), capsys)
