"""Reports about fp8 matrices: windows of optimizer steps, memory of the table, and warnings."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.sharding.fp8_health import Fp8Health


class Layers:
    """Stands for an executor and its records; ``tables`` has what graphs would write to."""

    def __init__(self, *names: str) -> None:
        self.tables: dict[int, Tensor] = {}
        self.device, self.rank = torch.device("cpu"), 0
        self.parameters = SimpleNamespace(set_fp8_health=self.tables.__setitem__)
        self.live = [SimpleNamespace(index=n, name=name, shape=torch.Size((4, 4))) for n, name in enumerate(names)]
        self.live.append(SimpleNamespace(index=9, name="bias", shape=torch.Size((4,))))

    def health(self, every: int) -> Fp8Health:
        executor: Any = self
        return Fp8Health(executor, executor, every)

    def __len__(self) -> int:
        return len(self.live)

    def note(self, layer: int, matrix: int, *numbers: float) -> None:
        row = self.tables[layer][matrix, : len(numbers)]
        row.copy_(torch.maximum(row, torch.tensor(numbers)))


def test_a_report_has_the_largest_numbers_since_the_last_one() -> None:
    layers = Layers("a")
    health = layers.health(every=2)
    assert health.before_forward()
    assert not health.before_forward()
    for amax in (4.0, 3.0, 2.0, 1.0):
        layers.note(0, 0, amax, 0.25, 0.0)
        layers.note(0, 1, amax)
        health.after_step()
        if amax == 3.0:
            assert health.values == {}  # the copy may be under way
            assert health.read()["a/input_amax"] == 4.0
    assert health.read() == {
        "a/input_amax": 2.0,
        "a/input_underflow": 0.25,
        "a/input_overflow": 0.0,
        "a/weight_amax": 2.0,
    }


def test_the_steps_since_the_last_report_are_reported_at_the_end() -> None:
    layers = Layers("a")
    health = layers.health(every=2)
    found: list[tuple[int, float]] = []

    def train(*amaxes: float, interrupted: bool = False) -> None:
        for number, amax in enumerate(amaxes, 1):
            health.before_forward()
            layers.note(0, 0, amax)
            if not interrupted or number < len(amaxes):
                health.after_step()
        found.clear()
        health.finish(lambda: found.append((health.steps, health.values["a/input_amax"])))

    train(5.0, 4.0, 3.0)
    assert found == [(1, 3.0)]
    train(2.0, 1.0)  # the window begins again
    assert found == [(2, 2.0)]
    train(4.0, 3.0, 2.0, 8.0, interrupted=True)
    assert found == [(1, 8.0)]
    train(7.0, interrupted=True)
    assert found == [(0, 7.0)]
    train(4.0, 2.0, 1.0, 1.0)
    assert found == [(2, 1.0)]
    before = health.values
    health.finish(lambda: pytest.fail("there is nothing to report"))
    health.before_forward()  # interrupted before a layer has raised numbers
    health.finish(lambda: pytest.fail("there is nothing to report"))
    assert health.values is before


def test_infinity_in_an_interrupted_step_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    layers = Layers("a")
    health = layers.health(every=100)
    health.before_forward()
    health.after_step()
    health.before_forward()
    layers.note(0, 0, math.inf)
    with caplog.at_level(logging.WARNING):
        health.finish()
    assert health.nonfinite == {"a/input": 2}
    assert len(caplog.records) == 1


def test_new_layers_get_new_memory_which_is_reported_to_the_caller() -> None:
    layers = Layers("a")
    health = layers.health(every=1)
    health.before_forward()
    before = layers.tables[0]
    layers.live.append(SimpleNamespace(index=1, name="b", shape=torch.Size((4, 4))))
    assert health.before_forward()
    assert set(layers.tables) == {0, 1}
    assert layers.tables[0].data_ptr() != before.data_ptr()


def test_a_training_that_has_recovered_is_warned_of_again(caplog: pytest.LogCaptureFixture) -> None:
    layers = Layers("a", "b")
    health = layers.health(every=1)
    health.before_forward()
    with caplog.at_level(logging.WARNING):
        for step, amax in enumerate((1.0, math.nan, math.inf, 1.0, 1.0, math.inf, 1.0), 1):
            layers.note(1, 0, amax)
            health.after_step()
            if step in (3, 4):
                assert health.nonfinite == {"b/input": 2}
        assert health.nonfinite == {"b/input": 6}
    assert [record.args[1] for record in caplog.records] == [2, 6]  # type: ignore[index]
