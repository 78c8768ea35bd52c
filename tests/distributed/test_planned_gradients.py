"""``memory=`` lets gradients alias compute copies if a training would not fit otherwise.

It then equals a training with rounded gradients, frees their memory, and still accepts micro-batches.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.engine import Engine
from lightning_zero.memory_planner.inputs import MemoryConfig
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.measured import AGAIN
from tests.helpers.models import OneLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative
from tests.helpers.sharded import adamw, engine_for, train_sharded
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
GIB, TOTAL = 2**30, 10**6
HELD, SAVED, GRADIENTS = 300_000, 10_000, 17_152  # bytes; the last are those of a rank
STEPS, LATER = 10, 4
BASE: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16, "gather_group_mb": 0.01}
REPLAYED = {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True, "reduce_transport": "copy"}


class Gauge(MemoryGauge):
    """A device with persistent memory, activations, and gradients unless they alias copies."""

    reports_memory = True
    engine: Engine | None = None
    eager = SAVED

    def start(self, anew: bool = False) -> None:
        pass

    def read(self) -> DeviceMemory:
        engine = Gauge.engine
        here = HELD + GRADIENTS * (engine is None or not engine.sharder.memory.alias_gradients)
        took = SAVED if engine is not None and engine.session.plans.count else Gauge.eager
        return DeviceMemory(TOTAL, 0, here + took, here + took, here)


class Course:
    """Observations of one training."""

    def __init__(self) -> None:
        self.over: list[bool] = []  # before each batch
        self.dtypes: list[Any] = []  # of the gradients of each batch
        self.old: list[StorageWeakRef] = []  # memory that gradients used


def train(limit: int | None, rounded: int = STEPS + LATER, options: Any = None, eager: int = SAVED) -> tuple[Any, ...]:
    """``limit``: bytes; None for none. ``rounded``: from this step on gradients are, by a hook.

    After ``STEPS`` some more have two micro-batches.
    """
    torch._dynamo.reset()
    torch.manual_seed(17)
    model, seen, said = build(OneLayer), Course(), []
    chosen = BASE | (options or {}) | ({} if limit is None else {"memory": limit / GIB})
    Gauge.engine, Gauge.eager = None, eager

    def look(param: Tensor) -> None:
        assert param.grad is not None
        seen.dtypes[-1].add(param.grad.dtype)
        if len(seen.over) > rounded:
            param.grad.copy_(param.grad.to(BF16))

    with (
        patch("lightning_zero.compile.session.MemoryGauge", Gauge),
        patch("lightning_zero.step.memory_controller.OFFLOADABLE", ("optimizer", "activations")),
        engine_for(model, **chosen) as engine,
    ):
        Gauge.engine, engine.session.progress._report = engine, said.append
        engine.memory.gradients.single_micro_batch = True
        memory = engine.sharder.memory
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(look)

        def note(*_: Any) -> None:
            seen.over.append(memory.alias_gradients)
            seen.dtypes.append(set())
            if memory.gradients is not None and not seen.old:
                seen.old = [StorageWeakRef(flat.untyped_storage()) for flat in memory.gradients.flat.values()]

        optimizer = adamw(model)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        batches, told = make_batches(OneLayer, STEPS + 2 * LATER, 12), {"context": autocast, "before_batch": note}
        one = train_sharded(engine, model, batches[:STEPS], optimizer, **told)
        roles, plan = memory_by_role(engine, [optimizer]), engine.memory.plan
        gone = bool(seen.old) and all(storage.expired() for storage in seen.old)
        two = train_sharded(engine, model, batches[STEPS:], optimizer, accumulate=2, announce=True, **told)
        return one, two, seen.over, seen.dtypes, gone, roles["gradient"], plan, said


def autocast() -> torch.autocast:
    return torch.autocast("cpu", BF16, cache_enabled=False)


def both(eager: int, begin: int, options: Any) -> tuple[Any, Any]:
    """By plan, and as it is where gradients are rounded from that step on."""
    return train(HELD + SAVED + GRADIENTS // 2, STEPS, options, eager), train(None, begin, options)


def check(mine: Reference, theirs: Reference) -> None:
    for what in ("losses", "grads", "params"):
        assert_close_relative(getattr(mine, what), getattr(theirs, what), 1e-6, what=what)


@pytest.mark.parametrize(("options", "eager", "begin"), [({}, SAVED, 1), (REPLAYED, 100, AGAIN)])
@pytest.mark.exhaustive_variants("options1-100-5")
def test_from_the_plan_on_a_training_is_what_it_is_with_rounded_gradients(
    ranks: Ranks, options: Any, eager: int, begin: int
) -> None:
    for planned, plain in ranks.run(2, both, eager, begin, options, deadline=120):
        one, two, over, dtypes, gone, held, plan, said = planned
        assert over[:STEPS] == [step > begin for step in range(STEPS)], (
            "decided before a step, and seen before the next"
        )
        assert dtypes[:STEPS] == [{torch.float32}] * begin + [{BF16}] * (STEPS - begin)
        assert (held, gone) == (0, True), "what gradients took is given back"
        assert plan.chosen == MemoryConfig(weights=plan.chosen.weights, grad_aliasing=True), "\n".join(said)
        table = next(line for line in said if "Memory plan" in line)
        [row] = [line for line in table.splitlines() if "gradients" in line]
        assert row.split()[1:7] == ["over", "copies", "of", "weights,", "in", "bfloat16"]
        check(one, plain[0])
        # Micro-batches that were not announced have gradients in float32.
        assert over[STEPS:] == [True] + [False] * (2 * LATER - 1)
        assert dtypes[STEPS:] == [{torch.float32}] * 2 * LATER
        [told] = [line for line in said if "several micro-batches share a step" in line]
        assert "tuning=Tuning(grad_aliasing=False)" in told
        check(two, plain[1])
