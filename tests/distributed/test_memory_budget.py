"""``memory=``: plans for a simulated device."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph

from lightning_zero.memory_planner.planner import LIMIT_MARGIN
from lightning_zero.offload.saved_tensors import SavedTensorOffload
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge
from tests.helpers.measured import AGAIN, Blocks, same
from tests.helpers.models import build, make_batches
from tests.helpers.options import config
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import adamw, case_loss, engine_for, train_sharded
from tests.ranks.pool import Ranks

GIB, TOTAL = 2**30, 10**6
HELD, SAVED = 200_000, 100_000  # bytes of persistent memory, and of activations without recomputation


@dataclass
class Device:
    """Takes persistent memory and, at the peak, activations: all of them in an eager step."""

    eager: int = SAVED
    fuller: int = 0  # on rank 1
    may_leave: tuple[str, ...] = ("optimizer",)


class Gauge(MemoryGauge):
    """The gauge of that device."""

    reports_memory = True
    simulated: Device
    engine: Any = None

    def start(self, anew: bool = False) -> None:
        pass

    def read(self) -> DeviceMemory:
        session = Gauge.engine.session if Gauge.engine is not None else None
        if session is None or not session.plans.count:
            took = self.simulated.eager
        else:
            took = int(session._compiler.context().config.activation_memory_budget * SAVED)
        others = self.simulated.fuller * dist.get_rank()
        return DeviceMemory(TOTAL, others, HELD + took, HELD + took, HELD)


def train(
    device: Device | None, steps: int = 7, again: dict[str, Any] | None = None, accumulate: int = 1, **options: Any
) -> dict[str, Any]:
    """Return a training's losses, weights, compiling batches and final options.

    Args:
        again: continue with these options.
    """
    torch._dynamo.reset()
    model, said = build(Blocks), []
    if options.get("frozen_dtype"):
        for block in model.blocks:
            block[2].requires_grad_(False)
    graphs: list[int] = [0]
    before: list[int] = []
    reduced: list[int] = []
    stays = True
    Gauge.engine = None

    def count(what: str, graph: Graph) -> None:
        graphs[0] += what == "after"

    def note(*_: Any) -> None:
        before.append(graphs[0])
        reduced.append(engine.executor.counters().get("reduce_bytes", 0))

    gauge = patch("lightning_zero.compile.session.MemoryGauge", Gauge if device is not None else MemoryGauge)
    with (
        gauge,
        patch("lightning_zero.step.memory_controller.OFFLOADABLE", (device or Device()).may_leave),
        patch.object(Gauge, "simulated", device, create=True),
        engine_for(model, "aot_eager", observe=count, gather_group_mb=0.001, **options) as engine,
    ):
        Gauge.engine, engine.session.progress._report = engine, said.append
        optimizer = adamw(model)
        runs = []
        for chosen in (None, again) if again is not None else (None,):
            if chosen is not None:
                on_host = engine.optimizers._on_host
                engine.configure(config(**{**STILL, **chosen}))
                before.append(graphs[0])
                stays = engine.optimizers._on_host is on_host
            engine.optimizers.check(optimizer)
            engine.optimizers.arrange([optimizer])
            batches, told = make_batches(Blocks, steps * accumulate, 12), {"accumulate": accumulate, "announce": True}
            runs.append(train_sharded(engine, model, batches, optimizer, case_loss, before_batch=note, **told))  # type: ignore[arg-type]
        before.append(graphs[0])
        return {
            "losses": [loss for run in runs for loss in run.losses],
            "params": runs[-1].params,
            "compiles_in": [i for i, (a, b) in enumerate(zip(before, before[1:], strict=False)) if b > a],
            "activations": engine.session._compiler.context().config.activation_memory_budget,
            "offload": engine.optimizers.config.offload,
            "stays": stays,
            "buffers": engine.optimizers.config.tuning.offload_buffer_mb,
            "kept": {g.until for plan in engine.session.plans.plan.graphs for g in plan.gathers},
            "plan": None if engine.memory.plan is None else engine.memory.plan.as_dict(),
            "reduced": reduced[-1] - reduced[-1 - accumulate] if len(reduced) > accumulate else 0,  # in as many batches
            "said": said,
        }


STILL: dict[str, Any] = {
    "compile_backend": "aot_eager",
    "reduce_bucket_mb": 0.01,
    "gather_group_mb": 0.001,
}


def alike(ranks: Ranks, device: Device | None, steps: int = 7, world_size: int = 2, **options: Any) -> Any:
    """Return the common decision of all ranks; they train like eager code, bit for bit."""
    found = ranks.run(world_size, train, device, steps, **options)
    same_model = {name: value for name, value in options.items() if name == "frozen_dtype"}
    for mine, theirs in zip(found, ranks.run(world_size, train, None, steps, compile=False, **same_model), strict=True):
        assert mine["losses"] == theirs["losses"]
        assert same(mine["params"], theirs["params"])
        for key in ("compiles_in", "activations", "offload", "kept"):
            assert mine[key] == found[0][key]
        assert mine["plan"]["chosen"] == found[0]["plan"]["chosen"]
    return found[0]


def test_with_room_left_weights_stay_after_some_steps(ranks: Ranks) -> None:
    found = alike(ranks, Device(fuller=500_000), memory="auto")
    assert found["compiles_in"] == [1, AGAIN]
    assert (found["activations"], found["offload"]) == (1.0, ())
    assert "backward" in found["kept"]
    assert found["plan"]["fits"]
    [table] = [line for line in found["said"] if "Memory plan" in line]
    assert "measured" in table.splitlines()[0]


@pytest.mark.parametrize("full", [False, True])
def test_plans_apply_to_quantized_frozen_weights(ranks: Ranks, full: bool) -> None:
    if not full:
        assert "backward" in alike(ranks, Device(), memory="auto", frozen_dtype="nf4")["kept"]
        return
    device, memory = Device(eager=1000), (HELD + 0.5 * SAVED) / GIB
    found = alike(ranks, device, 13, memory=memory, frozen_dtype="nf4")
    assert found["activations"] < 1.0
    assert found["plan"]["measured"] <= found["plan"]["limit"]


@pytest.mark.slow
def test_what_a_first_step_shows_is_planned_away_before_anything_is_compiled(ranks: Ranks) -> None:
    # 0.8 of the eager step's memory count as activations: a fifth of them has to go, and after that all fits.
    memory = (HELD + 0.85 * SAVED) / GIB
    found = alike(ranks, Device(), world_size=1, memory=memory)
    assert found["compiles_in"][0] == 1
    assert len(found["compiles_in"]) <= 2
    assert found["activations"] < 1.0
    assert "after the first step" in found["said"][0]


def test_what_was_measured_to_be_too_much_is_compiled_once_more(ranks: Ranks) -> None:
    eager = Device(eager=1000)  # the first step shows nothing
    found = alike(ranks, eager, 13, memory=(HELD + 0.5 * SAVED) / GIB)
    assert found["compiles_in"] == [1, AGAIN]
    assert found["activations"] < 1.0
    assert found["plan"]["measured"] <= found["plan"]["limit"]
    assert "the peak is" in found["said"][-1]


@pytest.mark.slow
def test_activations_leave_where_none_may_be_computed_again(ranks: Ranks) -> None:
    memory = (HELD + 0.5 * SAVED) / GIB
    device = Device(eager=1000, may_leave=("optimizer", "activations"))
    found = alike(ranks, device, world_size=1, memory=memory, activation_memory_budget=0.9)
    assert (found["activations"], found["offload"]) == (0.9, ("activations",))
    assert found["compiles_in"] == [1, AGAIN]


def test_optimizer_state_goes_to_the_host_at_setup_where_the_rest_would_not_fit(ranks: Ranks) -> None:
    # A CPU does not report its memory: the number alone decides.
    buffer = {"offload_buffer_mb": 0.001}
    (enough,) = ranks.run(1, train, None, 1, memory=1.0)
    assert (enough["offload"], enough["plan"]["fits"]) == ((), True)
    (whole,) = ranks.run(1, train, None, 1, memory=1.0, **buffer)
    (less,) = ranks.run(1, train, None, 4, memory=(whole["plan"]["peak"] - 1) / GIB, **buffer)
    (by_hand,) = ranks.run(1, train, None, 4, offload=("optimizer",), **buffer)
    assert less["offload"] == ("optimizer",)
    assert less["compiles_in"] == by_hand["compiles_in"] == [1]
    assert less["plan"]["fits"]
    assert less["losses"] == by_hand["losses"]
    assert same(less["params"], by_hand["params"])


def train_with_few_buffers(device: Device | None, steps: int, **options: Any) -> dict[str, Any]:
    """Train with small staging buffers whose size is the default."""
    mb = options["offload_buffer_mb"]
    with (
        patch("lightning_zero.memory_planner.inputs.DEFAULT_BUFFER_MB", mb),
        patch("lightning_zero.memory_planner.choices.MIN_RING_BYTES", 1),
        patch("lightning_zero.offload.staging_ring.MAX_SLOT_BYTES", 1024),
    ):
        return train(device, steps, emulate_cuda_graph_step=True, **options)


def test_what_lies_on_the_host_passes_through_as_much_as_there_is_room_for_once_a_pass_was_measured(
    ranks: Ranks,
) -> None:
    options: dict[str, Any] = {"offload": ("optimizer",), "offload_buffer_mb": 0.001}
    small = int(0.001 * 2**20)
    room = (HELD + SAVED + 3 * small) / (1 - LIMIT_MARGIN) / GIB  # one buffer of that size is there already
    found = ranks.run(2, train_with_few_buffers, Device(), 9, memory=room, **options)
    by_hand = ranks.run(2, train_with_few_buffers, None, 9, **options)
    for mine, theirs in zip(found, by_hand, strict=True):
        assert mine["buffers"] * 2**20 == 4 * small
        assert (mine["plan"]["chosen"]["ring"], mine["plan"]["fits"]) == (4 * small, True)
        assert theirs["buffers"] == 0.001
        assert mine["losses"] == theirs["losses"]
        assert same(mine["params"], theirs["params"])


def goes_on_with_other_buffers(memory: float) -> list[dict[str, Any]]:
    first: dict[str, Any] = {"offload": ("optimizer",), "offload_buffer_mb": 0.001, "memory": memory}
    others: tuple[dict[str, Any], ...] = ({"report_stall_after_s": 20.0}, {"offload_buffer_mb": 0.002})
    emulated = {"emulate_cuda_graph_step": True}
    return [train_with_few_buffers(Device(), 9, again=first | emulated | other, **first) for other in others]


@pytest.mark.slow
def test_buffers_that_are_set_by_hand_later_are_what_was_set(ranks: Ranks) -> None:
    small = int(0.001 * 2**20)
    (found,) = ranks.run(1, goes_on_with_other_buffers, (HELD + SAVED + 3 * small) / (1 - LIMIT_MARGIN) / GIB)
    assert [training["buffers"] * 2**20 for training in found] == [4 * small, 0.002 * 2**20]


def test_auto_is_nothing_where_the_device_does_not_tell(ranks: Ranks) -> None:
    (found,) = ranks.run(1, train, None, 3, memory="auto", compile=False)
    assert found["plan"] is None
    assert found["said"] == [
        "memory='auto' changes nothing: this device does not tell how much memory it has. Give a number of GiB."
    ]


def warned() -> list[str]:
    with pytest.warns(UserWarning, match=r"cannot be held: .* more are needed") as found:
        train(Device(), 2, memory=1000 / GIB, compile=False)
    return [str(one.message) for one in found]


def test_a_budget_that_cannot_be_held_is_a_warning_that_says_what_to_do(ranks: Ranks) -> None:
    (messages,) = ranks.run(1, warned)
    assert any("torch.utils.checkpoint" in message for message in messages)


def held() -> tuple[Any, Any]:
    memory = (HELD - 1) / GIB  # nothing is free when the first step begins
    with (
        warnings.catch_warnings(),
        patch(
            "lightning_zero.memory_planner.first_step_memory.SavedTensorOffload",
            partial(SavedTensorOffload, least_bytes=1),
        ),
    ):
        warnings.simplefilter("ignore")  # that it cannot be held
        return train(Device(), 3, memory=memory), train(None, 3, activation_memory_budget=0.2)


def test_what_a_first_step_saves_is_on_the_host_until_its_backward(ranks: Ranks) -> None:
    for found, by_hand in ranks.run(2, held):
        assert "were on the host until its backward" in "".join(found["said"])
        assert found["losses"] == by_hand["losses"]
        assert same(found["params"], by_hand["params"])


def held_without_a_limit() -> tuple[dict[str, Any], dict[str, Any]]:
    with patch(
        "lightning_zero.memory_planner.first_step_memory.SavedTensorOffload", partial(SavedTensorOffload, least_bytes=1)
    ):
        return train(Device(fuller=TOTAL - HELD), 3), train(None, 3)


def test_without_a_limit_what_a_full_device_has_no_room_for_is_on_the_host_as_well(ranks: Ranks) -> None:
    told = "of activations of this eager step"
    roomy, full = ranks.run(2, held_without_a_limit)
    assert told not in "".join(roomy[0]["said"])
    assert told in "".join(full[0]["said"])
    for found, alone in (roomy, full):
        assert found["losses"] == alone["losses"]
        assert same(found["params"], alone["params"])
        assert found["plan"] is None


def test_gradients_of_micro_batches_are_reduced_once_where_that_costs_less(ranks: Ranks) -> None:
    planned = ranks.run(2, once, Device(), memory="auto")
    for found, by_hand in zip(planned, ranks.run(2, once, None, stage=1), strict=True):
        assert found["plan"]["chosen"]["reduce_once"]
        assert found["plan"]["chosen"]["until"] == "step"
        assert found["reduced"] == by_hand["reduced"] > 0
        assert found["losses"] == pytest.approx(by_hand["losses"], rel=1e-6)
        assert_close_relative(found["params"], by_hand["params"], 1e-6, what="weights")
        assert "stay whole, reduced once a step" in "".join(found["said"])


def once(device: Device | None, **options: Any) -> dict[str, Any]:
    with patch("lightning_zero.memory_planner.choices.MIN_REDUCE_ONCE_GAIN", 0.0):  # as if links were slow
        return train(device, 7, accumulate=3, **options)


def goes_on(again: dict[str, Any]) -> dict[str, Any]:
    """With other options, after the first step has shown that the optimizer's state has to leave."""
    needed: dict[str, Any] = {"memory": (HELD + SAVED - 1) / GIB, "offload_buffer_mb": 0.001}
    by_hand = {"activation_memory_budget": 0.9}  # so nothing else can
    return train(Device(), 2, needed | by_hand | again, **needed, **by_hand)


