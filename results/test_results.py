"""pytest -q: the recorded runs, the tables made from them, and what records and measures."""
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# One thread, here and in what is started from here: on a busy machine several wait for each other.
os.environ.setdefault('OMP_NUM_THREADS', '1')
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import tasks
import bench
import maskprior
import records
import report
import train

RESULT = {
    'boolean': dict(accuracy=0.5, accuracy_unseen=0., loss=1., prediction_unseen=1., fitted=True,
                    mdi_accuracy=0.875, mdi_loss=2.),
    'arithmetic': dict(sequence_accuracy=0.5, sequence_accuracy_seen=1., digit_accuracy=0.75,
                       fitted=True),
    'images': dict(accuracy=0.5, accuracy_seen=0.5, loss=1., training_examples=100, fitted=False),
    'language': dict(perplexity=20., perplexity_test=21., training_examples=1000, fitted=None)}
LOG = {'boolean': dict(accuracy_unseen=[1., 0.]), 'arithmetic': {}, 'images': dict(accuracy=[0, 1]),
       'language': dict(perplexity=[30., 20.])}


def line(section, name, settings, log=(), **result):
    """A line of a section's file."""
    log = dict(step=[0, 4], prior_tv=[0.1, 0.2]) | LOG[section] | dict(log)
    result = RESULT[section] | dict(prior_tv_init=0.125, prior_tv_final=0.25) | result
    settings = settings | {'seed': int(name.rpartition('-s')[2])}
    return json.dumps(dict(name=name, command='', commit=None, torch='2', device='cpu', threads=1,
                           settings=settings, log=log, result=result))


def record(folder, section, *lines):
    (folder / f'{section}.jsonl').write_text('\n'.join(lines) + '\n')


def edit(run, **settings):
    config = json.loads((run / 'config.json').read_text())
    config['settings'] |= settings
    (run / 'config.json').write_text(json.dumps(config))


def copy_run(run, name, **settings):
    edit(shutil.copytree(run, run.parent / name), **settings)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """A folder as run_all.sh makes it: a run of train.py, as short as can be, and two copies."""
    folder = tmp_path_factory.mktemp('all') / 'runs'
    train.main(['--task', 'parity2', '--width', '16', '--heads', '2', '--steps', '2', '--batch',
                '8', '--device', 'cpu', '--out', f'{folder}/boolean'])
    run = folder / 'boolean' / 'parity2-mask-s0'
    copy_run(run, 'parity2-mask-s1', seed=1)
    copy_run(run, 'ablation/frozen-s0', freeze_mask=True)
    return folder


def refusal(call, capsys, code=1):
    """The one line with which a command refuses."""
    assert train.command(call, 'report.py') == code
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


def test_the_pages_are_what_report_makes_of_the_runs():
    tables = report.sections()
    found = []
    for path in (HERE.parent / 'README.md', *HERE.glob('*.md')):
        text = path.read_text(encoding='utf-8')
        found += [name for name in report.TABLES if f'<!-- report: {name} -->' in text]
        assert text == report.filled(text, tables), path
    assert sorted(found) == sorted(tables)


@pytest.mark.parametrize('section', records.SECTIONS)
def test_recorded_runs_are_strict_and_of_settings_that_train_takes(section):
    found = records.records(section)
    assert [run.name for run in found] == sorted({run.name for run in found})
    # One run of a row is enough: records.py refuses rows whose runs differ in their settings.
    for run, *_ in records.by_row(found).values():
        again = train.parse(['--device', 'cpu', *records.arguments(run)])
        assert train.run_config(again) == train.run_config(run.settings)
    for text in (HERE / f'{section}.jsonl').read_text(encoding='utf-8').splitlines():
        content = json.loads(text, parse_constant=pytest.fail)
        compact = json.dumps(content, separators=(',', ':'))
        assert text == compact and list(content) == list(vars(found[0]))


def test_results_stay_few_and_small():
    files = [path for path in HERE.iterdir() if path.name[0] not in '._']
    assert all(path.is_file() for path in files) and len(files) <= 40
    assert sum(path.stat().st_size for path in files) < 2e6


