#!/usr/bin/env bash
# Trains every row of the tables, into runs/:
#     bash run_all.sh [quick] [boolean] [theory] [arithmetic] [images] [language] [ablations] [paper]
# No section named: all but paper, which is ViT-Tiny for 300 epochs on all of the images. quick: one
# seed, fewer rows, shorter runs (cyclic3, mul3, images, language), no ablations or paper, into
# runs/quick. What is finished is skipped, what was interrupted goes on. Ends with tables of this
# machine's numbers beside the recorded ones and the paper's.
# DEVICE=cuda, cuda:1, mps or cpu (default: the best there is); JOBS=N runs at once (default: one a
# core on a CPU; 4 on a GPU, which is a guess, not measured); OUT=FOLDER instead of runs.
set -euo pipefail
cd "$(dirname "$0")"
export PYTHON=${PYTHON:-python} OUT=${OUT:-runs}
size=full
if [ "${1:-}" = quick ]; then size=quick OUT=$OUT/quick; shift; fi
two='0 1' three='0 1 2' five='0 1 2 3 4' ten='0 1 2 3 4 5 6 7 8 9'
[ $size = full ] || two=0 three=0 five=0 ten=0
# The positions of impulse's authors.
learned='--positions learned --pos-std 0.36'

# A row of a table: its name, its seeds, the arguments of train.py. One line a run.
row() {
    local seed
    for seed in $2; do echo "$1-s$seed --seed $seed ${*:3}"; done
}

boolean() {
    local init cheap=
    [ $size = full ] || cheap='--layers 2 --pos-std 0.5 --batch 64 --lr 1e-3 --steps 1000'
    for init in default qk-svd qk-opt mask; do
        row boolean/parity2-$init "$ten" --task parity2 --init $init
        row boolean/maj3-$init "$ten" --task maj3 --init $init
        row boolean/cyclic3-$init "$five" --task cyclic3 --init $init $cheap
        row boolean/diff2-$init "$five" --task diff2 --init $init
    done
    for init in default mask; do
        row boolean/parity3-$init "$five" --task parity3 --init $init
    done
    [ $size = full ] || return 0
    # What loses a prior: the weights of q and k, or their inputs?
    interventions boolean/interventions/parity2 "$five" --task parity2
    interventions boolean/interventions/maj3 "$five" --task maj3
    # There the prior misleads.
    interventions boolean/interventions/diff2 "$five" --task diff2
    # Not 3,500 steps: the default, which takes so long to fit, has no row here.
    set -- boolean/interventions/cyclic3 "$five" --task cyclic3 --steps 1000 --eval-every 250
    for init in qk-svd qk-opt mask; do row $1-$init "${@:2}" --init $init; done
    interventions "$@"
    # The structure measured on the training set; on the other tasks it is the known one.
    row boolean/measured/cyclic3-mask "${@:2}" --init mask --structure measured
}

# Parts of the model held still: the rows' name up to the arm, the seeds, the arguments.
interventions() {
    local init
    for init in qk-svd qk-opt mask; do
        row $1-$init-freeze-qk "${@:2}" --init $init --freeze-qk
        row $1-$init-hold-inputs "${@:2}" --init $init --hold-inputs
        row $1-$init-both "${@:2}" --init $init --freeze-qk --hold-inputs
    done
    row $1-mask-freeze-mask "${@:2}" --init mask --freeze-mask
    row $1-mask-mask-lr-10 "${@:2}" --init mask --mask-lr 10
}

arithmetic() {
    local init frac fracs='0.00025 0.0005 0.001 0.002 0.004' arms='default qk-svd qk-opt mask' short=
    [ $size = full ] || fracs='0.0005 0.001 0.004' arms='default mask' short='--steps 1500'
    for init in $arms; do
        for frac in $fracs; do
            row arithmetic/add3-$frac-$init "$three" --task add3 --init $init --frac $frac
        done
        row arithmetic/mul3-0.03-$init "$three" --task mul3 --init $init $short
    done
    [ $size = quick ] ||
        interventions arithmetic/interventions/add3-0.0005 "$two" --task add3 --frac 0.0005
}

images() {
    local task init tasks='cifar10 imagenet100' short=
    [ $size = full ] || tasks=cifar10 short='--epochs 3'
    for task in $tasks; do
        set -- --task $task
        [ $task = cifar10 ] || set -- "$@" --image-size 64 --patch 8
        for init in default mimetic mask; do
            row images/$task-$init "$two" "$@" --init $init $short
        done
        [ $size = full ] || return 0
        # mimetic and impulse set W_V and W_proj as well.
        for init in default mask; do
            row images/$task-$init-mimetic-v "$two" "$@" --init $init --mimetic-v
        done
        row images/$task-default-learned "$two" "$@" $learned --init default
        row images/$task-impulse "$two" "$@" $learned --init impulse
    done
}

language() {
    local task init seeds=$two short=
    # c = sigmoid(30) = 1: ALiBi
    local alibi='--init mask --freeze-mask --level 30' none='--positions none'
    [ $size = full ] || short='--steps 100'
    for task in wikitext2 tinystories; do
        for init in default qk-opt mask; do
            row language/$task-$init "$seeds" --task $task --init $init $short
        done
        row language/$task-alibi "$seeds" --task $task $alibi $short
        [ $size = full ] || continue
        row language/$task-qk-svd "$seeds" --task $task --init qk-svd
        row language/$task-no-positions-default "$seeds" --task $task --init default $none
        row language/$task-no-positions-alibi "$seeds" --task $task $alibi --tie-mask $none
        row language/$task-no-positions-mask "$seeds" --task $task --init mask --tie-mask $none
        seeds=$three
    done
}

