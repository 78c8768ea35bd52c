#!/usr/bin/env bash
# One would guess: a graph that adds to a tensor in place and then reads it reads the sum, and the tensor keeps it.
# It is so except for tensors of float64 without dimensions on the CPU: AOTAutograd drops the write. The compiled
# function reads the old value, the tensor stays as it was, and there is no error. Of one dimension, or in float32, it
# is kept; so is a write whose own result is read.
# It matters: a counter or an average that a module has as such a buffer stands still in all compiled training.
# Seen: torch 2.11.0 and 2.13.0, with "aot_eager" and "inductor"; not with backend="eager".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
cat > "$work/writes.py" <<'PY'
import torch


def added(backend, shape, dtype):
    torch._dynamo.reset()
    count = torch.zeros(shape, dtype=dtype)

    def add(x):
        count.add_(1)
        return x * count

    return torch.compile(add, backend=backend)(torch.ones(2, dtype=dtype))[0].item(), count.sum().item()


for backend in ("eager", "aot_eager"):
    for shape, dtype in (((), torch.float32), ((1,), torch.float64), ((), torch.float64)):
        found = added(backend, shape, dtype)
        print("torch", torch.__version__, backend, shape, dtype, "read and kept:", found)
        lost = backend == "aot_eager" and shape == () and dtype == torch.float64
        assert found == ((0, 0) if lost else (1, 1)), found
PY
for version in 2.11.0 2.13.0; do
  "$work/venv/bin/pip" install --quiet "torch==$version" numpy
  "$work/venv/bin/python" "$work/writes.py"
done