def test_the_index_reads_a_record_as_it_says(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    for code in (HERE / 'README.md').read_text(encoding='utf-8').split('```python\n')[1:]:
        exec(code.split('```')[0], {})
    accuracies, *labels = capsys.readouterr().out.splitlines()
    assert len(json.loads(accuracies)) >= 5
    assert any(label.startswith('parity2-mask 0.001 [') for label in labels)


def test_two_arms_are_compared_image_by_image(tmp_path):
    # Of four images right: 1010 and 1111 with the mask, 1000 and 1111 without.
    right = {'default-s0': '8', 'default-s1': 'f', 'mask-s0': 'a', 'mask-s1': 'f'}
    record(tmp_path, 'images', *(
        line('images', f'cifar10-{run}', {'task': 'cifar10', 'init': run[:-3], 'epochs': 1},
             right_images=digits) for run, digits in right.items()))
    # Means over the seeds: 0 0 50 0; their standard deviation 25, over the root of 4.
    assert '| cifar10 | mask − default | +12.50 ± 12.50 | +25.00 +0.00 |' in report.sections(
        tmp_path)['images']
    # No seed that both have: not seed 0, since an earlier mask does not say which are right.
    record(tmp_path, 'images', *(
        line('images', f'cifar10-{run}', {'task': 'cifar10', 'init': run[:-3], 'epochs': 1},
             **({'right_images': right[run]} if run != 'mask-s0' else {}))
        for run in ('default-s0', 'mask-s0', 'mask-s1')))
    assert 'mask − default' not in report.sections(tmp_path)['images']


def test_tables_of_each_section_by_hand(tmp_path):
    record(tmp_path, 'boolean', line('boolean', 'parity2-mask-s0', {}, loss=0.25),
           line('boolean', 'parity2-mask-s1', {}, loss=0.25, accuracy=0.7, fitted=False))
    record(tmp_path, 'arithmetic', *(
        line('arithmetic', f'add3-{frac}-{arm}-s0', {'task': 'add3', 'frac': frac, 'init': arm},
             sequence_accuracy=right)
        for arm, frac, right in (('default', 0.001, 0.1), ('default', 0.01, 0.9),
                                 ('mask', 0.001, 0.9), ('mask', 0.004, 1.))))
    record(tmp_path, 'images', line(
        'images', 'cifar10-default-s0', {'task': 'cifar10', 'init': 'default', 'epochs': 3},
        dict(step=[0, 3, 6, 8], prior_tv=[0.] * 4, accuracy=[0., 0.25, 0.5, 0.75])))
    record(tmp_path, 'language', line('language', 'wikitext2-default-s0', {'task': 'wikitext2'}),
           line('language', 'wikitext2-mask-s0', {'task': 'wikitext2'},
                dict(step=[0, 2, 4], prior_tv=[0.] * 3, perplexity=[30., 20., 10.])))
    tables = report.sections(tmp_path)
    for section, text in (
            ('headline', '| 60.00 ± 14.14 (1/2 not fitted) | –, –, –, 0.25 | 2 | 75, 100 |'),
            ('boolean', '| 1.00 ± 0.00 | 1/2 | 0.125 → 0.250 | 4 × 2 | 87.5%, 2'
             ' | 100, loss 0.0029 |'),
            ('boolean', '| step 0: 0.10, 100% → step 4: 0.20, 0% |'),
            ('arithmetic', '| add3 | 0.4 % | mask | 100.00 | 100.00 | 75.00 |'),
            ('arithmetic', '| <0.1 %, more than 3.2 times less | 0.1 %, 10.0 times less |'),
            ('images', '| cifar10 | 100 | default | 50.00 | 50.00 | 25.00 | 1.000 | 50.0 |'),
            ('language', '| 20.00 | 20.00 | 10.00 | 21.00 | 21.00 |  |  | 2'
             ' | 0.125 → 0.250 | 4 × 1 |')):
        assert text in tables[section]
    assert tables['arithmetic'].count('| 77.49 |') == 1
    # Beyond what was measured.
    by_frac = {0.1: records.rows('arithmetic', folder=tmp_path)['add3-0.01-default']}
    assert report.needed(by_frac, 0.95) == ('>', 0.1)


def test_interventions_are_compared_on_the_seeds_that_all_of_them_have(tmp_path):
    unseen = {'': (0.5, 0.7, 1.), 'freeze-qk': (0.25, 0.75), 'hold-inputs': (0.5, 0.5),
              'both': (1., 0.8)}
    lines = []
    for arm in records.QK_ARMS:
        for kind, of_seeds in unseen.items():
            name = f'interventions/parity2-{arm}-{kind}' if kind else f'parity2-{arm}'
            settings = dict(init=arm, freeze_qk=kind in ('freeze-qk', 'both'),
                            hold_inputs=kind in ('hold-inputs', 'both'))
            lines += [line('boolean', f'{name}-s{seed}', settings, accuracy_unseen=accuracy)
                      for seed, accuracy in enumerate(of_seeds)]
    record(tmp_path, 'boolean', *sorted(lines))
    fixed = {(arm, kind): runs for _, arm, kind, runs in records.intervened('boolean', tmp_path)}
    # The third seed has no intervention.
    found = [report.unseen(fixed, 'qk-opt', kind) for kind in report.FIXED]
    assert found == ['60', '50', '50', '90']
    assert '| neither | 60 | 60 |' in '\n'.join(report.two_causes({'parity2': fixed}))


def test_perplexities_are_compared_on_the_seeds_of_both(tmp_path):
    found = {'default-s0': 100., 'default-s1': 200., 'mask-s1': 150., 'mask-s2': 1.,
             'qk-opt-s2': 1.}
    record(tmp_path, 'language', *(
        line('language', f'wikitext2-{name}', {'task': 'wikitext2'}, perplexity_test=perplexity)
        for name, perplexity in sorted(found.items())))
    said = '\n'.join(report.next_words(records.rows('language', folder=tmp_path)))
    assert said.endswith('. WikiText-2: mask -25.0 % (1).')


def test_tables_go_to_their_places_and_to_all_or_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, 'HERE', tmp_path / 'results')
    monkeypatch.setattr(report, 'sections', lambda: {'x': '1'})
    first, second = tmp_path / 'README.md', tmp_path / 'results' / 'a.md'
    second.parent.mkdir()
    page = '<!-- report: x -->\n{}<!-- /report -->\ntext\n<!-- report: x -->\n{}<!-- /report -->'
    first.write_text(page.format('old\nold\n', ''))
    second.write_text('<!-- report: y -->\n<!-- /report -->')
    assert 'table of y' in refusal(lambda: report.main(['--write']), capsys)
    assert first.read_text() == page.format('old\nold\n', '')
    second.write_text('no table')
    report.main(['--write'])
    assert first.read_text() == page.format('1\n', '1\n')


