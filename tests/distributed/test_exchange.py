"""Hosts exchange weights in parts, in the order of reads.

The first layers run before the last part arrives. They read the values that they would read after the exchange.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.looks import counted, failing, look, seen
from tests.helpers.models import Case, _regression, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.recut import expected, train_captured_at_once
from tests.helpers.sharded import engine_for, sgd, single_thread, train_sharded
from tests.ranks.pool import Ranks

LAYERS, WIDTH, STEPS, SAMPLES = 7, 24, 6, 12
UNREPLAYED = 2  # a step that is compiled, before any is replayed
LAYER_MB = 4 * WIDTH * WIDTH / 2**20  # a part for each: the first ones would be smaller than that


class Layers(Case):
    """Registered in the opposite order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    @staticmethod
    def make_batch(seed: int, n: int) -> Any:
        return _regression(seed, n, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(reversed(self.layers)):
            x = torch.tanh(layer(look(x, number)))
        return x


REPLAYED = {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}
WAYS: dict[tuple[int, int], dict[str, dict[str, Any]]] = {
    (4, 2): {"copies, replayed": REPLAYED, "collectives": {"gather_transport": "collective"}},
    (2, 1): {"where they lie, replayed": REPLAYED},
}


def train(ways: dict[str, dict[str, Any]], ranks_per_host: int) -> dict[str, tuple[Reference, list[list[int]], int]]:
    """Return for each transport the trained weights.

    The layers' inputs in a compiled step and in the last one, and the parts of the exchange.
    """
    found = {}
    for name, options in ways.items():
        model = build(Layers)
        chosen = {"ranks_per_host": ranks_per_host, "gather_group_mb": LAYER_MB} | options
        with engine_for(model, "aot_eager", **chosen) as engine:
            seen.clear()
            counted[:] = [engine.executor]

            def note(model: nn.Module, index: int, engine: Any = engine, name: str = name) -> None:
                if index == UNREPLAYED + 1:  # a replay would count the events of its first run
                    counters = engine.executor.counters()
                    assert "replayed_graphs" not in counters
                    assert counters["awaited_parts"] == counters["exchanged_parts"], (name, counters)
                if index in (UNREPLAYED, STEPS - 1):
                    engine.executor.reset_counters()

            out = train_sharded(engine, model, make_batches(Layers, STEPS, SAMPLES), sgd(model), before_batch=note)
            counted.clear()
            counters = engine.executor.counters()
            assert counters["host_shard_refreshes"] == 1
            assert ("replayed_graphs" in counters) == ("replayed" in name)
            found[name] = out, [seen[UNREPLAYED], seen[-1]], counters["exchanged_parts"]
    return found


@pytest.mark.parametrize(("world_size", "ranks_per_host"), list(WAYS))
@pytest.mark.exhaustive_variants("4-2")
def test_first_layers_run_before_the_last_part_has_come(ranks: Ranks, world_size: int, ranks_per_host: int) -> None:
    with single_thread():
        batches = make_batches(Layers, STEPS, SAMPLES)
        expected = train_reference(build(Layers), batches, sgd, world=world_size)
    for found in ranks.run(world_size, train, WAYS[world_size, ranks_per_host], ranks_per_host, deadline=200):
        for name, (out, steps, parts) in found.items():
            for what in ("losses", "grads", "params"):
                assert_close_relative(getattr(out, what), getattr(expected, what), 1e-6, what=f"{name}: {what}")
            assert parts >= LAYERS, name
            for awaited in steps:
                assert awaited == sorted(awaited), name
                assert awaited[0] < parts / 2, f"{name}: {awaited} of {parts}"
                assert awaited[LAYERS // 2] < parts, f"{name}: {awaited} of {parts}"
                assert awaited[-1] >= parts - 1, f"{name}: {awaited} of {parts}"  # the last layer's own, right after it


def test_graphs_that_wait_for_parts_of_before_are_captured_anew(ranks: Ranks) -> None:
    with single_thread():
        reference = expected(2)
    for out, parts, dropped, replayed in ranks.run(2, train_captured_at_once, emulate_cuda_graph_model=True):
        for what in ("losses", "grads", "params"):
            assert_close_relative(getattr(out, what), getattr(reference, what), 1e-6, what=what)
        assert parts[1] == parts[-1] < parts[0]
        assert [reason.split(":")[0] for reason in dropped] == ["in step 1"]
        assert replayed > 0


def left_alone() -> str:
    """How the training ends where the other rank of the first host fails among the layers of a step."""
    model = build(Layers)
    failing.clear()
    with engine_for(model, "aot_eager", ranks_per_host=2, gather_group_mb=LAYER_MB) as engine:
        engine.cycle.begin_stage()

        def fail(model: nn.Module, index: int) -> None:
            if index == 3 and engine.rank == 1:
                failing.append(LAYERS // 2)

        try:
            train_sharded(engine, model, make_batches(Layers, STEPS, SAMPLES), sgd(model), before_batch=fail)
        except Exception as error:
            engine.watchdog.fail(error)
            return str(error)
        finally:
            failing.clear()
    return ""


def test_who_waits_for_a_part_hears_that_the_other_rank_has_failed(ranks: Ranks) -> None:
    for rank, ended in enumerate(ranks.run(4, left_alone, deadline=60)):
        assert "meant to fail" in ended, f"rank {rank}: {ended}"
        assert rank == 1 or "Rank 1 failed" in ended, f"rank {rank}: {ended}"
