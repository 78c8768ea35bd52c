"""`state_dtype="bf16"` in an engine.

The same training on any number of ranks, half the memory, and back again.
"""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.optimizer_steps import (
    Event,
    Lion,
    forget_one_state,
    load_own_state,
    other_settings,
    train_sharded_steps,
    unfreeze_and_add,
)
from tests.helpers.sharded import engine_for, train_step, whole_params, whole_state
from tests.ranks.pool import Ranks

STEPS = 6


class Sums(nn.Module):
    """Its gradients are small multiples of 6, which means over 2 and 3 ranks leave exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large, self.small, self.other = nn.Linear(61, 70), nn.Linear(9, 9), nn.Linear(65, 64, bias=False)

    def forward(self, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        layers: tuple[nn.Linear, ...] = (self.large, self.small, self.other)
        batches = [torch.randint(-4, 5, (2, layer.in_features), generator=rng).float() for layer in layers]
        return 6 * sum((layer(x).sum() for layer, x in zip(layers, batches, strict=True)), torch.zeros(()))


def train(emulate: bool = False, come_and_go: bool = False, **options: Any) -> dict[str, Any]:
    model = Sums()
    options |= {"emulate_cuda_graph_step": emulate, "offload_buffer_mb": 0.01}
    with engine_for(model, "eager", **options) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        for step in range(STEPS):
            if come_and_go and step in (2, 4):
                dtype = None if step == 2 else "bf16"
                engine.configure(replace(engine.config, tuning=replace(engine.config.tuning, state_dtype=dtype)))
            train_step(engine, optimizer, partial(model, step))
        entries = {name: optimizer.state[param] for name, param in model.named_parameters()}
        kinds = {name: {value.dtype for value in kept.values() if value.dim()} for name, kept in entries.items()}
        layout = engine.optimizers.stepper(optimizer).layout
        roles = memory_by_role(engine, [optimizer])
        values = {"params": whole_params(engine, model), "state": whole_state(engine, optimizer)}
        return {"values": values, "kinds": kinds, "roles": roles, "segments": len(layout.runs if layout else [])}


NARROW, WIDE = torch.bfloat16, torch.float32
KINDS = {
    "large.weight": {NARROW},
    "large.bias": {WIDE},
    "small.weight": {WIDE},
    "small.bias": {WIDE},
    "other.weight": {NARROW},
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.exhaustive_variants("3")
def test_any_number_of_ranks_and_any_way_to_step_give_the_same_bits(ranks: Ranks, world_size: int) -> None:
    (alone,) = ranks.run(1, train, state_dtype="bf16")
    assert alone["kinds"] == KINDS
    for options in ({}, {"emulate": True}, {"offload": ("optimizer",)}):
        for found in ranks.run(world_size, train, state_dtype="bf16", **options):
            torch.testing.assert_close(found["values"], alone["values"], rtol=0, atol=0)
            assert found["kinds"] == KINDS
            assert found["segments"] == 2, "what is narrow, and what is not, are neighbours"


def test_memory_is_counted_as_it_is(ranks: Ranks) -> None:
    (narrow,), (wide,) = ranks.run(1, train, state_dtype="bf16"), ranks.run(1, train)
    elements = sum(-(-numel // 32) * 32 for numel in (61 * 70, 65 * 64))
    assert wide["roles"]["optimizer_state"] - narrow["roles"]["optimizer_state"] == 2 * 2 * elements


def test_the_option_may_change_while_there_is_state(ranks: Ranks) -> None:
    (found,) = ranks.run(1, train, come_and_go=True, state_dtype="bf16")
    assert found["kinds"] == KINDS
    (narrow,) = ranks.run(1, train, state_dtype="bf16")
    for key, value in narrow["values"]["params"].items():  # steps of 0.02 at most, of which noise is a small part
        torch.testing.assert_close(found["values"]["params"][key], value, rtol=0, atol=0.1 * STEPS * 0.02)


def refuse() -> tuple[str, str]:
    model, found = Sums(), []
    with engine_for(model, "eager", state_dtype="bf16") as engine:
        for make in (Lion, lambda params: torch.optim.AdamW(params, differentiable=True)):
            with engine.registered_parameters(), pytest.raises(UnsupportedError) as caught:
                engine.optimizers.check(make(list(model.parameters())))
            found.append(str(caught.value))
    with engine_for(Sums().double(), "eager", state_dtype="bf16") as engine:
        assert engine.module is not None
        with pytest.raises(UnsupportedError) as caught:
            engine.optimizers.check(torch.optim.AdamW(engine.module.parameters()))
    return found[0], str(caught.value)


def test_what_cannot_be_narrow_is_refused_by_name(ranks: Ranks) -> None:
    ((unknown, double),) = ranks.run(1, refuse)
    assert "rounds the state of Lion" in unknown
    assert "Register it with lightning_zero.register_rule" in unknown
    assert "but its parameters are float64" in double
    with pytest.raises(ValueError, match="state_dtype='fp8' must be 'bf16', '8bit' or None"):
        Tuning(state_dtype="fp8")  # type: ignore[arg-type]


EVENTS: list[tuple[str, Event]] = [
    ("AdamW", unfreeze_and_add),
    ("SGD", load_own_state),
    ("ASGD", forget_one_state),
    ("NAdam", other_settings),
    ("a user's own", forget_one_state),
]
WAYS: list[tuple[bool, dict[str, Any]]] = [
    (False, {}),
    (True, {}),
    (True, {"offload": ("optimizer",), "offload_buffer_mb": 0.0001}),
]


def train_in_all_ways(events: list[tuple[str, Event]]) -> list[str]:
    """Return the differences with narrow state of every size."""
    wrong = []
    with patch("lightning_zero.optim.bf16_state.MIN_NUMEL", 1):
        for name, event in events:
            first, *others = [
                train_sharded_steps(name, event, emulate, state_dtype="bf16", **options) for emulate, options in WAYS
            ]
            kept = {dtype for entries in first[2][2][1] for _, dtype in entries}
            if NARROW not in kept:
                wrong.append(f"{name}, {event.__name__}: keeps {kept}")
            for (emulate, options), other in zip(WAYS[1:], others, strict=True):
                try:
                    torch.testing.assert_close(other[:2], first[:2], rtol=0, atol=0)
                    assert other[2][2] == first[2][2]
                except AssertionError as error:
                    wrong.append(f"{name}, {event.__name__}, emulate={emulate}, {options}: {error}")
    return wrong


@pytest.mark.parametrize(
    "events", [EVENTS[:2], pytest.param(EVENTS[2:], marks=pytest.mark.slow)], ids=["usual", "others"]
)
@pytest.mark.exhaustive_variants("others")
def test_whatever_happens_all_ways_to_step_give_the_same_bits(ranks: Ranks, events: list[tuple[str, Event]]) -> None:
    for wrong in ranks.run(2, train_in_all_ways, events, deadline=180):
        assert wrong == []
