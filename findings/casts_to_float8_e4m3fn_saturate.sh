#!/usr/bin/env bash
# One would guess: a number beyond 448 becomes NaN in float8_e4m3fn, which has no infinity. torch 2.11 does that, and so
# fp8 trainings find overflows by NaN in a loss or in a gradient norm.
# It is not so in torch 2.13: the cast saturates. Even infinity becomes 448. float8_e5m2 keeps infinity, as before.
# It matters: an infinite activation or weight that is cast without a scale of its own goes on as a finite number. A check
# for overflow must look at the matrix before the cast, or compute the scale from it: inf / inf is NaN, which stays NaN.
# Seen: torch 2.13.0 (CPU build), eager and Inductor: 448 for 500 and for infinity. torch 2.11.0: NaN for both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$work/casts.py" <<'PY'
import torch

values = torch.tensor([500.0, float("inf"), float("nan")])
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    print(dtype, values.tolist(), "->", values.to(dtype).float().tolist())
print("torch", torch.__version__)
found = values.to(torch.float8_e4m3fn).float()
assert found[:2].tolist() == [448.0, 448.0], "casts do not saturate now"
assert found[2].isnan()
scale = values[:2].abs().max() / 448
assert (values[:2] / scale).to(torch.float8_e4m3fn).float()[1].isnan(), "a scale that is infinite hides infinity"
PY
"$work/venv/bin/python" "$work/casts.py" 2>"$work/log" || { tail -n 5 "$work/log"; exit 1; }
