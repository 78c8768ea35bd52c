#!/usr/bin/env bash
# One would guess: dequantize_4bit returns the values that quantize_4bit has stored, on every device and for every shape.
# It is not so on CPUs in bitsandbytes 0.50.2: if a row is not a multiple of the block, many values take the scale of another
# block. Codes and scales are right.
# It matters: a base model that was quantized or compared on a CPU is silently wrong. Widths of common models are multiples
# of 64, so it shows in tests of small models, and with a larger blocksize. Decode such weights by codes and scales.
# Seen: bitsandbytes 0.50.2, torch 2.13.0 (CPU build), a CPU with AVX-512.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy bitsandbytes==0.50.2
cat > "$work/rows.py" <<'PY'
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

for shape, block, right in (((8, 128), 64, True), ((8, 96), 64, False), ((8, 64), 128, False)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(weight, blocksize=block, quant_type="nf4")
    pairs = packed.view(-1)
    codes = torch.stack([pairs >> 4, pairs & 15], 1).view(-1).long()
    own = (state.code[codes].view(-1, block) * state.absmax[:, None]).view(shape)
    theirs = dequantize_4bit(packed, state)
    print(shape, "blocks of", block, "error of its values", float((theirs - weight).norm() / weight.norm()),
          "of the codes times scales", float((own - weight).norm() / weight.norm()))
    assert (own - weight).norm() < 0.12 * weight.norm(), "codes and scales are wrong"
    assert torch.equal(own, theirs) == right, "it behaves otherwise now"
PY
"$work/venv/bin/python" "$work/rows.py" 2>"$work/log" || { tail -n 5 "$work/log"; exit 1; }
