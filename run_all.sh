#!/usr/bin/env bash
# One command for each row of the README's tables:  bash run_all.sh [boolean] [theory]    (no argument: every section)
# Two single-threaded runs side by side. What is finished is skipped, what was interrupted goes on; at the first failure the
# script names the run, starts no other and exits with non-zero.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} JOBS=${JOBS:-2} PYTHON=${PYTHON:-python}

# The arguments of train.py, one run a line on stdin.
runs() {
    xargs -P "$JOBS" -L 1 sh -c '
        echo "train.py $*"
        "$PYTHON" train.py "$@" --resume > /dev/null || { echo "run_all.sh: failed: train.py $*" >&2; exit 255; }' sh
}

boolean() {
    local out=results/boolean
    {
        # Every arm, every task (five seeds); parity3 and diff2 are ours
        for seed in 0 1 2 3 4; do
            for task in parity2 maj3 cyclic3; do
                for init in default qk-svd qk-opt mask; do
                    echo "--task $task --init $init --seed $seed --out $out"
                done
            done
            for task in parity3 diff2; do
                for init in default mask; do
                    echo "--task $task --init $init --seed $seed --out $out"
                done
            done
        done
        # Seeds that no setting was chosen by
        for seed in 10 11 12 13 14; do
            for task in parity2 maj3; do
                echo "--task $task --init mask --seed $seed --eval-every 500 --out $out/fresh"
            done
        done
        # The default, ten times as long
        echo "--task cyclic3 --init default --seed 0 --steps 10000 --eval-every 1000 --out $out --name cyclic3-default-10x-s0"
        for seed in 0 1; do
            # parity2 on the hole (-,-): who may see whom, per head or not
            row() { echo "--task parity2 --eval-every 500 --seed $seed --out $out/hole --name $1-s$seed --hole=-- ${*:2}"; }
            row default --init default
            for pattern in group cross sink chain split; do
                row mask-$pattern --init mask --pattern $pattern
            done
            row mask-group-strength-16 --init mask --strength 16
            row mask-chain-6-layers --init mask --pattern chain --layers 6
            # Ablations on parity2's own hole
            row() { echo "--task parity2 --eval-every 500 --seed $seed --out $out/ablation --name $1-s$seed ${*:2}"; }
            row frozen --init mask --freeze-mask
            row per-head --init mask --per-head
            for strength in 1 2 4; do
                row strength-$strength --init mask --strength $strength
            done
            for level in -4 0 8; do
                row level-$level --init mask --level=$level
            done
            row wrong-pair --init mask --prior-bits 2,3
            row wrong-pair-frozen --init mask --prior-bits 2,3 --freeze-mask
            row wrong-pair-stiff --init mask --prior-bits 2,3 --level 8
            for share in 0.05 0.2; do
                row flipped-$share --init mask --flip $share
            done
            # How far do the arms depend on the setting?
            for init in qk-svd qk-opt mask; do
                row $init-init-std-0.07 --init $init --init-std 0.07
                row $init-3-layers-pos-std-0.2 --init $init --layers 3 --pos-std 0.2
                row $init-strength-6 --init $init --strength 6
            done
            for init in qk-opt mask; do
                row $init-pos-std-0.02-batch-256 --init $init --pos-std 0.02 --init-std 0.07 --strength 4 --batch 256 --steps 1152
            done
            row qk-opt-10x-steps --init qk-opt --steps 10000 --eval-every 5000
        done
    } | runs
    "$PYTHON" results/report.py
}

theory() {
    "$PYTHON" theory.py                      # the table of every derivative and bound: exit 1 if one is violated
    "$PYTHON" results/theory_training.py     # the table and the figure of what it explains in training
}

sections=("$@")
[ $# -gt 0 ] || sections=(boolean theory)
for section in "${sections[@]}"; do
    case $section in
        boolean | theory) ;;
        *) echo "run_all.sh: no section '$section': boolean, theory" >&2; exit 2 ;;
    esac
done
for section in "${sections[@]}"; do $section; done