def goes_on_in_three_ways() -> list[dict[str, Any]]:
    patient, less = {"report_stall_after_s": 20.0}, {"memory": (HELD + 0.5 * SAVED) / GIB}
    return [
        goes_on(patient),
        goes_on({"offload": ("activations",)}),
        train(Device(eager=1000), AGAIN + 1, less | patient, **less),
    ]


def test_what_was_planned_holds_under_other_options_but_for_those_that_are_set_by_hand(ranks: Ranks) -> None:
    [(others, offload, activations)] = ranks.run(1, goes_on_in_three_ways)
    assert others["offload"] == ("optimizer",)
    assert tuple(others["plan"]["chosen"]["offload"]) == ("optimizer",)
    assert others["compiles_in"] == [1], "nothing begins anew"
    assert others["stays"], "state leaves the host and comes back"
    assert offload["offload"] == ("activations",)
    assert activations["activations"] < 1.0
    assert activations["compiles_in"] == [1, AGAIN]


@pytest.mark.exhaustive  # test_what_was_planned_holds changes options later
def test_a_later_trainer_has_its_own_budget(ranks: Ranks) -> None:
    less = {"memory": (HELD + 0.5 * SAVED) / GIB}
    for found in ranks.run(2, train, Device(eager=1000), 7, less, memory="auto"):
        assert found["activations"] < 1.0
        # Each of the two begins with an eager step, compiles, and once more after the measured ones.
        assert found["compiles_in"] == [1, AGAIN, 9, 13]
    for found in ranks.run(2, train, Device(eager=1000), 7, {}, **less):
        assert (found["activations"], found["plan"]) == (1.0, None)


