"""State in bfloat16 on a GPU.

On the host or not, captured or launched one by one, steps give the same bits, and captured ones about those of the
others and of a CPU.
"""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.step.runners import CapturedRunner
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)

STEPS = 8


def train(device: str, capture: bool, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = nn.Sequential(nn.Linear(96, 300), nn.LayerNorm(300), nn.Linear(300, 70))
    options |= {"offload_buffer_mb": 0.01, "cuda_graph_step": capture}
    with engine_for(model, "eager", device=device, **options) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)).to(engine.device)
        for step in range(STEPS):
            with engine.train_step():
                loss = model(x + 0.1 * step).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer, clip=0.1):
                optimizer.step()
            optimizer.zero_grad()
        stepper = engine.optimizers.stepper(optimizer)
        assert isinstance(stepper.runner, CapturedRunner)
        if device != "cpu":
            torch.cuda.synchronize()
        moments = {
            f"{name}.{key}": value.detach().cpu().clone().view(-1)
            for name, param in model.named_parameters()
            for key, value in optimizer.state[param].items()
        }
        weights = {name: value.cpu() for name, value in whole_params(engine, model).items()}
        return {"moments": moments, "weights": weights, "replays": stepper.replays}


def train_all_ways(state_dtype: str) -> list[dict[str, Any]]:
    device = f"cuda:{torch.cuda.current_device()}"
    narrow: dict[str, Any] = {"state_dtype": state_dtype}
    away = narrow | {"offload": ("optimizer",)}
    ways = [(device, c, o) for o in (narrow, away) for c in (True, False)]
    return [train(*way[:2], **way[2]) for way in ways] + [train("cpu", False, **narrow), train(device, True)]


def test_where_state_lies_changes_no_bit_and_captures_are_about_the_same(ranks: Ranks) -> None:
    (found,) = ranks.run(1, train_all_ways, "bf16", backend="cpu:gloo,cuda:nccl", deadline=400)
    captured, launched, captured_away, launched_away, cpu, wide = found
    ways = (captured, launched, captured_away, launched_away)
    assert [way["replays"] for way in ways] == [STEPS - 1, 0, STEPS - 1, 0]
    for away, here in ((captured_away, captured), (launched_away, launched)):
        for what in ("moments", "weights"):
            torch.testing.assert_close(away[what], here[what], rtol=0, atol=0)
    for name, value in captured["moments"].items():
        matrix = name.split(".")[:2] in (["0", "weight"], ["2", "weight"]) and not name.endswith("step")
        assert value.dtype is (torch.bfloat16 if matrix else torch.float32)
        if matrix:  # where the values before rounding differ in their last bits, the noise decides otherwise, seldom
            for other in (launched, cpu):
                same = (value == other["moments"][name]).float().mean().item()
                assert same > 0.9, f"{name}: of the elements {same:.3f} are the same"
        # Rounding is off by at most one unit in each of so many steps.
        atol = STEPS * 2.0**-7 * wide["moments"][name].abs().max().item()
        torch.testing.assert_close(value.float(), wide["moments"][name].float(), rtol=0, atol=atol)
    for name, value in captured["weights"].items():
        torch.testing.assert_close(value, wide["weights"][name], rtol=0, atol=STEPS * 1e-3 * 0.1)


def test_8_bit_state_is_the_same_where_it_lies_and_about_the_same_as_on_a_cpu(ranks: Ranks) -> None:
    (found,) = ranks.run(1, train_all_ways, "8bit", backend="cpu:gloo,cuda:nccl", deadline=400)
    captured, launched, captured_away, launched_away, cpu, wide = found
    assert [way["replays"] for way in (captured, launched, captured_away, launched_away)] == [STEPS - 1, 0] * 2
    for away, here in ((captured_away, captured), (launched_away, launched)):
        for what in ("moments", "weights"):
            torch.testing.assert_close(away[what], here[what], rtol=0, atol=0)
    codes = [name for name in captured["moments"] if name.endswith("_8bit_codes")]
    assert len(codes) == 4  # two moments of two matrices
    for name in codes:
        value = captured["moments"][name]
        for other in (launched, cpu):
            same = (value == other["moments"][name]).float().mean().item()
            assert same > 0.9, f"{name}: of the codes {same:.3f} are the same"
    for name, value in captured["weights"].items():
        torch.testing.assert_close(value, wide["weights"][name], rtol=0, atol=STEPS * 1e-3 * 0.3)
