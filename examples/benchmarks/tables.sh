#!/usr/bin/env bash
# Runs a table's rows one after the other on two GPUs, each in processes of its own and under a limit of its own, so that one
# row that hangs costs no other; what a row printed is in FOLDER/NAME.log, and a summary comes last. Most tables take 10 minutes.
#
#     bash examples/benchmarks/tables.sh starts FOLDER [ROWS]
#
# ROWS: an extended regular expression; rows whose whole name is not like it are left out. The tables:
#
# bench: README's chart. checkpoints, more-checkpoints: of 6.7B. starts: to the tenth step, with caches empty and filled.
# growth: 24 and 96 layers, in turn. hosts: two, of one GPU each. precisions, parts, checkpointed, images, lengths: models of
# models.py, beside peers. memory, budgets: on one GPU; 80 and 110 GiB take one of more than that. offload: of 6.7B, beside peers, of which some need deepspeed installed, and
# the largest. stages: 1 and 2, beside peers. over-copies: gradients over compute copies, beside peers. four: two hosts of
# two GPUs, on four, beside peers, and a fault on one of them. tests: those of tests/gpu that take two GPUs or a machine
# to themselves.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
table=${1:?bench, checkpoints, more-checkpoints, starts, growth, hosts, precisions, parts, checkpointed, images, lengths, memory, budgets, offload, stages, over-copies, four or tests}
out=$(realpath -m "${2:?a folder for logs}")
wanted=${3:-.*}
work=$(mktemp -d)
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
rows=()

# What is compiled, the C++ executor too, lies there from here on: empty at first.
caches() { export TORCHINDUCTOR_CACHE_DIR=$work/$1/inductor XDG_CACHE_HOME=$work/$1; }

# Ends all that has this in its environment. A rank that waits in a collective does not hear its launcher, and would be
# beside all later rows: they would take its memory and its time for theirs.
end_leftovers() {
  local environment
  for environment in /proc/[0-9]*/environ; do
    grep -qxzs -e "$1" "$environment" && kill -KILL "$(basename "${environment%/environ}")" 2>/dev/null
  done
  return 0
}

row() {
  local name=$1 limit=$2 begin=$SECONDS
  [[ $name =~ ^($wanted)$ ]] || return 0
  shift 2
  rows+=("$name")
  local mark="TABLES_ROW=$$-$name" status
  env "$mark" timeout --kill-after 5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  end_leftovers "$mark"
  echo "exit $status after $((SECONDS - begin)) s: $*" >>"$out/$name.log"
}

models() { row "$1" "$2" torchrun --nproc-per-node 2 examples/benchmarks/models.py "${@:3}"; }
devices=2
steps() { row "$1" "$2" torchrun --nproc-per-node $devices examples/benchmarks/step_time.py --devices $devices --size 1b "${@:3}"; }
tests() { row "$1" "$2" python3 -m pytest -n0 -rP "${@:3}"; }
build() { row build 60 python3 -m lightning_zero build; }

