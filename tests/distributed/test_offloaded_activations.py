"""``offload=("activations",)``: training is the same to the last bit for any offloaded values.

Copies that are as late as their waits allow have the right values.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.errors import UnsupportedError
from tests.helpers.checkpointed import NonReentrant
from tests.helpers.copy_streams import LateCopyStreams
from tests.helpers.models import Case, Deep, OneBlock, OneLayer, OneMLP, build, made_one_mlp, make_batches
from tests.helpers.options import config
from tests.helpers.oracle import Reference, assert_same_bits, shard_batch
from tests.helpers.sharded import adamw, case_loss, engine_for, train_sharded
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
AWAY: dict[str, Any] = {"offload": ("activations",), "offload_activations_mb": float("inf")}
MIXED: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16}


def made_late(engine: Engine) -> LateCopyStreams:
    """From here on, copies are done at their waits, and memory that returns to the pool is overwritten."""
    lanes = engine.executor.activations._streams = LateCopyStreams()
    return lanes


def train(case: str | type[Case], away: dict[str, Any], backend: str = "aot_eager", **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    training = options.pop("training", {})
    model = build(case)
    if isinstance(model, NonReentrant):
        made_one_mlp(model)
    context = partial(torch.autocast, "cpu", BF16, cache_enabled=False) if "compute_dtype" in options else None
    with engine_for(model, backend, **(away | options)) as engine:
        lanes = made_late(engine)
        batches = [model.make_batch(step, 8) for step in range(training.pop("steps", 4))]
        more = {"context": context} if context else {}
        out = train_sharded(engine, model, batches, adamw(model), **more, **training)
        activations = engine.executor.activations
        return {
            "out": out,
            "counters": engine.executor.counters(),
            "host": activations.nbytes,
            "waiting": lanes.waiting + len(activations._offloading) + len(activations._loading),
        }


def twice(model: Any, batch: Any) -> Any:
    return model.loss(batch) + 2 * model.loss(batch)


WAYS: dict[str, dict[str, Any]] = {
    "mixed precision, accumulated": {"case": OneMLP, **MIXED, "training": {"accumulate": 2}},
    "called twice before a backward": {"case": OneLayer, "training": {"loss_fn": twice, "steps": 3}},
    "replayed": {"case": OneLayer, "emulate_cuda_graph_model": True, "training": {"accumulate": 2, "steps": 12}},
    "without passes": {"case": OneLayer, "prefetch": False},
    "activations checkpointed": {"case": NonReentrant},
    "several graphs": {"case": "TwelveBlocks"},
    "weights kept": {"case": OneLayer, "unsharded_cache_mb": float("inf"), "unsharded_cache_until": "step"},
}
QUICK = ("mixed precision, accumulated", "replayed")


def both(way: str) -> list[dict[str, Any]]:
    options = dict(WAYS[way])
    case, training = options.pop("case"), options.pop("training", {})
    return [train(case, away, training=dict(training), **options) for away in ({}, AWAY)]


@pytest.mark.parametrize(
    ("way", "world_size"),
    [(way, 2) if way in QUICK else pytest.param(way, 1, marks=pytest.mark.slow) for way in WAYS],
)
@pytest.mark.exhaustive_variants(
    "called twice before a backward-1", "without passes-1", "activations checkpointed-1", "several graphs-1"
)
def test_training_is_the_same_to_the_last_bit(ranks: Ranks, way: str, world_size: int) -> None:
    for plain, away in ranks.run(world_size, both, way, deadline=240):
        assert_same_bits(away["out"], plain["out"])
        left = away["counters"].pop("offload_bytes")
        assert away["counters"].pop("offloaded_activations") > 3
        assert left == away["counters"].pop("reload_bytes") > 0
        for counters in (away["counters"], plain["counters"]):  # how many buckets there are is a matter of timing
            del counters["allocated_buckets"], counters["grown_buckets"], counters["bucket_bytes"]
        assert away["counters"] == plain["counters"], "weights and gradients travel as before"
        assert away["waiting"] == 0
        assert plain["host"] == 0


def bytes_that_leave(megabytes: float | None) -> tuple[int, int]:
    """In each pass, and of it the largest."""
    model = build(OneLayer)
    with engine_for(model, "aot_eager", offload=("activations",), offload_activations_mb=megabytes) as engine:
        train_sharded(engine, model, make_batches(OneLayer, 3, 24), adamw(model))
        counted = engine.executor.counters()
        return counted.get("offload_bytes", 0) // 2, counted.get(
            "reload_bytes", 0
        ) // 2  # two of the steps are compiled


def some_amounts() -> dict[float | None, tuple[int, int]]:
    return {amount: bytes_that_leave(amount) for amount in (0.0, 0.1, 100.0, None)}


def test_an_amount_is_kept_and_without_one_nothing_leaves_that_compute_would_wait_for(ranks: Ranks) -> None:
    [found] = ranks.run(1, some_amounts, deadline=120)
    some, hidden, everything = found[0.1], found[None], found[100.0]
    assert found[0.0] == (0, 0)
    assert hidden[0] == hidden[1] < everything[0]
    assert 0.05 * 2**20 < some[0] == some[1] <= 0.1 * 2**20 < everything[0] == everything[1]


class InParts(OneLayer):
    """Two graphs for a call, between which Python runs."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.tokens(ids))
        torch._dynamo.graph_break()
        return self.head(self.norm(self.blocks[0](x)))


