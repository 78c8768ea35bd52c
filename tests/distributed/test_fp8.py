"""Products in fp8: training on shards equals eager training with the same casts, on one rank and on two."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compile.graph_plan import Plan
from lightning_zero.errors import UnsupportedError
from lightning_zero.report.engine_report import startup_summary
from tests.helpers.fp8_model import ACCUMULATE, CLIP, FP8_LAYERS, OPTIONS, STEPS, Model, evaluate, loss_of, train_plain
from tests.helpers.fp8_oracle import Fp8Linear, with_fp8_layers
from tests.helpers.logs import logged
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, sgd, whole_params
from tests.ranks.pool import Ranks

REASONS = {
    "tokens.weight": "an embedding reads the weight",
    "router.weight": "24 outputs, not a multiple of 16",
    "kept.weight": "excluded by fp8_exclude",
}


def train(backend: str = "aot_eager", **options: Any) -> dict[str, Any]:
    """Train on this rank's shards.

    All ranks take equal batches, so that their scales are those of one rank.
    """
    model = Model()
    losses = []
    with engine_for(model, backend, **OPTIONS | options) as engine:
        optimizer = sgd(model)
        for index in range(STEPS * ACCUMULATE):
            with engine.train_step():
                loss = loss_of(model, index)
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            if index % ACCUMULATE:
                with engine.optimizers.stepping(optimizer, clip=CLIP):
                    optimizer.step()
                optimizer.zero_grad()
        engine.eval_step()
        losses.append(evaluate(model))
        return {
            "losses": losses,
            "params": whole_params(engine, model),
            "plan": engine.session.plans.plan,
            "summary": startup_summary(engine, [optimizer]),
            "health": None if engine.fp8_health is None else engine.fp8_health.read(),
        }


def train_by_stages() -> list[dict[str, Any]]:
    return [train(), train(stage=1)]


def oracle(fp8: bool = True, **settings: Any) -> dict[str, Any]:
    last = STEPS * ACCUMULATE - 1
    return train_plain(lambda model, index: [evaluate(model)] if index == last else [], fp8, **settings)


def reasons(plan: Plan, kind: str) -> dict[str, str]:
    graphs = [graph for graph in plan.graphs if graph.kind == kind]
    return {linear.weight: reason for graph in graphs for linear in graph.linears for reason in linear.reasons}


def test_training_equals_an_eager_one_with_the_same_casts(ranks: Ranks) -> None:
    expected = oracle()
    [one] = ranks.run(1, train, deadline=120.0, fp8_health_every=1)
    assert_close_relative(one["health"], expected["health"], 1e-6, atol=1e-12, what="health")
    assert_close_relative(one["losses"], expected["losses"], 1e-6, what="losses")
    assert_close_relative(one["params"], expected["params"], 1e-6, atol=1e-8, what="weights")
    assert expected["losses"][1:] != oracle(fp8=False)["losses"][1:]
    assert reasons(one["plan"], "forward") == reasons(one["plan"], "backward") == REASONS
    fp8 = f"fp8: {len(FP8_LAYERS)} of {len(FP8_LAYERS) + len(REASONS)} linear layers, in 16 bits: "
    assert fp8 in one["summary"]
    assert "excluded by fp8_exclude (1)" in one["summary"]
    # All ranks take equal batches, so two are one.
    for rank in ranks.run(2, train_by_stages, deadline=180.0):
        for found in rank:
            assert_close_relative(found["losses"], one["losses"], 1e-6, what="losses")
            assert_close_relative(found["params"], one["params"], 1e-6, atol=1e-8, what="weights")


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_with_a_scale_for_each_row_equals_an_eager_one(ranks: Ranks, world_size: int) -> None:
    expected = oracle(by_row=True)
    for found in ranks.run(world_size, train, deadline=180.0, fp8_recipe="rowwise", fp8_health_every=1):
        assert_close_relative(found["losses"], expected["losses"], 1e-6, what="losses")
        assert_close_relative(found["params"], expected["params"], 1e-6, atol=1e-8, what="weights")
        assert_close_relative(found["health"], expected["health"], 1e-6, atol=1e-12, what="health")
        assert f"fp8 rowwise: {len(FP8_LAYERS)} of" in found["summary"]


@pytest.mark.parametrize(
    ("world_size", "kind", "by_row", "options"),
    [
        (1, "nf4", False, {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}),
        (2, "nf4", True, {}),
        (2, "int8", False, {"prefetch": False}),
    ],
)
def test_training_with_packed_frozen_weights_equals_an_eager_one(
    ranks: Ranks, world_size: int, kind: Any, by_row: bool, options: dict[str, Any]
) -> None:
    expected = oracle(by_row=by_row, frozen_dtype=kind)
    assert expected["losses"][1:] != oracle(by_row=by_row)["losses"][1:]
    # A weight that is dequantized in fp8 has no shares of elements.
    shares = () if by_row else ("frozen.weight/weight_underflow", "frozen.weight/weight_overflow")
    del expected["params"]["frozen.weight"]  # codes
    options = {"frozen_dtype": kind, "fp8_recipe": "rowwise" if by_row else "tensorwise", **options}
    for found in ranks.run(world_size, train, deadline=180.0, fp8_health_every=1, **options):
        assert_close_relative(found["losses"], expected["losses"], 1e-6, what="losses")
        assert found["params"].pop("frozen.weight").dtype is torch.int32
        assert_close_relative(found["params"], expected["params"], 1e-6, atol=1e-8, what="weights")
        numbers = {name: number for name, number in expected["health"].items() if name not in shares}
        assert_close_relative(found["health"], numbers, 1e-6, atol=1e-12, what="health")
        products = [linear for graph in found["plan"].graphs for linear in graph.linears if "frozen" in linear.weight]
        assert {dtype for linear in products for _, dtype in linear.products} == {"fp8"}


class Expert(nn.Module):
    """Has a layer that computes the rows with a large first element, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.expert, self.last = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, rows = self.first(x), (x[:, 0] > 1).nonzero().squeeze(1)
        return self.last(hidden.index_add(0, rows, self.expert(hidden[rows])))


