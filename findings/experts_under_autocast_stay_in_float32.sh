#!/usr/bin/env bash
# One would guess: under autocast in bfloat16, experts of a mixture compute in bfloat16, as all other products of matrices
# do, and torch.compile makes a grouped product of them.
# It is so: grouped_mm has no rule for autocast. Experts with float32 weights compute in float32, and refuse a bfloat16
# input. Compiled, transformers' experts become a loop over experts, which copies the groups' sizes to the host. With
# transformers 5.17 its backward cannot be traced, so a full graph raises; with 5.24 it is an op, and still that loop.
# It matters: with float32 weights and autocast a mixture trains slower than with bfloat16 weights and waits for the host
# in each layer, and neither a warning nor the dtype of the model's output says so.
# Seen: torch 2.13.0 (CPU build), transformers 5.17.0 and 5.24.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/experts.py" <<'PY'
import torch
import torch.nn.functional as F
import transformers
from torch._dynamo.testing import AotEagerAndRecordGraphs
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
config._experts_implementation = "grouped_mm"


def experts(dtype: torch.dtype) -> MixtralExperts:
    made = MixtralExperts(config).to(dtype)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return made


def products(dtype: torch.dtype) -> set[str]:
    """The ops of compiled forward and backward that multiply by experts."""
    torch._dynamo.reset()
    graphs = AotEagerAndRecordGraphs()
    compiled = torch.compile(experts(dtype), backend=graphs, fullgraph=True)
    rows = torch.randn(16, 32, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(rows, torch.randint(0, 4, (16, 2)), torch.rand(16, 2)).float().sum().backward()
    names = {str(node.target) for graph in (*graphs.fw_graphs, *graphs.bw_graphs) for node in graph.graph.nodes}
    return {name for name in names if "grouped_mm" in name}


rows, weights, ends = torch.randn(16, 32), torch.randn(4, 32, 64), torch.tensor([4, 8, 12, 16], dtype=torch.int32)
with torch.autocast("cpu", torch.bfloat16):
    plain, grouped = torch.mm(rows, weights[0]), F.grouped_mm(rows, weights, offs=ends)
    try:
        F.grouped_mm(rows.bfloat16(), weights, offs=ends)
        mixed = "works"
    except RuntimeError:
        mixed = "raises"
print("torch", torch.__version__, "transformers", transformers.__version__)
print("under autocast: mm gives", plain.dtype, "grouped_mm gives", grouped.dtype, "grouped_mm of two dtypes", mixed)
assert (plain.dtype, grouped.dtype, mixed) == (torch.bfloat16, torch.float32, "raises")
low = products(torch.bfloat16)
try:
    full = str(sorted(products(torch.float32)))
except Exception as error:
    full = f"cannot be traced ({type(error).__name__})"
print("compiled experts, bfloat16 weights:", sorted(low))
print("compiled experts, float32 weights:", full)
assert any("aten._grouped_mm" in name for name in low)
if transformers.__version__ == "5.17.0":
    assert full.startswith("cannot be traced"), full
else:
    assert "fallback" in full and "aten._grouped_mm" not in full, full
PY
python3 -m venv "$work/venv"
for version in 5.17.0 5.24.0; do
  "$work/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version" numpy
  "$work/venv/bin/python" "$work/experts.py" 2>/dev/null
done