def more_later(seen: list[int]) -> Any:
    """Calls the model once in a first step, and twice afterwards."""

    def loss(model: Any, batch: Any) -> Any:
        seen.append(0)
        return twice(model, batch) if len(seen) > 1 else model.loss(batch)

    return loss


def passes_of(case: type[Case], loss_fn: Any, replayed: bool = False) -> tuple[list[float], list[str]]:
    """Return the MiB that each of them sent, with a limit of 0.1, and the messages."""
    torch._dynamo.reset()
    said: list[str] = []
    sent: list[float] = []
    model = build(case)
    options: dict[str, Any] = {"offload": ("activations",), "offload_activations_mb": 0.1}
    if replayed:
        options["emulate_cuda_graph_model"] = True

    def note(*_: Any) -> None:
        sent.append(engine.executor.counters().get("offload_bytes", 0) / 2**20)

    with (
        engine_for(model, "aot_eager", **options) as engine,
        patch.object(engine.session.progress, "report", said.append),
    ):
        batches = make_batches(OneLayer, 12 if replayed else 4, 24)
        train_sharded(engine, model, batches, adamw(model), loss_fn, before_batch=note)
        note()
    lines = [line for line in said if "offload_activations_mb" in line]
    return [after - before for before, after in zip(sent, sent[1:], strict=False)], lines


def passes_of_all() -> dict[str, Any]:
    return {
        "twice": passes_of(OneLayer, twice),
        "replayed": passes_of(OneLayer, twice, replayed=True),
        "in parts": passes_of(InParts, case_loss),
        "more later": passes_of(OneLayer, more_later([])),
    }


def test_an_amount_is_kept_by_all_graphs_of_a_pass_together(ranks: Ranks) -> None:
    [found] = ranks.run(1, passes_of_all, deadline=240)
    [told] = found["more later"][1]
    for way in ("twice", "replayed", "in parts"):
        sent, said = found[way]
        assert sent[0] == 0, "a first step is eager"
        assert all(0.05 < mib <= 0.1 for mib in sent[1:]), way
        assert said == []
    assert any(mib > 0.1 for mib in found["more later"][0])
    assert "exceeded it in the whole OneLayer" in told
    assert "a call that the first step did not have" in told


