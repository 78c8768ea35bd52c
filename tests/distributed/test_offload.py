"""State of optimizers on the host: training is the same to the last bit, in every way to step."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import DisableTorchFunctionSubclass, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.engine import engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.staging_ring import RingPass, StagedChunk, StagingRing
from tests.helpers.lion import Lion
from tests.helpers.models import build
from tests.helpers.optimizer_steps import (
    OPTIMIZERS,
    Event,
    Parts,
    forget_one_state,
    load_own_state,
    nothing,
    other_settings,
    train_sharded_steps,
    unfreeze_and_add,
)
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks

ON_HOST: dict[str, Any] = {"offload": ("optimizer",), "offload_buffer_mb": 0.0001}  # some stretches for each segment


def stay(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def come_and_go(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The option changes while there is state."""
    engine = engine_of(model)
    assert engine is not None
    if step in (4, 9):
        engine.configure(replace(engine.config, offload=() if engine.config.offload else ("optimizer",)))


def other_buffers(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The size of the buffers changes, as by a plan after a measurement; state stays in place."""
    engine = engine_of(model)
    assert engine is not None
    if engine.config.offload and step in (4, 9):
        before = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
        tuning = replace(engine.config.tuning, offload_buffer_mb=0.5 if step == 4 else 0.0001)
        engine.configure(replace(engine.config, tuning=tuning))
        assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == before


OWN = [
    ("AdamW", nothing),
    ("SGD", nothing),
    ("ASGD", load_own_state),
    ("AdamW", unfreeze_and_add),
    ("Adam", come_and_go),
    ("AdamW", other_buffers),
]
CAPTURED = [
    ("AdamW", other_settings),
    ("Adam", forget_one_state),
    ("RMSprop", nothing),
    ("NAdam", load_own_state),
    ("Rprop", nothing),
    ("a user's own", nothing),
    ("Adam", other_buffers),
]


class Counted(RingPass):
    """Notes how many loads pass at once."""

    most = 0

    def __init__(self, ring: StagingRing, loads: Sequence[StagedChunk]) -> None:
        super().__init__(ring, loads)
        Counted.most = max(Counted.most, len(loads))


def train_both_ways(cases: list[tuple[str, Event]], emulate: bool) -> list[str]:
    """Return the differences of each case with state on the host."""
    wrong = []
    for name, event in cases:
        expected = train_sharded_steps(name, stay if event is come_and_go else event, emulate)
        Counted.most = 0
        with (
            patch("lightning_zero.step.chunked_step.RingPass", Counted),
            patch("lightning_zero.optim.flat_runs.RingPass", Counted),
        ):
            found = train_sharded_steps(name, event, emulate, **ON_HOST)
        try:
            torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
            assert found[2] == expected[2]
            assert name == "ASGD" or Counted.most > found[2][0], "no segment was stepped in several stretches"
        except AssertionError as error:
            wrong.append(f"{name}, {event.__name__}: {error}")
    return wrong


@pytest.mark.parametrize(("cases", "emulate"), [(OWN, False), (CAPTURED, True)], ids=["own", "captured"])
@pytest.mark.exhaustive_variants("own")
def test_training_is_the_same_to_the_last_bit(ranks: Ranks, cases: list[tuple[str, Event]], emulate: bool) -> None:
    for wrong in ranks.run(2, train_both_ways, cases, emulate, deadline=120):
        assert wrong == []


def buffers_grow(emulate: bool) -> tuple[Any, Any, int]:
    """Training in which more is stepped from some step on, without and with room for all of it; how often buffers of
    another number were made.
    """
    made: list[int] = []
    resize = StagingRing.resize
    expected = train_sharded_steps("AdamW", unfreeze_and_add, emulate)
    with (
        patch("lightning_zero.offload.staging_ring.MAX_SLOT_BYTES", 1024),
        patch.object(StagingRing, "resize", lambda ring, nbytes: (made.append(nbytes), resize(ring, nbytes))[1]),
    ):
        found = train_sharded_steps("AdamW", unfreeze_and_add, emulate, offload=("optimizer",), offload_buffer_mb=0.5)
    return found[:2], expected[:2], len(made)


@pytest.mark.parametrize("emulate", [False, True], ids=["own", "captured"])
def test_more_to_step_passes_through_more_buffers(ranks: Ranks, emulate: bool) -> None:
    for found, expected, made in ranks.run(2, buffers_grow, emulate):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert made > 1


def when_it_comes(masters: bool) -> list[str]:
    """Note forwards, steps, and the beginning of copies for the next step."""
    seen: list[str] = []
    ahead = RingPass.prefetch
    model = build(Parts)
    others = {"offload": ("optimizer", "parameters"), "compute_dtype": torch.bfloat16} if masters else {}
    with (
        engine_for(model, emulate_cuda_graph_step=True, **ON_HOST | others) as engine,
        patch.object(RingPass, "prefetch", lambda through: (seen.append("comes"), ahead(through))[1]),
    ):
        with engine.registered_parameters():
            optimizer = OPTIMIZERS["AdamW"](model)
        for step in range(4):
            with engine.train_step():
                seen.append("forward")
                loss = model(torch.randn(6, 19), extra=True).float().square().mean()
            engine.cycle.before_backward()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                seen.append("step")
                optimizer.step()
            if step == 2:  # between steps the version may stay
                for state in optimizer.state.values():
                    state["exp_avg"].data.zero_()
    return seen


def test_state_comes_once_beside_forward_and_masters_beside_backward(ranks: Ranks) -> None:
    (seen,) = ranks.run(1, when_it_comes, False)
    assert seen[-6:] == ["comes", "forward", "step", "comes", "forward", "step"]
    (seen,) = ranks.run(1, when_it_comes, True)
    assert seen[-6:] == ["forward", "comes", "step", "forward", "comes", "step"]


def amid_a_step(refused: bool, **options: Any) -> dict[str, Any]:
    """Weights after steps, in each of which another optimizer's is refused while state is in buffers."""
    model, lerp = build(Parts), torch.Tensor.lerp_

    with (
        patch("lightning_zero.offload.staging_ring.MAX_SLOT_BYTES", 1024),
        patch("lightning_zero.offload.staging_ring.MIN_TENSORS_PER_SLOT", 1),
        engine_for(model, "eager", cuda_graph_step=False, **options) as engine,
    ):
        with engine.registered_parameters():
            first, last = list(model.parameters())[:-1], list(model.parameters())[-1:]
            optimizer, other = Lion(first, lr=0.01), torch.optim.AdamW(last)
        engine.optimizers.arrange([optimizer, other])

        def attempts(value: Any, *args: Any) -> Any:
            if refused:
                with pytest.raises(RuntimeError), engine.optimizers.stepping(other):
                    other.step()
            return lerp(value, *args)

        for step in range(4):
            with engine.train_step():
                loss = model(torch.randn(6, 19, generator=torch.Generator().manual_seed(step))).square().mean()
            engine.cycle.before_backward()
            loss.backward()
            with patch.object(torch.Tensor, "lerp_", attempts), engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            other.zero_grad()
        return whole_params(engine, model)


def test_a_step_that_is_refused_leaves_the_buffers_of_the_one_under_way(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, amid_a_step, False)
    (found,) = ranks.run(1, amid_a_step, True, offload=("optimizer",), offload_buffer_mb=0.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def configure_twice() -> list[tuple[str, ...]]:
    model = build(Parts)
    with engine_for(model, "eager") as engine:
        with engine.registered_parameters():
            optimizer = OPTIMIZERS["AdamW"](model)
        engine.optimizers.arrange([optimizer])
        engine.optimizers.stepper(optimizer)
        away = replace(engine.config, offload=("optimizer",))
        full = patch(
            "lightning_zero.step.optimizer_steps.move_state_to_host", side_effect=MemoryError("the host is full")
        )
        with full, pytest.raises(MemoryError):
            engine.configure(away)
        engine.configure(away)
        return [engine.config.offload, engine.optimizers.config.offload]


def test_options_that_could_not_be_put_in_force_are_when_they_are_given_again(ranks: Ranks) -> None:
    assert ranks.run(1, configure_twice) == [[("optimizer",)] * 2]


def refuse() -> str:
    model = build(Parts)
    with engine_for(model, "eager", **ON_HOST) as engine:
        with engine.registered_parameters():
            optimizer = OPTIMIZERS["Lion"](model)
        with pytest.raises(UnsupportedError) as caught:
            engine.optimizers.check(optimizer)
    return str(caught.value)


def test_an_optimizer_whose_rule_is_not_known_is_refused_by_name(ranks: Ranks) -> None:
    (message,) = ranks.run(1, refuse)
    assert "which needs the update rule of Lion" in message
    assert "Register it with lightning_zero.register_rule" in message


def copy_out(optimizer: torch.optim.Optimizer, find: Any) -> None:
    """Copy as state leaves a GPU. Here it is on the host already, and must not change."""
    for entries in optimizer.state.values():
        entries.update({key: value.clone() for key, value in entries.items()})


def left_behind(**options: Any) -> int:
    """Return the state that is still on the device after it moved to the host, without a search for cycles."""
    model = build(Parts)
    with engine_for(model, "eager", **options) as engine:
        with engine.registered_parameters():
            optimizer = OPTIMIZERS["AdamW"](model)
        engine.optimizers.arrange([optimizer])
        for _ in range(3):
            with engine.train_step():
                loss = model(torch.ones(4, 19)).square().sum()
            loss.backward()
            with engine.optimizers.stepping(optimizer, clip=1.0):
                optimizer.step()
            del loss
        state = [value for entries in optimizer.state.values() for value in entries.values() if value.numel() > 1]
        with DisableTorchFunctionSubclass():
            held = [StorageWeakRef(value.untyped_storage()) for value in state]
        assert len(held) >= 2
        del state
        gc.collect()
        gc.disable()
        try:
            with patch("lightning_zero.step.optimizer_steps.move_state_to_host", copy_out):
                engine.configure(replace(engine.config, offload=("optimizer",)))
            return sum(not one.expired() for one in held)
        finally:
            gc.enable()


@pytest.mark.parametrize("emulate", [False, True], ids=["own", "captured"])
def test_state_that_goes_to_the_host_leaves_the_device_at_once(ranks: Ranks, emulate: bool) -> None:
    assert ranks.run(1, left_behind, emulate_cuda_graph_step=emulate) == [0]
