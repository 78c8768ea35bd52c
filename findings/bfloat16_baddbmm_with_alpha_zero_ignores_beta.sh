#!/usr/bin/env bash
# One would guess: torch.baddbmm(base, x, y, alpha=0, beta=-0.5) is -0.5 * base in every dtype.
# It is so in float32 and float16. In bfloat16 on a CPU with oneDNN, beta is not applied unless it is 1, and the result
# is wrong without an error. With beta=0 it may be NaN.
# It matters: a Newton-Schulz iteration whose last coefficient is zero, such as (1.5, -0.5, 0), computes such a product.
# Seen: torch 2.13.0 (CPU build): relative errors of 0.0, 0.0 and 3.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$work/baddbmm.py" <<'PY'
import torch

torch.manual_seed(0)
base = torch.randn(2, 64, 64)
errors = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = base.to(dtype)
    expected = -0.5 * x.float()
    found = torch.baddbmm(x, x, x.mT, alpha=0.0, beta=-0.5).float()
    errors[dtype] = float((found - expected).abs().max() / expected.abs().max())
    print(dtype, "relative error", round(errors[dtype], 4))
print("torch", torch.__version__)
assert errors[torch.float32] == errors[torch.float16] == 0
assert errors[torch.bfloat16] > 0.1, "bfloat16 is right now"
PY
"$work/venv/bin/python" "$work/baddbmm.py" 2>"$work/log" || { tail -n 5 "$work/log"; exit 1; }
