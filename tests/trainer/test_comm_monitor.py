"""The numbers of a training on two ranks, in its logger."""

import time
from contextlib import nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zero import CommMonitor
from lightning_zero.compile import session
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.node_costs import DeviceSpeed
from lightning_zero.sharding.fp8_health import NUMBERS
from tests.helpers.callbacks import Lines
from tests.helpers.trainer import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    WIDTH,
    Regression,
    close,
    make_loader,
    make_strategy,
    make_trainer,
)
from tests.ranks.pool import Ranks

PEAK = 1e9
WEIGHTS = INPUTS * WIDTH + WIDTH * HIDDEN + HIDDEN * OUTPUTS
# Forward and both gradients of each layer, but for the gradient of the first one's input; of 3 samples on each rank.
FLOPS = 2 * 3 * (3 * WEIGHTS - INPUTS * WIDTH)

Logged = list[tuple[int, dict[str, float]]]


def _logged(kind: str, steps: int = 12, **arguments: Any) -> Logged:
    lines, module = Lines(), Regression()
    monitor = CommMonitor(every_n_steps=4, length_fn=lambda batch: batch[0].numel(), peak_flops=PEAK)
    callbacks = [monitor, *arguments.pop("callbacks", [])]
    trainer = make_trainer(kind, logger=lines, callbacks=callbacks, **arguments)
    trainer.fit(module, make_loader(kind, steps), make_loader(kind, 2, seed=1))
    close(module)
    logged = [(step, values) for step, values in lines.lines if "comm/gathered_mib" in values]
    assert monitor.values == (logged[-1][1] if trainer.is_global_zero else {})
    return logged


def test_every_fourth_step_is_logged(ranks: Ranks) -> None:
    [first, _] = ranks.run(2, _logged, "compiled")
    assert [step for step, _ in first] == [3, 7, 11], "where Lightning logs what was logged in these steps"
    assert "throughput/step_ms" not in first[0][1], "something was compiled in these"
    for _, values in first[1:]:
        per_step = values["throughput/step_ms"] / 1e3
        assert values["throughput/samples_per_sec"] == pytest.approx(6 / per_step)
        assert values["throughput/tokens_per_sec"] == pytest.approx(6 * INPUTS / per_step)
        assert values["throughput/tflops_per_device"] == pytest.approx(FLOPS / per_step / 1e12)
        assert values["throughput/mfu"] == pytest.approx(FLOPS / per_step / PEAK)
        # Every weight is so small that it stays for backward: gathered once, in whole rows of both ranks.
        assert 4 * WEIGHTS <= values["comm/gathered_mib"] * 2**20 <= 1.2 * 4 * WEIGHTS
        assert values["comm/reduced_mib"] * 2**20 >= 4 * WEIGHTS
        assert 4 * WEIGHTS / 2 <= values["memory/master_shard_mib"] * 2**20 <= 1.2 * 4 * WEIGHTS / 2
        assert values["memory/gradient_mib"] == values["memory/master_shard_mib"]
        assert values["memory/optimizer_state_mib"] == pytest.approx(2 * values["memory/master_shard_mib"], rel=0.2)
        assert values["replays/forward_backward"] == values["replays/optimizer_step"] == 0
        assert "comm/exposed_ms_estimated" not in values, "links between CPUs are not measured"


class Fp8Regression(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 48), nn.Linear(48, OUTPUTS))