def test_runs_of_this_machine_stand_beside_the_recorded_ones(runs, tmp_path, capsys):
    runs = shutil.copytree(runs, tmp_path / 'runs')
    copy = runs / 'boolean' / 'longer'
    shutil.copytree(runs / 'boolean' / 'parity2-mask-s0', copy)
    record(tmp_path, 'boolean', line('boolean', 'parity2-mask-s0', {'width': 16}, accuracy=0.875))
    result = json.loads((runs / 'boolean' / 'parity2-mask-s0' / 'result.json').read_text())
    cell = f'{100 * result["accuracy"]:.2f}'
    found = '\n'.join(report.beside_recorded(runs, tmp_path)).splitlines()
    assert found[4] == f'| ablation/frozen | {cell} (1) |  |  |'
    assert found[5] == ('| parity2-mask --heads 2 --steps 2 --batch 8 --clip 1.0 --eval-every 100 '
                        f'--eval-early 10 | {cell} ± 0.00 (2) | '
                        '87.50 (1) | 100 |')
    assert capsys.readouterr().err == (f'report.py: {copy} is left out: the name longer does not '
                                       'end with a seed, such as -s0\n')


def test_a_run_of_train_is_recorded_and_read_again(runs, tmp_path):
    assert records.collect([runs], tmp_path) == [f'{tmp_path}/boolean.jsonl: 3 added, 0 replaced']
    first, again = records.rows('boolean', folder=tmp_path)['parity2-mask']
    assert (first.seed, again.seed, first.steps) == (0, 1, 2)
    assert (first.settings.width, first.settings.lr) == (16, 1e-3)
    assert list(records.rows('boolean', 'ablation', tmp_path)) == ['frozen']
    result = json.loads((runs / 'boolean' / 'parity2-mask-s0' / 'result.json').read_text())
    assert first.result['loss'] == float(f'{result["loss"]:.10g}')
    assert {'seconds', 'fourier'}.isdisjoint(first.log) and len(first.log['loss']) == 2
    assert {'mdi_loss_seen', 'seed', 'torch'}.isdisjoint(first.result)
    # A folder below, a single run; and once more.
    for path in (runs / 'boolean' / 'ablation', runs / 'boolean' / 'ablation' / 'frozen-s0'):
        assert records.collect([path], tmp_path)[0].endswith(': 0 added, 1 replaced')
    assert len(records.records('boolean', tmp_path)) == 3


