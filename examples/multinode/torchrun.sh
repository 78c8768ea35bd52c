#!/usr/bin/env bash
# Run this on each host, with the same HEAD, which is the name of one of them as the others see it:
#
#     HEAD=node-a bash examples/multinode/torchrun.sh --out /shared/runs/gpt
#
# Training begins with as many hosts as have come (1 to 4) half a minute after the first one. A host that is lost, or one
# more that comes, ends the processes on all others; they start again on the hosts that there are then, and go on from
# the last checkpoint. Arguments are passed on to train.py.
#
#   NODES  hosts, "4", or from "1:4" (the default) which training goes on with any number
#   GPUS   processes on each, by default one for each GPU
#   PORT   of HEAD, where hosts find each other, by default 29400
#   JOB    a name that all hosts give, so that two jobs on one HEAD stay apart
#   RESTARTS, WAIT_S  how often to start again after a failure (3), and seconds to wait for more hosts (30)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec python -m torch.distributed.run \
  --nnodes="${NODES:-1:4}" \
  --nproc-per-node="${GPUS:-gpu}" \
  --max-restarts="${RESTARTS:-3}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${HEAD:?set HEAD to the name of the host where all hosts find each other}:${PORT:-29400}" \
  --rdzv-id="${JOB:-gpt}" \
  --rdzv-conf="last_call_timeout=${WAIT_S:-30}" \
  "$here/train.py" "$@"
