#!/usr/bin/env bash
# Draft heads from an accelerator that is lent for minutes: each configuration trains for an equal share of
# LIMIT seconds, compilation and evaluation included.
#
#   OUT=out LIMIT=480 bash research/train_day.sh [CONFIG ...]       (default: SmolLM2's DSpark and EAGLE-3)
#
# MODEL   a name, a directory or a file; FILE.part00 if it had to be brought in parts, which are joined in WORK
# FLAGS   more flags for every training, such as --config.data.source=work/coder/tokens
# WORK    checkpoints (default: work/train_day); with the same WORK each training goes on where it stopped
#
# OUT gets, per configuration, NAME.tgz of less than 16 MiB (heads in float16, or int8 if that is too large, with
# their recipe) and NAME.jsonl, the log.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-out}") work=$(realpath -m "${WORK:-work/train_day}") limit=${LIMIT:-480} model=${MODEL:-smollm2}
configs=("$@")
[ $# -gt 0 ] || configs=(configs/smollm2_dspark.py configs/smollm2_eagle3.py)
mkdir -p "$out" "$work"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$work/programs}" PYTHONUNBUFFERED=1

if [[ $model == *.part00 ]]; then
    joined="$work/$(basename "${model%.part00}")"
    [ -f "$joined" ] || { cat "${model%00}"[0-9][0-9] > "$joined.new" && mv "$joined.new" "$joined"; }
    model=$joined
fi
for packed in research/smollm2/answers*.xz; do
    [ -f "${packed%.xz}" ] || xz -dk "$packed"
done

# Steps that fit into some seconds: from the speed of a few, which leave their hidden states to the training.
steps_in() {
    local name=$1 config=$2 end=$3 trial="$work/$1.trial" speed positions
    timeout -k 10 $((end - SECONDS)) python train.py --config="$config" --config.model.path="$model" ${FLAGS:-} --workdir="$trial" \
        --config.train.steps=24 --config.train.log_every=4 > "$work/$name.trial.log" 2>&1 || return 1
    speed=$(grep -o '[0-9,]* tokens/s' "$work/$name.trial.log" | tail -1 | tr -dc 0-9)
    positions=$(python -c '
import json, sys
run = json.load(open(sys.argv[1]))
print(run["train"]["batch_size"] * run["data"]["seq_len"])' "$trial/config.json") || return 1
    mkdir -p "$work/$name"
    [ ! -d "$trial/features" ] || mv "$trial/features" "$work/$name/"
    rm -rf "$trial"
    echo $(((end - SECONDS) * speed / positions * 85 / 100))
}

# The newest heads of a training as an archive that is small enough.
pack() {
    local name=$1 heads="$work/$1/export" dtype
    [ -d "$heads" ] || heads="$work/$name/best"
    [ -d "$heads" ] || { echo "$name: no heads yet"; return 1; }
    for dtype in float16 int8; do
        rm -rf "$work/packed" && mkdir "$work/packed"
        medusa convert --model "$model" --drafter "$heads" --to native --dtype "$dtype" --out "$work/packed/$name"
        tar -C "$work/packed" -czf "$out/$name.tgz" "$name"
        [ "$(stat -c %s "$out/$name.tgz")" -lt 16000000 ] && break
    done
    cp "$work/$name/log.jsonl" "$out/$name.jsonl"
    ls -l "$out/$name.tgz"
}

failed=0
for i in "${!configs[@]}"; do
    config=${configs[i]} name=$(basename "${configs[i]}" .py)
    end=$((SECONDS + (limit - SECONDS) / (${#configs[@]} - i) - 20))  # 20 s to pack
    if [ ! -f "$work/$name.steps" ]; then
        steps=$(steps_in "$name" "$config" "$end") || { tail -5 "$work/$name.trial.log"; failed=1; continue; }
        echo "$steps" > "$work/$name.steps"
    fi
    steps=$(cat "$work/$name.steps")
    echo "$name: $steps steps, $((end - SECONDS)) s"
    timeout -k 15 $((end - SECONDS)) python train.py --config="$config" --config.model.path="$model" ${FLAGS:-} --workdir="$work/$name" \
        --config.train.steps="$steps" --config.train.eval_every=$((steps / 6 + 1)) --config.train.save_every=$((steps / 3 + 1)) \
        || echo "$name: stopped; the same command goes on"
    pack "$name" || failed=1
done
exit $failed