DAMAGE = {
    'result.json is damaged': lambda run: (run / 'result.json').write_text('{"seed": 1'),
    'log.jsonl, line 2, is damaged': lambda run: (run / 'log.jsonl').write_text('{}\n{"step"'),
    'lacks the last evaluation': lambda run: (run / 'log.jsonl').write_text('{"step": 0}'),
    "KeyError: 'accuracy_unseen'": lambda run: (run / 'log.jsonl').write_text('{"step": 2}'),
    'list index out of range': lambda run: (run / 'log.jsonl').write_text(''),
    'No such file': lambda run: (run / 'log.jsonl').unlink(),
    'NaN is no JSON': lambda run: (run / 'result.json').write_text('{"accuracy": NaN}'),
    'None stands for a metric': lambda run: (run / 'result.json').write_text('{}'),
    'high stands for a metric': lambda run: (run / 'result.json').write_text('{"accuracy":"high"}'),
    "no attribute 'items'": lambda run: (run / 'result.json').write_text('[]'),
    'its seed is 1': lambda run: run.rename(run.parent / 'parity2-mask-s7'),
    'rename the run': lambda run: run.rename(run.parent / 'mask-s1'),
    'no table shows': lambda run: copy_run(run, f'own/{run.name}'),
    'not know: widht': lambda run: edit(run, widht=16),
    'of other settings (--width was 16)': lambda run: edit(run, width=8),
    'is a second parity2-mask-s1': lambda run: copy_run(run, f'boolean/{run.name}'),
    'no seed of the row': lambda run: copy_run(run, 'parity2-mask-s2', seed=2, lr=1.),
}


@pytest.mark.parametrize('says', DAMAGE)
def test_what_is_no_run_of_a_row_is_refused_and_nothing_is_lost(says, runs, tmp_path, capsys):
    records.collect([runs], tmp_path)
    before = (tmp_path / 'boolean.jsonl').read_bytes()
    shutil.copytree(runs, tmp_path / 'runs')
    DAMAGE[says](tmp_path / 'runs' / 'boolean' / 'parity2-mask-s1')
    assert says in refusal(lambda: records.collect([tmp_path / 'runs'], tmp_path), capsys)
    assert (tmp_path / 'boolean.jsonl').read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {'boolean.jsonl', 'runs'}


def test_a_recorded_line_that_is_cut_off_is_named_and_left_alone(runs, tmp_path, capsys):
    records.collect([runs], tmp_path)
    path = tmp_path / 'boolean.jsonl'
    lines = path.read_text().splitlines()
    for text, says in (('\n'.join([lines[0], lines[1][:-40], lines[2]]), 'line 2, is damaged'),
                       ('\n'.join(lines)[:-1], 'line 3, is damaged'),
                       ('\n'.join([*lines, lines[0]]), 'line 4, is a second ablation/frozen-s0'),
                       ('[]\n', 'line 1, is no run of boolean')):
        path.write_text(text)
        for call in (lambda: records.collect([runs], tmp_path), lambda: report.sections(tmp_path)):
            assert f'{path}, {says}' in refusal(call, capsys)
        assert path.read_text() == text


def test_a_run_of_earlier_code_is_recorded(tmp_path):
    """Its settings lack what came later, its result what was added since; images were vision."""
    run = tmp_path / 'vision' / 'cifar10-mask-s0'
    run.mkdir(parents=True)
    settings = {'task': 'cifar10', 'seed': 0, 'epochs': 12, 'steps': 9, 'device': 'cpu'}
    (run / 'config.json').write_text(json.dumps(dict(
        settings=settings, command='', torch='2', threads=1, processes=1, commit=None)))
    (run / 'log.jsonl').write_text('{"step": 7, "accuracy": 0.123456789, "prior_tv": 0}\n')
    result = RESULT['images'] | dict(seed=0, prior_tv_init=0., prior_tv_final=0., device='cpu')
    (run / 'result.json').write_text(json.dumps(result))
    section, _, run = records.read_run(run, tmp_path)
    assert (section, run.name, run.device) == ('images', 'cifar10-mask-s0', 'cpu')
    assert run.settings == train.Settings(task='cifar10', epochs=12)
    assert run.log == {'step': [7], 'accuracy': [0.12346], 'prior_tv': [0]}


