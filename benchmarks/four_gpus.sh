#!/usr/bin/env bash
# Runs what takes four GPUs of one host: 200 steps of meshes of 2 x 2 beside their oracles, then speeds on 4, 2 and 1.
# Usage: benchmarks/four_gpus.sh OUT [cuda|cpu]. On a CPU, or with two GPUs, the meshes alone. Not yet run on four GPUs.
set -euo pipefail
out=$1 device=${2:-cuda}
mkdir -p "$out"
on() { torchrun --nproc-per-node "$@"; }

for recipe in current block mxfp8 nvfp4; do
    for kind in "tp x etp" "dp x etp" experts; do
        on 4 benchmarks/etp_steps.py "$kind" $recipe --device "$device" --steps 200 --out "$out/etp.jsonl"
    done
    on 4 benchmarks/ep_steps.py "one process" $recipe --experts --device "$device" --out "$out/ep.jsonl"
    on 4 benchmarks/ep_steps.py "ep x eetp" $recipe --device "$device" --out "$out/ep.jsonl"
done
[ "$device" = cuda ] && [ "$(nvidia-smi -L | wc -l)" -ge 4 ] || exit 0
on 4 benchmarks/nccl_etp.py --repetitions 20 | tee "$out/nccl-etp.log"
for ranks in 4 2 1; do  # contenders keep 12 bytes a parameter each, of 1.7e9: one GPU has room for two
    only=([4]="(current|block)(, (TP 2 x )?ETP)?" [2]="(current|block)(, ETP)?" [1]=current)
    on $ranks -m minifloat.tools.bench.ranks fsdp exposed experts --rounds 5 --out "$out/$ranks" \
        --only "^minifloat ${only[$ranks]}$" | tee "$out/speed-$ranks.log"
done
