"""``memory=`` under a Trainer and under Fabric: the plan, and the hint in out-of-memory errors."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero import PlanReport
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge
from tests.helpers.fabric import closing, make_fabric, network, set_up
from tests.helpers.trainer import Regression, close, fitted, make_loader, make_strategy, make_trainer
from tests.ranks.pool import Ranks

GIB = 2**30
TOTAL = 100 * GIB


class Full(MemoryGauge):
    """A device that is full of activations."""

    reports_memory = True

    def start(self, anew: bool = False) -> None:
        pass

    def read(self) -> DeviceMemory:
        return DeviceMemory(TOTAL, 2**30, TOTAL - 2**30, TOTAL - 2**30, 2**20)


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


class Greedy(Regression):
    def training_step(self, batch: Any, index: int) -> Any:
        if index == 1:
            raise out_of_memory()
        return super().training_step(batch, index)


def notes(memory: Any, **options: Any) -> list[str]:
    torch._dynamo.reset()
    module, trainer = Greedy(), make_trainer("compiled", strategy=make_strategy("compiled", memory=memory, **options))
    with (
        patch("lightning_zero.compile.session.MemoryGauge", Full),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        trainer.fit(module, make_loader("compiled", 3))
    close(module)
    return caught.value.__notes__


def test_an_out_of_memory_error_says_what_to_try(ranks: Ranks) -> None:
    ([note],) = ranks.run(1, notes, None)
    assert note.startswith("lightning_zero: pass ZeroStrategy(memory='auto')")
    ([note],) = ranks.run(1, notes, "auto")
    assert note.startswith("lightning_zero: memory='auto' was planned for.")
    assert "take fewer samples in a batch" in note


def raise_it(*_: Any) -> None:
    raise out_of_memory()


def fabric_notes() -> list[str]:
    fabric, net = make_fabric("eager", memory="auto", offload=("optimizer",)), network()
    with patch("lightning_zero.compile.session.MemoryGauge", Full):
        model, _ = set_up(fabric, net)
    next(net.children()).register_forward_hook(raise_it)
    with closing(model), pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.zeros(2, 23))
    return caught.value.__notes__


def test_a_loop_of_fabrics_is_told_likewise(ranks: Ranks) -> None:
    ([note],) = ranks.run(1, fabric_notes)
    assert "memory='auto' was planned for." in note


def validated() -> bool:
    module, trainer = Regression(), make_trainer("eager", memory=1.0)
    prepare, taken = trainer.strategy._prepare_module, []

    def and_look(*args: Any) -> None:
        prepare(*args)
        taken.append(trainer.strategy._require_engine().executor.weights.uses_epoch_lock())

    trainer.strategy._prepare_module = and_look
    trainer.validate(module, make_loader("eager", 2), verbose=False)
    close(module)
    return taken == [True]


def test_where_nothing_is_trained_ranks_read_each_others_weights_at_once(ranks: Ranks) -> None:
    assert all(ranks.run(2, validated)), "no plan comes, and ranks may evaluate unevenly"


def planned(home: str) -> list[Any]:
    report = PlanReport(home)
    with fitted("eager", steps=2, strategy=make_strategy("eager", memory=1.0), callbacks=[report]) as (_, trainer):
        plan = trainer.strategy.memory_plan
        return [str(plan), plan.as_dict(), trainer.strategy._require_engine().config.memory]


def test_the_plan_is_an_object_and_stands_in_the_report(ranks: Ranks, tmp_path: Path) -> None:
    ((text, found, memory),) = ranks.run(1, planned, str(tmp_path))
    assert memory == 1.0
    assert text.startswith("Memory plan, estimated before the first step, without activations. The expected peak")
    assert found["limit"] == 2**30
    assert json.loads((tmp_path / "memory.json").read_text()) == json.loads(json.dumps(found))
    assert (tmp_path / "memory.txt").read_text().strip() == text
