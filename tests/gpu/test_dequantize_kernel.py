"""The kernels for packed frozen weights equal the ops that define the values, also in replayed graphs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.sharding.dequantize_kernel import is_available
from lightning_zero.sharding.weight_format import DEQUANTIZE, WeightFormat, decode, largest_value
from tests.helpers.models import build, make_batches
from tests.helpers.sharded import adamw, case_loss, engine_for
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)
SHAPES = [(1, 1), (25, 19), (7, 8195), (300, 200), (1024, 4096)]


def needs_the_kernel() -> None:
    if not is_available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the kernels need Triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_values_are_those_of_the_ops(kind: Any, dtype: torch.dtype) -> None:
    needs_the_kernel()
    torch.manual_seed(0)
    for shape in SHAPES:
        packing = WeightFormat(kind, torch.Size(shape), dtype)
        packed = packing.encode(torch.randn(shape, device="cuda"))
        expected = decode(
            lambda op, *args, **settings: op(*args, **settings), packed, shape, dtype, kind, packed.device
        )
        assert torch.equal(packing.decode(packed), expected), shape


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_fp8_values_are_those_of_the_ops_in_both_layouts(kind: Any) -> None:
    needs_the_kernel()
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8")
    torch.manual_seed(0)
    for shape in [*SHAPES, (48, 272), (4096, 4096)]:
        packing = WeightFormat(kind, torch.Size(shape), torch.float32)
        packed = packing.encode(torch.randn(shape, device="cuda"))
        run = lambda op, *args, **settings: op(*args, **settings)  # noqa: E731
        factor = 448 / largest_value(run, packed, packing.words)
        for transposed in (False, True):
            arguments = packed, shape, torch.float8_e4m3fn, kind
            expected = decode(run, *arguments, packed.device, factor, transposed)
            found = DEQUANTIZE(*arguments, factor, transposed)
            assert found.is_contiguous()
            assert torch.equal(found.float(), expected.float()), (shape, transposed)


def train(kind: str, backend: str, kernel: bool) -> tuple[list[float], int]:
    model = build("LoRA")
    device = f"cuda:{torch.cuda.current_device()}"
    with (
        patch("lightning_zero.sharding.dequantize_kernel.is_available", lambda device: kernel),
        patch("lightning_zero.compile.passes.dequantize.is_available", lambda device: kernel),
        engine_for(model, backend, device=device, frozen_dtype=kind) as engine,
    ):
        optimizer, losses = adamw(model), []
        for batch in make_batches("LoRA", 8, 12):
            with engine.train_step():
                loss = case_loss(model, tuple(value.to(device) for value in batch))
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, engine.executor.counters().get("replayed_graphs", 0)


def train_all(kind: str) -> dict[str, tuple[list[float], int]]:
    ways = {"eager": ("eager", True), "compiled": ("inductor", True), "ops": ("inductor", False)}
    return {name: train(kind, *way) for name, way in ways.items()}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_replayed_training_is_that_of_eager_code_and_of_the_ops(ranks: Ranks, kind: str) -> None:
    needs_the_kernel()
    found = ranks.run(1, train_all, kind, backend="nccl", deadline=240)[0]
    for name in ("compiled", "ops"):
        losses, replayed = found[name]
        assert replayed > 0
        assert losses == pytest.approx(found["eager"][0], rel=1e-4)