def expert_losses(model: nn.Module, step: Callable[[int], AbstractContextManager[Any]]) -> list[float]:
    losses = []
    for index, largest in enumerate((5.0, 5.0, 1.0, 5.0)):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(index)).clamp(max=largest)
        with step(index), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def train_an_expert() -> tuple[list[float], Plan]:
    model = Expert()
    with engine_for(model, **OPTIONS) as engine, patch("torch._dynamo.config.capture_dynamic_output_shape_ops", True):
        return expert_losses(model, lambda _: engine.train_step()), engine.session.plans.plan


def test_a_layer_that_may_get_no_rows_stays_in_16_bits(ranks: Ranks) -> None:
    model = with_fp8_layers(Expert(), ("first", "last"))
    expected = expert_losses(model, lambda index: patch.object(Fp8Linear, "on", index > 0))
    [(losses, plan)] = ranks.run(1, train_an_expert, deadline=120.0)
    assert_close_relative(losses, expected, 1e-6, what="losses")
    assert reasons(plan, "forward") == {"expert.weight": "sizes that depend on values, and may be 0"}


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).square())


FAULT, AFTER = 3, 2  # optimizer step, counted from 1, and steps after it


def train_with_a_fault(where: str, every: int) -> dict[str, Any]:
    """Make one rank's activations or gradients infinite in one step. Return norms, warnings and first matrices."""
    model, norms = Squares(), []
    options = OPTIONS | {"fp8_health_every": every, "emulate_cuda_graph_model": True}
    with engine_for(model, **options) as engine, logged("lightning_zero.sharding.fp8_health") as lines:
        optimizer = sgd(model)
        for step in range(1, FAULT + AFTER + 1):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            faulty = step == FAULT and engine.rank == engine.world_size - 1
            with engine.train_step(), torch.autocast("cpu", torch.bfloat16):
                loss = model(x * (1e25 if faulty and where == "forward" else 1)).float().mean()
            (loss * (float("inf") if faulty and where == "backward" else 1)).backward()
            with engine.optimizers.stepping(optimizer, clip=CLIP) as norm:
                optimizer.step()
            assert norm is not None
            norms.append(norm.item())
            optimizer.zero_grad()
        assert engine.fp8_health is not None
        engine.fp8_health.read()
        return {"norms": norms, "lines": lines, "nonfinite": engine.fp8_health.nonfinite}


@pytest.mark.parametrize(
    ("where", "every", "first"),
    [("forward", 1, ["down.weight/input"]), ("backward", 5, [f"{n}.weight/output_gradient" for n in ("down", "up")])],
)
def test_infinity_on_one_rank_reaches_the_norm_and_is_named(
    ranks: Ranks, where: str, every: int, first: list[str]
) -> None:
    found = ranks.run(2, train_with_a_fault, where, every, deadline=120.0)
    for rank, result in enumerate(found):
        finite = [math.isfinite(norm) for norm in result["norms"]]
        assert finite == [step < FAULT for step in range(1, FAULT + AFTER + 1)]
        # The other rank's matrices are infinite or NaN after the optimizer has written the weights.
        expected = first if rank == 1 else ["up.weight/weight"]
        assert [*result["nonfinite"]][: len(expected)] == expected
        step = result["nonfinite"][expected[0]]
        assert step == FAULT + (rank == 0)
        [line] = result["lines"]
        assert f"on rank {rank}, since optimizer step {step}" in line
        assert f"first in {expected[0]}" in line


def wrong_device() -> str:
    """Return the error of an engine on a GPU without fp8 products."""
    with engine_for(None, **OPTIONS) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.session, "_mesh", SimpleNamespace(device=torch.device("cuda")))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        with pytest.raises(UnsupportedError) as error:
            engine.session.check(engine.config)
    return str(error.value)


def test_a_device_without_fp8_is_refused_with_those_that_have_it(ranks: Ranks) -> None:
    [message] = ranks.run(1, wrong_device)
    assert "NVIDIA A100 has compute capability 8.0" in message
    assert "H100" in message