class Caching(MemoryGauge):
    """A device with 5 GiB cached, except when it is read right after the cache was emptied."""

    reports_memory = True
    given_back = 0
    empty_now = False

    def start(self, anew: bool = False) -> None:
        pass

    def empty(self) -> None:
        Caching.given_back, Caching.empty_now = Caching.given_back + 1, True

    def read(self) -> DeviceMemory:
        cached = 0 if Caching.empty_now else 5 * GIB
        Caching.empty_now = False
        return DeviceMemory(80 * GIB, 0, 0, 5 * GIB, 3 * GIB, cached)


def given_back(memory: Any, then: Any) -> list[int]:
    """Return the releases of each step, with other options from the fourth on, and of an evaluation."""
    torch._dynamo.reset()
    Caching.given_back, model, found = 0, build(Blocks), []
    with (
        patch("lightning_zero.compile.session.MemoryGauge", Caching),
        engine_for(model, memory=memory, compile=False) as engine,
    ):
        optimizer = adamw(model)
        for number, batch in enumerate(make_batches(Blocks, 6, 4)):
            if number in (0, 3):
                engine.configure(config(compile=False, memory=memory if number == 0 else then))
                engine.optimizers.check(optimizer)
                engine.optimizers.arrange([optimizer])
            before = Caching.given_back
            with engine.train_step():
                loss = case_loss(model, batch)
            engine.cycle.before_backward()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            found.append(Caching.given_back - before)
        before = Caching.given_back
        engine.cycle.eval_step()
        found.append(Caching.given_back - before)
    return found


def test_what_the_allocator_caches_is_given_back_in_a_training_with_a_limit_and_in_no_other(ranks: Ranks) -> None:
    # The first step gives back by itself, before its backward and before the optimizer makes its state: the latter in any
    # training, of which other options begin another one.
    assert ranks.run(1, given_back, 8.0, None) == [[2, 3, 3, 1, 0, 0, 0]]
    assert ranks.run(1, given_back, None, None) == [[1, 0, 0, 0, 0, 0, 0]]
    assert ranks.run(1, given_back, "auto", 8.0) == [[2, 0, 0, 2, 3, 3, 1]]
