"""Bytes alive at each node, against lifetimes worked out by hand."""

import torch

from lightning_zero.report.memory import Alive, MemoryPoint, MemoryTimeline, memory_timeline
from tests.helpers.tracing import traced
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten


def during(timeline: MemoryTimeline) -> list[int]:
    return [point.during for point in timeline.points]


def after(timeline: MemoryTimeline) -> list[int]:
    return [point.after for point in timeline.points]


def test_a_result_lives_until_its_last_use() -> None:
    graph = traced(lambda x: (x.exp() + 1).sin(), torch.zeros(25))
    timeline = memory_timeline(graph)
    # input | exp | exp, add | add, sin | what is returned stays
    assert during(timeline) == [100, 200, 300, 300, 200]
    assert after(timeline) == [100, 200, 200, 200, 200]
    assert (timeline.peak, timeline.peak_index) == (300, 2)


def test_a_view_keeps_its_base_alive_and_adds_nothing() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        made = x.exp()
        view = made[:1]
        other = x.sin()
        return other + view

    timeline = memory_timeline(traced(run, torch.zeros(10, 10)))
    # x | exp | slice | sin | add: the whole of exp lives until the view is used | output
    assert during(timeline) == [400, 800, 800, 1200, 1600, 800]
    assert after(timeline) == [400, 800, 800, 1200, 800, 800]


def test_inputs_stay_or_go_with_their_last_use_as_the_caller_says() -> None:
    def run(weight: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        return (weight * saved).exp().sin()

    graph = traced(run, torch.zeros(10), torch.zeros(10))
    weight, saved = list(graph.nodes)[:2]
    assert after(memory_timeline(graph)) == [80, 80, 120, 120, 120, 120]
    freed = memory_timeline(graph, keep=lambda node: node is weight)
    assert after(freed) == [80, 80, 80, 80, 80, 80]
    assert during(freed) == [80, 80, 120, 120, 120, 80]
    assert after(memory_timeline(graph, keep=lambda node: False))[-1] == 40
    assert (memory_timeline(graph).held, freed.held) == (80, 40)


def test_all_inputs_are_there_before_the_graph_runs() -> None:
    graph = traced(lambda a, b: a + b, torch.zeros(1), torch.zeros(2))
    assert memory_timeline(graph).points[0] == MemoryPoint(next(iter(graph.nodes)).name, 12, 12)


def test_an_input_that_nobody_reads_goes_at_once_unless_it_is_kept() -> None:
    graph = traced(lambda a, b: b + 1, torch.zeros(10), torch.zeros(1))
    assert after(memory_timeline(graph, keep=lambda node: False)) == [4, 4, 4, 4]
    assert after(memory_timeline(graph))[0] == 44


def test_a_result_that_nobody_reads_is_gone_after_its_node() -> None:
    b = Builder()
    x = b.input("x", 10)
    b.call(aten.exp.default, x)
    timeline = memory_timeline(b.done(x))
    assert during(timeline) == [40, 80, 40]
    assert after(timeline) == [40, 40, 40]


def test_the_largest_at_the_peak_come_first() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x, x, x])
        return wide.sum() + x.sum()

    timeline = memory_timeline(traced(run, torch.zeros(100)))
    assert timeline.peak == 1204 + 400
    assert timeline.alive[0] == Alive("cat", 1200)
    assert [alive.nbytes for alive in timeline.alive] == [1200, 400, 4]
    assert sum(alive.nbytes for alive in timeline.alive) == timeline.peak


def test_each_of_several_results_lives_on_its_own() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, 1)
        return (variance + 1).exp()

    timeline = memory_timeline(traced(run, torch.zeros(10, 2)))
    names = [point.name for point in timeline.points]
    # The mean is never read: it goes with the node that takes it out.
    assert after(timeline)[names.index("add")] == 80 + 40
    assert after(timeline)[names.index("var_mean")] == 80 + 80


def test_a_group_of_gathered_weights_lives_until_the_last_of_them_is_used() -> None:
    b = Builder()
    one, two, x = b.shard("one", 8), b.shard("two", 8), b.input("x", 4, 4)
    group = b.graph.call_function(torch.ops.lightning_zero.gather_group.default, ([one, two], torch.float32, 32))
    group.meta["val"] = torch.empty(32, device="meta")
    ready = b.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (group,))
    ready.meta["val"] = group.meta["val"]
    first = b.call(aten.view.default, b.call(aten.slice.Tensor, ready, 0, 0, 16), [4, 4])
    second = b.call(aten.view.default, b.call(aten.slice.Tensor, ready, 0, 16, 32), [4, 4])
    a = b.call(aten.mm.default, x, first)
    c = b.call(aten.mm.default, a, second)
    timeline = memory_timeline(b.done(c))
    left = {point.name: point.after for point in timeline.points}
    inputs = 32 + 32 + 64
    assert left[group.name] == inputs + 128
    assert left[a.name] == inputs + 128 + 64
    assert left[c.name] == inputs + 64
    assert timeline.peak == inputs + 128 + 64 + 64


def test_symbolic_sizes_count_as_seen() -> None:
    timeline = memory_timeline(traced(lambda x: x.exp(), torch.zeros(7, 3), mode="symbolic"))
    assert timeline.peak == 2 * 7 * 3 * 4


def test_an_empty_graph_takes_nothing() -> None:
    b = Builder()
    assert memory_timeline(b.done()).peak == 0
