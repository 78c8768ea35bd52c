#!/usr/bin/env bash
# One would guess: block.compile() compiles the block in place, and does what torch.compile(block) does. Guides to
# fully_shard compile each block in this way.
# It is so with torch 2.14.1 and 2.15. With torch 2.13, compile() of a module whose class is torch's own, such as
# nn.TransformerEncoderLayer, compiles nothing: its outermost frame is in torch's files, which Dynamo leaves out.
# torch.compile of the same module compiles it, and so does compile() of a subclass with its own forward.
# It matters: nothing is raised or logged. A model of nn.TransformerEncoderLayer under fully_shard trains eagerly, and
# a comparison with "FSDP2 and compiled blocks" measures an eager peer.
# Seen: torch 2.13.0 (CPU build).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/blocks.py" <<'PY'
import torch
from torch import Tensor, nn


class Own(nn.TransformerEncoderLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def graphs(block: nn.Module, in_place: bool) -> int:
    """Return how many graphs a first call of the block compiles."""
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    if in_place:
        block.compile(backend=backend)
    else:
        block = torch.compile(block, backend=backend)
    block(torch.randn(2, 5, 16))
    return len(seen)


print("torch", torch.__version__)
found = {}
for name, make in {
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(16, 2, 32),
    "nn.Sequential": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
    "a subclass": lambda: Own(16, 2, 32),
}.items():
    found[name] = graphs(make(), True), graphs(make(), False)
    print(f"{name}: compile() made {found[name][0]} graphs, torch.compile() made {found[name][1]}")
expected = {"nn.TransformerEncoderLayer": (0, 1), "nn.Sequential": (0, 1), "a subclass": (1, 1)}
assert found == expected, "the behaviour has changed"
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 numpy
"$work/env/bin/python" "$work/blocks.py"