caches "$table"
case $table in
  bench)
    build
    # Whole models that torch compiles (the floor, DDP) take minutes to start. Ended halfway, it goes on where it was.
    row bench 900 python3 examples/benchmarks/compare 1b --steps 36 --warm 15 --limit 220 --out "$out/bench" --resume
    ;;
  checkpoints | more-checkpoints)
    build
    save=(python3 examples/benchmarks/checkpoints.py --home "$work/home" --devices 2 --size 7b --at 12 --eager --warm)
    if [ "$table" = checkpoints ]; then
      row compared 540 "${save[@]}" --rows sharded,fsdp2 --minutes 8.9
    else
      row full 260 "${save[@]}" --rows full --minutes 4.2
      row async 210 "${save[@]}" --rows async --accumulate 4 --at 8 --after 36 --minutes 3.3
    fi
    ;;
  starts)
    # The second model finds the first one's pieces, but no cache of its own, and the executor built: so each has caches.
    for model in gpt2 llama; do
      caches "$model"
      models "$model-cold" 110 "$model" --steps 24 --warm 12
      models "$model-warm" 75 "$model" --steps 24 --warm 12
      models "$model-fsdp2_graph" 70 "$model" --steps 24 --warm 12 --strategy fsdp2_graph
    done
    ;;
  growth)
    build
    # Each with empty caches of its own: 96 layers would find kernels of 24, which spares them a second. And in turn, three
    # times: what one machine takes for the same varies by more than what is asked about.
    for turn in 1 2 3; do
      for layers in 24 96; do
        export TORCHINDUCTOR_CACHE_DIR=$work/growth-$layers-$turn
        models "gpt2-$layers-$turn" 110 gpt2 --layers "$layers" --batch 1 --steps 11 --warm 6
      done
    done
    ;;
  hosts)
    two=(--steps 50 --warm 20 --option tuning.ranks_per_host=1)
    steps one-host 110 --batch 2 --length 2048 --steps 50 --warm 20
    steps two-hosts 90 --batch 2 --length 2048 "${two[@]}"
    steps two-hosts-traced 90 --batch 2 --length 2048 "${two[@]}" --trace "$work/trace.json"
    steps two-hosts-50-traced 90 --batch 2 --length 2048 "${two[@]}" --option tuning.emulate_cross_host_gb_per_s=50 \
      --trace "$work/trace-50.json"
    for speed in 50 12.5; do
      slow=(--option "tuning.emulate_cross_host_gb_per_s=$speed")
      steps "two-hosts-$speed" 90 --batch 2 --length 2048 "${two[@]}" "${slow[@]}"
      steps "flat-$speed" 90 --batch 2 --length 2048 "${two[@]}" "${slow[@]}" --option 'tuning.compute_shard_group="all"'
    done
    ;;
  precisions)
    for precision in bf16-mixed bf16-true; do models "small_gpt-$precision" 75 small_gpt --precision "$precision"; done
    models small_gpt-fsdp2_graph 60 small_gpt --strategy fsdp2_graph
    ;;
  parts)
    for model in parts wrapped_parts; do models "$model" 90 "$model"; done
    models parts-fsdp2 60 parts --strategy fsdp2
    ;;
  checkpointed)
    for batch in 2 4; do
      models "llama_checkpointed-$batch" 90 llama_checkpointed --batch "$batch" --steps 30
      models "llama_checkpointed-fsdp2-$batch" 80 llama_checkpointed --batch "$batch" --steps 30 --strategy fsdp2
    done
    ;;
  images)
    for model in vit convnext; do
      models "$model" 110 "$model" --steps 30
      models "$model-ddp" 110 "$model" --steps 30 --strategy ddp
    done
    ;;
  lengths)
    build
    models lengths 400 small_gpt --lengths 128,192,256,320,384,448,512,640 --steps 400 --warm 60
    ;;
  memory)
    build
    row five-models 420 python3 examples/benchmarks/plan_check.py
    row sweep 400 python3 examples/benchmarks/memory_sweep.py t5_base --memory 14 --total 380
    ;;
  budgets)
    # What fits best comes first; where a sweep is ended, what it had tried counts.
    sweep() { row "$1-$2" "$3" python3 examples/benchmarks/memory_sweep.py "$1" --memory "$2" --total $(($3 - 5)) "${@:4}"; }
    build
    sweep decoder_1.36b 30 265 --budgets 0.7,0.5,0.3 --offload ,activations
    sweep decoder_3b 50 265 --budgets 1,0.7 --offload optimizer,optimizer+activations --buffers 256,8000
    sweep decoder_6.7b 80 400 --budgets 0.9,0.7 --offload optimizer --buffers 256,8000
    sweep decoder_6.7b 110 400 --budgets 1 --offload optimizer,optimizer+activations --buffers 256,8000,16000
    ;;
  offload)
    build
    host=(python3 examples/benchmarks/offload.py --devices 2)
    row offload 265 "${host[@]}" --sizes 7b --ways device,offload --accumulate 1,8 --steps 5 --warm 6 --limit 130
    row wide 150 "${host[@]}" --sizes 7b --ways offload --accumulate 1,8 --steps 5 --warm 6 --limit 145 --buffer-mb 14000
    row hidden 150 "${host[@]}" --sizes 7b --ways offload --accumulate 1 --steps 5 --warm 6 --limit 145 --buffer-mb 6000
    row fsdp2 285 "${host[@]}" --sizes 7b --ways fsdp2 --accumulate 1 --steps 2 --warm 1 --limit 280
    # DeepSpeed compiles an operator when it is used first, which can take a row's whole limit: so that has rows, too.
    for op in CPUAdam DeepCompile; do
      row "build-$op" 240 python3 -c "from deepspeed.ops import op_builder; op_builder.${op}Builder().load(verbose=True)"
    done
    row deepspeed 215 "${host[@]}" --sizes 7b --ways deepspeed --accumulate 1 --steps 3 --warm 2 --limit 210
    row deepcompile 215 "${host[@]}" --sizes 7b --ways deepcompile --accumulate 1 --steps 3 --warm 3 --limit 210
    # With masters and state on the host, 12 bytes a weight, 18 billion take 216 of 256 GiB; FSDP2 has gradients there, too.
    for size in 13b 18b; do
      row "largest-$size" 275 "${host[@]}" --sizes $size --ways all --accumulate 1 --steps 3 --warm 5 --limit 270
    done
    for size in 13b 18b; do
      row "largest-auto-$size" 275 "${host[@]}" --sizes $size --ways auto --accumulate 1 --steps 3 --warm 12 --limit 270
    done
    for way in fsdp2 fsdp2_unpinned; do
      row "largest-$way-13b" 295 "${host[@]}" --sizes 13b --ways $way --accumulate 1 --steps 2 --warm 1 --limit 290
    done
    ;;
  stages)
    build
    for size in 350m 1b; do
      few=(--size "$size" --batch 2 --length 2048 --steps 36 --warm 15)
      for stage in 1 2; do steps "$size-stage-$stage" 75 "${few[@]}" --option "stage=$stage"; done
      steps "$size-ddp" 150 "${few[@]}" --strategy ddp_compile # torch compiles the whole of it
      steps "$size-fsdp2-no-reshard" 60 "${few[@]}" --strategy fsdp2 --no-reshard
    done
    ;;
  over-copies)
    build
    for over in false true; do
      option=(--option "tuning.grad_aliasing=$over")
      models "llama-$over" 80 llama --steps 24 --warm 12 "${option[@]}"
      steps "1b-$over" 70 --batch 2 --length 2048 --steps 36 --warm 15 "${option[@]}"
      steps "7b-$over" 130 --size 7b --batch 1 --length 2048 --steps 20 --warm 10 "${option[@]}"
    done
    models llama-fsdp2 60 llama --steps 24 --warm 12 --strategy fsdp2
    steps 1b-fsdp2 60 --batch 2 --length 2048 --steps 36 --warm 15 --strategy fsdp2
    steps 7b-fsdp2 120 --size 7b --batch 1 --length 2048 --steps 20 --warm 10 --strategy fsdp2
    ;;
  four)
    # Each row sees hosts of two GPUs, between which FSDP2 replicates, and what crosses them is counted.
    four() { devices=4 steps "$1" "$2" --ranks-per-host 2 "${@:3}"; }
    flat=(--option 'tuning.compute_shard_group="all"')
    once=(--option 'tuning.cross_host_reduce="step"')
    build
    for length in 2x2048 1x512; do
      few=(--batch "${length%x*}" --length "${length#*x}" --steps 50 --warm 20 --on-cpu)
      four "1b-$length" 90 "${few[@]}"
      four "1b-$length-flat" 80 "${few[@]}" "${flat[@]}"
      four "1b-$length-fsdp2" 80 "${few[@]}" --strategy fsdp2
    done
    four 1b-2x2048-ddp 90 --batch 2 --length 2048 --steps 50 --warm 20 --on-cpu --strategy ddp
    few=(--batch 2 --length 2048 --steps 40 --warm 20 --accumulate 4)
    four 1b-accumulated 90 "${few[@]}"
    four 1b-accumulated-once 80 "${few[@]}" "${once[@]}"
    four 1b-accumulated-flat 80 "${few[@]}" "${flat[@]}"
    four 1b-accumulated-fsdp2 80 "${few[@]}" --strategy fsdp2
    few=(--size 7b --batch 1 --length 2048 --steps 36 --warm 15)
    four 7b 140 "${few[@]}"
    four 7b-flat 120 "${few[@]}" "${flat[@]}"
    four 7b-fsdp2 120 "${few[@]}" --strategy fsdp2
    slow=(--batch 2 --length 2048 --steps 36 --warm 15 --option tuning.emulate_cross_host_gb_per_s=50)
    four 1b-50 70 "${slow[@]}"
    four 1b-50-flat 70 "${slow[@]}" "${flat[@]}"
    four 1b-one-host 70 --batch 2 --length 2048 --steps 36 --warm 15 --ranks-per-host 4
    row fault 110 python3 -m tests.faults.table --device cuda --only ranks_per_host --jobs 3
    tests hosts 130 tests/gpu/test_hosts.py -k two_hosts_of_two
    ;;
  tests)
    build
    tests memory 200 tests/gpu/test_memory_plan.py
    tests missing 150 -x tests/gpu/test_missing_parts.py
    tests hosts 240 tests/gpu/test_hosts.py tests/gpu/test_ranges.py tests/gpu/test_peers.py tests/gpu/test_masters_on_host.py
    ;;
  *)
    echo "There is no table $table." >&2
    exit 2
    ;;
esac

python3 - "$out" "${rows[@]}" <<'PYTHON'
import json, sys
from pathlib import Path

shown = ("ms", "ms_10_90", "peak_gib", "reserved_gib", "device_gib", "start_s", "gb_across")
for name in sys.argv[2:]:
    lines = Path(sys.argv[1], f"{name}.log").read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    said = ", ".join(f"{key} {found[-1][key]}" for key in shown if key in found[-1]) if found else ""
    last = "" if said else " | ".join(lines[-4:-1])
    print(f"{name}: {said or last}; {lines[-1].partition(':')[0]}")
PYTHON
rm -rf "$work"
