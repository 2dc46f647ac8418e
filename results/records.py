"""The recorded runs: reads them, and adds finished runs to them (report.py --collect).

results/SECTION.jsonl holds the runs of a section, one a line, by name; README.md beside this file
says what is in a line.

    from records import rows
    for label, runs in rows('boolean').items():            # a row: the runs of one label, by seed
        print(label, [run.result['accuracy'] for run in runs], runs[0].log['step'])
"""
import json
import math
import re
import sys
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import tasks
import train
from tasks import BOOLEAN_TARGETS, UsageError
from train import RunError

SECTIONS = {'boolean': tasks.Boolean, 'arithmetic': tasks.Arithmetic, 'images': tasks.Images,
            'language': tasks.Language}
# The order of the rows.
ARMS = ('default', 'default-10x', 'mimetic', 'impulse', 'qk-svd', 'qk-opt', 'alibi',
        'mask-shared', 'mask')
# What a run must have to stand in its section's tables: metrics of its result, of its log.
RESULT = {
    'boolean': ('accuracy', 'accuracy_unseen', 'loss', 'prediction_unseen', 'fitted',
                'mdi_accuracy', 'mdi_loss'),
    'arithmetic': ('sequence_accuracy', 'sequence_accuracy_seen', 'digit_accuracy', 'fitted'),
    'images': ('accuracy', 'accuracy_seen', 'loss', 'training_examples'),
    'language': ('perplexity', 'perplexity_test', 'training_examples'),
}
LOG = {'boolean': ('accuracy_unseen', 'prior_tv'), 'arithmetic': ('prior_tv',),
       'images': ('accuracy', 'prior_tv'), 'language': ('perplexity', 'prior_tv')}
# The folders of a section, and whether a run's name in there says TASK-ARM (arithmetic:
# TASK-FRAC-ARM), as the table that shows them needs it.
FOLDERS = {'boolean': {'': True, 'interventions': True, 'measured': True, 'knobs': True,
                       'batch-64': True, 'fresh': True, '2-layers': True, '3-layers': True,
                       'hole': False, 'ablation': False},
           'arithmetic': {'': True, 'interventions': True, 'weight-decay-3': True,
                          'ablation': False},
           'images': {'': True, 'earlier': True, 'epoch': True, 'paper': True},
           'language': {'': True, 'short': True}}
# What a result says that its record says elsewhere, or that is known from the task.
SAID_ELSEWHERE = ('task', 'init', 'seed', 'step', 'steps', 'torch', 'device', 'target_fourier')
# Significant digits. Fewer would round some means of the tables the other way: an accuracy is a
# multiple of 1 / 2000 or 1 / 10000 in float32, and the mean of two of them often half-way.
LOG_DIGITS = 5
RESULT_DIGITS = 10
# Sections that earlier code named otherwise.
FORMER_SECTIONS = {'vision': 'images'}


# ------------------------------------------------------------------------- the recorded runs

@dataclass
class Record:
    """A finished run, as a line of SECTION.jsonl holds it."""
    name: str                 # the path below its section and the seed: ablation/frozen-s0
    command: str
    commit: str
    torch: str
    device: str
    threads: int
    settings: train.Settings  # complete: the line has those alone that differ from the defaults
    log: dict                 # {metric: its value at each evaluation, None where it has none}
    result: dict              # {metric: its value at the end}

    @property
    def row(self):            # ablation/frozen
        return self.name.rpartition('-s')[0]

    @property
    def label(self):          # frozen
        return self.row.rpartition('/')[2]

    @property
    def seed(self):
        return self.settings.seed

    @property
    def steps(self):
        return self.log['step'][-1]


def parse_json(text, where):
    """Strict JSON -> its value; RunError, which says where, for anything else."""
    def refuse(constant):
        raise ValueError(f'{constant} is no JSON')
    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise RunError(f'{where} is damaged or cut off ({error}): nothing is changed') from None


def read_json(path):
    """What a JSON file holds."""
    try:
        return parse_json(path.read_text(encoding='utf-8'), path)
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f'{path} cannot be read: {error}') from None


# A page reads its section once for each of its tables.
@lru_cache(maxsize=None)
def parse_record(line, section, where):
    """A line of SECTION.jsonl -> Record; RunError, which says where, for any other text."""
    content = parse_json(line, where)
    try:
        record = Record(**content | {'settings': train.Settings(**content['settings'])})
        check_metrics(record, section)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f'{where} is no run of {section} ({type(error).__name__}: {error}): '
                       'nothing is changed') from None
    return record


