"""Of the command lines of train.py on stdin, one a line, prints those whose run isn't finished: what run_all.sh has to do.

One import of torch for all of them; a finished run of other settings is an error, as it is in train.py.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train


def main():
    for line in sys.stdin:
        settings = train.parse(line.split())
        if not train.is_finished(settings, resume=True):
            print(line, end='')


if __name__ == '__main__':
    sys.exit(train.command(main, 'unfinished.py'))
