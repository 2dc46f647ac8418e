"""Of the command lines of train.py on stdin, one a line, prints those whose run isn't finished: what run_all.sh has to do.

One import of torch for all of them; a finished run of other settings is an error, as it is in train.py. Of a data set that
isn't there stderr says so, once, with the command that gets it; its runs are left out, and the exit code is 3.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tasks
import train


def main():
    absent = {}                                                                    # {task: how to get its data}
    for line in sys.stdin:
        settings = train.parse(line.split())
        if train.is_finished(settings, resume=True) or settings.task in absent:
            continue
        try:
            if settings.task in tasks.PLACES:
                tasks.find(settings.task, settings.data_dir)
            print(line, end='')
        except tasks.DataError as error:
            absent[settings.task] = error
    for error in absent.values():
        print(f'not run: {error}', file=sys.stderr)
    return 3 if absent else 0


if __name__ == '__main__':
    sys.exit(tasks.command(main, 'unfinished.py'))