# Every other recorded run: ablations, earlier settings, longer runs.
ablations() {
    local recorded
    recorded=$("$PYTHON" results/report.py --rows) || return 1
    awk 'NR == FNR { listed[$1]; next } !($1 in listed)' \
        <(boolean; arithmetic; images; language) - <<< "$recorded"
}

paper() {
    local task init
    for task in cifar10 cifar100 imagenet100; do
        for init in default mimetic impulse mask; do
            set -- --task $task --init $init --width 192 --layers 12 --init-std 0.02 --epochs 300 \
                --batch 512 --lr 1e-3 --warmup 10 --eval-every 10 --drop-path 0.1 \
                --randaugment 2 --mixup 0.8 --cutmix 1 --erasing 0.25 --sdpa --compile
            [ $init != impulse ] || set -- "$@" $learned
            row images/paper/$task-$init 0 "$@"
        done
    done
}

# Every derivative and bound; exit code 1 if one is violated.
theory() {
    local draws=100000
    [ $size = full ] || draws=10000
    "$PYTHON" theory.py --draws $draws --out "$OUT/theory"
}

# One line of the list: its number, its name, the arguments of train.py.
one_run() {
    local number=$1 name=$2 finished left= error
    shift 2
    finished=$(wc -l < "$FINISHED")
    [ "$finished" -eq 0 ] ||
        left=", about $(( ($(date +%s) - START) * (TOTAL - finished) / finished / 60 + 1 )) min left"
    echo "[$number of $TOTAL$left] $name"
    if ! error=$("$PYTHON" train.py "$@" --device "$DEVICE" --out "$OUT" --name "$name" --resume \
                 2>&1 > /dev/null); then
        echo "run_all.sh: failed: train.py $* --name $name: $(tail -n 1 <<< "$error")" >&2
        # xargs then starts no other.
        return 255
    fi
    echo "$name" >> "$FINISHED"
}
export -f one_run

# Runs the list on stdin, several at once, in a process group of their own that ends with this one.
run_list() {
    local name arguments todo=
    while read -r name arguments; do
        # Finished, and with these arguments.
        if [ -f "$OUT/$name/result.json" ] &&
            grep -qF -- "train.py $arguments --device" "$OUT/$name/config.json"; then continue; fi
        todo+="$name $arguments"$'\n'
    done
    export TOTAL START
    TOTAL=$(grep -c . <<< "$todo" || true) START=$(date +%s)
    echo "run_all.sh: $TOTAL runs to do, $JOBS at once on $DEVICE, into $OUT/"
    [ "$TOTAL" -gt 0 ] || return 0
    : > "$FINISHED"
    set -m
    nl -s ' ' <<< "${todo%$'\n'}" | xargs -P "$JOBS" -L 1 bash -c 'one_run "$@"' one_run &
    runs=$!
    set +m
    trap 'kill -TERM -- -$runs 2> /dev/null; echo "run_all.sh: stopped; the same command goes on" >&2; exit 130' INT TERM HUP
    wait $runs || return 1
    trap - INT TERM HUP
}

if [ $# -eq 0 ]; then
    set -- boolean theory arithmetic images language
    [ $size = quick ] || set -- "$@" ablations
fi
for section; do
    case $section in
        boolean | theory | arithmetic | images | language) ;;
        ablations | paper)
            [ $size = full ] || { echo "run_all.sh: quick has no $section" >&2; exit 2; } ;;
        *) echo "run_all.sh: no section '$section': see the head of this file" >&2; exit 2 ;;
    esac
done
mkdir -p "$OUT"
if [ -f "$OUT/.pid" ] && kill -0 "$(cat "$OUT/.pid")" 2> /dev/null; then
    echo "run_all.sh: another run_all.sh is at work in $OUT" >&2
    exit 1
fi
echo $$ > "$OUT/.pid"
export FINISHED=$OUT/.finished
trap 'rm -f "$OUT/.pid" "$FINISHED"' EXIT
# The device, and the tasks whose data is not there.
found=$("$PYTHON" - "${DEVICE:-auto}" <<'P'
import sys
try:
    import tasks, train
except ModuleNotFoundError as error:
    sys.exit(f'run_all.sh: {error}: pip install -r requirements.txt')
def main():
    print(train.parse(['--device', sys.argv[1]]).device)
    for task in tasks.DATA_PATHS:
        try:
            tasks.find_dataset(task, tasks.DATA_DIR)
        except tasks.DataError:
            print(task)
sys.exit(train.command(main, 'run_all.sh'))
P
) || exit $?
export DEVICE=${found%%$'\n'*}
absent=$(tail -n +2 <<< "$found" | tr '\n' '|')
if [ "$DEVICE" = cpu ]; then
    JOBS=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
    # More than one run at once: one thread each.
    [ "$JOBS" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
    JOBS=${JOBS:-4}
fi
case $JOBS in
    '' | *[!0-9]* | 0*) echo "run_all.sh: JOBS=$JOBS must be a whole number from 1" >&2; exit 2 ;;
esac
status=0 list=
for section; do
    case $section in
        theory) theory || status=1 ;;
        *) list+=$($section)$'\n' || exit 1 ;;
    esac
done
if [ -n "$absent" ] && left_out=$(grep -oE -- "--task (${absent%|}) " <<< "$list" | sort -u); then
    list=$(grep -vE -- "--task (${absent%|}) " <<< "$list" || true)
    echo "run_all.sh: left out, no data (python train.py --list says how to get it):" \
        $(cut -d ' ' -f 2 <<< "$left_out") >&2
    status=1
fi
if [ -n "${list//[$'\n']/}" ]; then
    run_list < <(grep . <<< "$list") || exit 1
    "$PYTHON" results/report.py --runs "$OUT"
fi
exit $status