def check_metrics(record, section):
    """Refuses by a ValueError what no table can be made from."""
    if section_of(record.settings.task) != section:
        raise ValueError(f'it is of {record.settings.task}')
    if not record.name.endswith(f'-s{record.seed}'):
        raise ValueError(f'its seed is {record.seed}, its name {record.name}')
    columns = [record.log[metric] for metric in ('step', *LOG[section])]
    if not columns[0] or len({len(column) for column in columns}) > 1:
        raise ValueError('its log lacks an evaluation')
    final = [record.result.get(metric) for metric in
             (*RESULT[section], 'prior_tv_init', 'prior_tv_final')]
    for value in [*final, *sum(columns, [])]:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f'{value} stands for a metric')


def section_of(task):
    for section, family in SECTIONS.items():
        if task in tasks.TASKS and issubclass(tasks.TASKS[task], family):
            return section
    raise RunError(f'{task} is of none of the sections {", ".join(SECTIONS)}')


def read_lines(section, folder):
    """{name: (line, Record)} of SECTION.jsonl in the folder; {} where there is no such file."""
    path = folder / f'{section}.jsonl'
    if not path.exists():
        return {}
    found = {}
    try:
        text = path.read_text(encoding='utf-8').removesuffix('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f'{path} cannot be read: {error}') from None
    if not text:
        raise RunError(f'{path} is empty: take it from git again, or remove it')
    for number, line in enumerate(text.split('\n'), 1):
        record = parse_record(line, section, f'{path}, line {number},')
        if record.name in found:
            raise RunError(f'{path}, line {number}, is a second {record.name}: remove one')
        found[record.name] = line, record
    check_rows([record for _, record in found.values()])
    return found


def records(section, folder=HERE):
    """The recorded runs of a section, a list of Record in the order of their names."""
    return [record for _, record in read_lines(section, folder).values()]


def by_row(records):
    """{row: [Record for each seed]}; a record's row is its name without the seed."""
    found = {}
    for record in records:
        found.setdefault(record.row, []).append(record)
    return found


def rows(section, prefix='', folder=HERE):
    """{label: [Record for each seed]} of the runs PREFIX/LABEL-sSEED (no prefix: LABEL-sSEED)."""
    prefix = f'{prefix}/' if prefix else ''
    return {runs[0].label: runs for row, runs in by_row(records(section, folder)).items()
            if row == prefix + runs[0].label}


def by_arm(rows):
    """[(task, arm, runs)] of rows labelled TASK-ARM, in the order of BOOLEAN_TARGETS and ARMS."""
    def order(row):
        task, arm, _ = row
        return place(task, list(BOOLEAN_TARGETS)), task, place(arm, ARMS), arm
    return sorted([(*label.split('-', 1), runs) for label, runs in rows.items()], key=order)


# The main arms, in the order of the tables' columns; those with the prior in W_Q and W_K.
MAIN_ARMS = ('default', 'qk-svd', 'qk-opt', 'mask')
QK_ARMS = ('qk-svd', 'qk-opt')
# The paper's Boolean tasks.
PAPER_TASKS = ('parity2', 'maj3', 'cyclic3')
# What is held still while the rest learns.
INTERVENTIONS = {
    '': 'nothing', 'freeze-qk': 'W_Q and W_K frozen', 'hold-inputs': 'inputs of q and k held',
    'both': 'both', 'freeze-mask': 'M frozen', 'mask-lr-10': 'learning rate of M × 10',
}
# The tasks that they are made on, as a row's name begins.
INTERVENED = {'boolean': tuple(BOOLEAN_TARGETS), 'arithmetic': ('add3-0.0005',)}


def intervened(section, folder):
    """Yields (task, arm, kind, runs) of the interventions, each arm's plain runs first."""
    found = rows(section, 'interventions', folder)
    # cyclic3 has plain runs of its own there, as short as the others.
    row_of = rows(section, folder=folder) | found
    for task in INTERVENED[section]:
        for arm in ARMS:
            seeds = {run.seed for label, runs in found.items() for run in runs
                     if label.removeprefix(f'{task}-{arm}-') in INTERVENTIONS}
            for kind in INTERVENTIONS:
                runs = row_of.get(f'{task}-{arm}-{kind}' if kind else f'{task}-{arm}', [])
                runs = [run for run in runs if run.seed in seeds]
                if runs:
                    yield task, arm, kind, runs


def place(item, order):
    return order.index(item) if item in order else len(order)


def values(runs, metric, scale=1):
    """The final metric of each run, times the scale; none where no run has it."""
    found = [run.result[metric] for run in runs if metric in run.result]
    if len(found) not in (0, len(runs)):
        raise ValueError(f'{metric}: only {len(found)} of {len(runs)} runs have it')
    return found if scale == 1 else [scale * value for value in found]


def same_seeds(runs, others):
    """[(run, the other run of its seed)], of the seeds that both have."""
    of_seed = {other.seed: other for other in others}
    return [(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]


def changed(record, before):
    """{option: what it was} of the settings, but the seed, in which two records differ."""
    now, was = train.run_config(record.settings), train.run_config(before.settings)
    return {train.option(name): value for name, value in train.changed_settings(now, was).items()
            if name != 'seed'}


def arguments(record):
    """The arguments of train.py that make the run, beyond its task's recipe, a list."""
    settings = record.settings
    recipe = train.Settings(**train.RECIPES.get(settings.task, {}))
    found = ['--seed', str(settings.seed), '--task', settings.task, '--init', settings.init]
    for name, value in train.run_config(settings).items():
        if name not in ('seed', 'task', 'init') and value != getattr(recipe, name):
            text = ','.join(map(str, value)) if isinstance(value, list) else str(value)
            # What looks like an option stands behind a =.
            joined = text[0] in '+-'
            found += [f'{train.option(name)}={text}'] if joined else [train.option(name), text]
    return found


def all_arguments(folder=HERE):
    """Lines: SECTION/NAME and train.py's arguments for it, of each recorded run."""
    return [f'{section}/{run.name} {" ".join(arguments(run))}'
            for section in SECTIONS for run in records(section, folder)]


def check_rows(records):
    """Refuses runs that have the name of a row and not its settings."""
    first = {}
    for record in records:
        other = changed(record, first.setdefault(record.row, record))
        if other:
            raise RunError(f'{record.name} is no seed of the row of {first[record.row].name}: '
                           f'{", ".join(other)} differs; nothing is changed')


# ------------------------------------------------------------------------------ recording runs

def rounded(value, digits):
    """The value with its floats, also those in lists and dicts, at so many significant digits."""
    if isinstance(value, float):
        return float(f'{value:.{digits}g}')
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return value


def recorded_log(evaluations):
    """Evaluations, one dict each -> {metric: list of numbers}.

    Without seconds, what is no number, how far M and the weights have moved (the result has the
    last of it), and of a Boolean run the accuracy on the whole cube, which follows from those on
    seen and unseen inputs.
    """
    metrics = dict.fromkeys(key for row in evaluations for key in row)
    left_out = {'seconds', 'inputs', *(name for name in metrics if name.startswith('change_'))}
    if 'accuracy_unseen' in metrics:
        left_out.add('accuracy')
    columns = {}
    for metric in metrics:
        column = [row.get(metric) for row in evaluations]
        if metric not in left_out and all(v is None or isinstance(v, (int, float)) for v in column):
            columns[metric] = rounded(column, LOG_DIGITS)
    return columns


def recorded_result(result):
    """The result without what the record says elsewhere; of the MDI accuracy and loss alone."""
    kept = {}
    for metric, value in result.items():
        of_mdi = metric.startswith('mdi_') and metric not in ('mdi_accuracy', 'mdi_loss')
        if metric not in SAID_ELSEWHERE and not of_mdi:
            digits = LOG_DIGITS if metric == 'fourier' else RESULT_DIGITS
            kept[metric] = rounded(value, digits)
    return kept


def recorded_settings(config, path):
    """The settings in a config.json -> those that matter for its task and are not the default."""
    unknown = config.keys() - {field.name for field in fields(train.Settings)}
    if unknown:
        raise RunError(f'{path} has a setting that train.py does not know: {sorted(unknown)[0]}')
    default = train.Settings()
    return {name: value for name, value in train.run_config(train.Settings(**config)).items()
            if value != getattr(default, name)}


def read_run(run, given):
    """The folder of a finished run, found below the folder `given` -> (section, line, Record)."""
    try:
        config, result, log = ((run / name).read_text(encoding='utf-8')
                               for name in ('config.json', 'result.json', 'log.jsonl'))
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f'{run} is no finished run: {error}') from None
    config = parse_json(config, run / 'config.json')
    result = parse_json(result, run / 'result.json')
    evaluations = [parse_json(line, f'{run / "log.jsonl"}, line {number},')
                   for number, line in enumerate(log.splitlines(), 1)]
    try:
        section = section_of(config['settings']['task'])
        content = dict(
            name=name_of_run(run, given, section), command=config['command'],
            commit=config['commit'], torch=config['torch'],
            device=config.get('device') or result.get('device'), threads=config['threads'],
            settings=recorded_settings(config['settings'], run / 'config.json'),
            log=recorded_log(evaluations), result=recorded_result(result))
        if evaluations[-1]['step'] != result.get('steps', evaluations[-1]['step']):
            raise ValueError('its log lacks the last evaluation')
        line = json.dumps(content, allow_nan=False, separators=(',', ':'))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(f'{run} is no finished run ({type(error).__name__}: {error}): '
                       'nothing is changed') from None
    return section, line, parse_record(line, section, run)


def name_of_run(run, given, section):
    """A run's recorded name: its path below runs/SECTION/, else below the folder that was given."""
    parts = run.resolve().parts
    if 'runs' in parts:
        parts = parts[len(parts) - parts[::-1].index('runs'):]
    else:
        parts = run.relative_to(given).parts or (run.resolve().name,)
    parts = [FORMER_SECTIONS.get(part, part) for part in parts]
    if section in parts:
        parts = parts[len(parts) - parts[::-1].index(section):]
    if not re.search(r'-s\d+$', parts[-1]):
        raise RunError(f'the name {parts[-1]} does not end with a seed, such as -s0')
    return '/'.join(parts)


def check_name(record, section, run):
    """Refuses a name that no table shows."""
    folder = record.row.rpartition('/')[0]
    task = f'{record.settings.task}-'
    if section == 'arithmetic':
        # No exponent: 0.00005 in the place of 5e-05.
        task += f'{record.settings.frac:.12f}'.rstrip('0').rstrip('.') + '-'
    if folder not in FOLDERS[section]:
        raise RunError(f'{run} would be recorded as {record.name}, and no table shows what is '
                       f'in {folder}/; {section} has {", ".join(filter(None, FOLDERS[section]))}')
    shown = ['-'.join(filter(None, (start, arm, kind))) for start in INTERVENED.get(section, ())
             for arm in ARMS for kind in INTERVENTIONS]
    if folder == 'interventions' and record.label not in shown:
        raise RunError(f'{run} would be recorded as {record.name}, which no table shows')
    if FOLDERS[section][folder] and not record.label.startswith(task):
        raise RunError(f'{run} would be recorded as {record.name}, and the table takes names '
                       f'such as {task}{record.settings.init}-s{record.seed}: rename the run')


def find_runs(path):
    """The folders of the finished runs below a folder (or itself, if it is one).

    Below its folders boolean/, arithmetic/ ... alone, if it has any: what lies beside them in runs/
    are other experiments.
    """
    if not path.is_dir():
        raise UsageError(f'{path} is no folder')
    of_sections = [path / name for name in (*SECTIONS, *FORMER_SECTIONS) if (path / name).is_dir()]
    runs = [file.parent for below in of_sections or [path] for file in below.rglob('result.json')]
    if not runs:
        raise RunError(f'{path} holds no finished run: no result.json in it')
    return sorted(runs)


def merge(section, new, folder):
    """(text of SECTION.jsonl with the new runs in it, how many of them it had already)."""
    found = read_lines(section, folder)
    replaced = new.keys() & found.keys()
    for name in sorted(replaced):
        (_, record), (_, before) = new[name], found[name]
        other = [f'{option} was {value}' for option, value in changed(record, before).items()]
        if other:
            raise RunError(f'{section}.jsonl has a {name} of other settings ({", ".join(other)}): '
                           'rename the run, or remove that line; nothing is changed')
    found |= new
    check_rows([found[name][1] for name in sorted(found)])
    return ''.join(f'{found[name][0]}\n' for name in sorted(found)), len(replaced)


def collect(paths, folder=HERE):
    """Adds the finished runs in or below the paths to the files of their sections in the folder.

    Returns a line a file that says what was done. After a RunError none is added; where a file
    cannot be written, whole sections are.
    """
    new = {}
    for path in paths:
        for run in find_runs(path):
            section, line, record = read_run(run, path)
            check_name(record, section, run)
            if record.name in new.setdefault(section, {}):
                raise RunError(f'{run} is a second {record.name} of {section}: nothing is changed')
            new[section][record.name] = line, record
    done = []
    # Another process that records waits until this one has.
    with tasks.lock(folder):
        merged = {section: merge(section, runs, folder) for section, runs in new.items()}
        for section, (text, replaced) in merged.items():
            # Of a --collect that was killed.
            for temporary in folder.glob(f'{section}.jsonl.*.tmp'):
                temporary.unlink()
            train.write_text(folder / f'{section}.jsonl', text)
            added = len(new[section]) - replaced
            done.append(f'{folder / section}.jsonl: {added} added, {replaced} replaced')
    return done
