"""Plans within a limit, from estimates instead of measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.cli.main import main
from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.memory_planner.inputs import EngineMemoryFacts
from lightning_zero.planning.estimate_training import Training, _facts, plan, plan_within_limit, with_first_step_peak
from lightning_zero.planning.fake_step import StepEstimate
from lightning_zero.planning.persistent_memory import OptimizerMemory, shard_parameters
from lightning_zero.planning.training_plan import PassEstimates, TrainingPlan
from lightning_zero.profiling.device_gauges import memory_limit
from lightning_zero.profiling.devices import Device, find_device

GIB = 2**30
KNOWN = EngineMemoryFacts(
    states=8 * GIB, masters=4 * GIB, full_weights=2 * GIB, ring=GIB // 4, offloadable=("optimizer",), gather_s=3e-12
)
CARD = replace(find_device("H100"), context=0.0)


class Estimates:
    """Estimates of a training that saves 20 GiB without recomputation, and ``hidden`` GiB more with it."""

    def __init__(self, hidden: float = 0.0) -> None:
        self.asked: list[EngineConfig] = []
        self.hidden = hidden

    def __call__(self, config: EngineConfig) -> TrainingPlan:
        self.asked.append(config)
        assert config.memory is None
        budget = config.activation_memory_budget
        saved = int(self.saved(budget) * GIB)
        step = StepEstimate(saved=saved, peak=saved, forward_s=0.05, backward_s=0.1)
        state = GIB // 4 if "optimizer" in config.offload else 8 * GIB
        roles = {"master_shard": 4 * GIB, "optimizer_state": state}
        return TrainingPlan(CARD, 2, 10**9, roles, PassEstimates(step, None, "", 0), 0, graphs=False)

    def saved(self, budget: float) -> float:
        return 20 * budget + self.hidden * (budget < 1)


def within(memory: float, hidden: float = 0.0, **options: Any) -> tuple[TrainingPlan, Estimates]:
    estimates = Estimates(hidden)
    return plan_within_limit(EngineConfig(memory=memory, **options), estimates, KNOWN, 1), estimates


def test_what_fits_is_estimated_once_and_the_rest_goes_to_weights() -> None:
    found, estimates = within(33)
    assert len(estimates.asked) == 1
    assert found.memory is not None
    assert found.memory.chosen.weights == GIB
    assert found.roles["unsharded_cache"] == GIB
    assert found.peak == found.memory.peak == 33 * GIB


def test_a_choice_is_estimated_and_mended_where_it_does_not_do_what_was_thought() -> None:
    found, estimates = within(26, hidden=6)
    budgets = [config.activation_memory_budget for config in estimates.asked]
    assert budgets[:2] == [1.0, 0.5]
    assert budgets[2] < 0.5
    assert found.memory is not None
    assert found.memory.peak <= 26 * GIB


class Coarse(Estimates):
    """Estimates in which all shares below 1 save the same."""

    def saved(self, budget: float) -> float:
        return 20 if budget == 1 else 13


def test_what_was_estimated_not_to_fit_is_not_chosen_because_less_has_room_to_spare() -> None:
    estimates = Coarse()
    found = plan_within_limit(EngineConfig(memory=30), estimates, KNOWN, 1)
    assert [config.activation_memory_budget for config in estimates.asked] == [1.0, 0.8, 0.9]
    assert found.memory is not None
    assert found.memory.chosen.activation_memory_budget == 0.9
    assert found.memory.fits
    assert found.peak <= 30 * GIB


def test_what_is_set_by_hand_is_estimated_as_it_is() -> None:
    found, estimates = within(20, offload=("optimizer",), activation_memory_budget=0.9)
    assert {(c.offload, c.activation_memory_budget) for c in estimates.asked} == {(("optimizer",), 0.9)}
    assert found.memory is not None
    assert found.memory.missing > 0


@pytest.mark.parametrize("memory", [10, 14, 20, 25, 30, 34])
def test_what_is_said_to_fit_does(memory: float) -> None:
    found, _ = within(memory)
    assert found.memory is not None
    assert found.memory.fits == (found.peak <= memory * GIB)
    assert found.as_dict()["memory"]["fits"] == found.memory.fits


def first_step(memory: float, eager: float, least: float) -> tuple[float, bool, int]:
    """Return the GiB of the first step, True if all fits, and the number of offloaded passes."""
    found, _ = within(memory)
    passes = replace(found.passes, eager=StepEstimate(peak=int(eager * GIB)))
    asked: list[None] = []

    def held() -> StepEstimate:
        asked.append(None)
        return StepEstimate(peak=int(least * GIB))

    told = with_first_step_peak(replace(found, passes=passes), held)
    assert told.memory is not None
    assert told.memory.first_step is not None
    assert told.first_peak == told.memory.first_step
    return told.memory.first_step / GIB, told.memory.fits, len(asked)


def test_a_first_step_has_no_state_of_optimizers_beside_its_activations() -> None:
    # 4 GiB of masters and 1 of weights that stay; 8 more of state once the pass is over.
    assert first_step(33, 27, 3) == (32, True, 0)
    assert first_step(33, 2, 2) == (13, True, 0)


def test_what_a_first_step_saves_leaves_as_far_as_there_is_no_room() -> None:
    assert first_step(33, 40, 3) == (33, True, 1)
    most, fits, _ = first_step(33, 40, 30)
    assert (most, fits) == (35, False)


def test_without_a_limit_a_first_step_that_would_fill_the_device_leaves_as_far() -> None:
    step = StepEstimate(peak=20 * GIB)
    found = TrainingPlan(CARD, 2, 10**9, {"master_shard": 40 * GIB}, PassEstimates(step, None, "", 0), 0, graphs=False)
    limit = int(memory_limit(None, CARD.memory))
    for eager, least, expected in ((20, 2, 60 * GIB), (38, 2, limit), (38, 35, 75 * GIB)):
        passes = replace(found.passes, eager=StepEstimate(peak=eager * GIB))
        told = with_first_step_peak(replace(found, passes=passes), lambda least=least: StepEstimate(peak=least * GIB))  # type: ignore[misc]
        assert (told.first_peak, told.memory) == (expected, None)


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.silu(layer(x)) * x
        return x.square().mean()


def test_a_module_is_planned_within_less_than_it_takes() -> None:
    training = Training(loss=lambda net, batch: net(batch))
    card = Device("tiny", 10**9, 1e12, 1e12, 1e12, 1e11, context=0.0)
    with torch.device("meta"):
        net, batch = Net(), torch.empty(4096, 64)
    whole = plan(net, batch, device=card, training=training)
    assert whole.memory is None
    less = plan(net, batch, device=card, training=training, memory=0.75 * whole.peak / GIB)
    assert less.memory is not None
    assert less.memory.chosen.activation_memory_budget < 1.0
    assert less.passes.compiled is not None
    assert whole.passes.compiled is not None
    assert less.passes.compiled.saved < whole.passes.compiled.saved
    # Eagerly it saves more than that. Six pairs of activations of 1 MiB, of which backward needs a few at a time.
    assert less.passes.eager is not None
    assert less.memory.first_step is not None
    assert less.memory.first_step <= less.memory.limit < less.stays + less.passes.eager.peak


def test_master_weights_of_a_large_model_lie_on_the_host_where_it_does_not_fit_otherwise() -> None:
    training = Training(loss=lambda net, batch: net(batch))
    card = Device("large", 10**11, 1e12, 1e12, 1e12, 1e11, context=0.0)
    with torch.device("meta"):
        net, batch = Net(8192, 2), torch.empty(8, 8192)
    masters = sum(param.nbytes for param in net.parameters() if param.dim() == 2)
    whole = plan(net, batch, device=card, training=training)
    limit = (whole.peak - 2.5 * masters) / GIB + 0.25  # state is twice as large; a quarter of a GiB are buffers
    by_hand = {"tuning": Tuning(grad_aliasing=False)}
    found = plan(net, batch, device=card, training=training, memory=limit, **by_hand)
    assert found.memory is not None
    assert {"optimizer", "parameters"} <= set(found.memory.chosen.offload)
    assert found.roles["master_shard"] == whole.roles["master_shard"] - masters
    cuts, kept = shard_parameters(net, 2), OptimizerMemory(states=2 * masters, temporary=0, words="")
    config = EngineConfig(compute_dtype=torch.bfloat16)
    for hosts, may in ((1, True), (2, False)):
        assert ("parameters" in _facts(cuts, kept, config, card, 2, hosts).offloadable) == may


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Manual(Net):
    automatic_optimization = False


@pytest.mark.exhaustive  # see distributed/test_planned_gradients.py
def test_gradients_lie_over_copies_where_a_step_has_one_micro_batch_and_does_not_fit_otherwise() -> None:
    card = Device("large", 10**11, 1e12, 1e12, 1e12, 1e11, context=0.0)
    with torch.device("meta"):
        net, manual, batch = Net(1024, 2), Manual(1024, 2), torch.empty(4096, 1024)
    gradients = sum(param.nbytes for param in net.parameters())

    def planned(net: nn.Module, memory: float | None, accumulate: int = 1, ranks: int = 1, **more: Any) -> TrainingPlan:
        training = Training(lambda net, batch: net(batch), sgd, accumulate, ranks_per_host=1)
        return plan(net, batch, ranks, card, training=training, memory=memory, **more)

    whole = planned(net, None)
    limit = (whole.peak - gradients / 2) / GIB
    found = planned(net, limit)
    assert found.memory is not None
    assert found.memory.fits
    assert (found.memory.chosen.grad_aliasing, found.memory.chosen.offload) == (True, ())
    assert found.memory.chosen.activation_memory_budget == 1.0
    assert found.roles["gradient"] == 0 < whole.roles["gradient"]
    assert "over copies of weights, in bfloat16" in str(found.memory)
    assert found.peak == whole.peak - gradients + found.roles["unsharded_cache"]
    # In the first step, which shows that it is needed, they have memory of their own.
    assert found.passes.eager is not None
    assert found.memory.first_step is not None
    assert found.passes.eager.peak > 2 * gradients, "so that it shows no earlier"
    assert found.memory.first_step == min(found.stays + gradients + found.passes.eager.peak, found.memory.limit)
    enough = planned(net, whole.peak / GIB + 0.01)
    others = planned(net, limit, 2), planned(net, limit, ranks=2), planned(manual, limit)
    for other in (enough, *others, planned(net, limit, precision="32-true"), planned(net, limit, stage=1)):
        assert other.memory is not None
        assert not other.memory.chosen.grad_aliasing


SCRIPT = """
import lightning as L, torch

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(8, 64), 4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


def test_the_command_prints_a_plan_and_its_status_says_whether_it_fits(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["plan", f"{script}:Module", "--device", "L4", "--memory", "auto"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Memory plan, estimated" in shown
    assert "offloaded to the host" in shown
    assert "Copies to and from the host are estimated at 50 GB/s in each direction." in shown
    assert "Times are estimated from operations and bytes" in shown
    assert main([*command[:-1], "0.5", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["missing"] > 0
    assert found["known"]["parameters, bytes"] == "counted"
    assert "of a pass estimated" in found["memory"]["seconds_known"]