class Stops(Fp8Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            raise KeyError("stop")


def _logged_fp8(every: int = 2, stops: bool = False) -> tuple[Logged, dict[str, float], float]:
    tuning = {"fp8_min_gain": 0, "fp8_health_every": every}
    strategy = make_strategy("compiled", linear_dtype="fp8", **tuning)
    lines, module = Lines(), Stops() if stops else Fp8Regression()
    trainer = make_trainer(
        "compiled", strategy=strategy, precision="bf16-mixed", logger=lines, callbacks=[CommMonitor(every_n_steps=4)]
    )
    with pytest.raises(KeyError, match="stop") if stops else nullcontext():
        trainer.fit(module, make_loader("compiled", 8))
    health = trainer.strategy.fp8_health()
    weight = module.state_dict()["net.2.weight"].abs().max().item()
    close(module)
    return lines.lines, health, weight


def test_the_health_of_fp8_layers_is_logged(ranks: Ranks) -> None:
    """Only the second layer's sizes are multiples of 16."""
    [(first, health, weight), _] = ranks.run(2, _logged_fp8)
    name = "net.2.weight"
    numbers = {f"{matrix}_{number}" for matrix in ("input", "weight", "output_gradient") for number in NUMBERS}
    assert set(health) == {f"{name}/{number}" for number in numbers}
    logged = [values for _, values in first if "comm/gathered_mib" in values]
    assert [{key for key in values if key.startswith("fp8/")} for values in logged] == 2 * [
        {"fp8/steps", *(f"fp8/{n}" for n in health)}
    ]
    assert logged[-1][f"fp8/{name}/weight_amax"] == pytest.approx(weight, rel=0.2)  # steps of 0.01


@pytest.mark.parametrize("stops", [False, True])
def test_the_last_steps_of_fp8_layers_are_logged_when_training_ends(ranks: Ranks, stops: bool) -> None:
    [(first, health, weight), _] = ranks.run(2, _logged_fp8, 3, stops)
    logged = [(step, values) for step, values in first if "fp8/steps" in values]
    last, values = logged[-1]
    assert (last, values["fp8/steps"]) == ((6, 1) if stops else (7, 2))
    assert [values["fp8/steps"] for _, values in logged[:-1]] == ([3] if stops else [3, 3])
    assert {name: value for name, value in values.items() if name != "fp8/steps"} == {
        f"fp8/{name}": value for name, value in health.items()
    }
    assert values["fp8/net.2.weight/weight_amax"] == pytest.approx(weight, rel=0.1)


def test_accumulated_batches_count_for_one_step(ranks: Ranks) -> None:
    [first, _] = ranks.run(2, _logged, "eager", accumulate_grad_batches=2, max_epochs=2)
    assert [step for step, _ in first] == [3, 7, 11]
    for _, values in first:
        per_step = values["throughput/step_ms"] / 1e3
        assert values["throughput/samples_per_sec"] == pytest.approx(2 * 6 / per_step)
        assert values["throughput/mfu"] == pytest.approx(2 * FLOPS / per_step / PEAK)


def _logged_with_links_and_replays() -> Logged:
    # A transfer takes a second and a node next to nothing: all is exposed.
    costs = CostModel(((1, 1.0), (1 << 30, 1.0)), DeviceSpeed({torch.float32: 1e15}, 1e15, 1e-9), beside=1.0)
    with patch.object(session, "measure_costs", lambda *_: costs):
        return _logged("compiled", strategy=make_strategy("compiled", emulate_cuda_graph_model=True))


def test_steps_that_replay_graphs_say_so_and_exposed_communication_comes_from_the_plan(ranks: Ranks) -> None:
    [first, _] = ranks.run(2, _logged_with_links_and_replays)
    assert [values["replays/forward_backward"] for _, values in first][1:] == [1, 1]
    exposed = [values.get("comm/exposed_ms_estimated") for _, values in first]
    assert exposed[0] is None
    assert all(ms is not None and ms == pytest.approx(2000, rel=0.01) for ms in exposed[1:]), "a gather and a reduce"


def _logged_beside_lightnings() -> Logged:
    class Own(CommMonitor):
        def __init__(self) -> None:
            super().__init__(every_n_steps=4)

    theirs = ThroughputMonitor(batch_size_fn=lambda batch: 5, length_fn=lambda batch: 70, window_size=2)
    lines, module = Lines(), Regression()
    trainer = make_trainer("eager", logger=lines, log_every_n_steps=4, callbacks=[Own(), theirs])
    trainer.fit(module, make_loader("eager", 8))
    close(module)
    return lines.lines


@pytest.mark.filterwarnings("ignore:.*flops_per_batch.*")
def test_sizes_of_batches_are_told_once(ranks: Ranks) -> None:
    [first, _] = ranks.run(2, _logged_beside_lightnings)
    ours = [values for _, values in first if "throughput/step_ms" in values]
    assert len(ours) == 2
    for values in ours:
        assert values["throughput/samples_per_sec"] == pytest.approx(2 * 5 / values["throughput/step_ms"] * 1e3)
        assert values["throughput/tokens_per_sec"] == pytest.approx(2 * 70 / values["throughput/step_ms"] * 1e3)
    assert any("train/samples_per_sec" in values for _, values in first), "Lightning's own goes on"


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_it_belongs_to_the_strategy() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False, callbacks=[CommMonitor()]
    )
    with pytest.raises(
        MisconfigurationException, match=r"CommMonitor looks at the engine of ZeroStrategy, but this is"
    ):
        trainer.fit(Regression(), make_loader("single"))
    with pytest.raises(MisconfigurationException, match=r"every_n_steps=0\): pass at least 1"):
        CommMonitor(every_n_steps=0)


def _hooks_seconds() -> float:
    """Return the median time of the callback's hooks in a batch without logging."""
    took: list[float] = []

    class Timed(CommMonitor):
        def on_train_batch_start(self, *args: Any) -> None:
            begun = time.perf_counter()
            super().on_train_batch_start(*args)
            took.append(time.perf_counter() - begun)

        def on_train_batch_end(self, *args: Any) -> None:
            begun = time.perf_counter()
            super().on_train_batch_end(*args)
            took[-1] += time.perf_counter() - begun

    module = Regression()
    trainer = make_trainer("eager", callbacks=[Timed(every_n_steps=1000)])
    trainer.fit(module, make_loader("eager", 60))
    close(module)
    return median(took)


def test_a_batch_that_is_not_logged_costs_next_to_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, _hooks_seconds)[0] < 1e-3