def without_backward() -> list[Any]:
    """Host memory after forwards without a backward or with a failed one, and after evaluations."""
    model, found = build(OneLayer), []
    with engine_for(model, "aot_eager", **AWAY) as engine:
        lanes, activations = made_late(engine), engine.executor.activations
        optimizer, batches = adamw(model), make_batches(OneLayer, 8, 12)
        train_sharded(engine, model, batches[:2], optimizer)
        mine = shard_batch(batches[0], engine.rank, engine.world_size)
        held, left = activations.nbytes, engine.executor.counters()["offload_bytes"]
        engine.eval_step()
        with torch.no_grad():
            model.loss(mine)
        found.append(engine.executor.counters()["offload_bytes"] - left)
        for _ in range(3):
            with engine.train_step():
                model.loss(mine)
        found.append(activations.nbytes - held)
        for fails in (True, False):
            with engine.train_step():
                loss = model.loss(mine)
            if fails:
                loss.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            else:
                loss.backward()
            del loss
        found.append(activations.nbytes - held)
        train_sharded(engine, model, batches[2:], optimizer)
        found += [activations.nbytes - held, lanes.waiting]
        engine.cycle.clean_up()
        found.append(activations.nbytes)
    return found


def test_memory_of_the_host_is_free_where_no_backward_comes(ranks: Ranks) -> None:
    for evaluated, forward_only, failed, trained, waiting, after in ranks.run(2, without_backward, deadline=120):
        assert evaluated == 0, "nothing leaves in an evaluation"
        assert forward_only == failed == trained == 0, "the same memory serves"
        assert waiting == after == 0


class Breaks(nn.Module):
    """Its backward fails, in the middle of a compiled one."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.lightning_zero_offload_tests.passes(x)


@torch.library.custom_op("lightning_zero_offload_tests::passes", mutates_args=())
def passes(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("lightning_zero_offload_tests::breaks", mutates_args=())
def breaks(x: torch.Tensor) -> torch.Tensor:
    if Breaks.armed:
        raise ArithmeticError("broken")
    return x.clone()


passes.register_fake(torch.empty_like)
breaks.register_fake(torch.empty_like)
passes.register_autograd(lambda ctx, grad: breaks(grad))


class BreaksInBackward(OneBlock):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].attention = Breaks()


def interrupted(away: dict[str, Any]) -> tuple[Reference, int]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = build(BreaksInBackward)
    with engine_for(model, "aot_eager", **away) as engine:
        lanes = made_late(engine)
        optimizer, batches = adamw(model), make_batches(OneMLP, 6, 12)
        train_sharded(engine, model, batches[:3], optimizer)
        with engine.train_step():
            loss = model.loss(batches[3])
        Breaks.armed = True
        try:
            loss.backward()
        except ArithmeticError:
            Breaks.armed = False
        assert not Breaks.armed
        half = len(engine.executor.activations._loading)
        engine.cycle.reset()
        assert lanes.waiting == 0
        optimizer.zero_grad()
        return train_sharded(engine, model, batches[3:], optimizer), half


def interrupted_both_ways() -> list[tuple[Reference, int]]:
    return [interrupted(away) for away in ({}, AWAY)]


def test_training_goes_on_after_an_exception_in_the_middle_of_a_backward(ranks: Ranks) -> None:
    for (plain, _), (away, half) in ranks.run(1, interrupted_both_ways, deadline=120):
        assert half > 0, "something was on its way back"
        assert_same_bits(away, plain)


def test_where_nothing_is_compiled_the_option_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="compile=False leaves none. Leave compile at True"):
        config(offload=("activations",), compile=False)


class TwoLayers(Deep):
    """Without embeddings and a loss of classes, whose code takes longer to generate."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[2:]


@pytest.mark.exhaustive  # the others here compile with aot_eager
@pytest.mark.parametrize(
    ("case", "whole"),
    [(TwoLayers, True), (Deep, False)],
    ids=["whole", "in pieces"],
)
def test_generated_code_keeps_what_is_on_its_way(ranks: Ranks, case: type[Case], whole: bool) -> None:
    for plain, away in ranks.run(1, generated, case, whole, deadline=400):  # two show it without code
        assert away["counters"]["offload_bytes"] > 0
        assert away["waiting"] == 0
        assert_same_bits(away["out"], plain["out"])


def generated(case: type[Case], whole: bool) -> list[dict[str, Any]]:
    return [train(case, away, "inductor", compile_whole_graphs=whole) for away in ({}, AWAY)]
