"""Models that a compiler takes apart: breaks in every block, code it must not touch, branches on data, exceptions."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import Graph

from tests.helpers.memory import gathered_weights
from tests.helpers.models import Batch, Case, OneMLP, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.sharded import BACKENDS, EAGER, adamw, engine_for, sgd, train_case, train_plain, train_sharded
from tests.ranks.pool import Ranks

SAMPLES = 12


def count_graphs(steps: int) -> dict[str, Any]:
    seen: list[str] = []

    def observe(what: str, graph: Graph) -> None:
        seen.append(what)

    model = build("TwelveBlocks")
    counters.clear()
    with engine_for(model, "aot_eager", observe) as engine:
        batches = make_batches("TwelveBlocks", 1 + steps, SAMPLES)
        out = train_sharded(engine, model, batches[:2], adamw(model), clip_norm=0.5)
        first = seen.count("joint")
        train_sharded(engine, model, batches[2:], adamw(model), clip_norm=0.5)
        reads = engine.executor.counters()["eager_gathers"]
        # One eager step reads all weights once; code outside of the graphs reads eagerly in each later step.
        per_step = (reads - len(engine.sharder.live)) / steps
    return {
        "out": out,
        "joint": first,
        "later": seen.count("joint") - first,
        "unique": counters["stats"]["unique_graphs"],
        "limit": sum(counters["recompile_limit"].values()) + counters["frames"]["total"] - counters["frames"]["ok"],
        "eager reads": per_step,
    }


@pytest.mark.parametrize("world_size", [2], ids="W={}".format)
def test_twelve_blocks_with_a_break_in_each_share_their_graphs(ranks: Ranks, world_size: int) -> None:
    out = ranks.run(world_size, count_graphs, 4)[0]
    # Two halves of a block, each once for the first block, whose input needs no gradient, and once for the eleven
    # others. Graphs that know their block would be 24, and Dynamo gives up at eight.
    assert out["joint"] == 4
    assert out["unique"] == 4
    assert out["later"] == 0
    assert out["limit"] == 0
    assert out["eager reads"] == 0
    expected = train_reference(
        build("TwelveBlocks"), make_batches("TwelveBlocks", 2, SAMPLES), adamw, world=world_size, clip_norm=0.5
    )
    assert_close_relative(out["out"].losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out["out"].params, expected.params, 1e-6, atol=2e-8, what="params")


class BrokenLoop(OneMLP):
    """Dynamo runs such a loop eagerly, and compiles the functions that it calls, except for torch's own modules."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.blocks[0].mlp:
            torch._dynamo.graph_break()
            x = layer(x)
        return self.head(self.norm(x))


def graphs_of_a_broken_loop() -> list[str]:
    graphs: list[str] = []
    model, batches = build(BrokenLoop), make_batches(BrokenLoop, 2, SAMPLES)
    with engine_for(model, "aot_eager", lambda what, graph: graphs.append(what)) as engine:
        for batch in batches:
            with engine.train_step():
                model.loss(batch).backward()
    return graphs


def test_what_torchs_own_modules_read_behind_a_break_is_no_graph_of_one_weight(ranks: Ranks) -> None:
    assert not ranks.run(1, graphs_of_a_broken_loop)[0]  # whose result would be saved whole


class DataDependent(Case):
    """The branch hangs on a value, so the graph ends there; all ranks take the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.positive = nn.Linear(25, 25)
        self.negative = nn.Linear(25, 25, bias=False)
        self.last = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 19, generator=rng).abs() * (-1) ** (seed // 2)
        return x, torch.randn(n, 23, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x.sum() > 0)
        x = torch.tanh(self.first(x))
        return self.last(self.positive(x) if positive else self.negative(x))


class ItemInTheMiddle(DataDependent):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if x.sum().item() > 0:
            hidden = self.positive(hidden)
        return self.last(self.negative(hidden))


@pytest.mark.parametrize(("world_size", "backend"), [(2, "aot_eager"), (3, EAGER)])
@pytest.mark.parametrize("case", [DataDependent, ItemInTheMiddle, "CompilerDisabled"])
@pytest.mark.exhaustive_variants("DataDependent-3-eager", "ItemInTheMiddle-2-aot_eager", "CompilerDisabled-3-eager")
def test_broken_graphs_train_as_in_one_process(
    ranks: Ranks, world_size: int, case: type[Case] | str, backend: str
) -> None:
    out, _ = ranks.run(world_size, train_case, case, backend, 6, SAMPLES, sgd, clip_norm=0.2)[0]
    expected = train_reference(build(case), make_batches(case, 6, SAMPLES), sgd, world=world_size, clip_norm=0.2)
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
    assert_close_relative(out.params, expected.params, 1e-6, what="params")


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("tripped in backward")


class Fragile(Case):
    """Raise in the middle on request."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(23, 25)
        self.second = nn.Linear(25, 25)
        self.third = nn.Linear(25, 19)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), torch.randn(n, 19, generator=rng)

    @torch.compiler.disable
    def maybe_trip(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise RuntimeError("tripped in forward")
        return _Trip.apply(x) if self.where == "backward" else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.third(torch.tanh(self.maybe_trip(x)))


def trip_and_go_on(backend: str, trips: dict[int, str]) -> tuple[list[dict[str, Any]], Reference]:
    """Return the state after each exception, and the training as it continued."""
    model = build(Fragile)
    found, out = [], Reference()
    with engine_for(model, backend, reduce_bucket_mb=0.002) as engine:
        optimizer = adamw(model)
        for step, batch in enumerate(make_batches(Fragile, 5, SAMPLES)):
            if step in trips:
                with gathered_weights() as gathered:
                    model.where = trips[step]
                    message = ""
                    try:
                        train_sharded(engine, model, [batch], optimizer)
                    except RuntimeError as error:
                        message = str(error)
                    model.where = ""
                    engine.cycle.reset()
                    optimizer.zero_grad()
                    gc.collect()
                    left = gathered.left()
                watched = engine.executor.counters()["watched_weights"]
                found.append({"message": message, "gathered": gathered.count, "left": left, "watched": watched})
            one = train_sharded(engine, model, [batch], optimizer)
            for what in ("losses", "grads", "params"):
                getattr(out, what).extend(getattr(one, what))
    return found, out


# The first step records the modules to compile.
TRIPS = [{0: "forward", 2: "backward"}, {0: "backward", 2: "forward"}]


@pytest.mark.parametrize("trips", TRIPS, ids=["forward first", "backward first"])
@pytest.mark.parametrize(("world_size", "backend"), [*((2, backend) for backend in BACKENDS), (3, EAGER)])
@pytest.mark.exhaustive_variants("2-aot_eager-backward first")
def test_training_goes_on_after_an_exception(
    ranks: Ranks, world_size: int, trips: dict[int, str], backend: str
) -> None:
    model = build(Fragile)
    expected = train_plain(model, make_batches(Fragile, 5, SAMPLES), adamw(model), world=world_size)
    for found, out in ranks.run(world_size, trip_and_go_on, backend, trips):
        for where, trip in zip(trips.values(), found, strict=True):
            assert trip["message"] == f"tripped in {where}"
            assert trip["gathered"] > 0
            assert trip["left"] == 0
            assert trip["watched"] == 0
        for what in ("losses", "grads", "params"):
            assert_close_relative(getattr(out, what), getattr(expected, what), 3e-6, atol=2e-8, what=what)