def test_several_that_record_at_once_lose_nothing(runs, tmp_path):
    run = shutil.copytree(runs / 'boolean' / 'parity2-mask-s0', tmp_path / 'parity2-mask-s0')
    for seed in range(1, 8):
        copy_run(run, f'parity2-mask-s{seed}', seed=seed)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: records.collect([path], tmp_path), tmp_path.glob('parity2-*')))
    assert [run.seed for run in records.records('boolean', tmp_path)] == list(range(8))


def test_bench_times_what_it_says(tmp_path):
    slow, fast = bench.timed(0.1, 'cpu', lambda: time.sleep(0.02), lambda: None)
    assert 0.02 <= slow[1] <= slow[0] <= slow[2] and fast[0] < slow[0]
    bench.made_up_data(tmp_path)
    # The real vocabularies' sizes.
    sizes = [len(tasks.corpus(name, tmp_path)[1]) for name in ('wikitext2', 'tinystories')]
    assert sizes == [33_278, 4096] and len(tasks.cifar('cifar10', tmp_path)[0][1]) == 5000


def test_bench_measures_what_training_does():
    B, N, D, L = 128, 16, 16, 2
    # Forward once and backward twice: k and v of all tokens, all else of all tokens but, in the
    # last block, of one; d H = D.
    token = 2 * D * D * (2 + 8) + 2 * 2 * D * N
    flops = 3 * B * ((N + 1) * token + L * N * 2 * D * D * 2 + 2 * D)
    options = ['--width', '16', '--heads', '2', '--device', 'cpu']
    for row in bench.bench_task('parity2', options, {False: 1e3, True: 1e3}, 0):
        assert 1e6 * row['gflops_per_second'] * row['milliseconds'] == pytest.approx(flops)
        assert row['mask_over_default'] > 0 < row['torch_layers_over_ours'] and row['costs']
        assert row['peer'] == 'fused blocks, DataLoader' and row['peer_over_default'] > 0


def test_the_peers_of_the_bench_compute_what_ours_do():
    """Fused blocks with our weights give our output; so the times compare like with like."""
    torch.manual_seed(0)
    for causal in (False, True):
        model = maskprior.Transformer(5, (7,), 3, 16, 2, pool=None, causal=causal)
        block, x = model.blocks[0], torch.randn(2, 7, 16)
        peer = bench.FusedBlock(block, 16, 2)
        for name in ('norm1', 'norm2', 'mlp'):
            setattr(peer, name, getattr(block, name))
        peer.proj = block.attn.proj
        peer.qkv.weight.data = torch.cat([getattr(block.attn, w).weight for w in 'qkv'])
        assert torch.allclose(peer(x), block(x), atol=1e-6)


def test_growth_is_counted_by_its_entries(monkeypatch):
    monkeypatch.setattr(bench, 'LENGTHS', (8,))
    rows = list(bench.bench_growth('cpu', 0, D=4, H=2))
    assert [row['N'] for row in rows] == [8] and len(rows[0]['milliseconds']) == 3
    lines = list(report.growth(rows))
    # 16 bytes an entry: [8, 8], three of these, [3, 8]; and 131,072^2 of them.
    assert lines[2].startswith('| 8 | 0.00102 | 0.00307 | 0.000384 | ')
    assert lines[4].startswith('| 131,072 | 2.75e+05 | 8.25e+05 | 6.29 | ')


def test_bench_leaves_what_is_recorded_unless_told_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = dict(torch='2', device='cpu', threads=1, product={}, tasks=[], attention=[],
                 growth=[], seeds=[])
    monkeypatch.setattr(bench, 'bench', lambda *_: found)
    recorded = (HERE / 'speed.json').read_bytes()
    bench.main([])
    assert json.loads((tmp_path / 'runs' / 'speed' / 'speed.json').read_text()) == found
    assert (HERE / 'speed.json').read_bytes() == recorded


@pytest.mark.parametrize('says, call', {
    'no section': lambda: report.main(['languages']),
    'take none': lambda: report.main(['language', '--write']),
    'nowhere is no folder': lambda: report.main(['--runs', 'nowhere']),
    'none is no folder': lambda: report.main(['--collect', 'none']),
    'name none': lambda: bench.main(['parity2', '--write']),
    'no task parity': lambda: bench.main(['parity'])}.items())
def test_bad_arguments_are_one_line(says, call, capsys):
    assert says in refusal(call, capsys, 2)
