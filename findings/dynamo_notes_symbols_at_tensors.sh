#!/usr/bin/env bash
# One would guess: after torch._dynamo.reset(), compiling a function again for the same input gives the same graph.
# It is so: since torch 2.14 AOTAutograd notes at tensors that a graph returns which of their sizes were symbols
# (_dynamo_propagated_dynamic_indices). An input of a checkpointed region is saved, so it is returned, and gets the note
# itself. reset() leaves the note, and with it equal sizes of two inputs are no longer one symbol: the next graph of the
# same tensor has an input more. A fresh tensor of the same shape has the first graph.
# It matters: ranks that compiled other things of the same tensors before have other graphs, and other cache keys.
# Seen: torch 2.14.1 (graph inputs: 5, then 6, fresh tensor 5); not so in torch 2.13.0 (5, 5, 5).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
cat > "$work/graphs.py" <<'PY'
import sys

import torch
from torch.utils.checkpoint import checkpoint

counts = []


def product(x, weight):
    return checkpoint(lambda x: (x @ weight).sin(), x, use_reentrant=False).sum()


def count(module, inputs):
    counts.append(len(inputs))
    return torch._dynamo.lookup_backend("aot_eager")(module, inputs)


def compiled(x):
    torch._dynamo.reset()
    weight = torch.ones(16, 24, requires_grad=True)
    torch.compile(product, backend=count, dynamic=True)(x, weight)


x = torch.ones(96).view(6, 16)
compiled(x)
compiled(x)
compiled(x.clone())
print("torch", torch.__version__, "inputs of the graphs:", counts, "noted:", vars(x))
assert counts == ([5, 6, 5] if sys.argv[1] == "noted" else [5, 5, 5]), counts
PY
for case in "2.13.0 plain" "2.14.1 noted"; do
  read -r version kind <<< "$case"
  "$work/venv/bin/pip" install --quiet "torch==$version" numpy
  "$work/venv/bin/python" "$work/graphs.py" "$kind"
done
