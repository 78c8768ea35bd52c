"""Test which weights are kept from forward to backward."""

import math
import random
from collections import Counter

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compile.fx_utils import InPlaceReads
from lightning_zero.compile.partitioner.partition import tag_gathers
from lightning_zero.compile.passes.saved_weights import BackwardWaits, SavedLimits, _Weight, _within, choose_saved
from tests.helpers import waits as oracle
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
BF16 = torch.bfloat16


def joint(*widths: int, cast: bool = False) -> tuple[Graph, list[Node]]:
    """x through the weights in order and back; gathers named by number."""
    b = Builder()
    shards = [b.shard(f"s{i}", 4096) for i in range(len(widths))]
    x, g = b.input("x", 8, widths[0]), b.input("tangents_1", 8, widths[-1])
    gathers, used = [], []
    for shard, into, out in zip(shards, widths, [*widths[1:], widths[-1]], strict=True):
        gathers.append(b.gather(shard, into, out))
        used.append(b.call(aten._to_copy.default, gathers[-1], dtype=BF16) if cast else gathers[-1])
        x = b.call(aten.mm.default, x if not cast else b.call(aten._to_copy.default, x, dtype=BF16), used[-1])
    grads = []
    for weight in reversed(used):
        g = b.call(aten._to_copy.default, g, dtype=BF16) if cast else g
        g = b.call(aten.mm.default, g, b.call(aten.t.default, weight))
        grads.append(g)
    return b.done(x, *grads), gathers


def names(nodes: list[Node]) -> list[str]:
    return [node.name for node in nodes]


def test_small_weights_are_kept_whatever_the_budget() -> None:
    graph, _ = joint(4, 40, 2)
    assert names(choose_saved(graph, SavedLimits(4 * 80, 0))) == ["gather_default_2", "gather_default_1"]
    assert choose_saved(graph, SavedLimits(0, 0)) == []


def test_the_last_weights_are_kept_first_and_what_does_not_fit_is_skipped() -> None:
    graph, gathers = joint(4, 40, 8, 8)  # of 160, 320, 64 and 64 elements
    assert choose_saved(graph, SavedLimits(0, 4 * 64)) == [gathers[3]]
    assert choose_saved(graph, SavedLimits(0, 4 * 64 * 2)) == [gathers[3], gathers[2]]
    assert choose_saved(graph, SavedLimits(0, 4 * (64 * 2 + 160))) == [gathers[3], gathers[2], gathers[0]]
    assert choose_saved(graph, SavedLimits(0, math.inf)) == gathers[::-1]


def test_nothing_is_kept_of_weights_that_graphs_read_in_place() -> None:
    graph, _ = joint(4, 40, 2)
    shards, copies = InPlaceReads(frozenset()), InPlaceReads(frozenset({torch.bfloat16}))
    assert choose_saved(graph, SavedLimits(4 * 80, math.inf, in_place=shards)) == []
    graph, gathers = joint(4, 40, 2, cast=True)
    assert len(choose_saved(graph, SavedLimits(0, math.inf, in_place=shards))) == len(gathers)
    assert choose_saved(graph, SavedLimits(0, math.inf, in_place=copies)) == []


def test_what_backward_would_wait_for_longest_for_its_size_is_kept() -> None:
    """After the last weight has arrived, compute hides the small one before it, but not the large one."""
    graph, gathers = joint(4, 40, 8, 8)  # of 160, 320, 64 and 64 elements
    assert choose_saved(graph, SavedLimits(0, 4 * (64 + 320))) == [gathers[3], gathers[1]]


def test_what_is_kept_already_takes_no_transfer_that_others_would_wait_for() -> None:
    """Computing with the two kept weights hides most of the third's transfer, and less of the last one's."""
    graph, gathers = joint(12, 8, 8, 4)  # of 96, 64, 32 and 16 elements
    assert choose_saved(graph, SavedLimits(0, 4 * (16 + 32))) == [gathers[3], gathers[2]]
    assert choose_saved(graph, SavedLimits(0, 4 * (16 + 32 + 96))) == [gathers[3], gathers[2], gathers[0]]


def test_what_is_kept_without_a_budget_takes_no_transfer_either() -> None:
    """Computing with the two of the last group hides all of the third's transfer."""
    graph, gathers = joint(11, 12, 8, 8)  # of 132, 96, 64 and 64 elements
    limits = SavedLimits(0, 4 * 132, group_bytes=4 * 128)
    assert choose_saved(graph, limits) == [gathers[3], gathers[2], gathers[0]]


def test_the_last_group_of_a_steps_forward_is_kept_without_a_budget() -> None:
    graph, gathers = joint(4, 40, 8, 8)
    assert choose_saved(graph, SavedLimits(0, 0, group_bytes=4 * 64)) == [gathers[3]]
    assert choose_saved(graph, SavedLimits(0, 0, group_bytes=4 * 128)) == [gathers[3], gathers[2]]
    assert choose_saved(graph, SavedLimits(0, 0, group_bytes=4 * 64 - 1)) == []
    # Groups are smaller in graphs with few weights; the last weight may be larger than a group.
    assert choose_saved(graph, SavedLimits(0, 0, group_bytes=10**6, parts=12)) == [gathers[3]]
    # It does not count against the budget.
    assert choose_saved(graph, SavedLimits(0, 4 * 64, group_bytes=4 * 64)) == [gathers[3], gathers[2]]


def test_a_last_weight_that_others_are_used_after_is_not_kept_without_a_budget() -> None:
    b = Builder()
    shards = [b.shard(name, 64) for name in "ab"]
    x, g = b.input("x", 8, 8), b.input("tangents_1", 8, 8)
    first, second = (b.gather(shard, 8, 8) for shard in shards)
    y = b.call(aten.mm.default, b.call(aten.mm.default, b.call(aten.mm.default, x, second), first), first)
    # Backward needs the second weight first, and forward uses the first one after it.
    h = b.call(aten.mm.default, b.call(aten.mm.default, g, second), first)
    graph = b.done(y, h)
    assert choose_saved(graph, SavedLimits(0, 0, group_bytes=10**6, parts=1)) == []


def test_a_weight_that_is_used_at_both_ends_of_forward_is_not_kept_without_a_budget() -> None:
    b = Builder()
    tied, other = b.shard("tied", 64), b.shard("other", 64)
    x, g = b.input("x", 8, 8), b.input("tangents_1", 8, 8)
    first, middle, last = b.gather(tied, 8, 8), b.gather(other, 8, 8), b.gather(tied, 8, 8)
    y = b.call(aten.mm.default, b.call(aten.mm.default, b.call(aten.mm.default, x, first), middle), last)
    h = b.call(aten.mm.default, b.call(aten.mm.default, g, last), middle)
    assert choose_saved(b.done(y, h), SavedLimits(0, 0, group_bytes=10**6, parts=1)) == []


def test_what_is_kept_is_the_cast_that_is_used_and_counts_as_such() -> None:
    graph, gathers = joint(8, 8, cast=True)
    kept = choose_saved(graph, SavedLimits(0, 2 * 64 * 2))
    assert [str(node.target) for node in kept] == ["aten._to_copy.default"] * 2
    assert [node.args[0] for node in kept] == gathers[::-1]


def test_a_weight_that_backward_does_not_need_is_not_kept() -> None:
    b = Builder()
    table, ids, g = b.shard("table"), b.input("ids", 8, 5), b.input("tangents_1", 8, 5)
    graph = b.done(b.call(aten.add.Tensor, ids, b.gather(table, 5)), b.call(aten.neg.default, g))
    assert choose_saved(graph, SavedLimits(10**6, math.inf)) == []


def test_a_tied_weight_counts_once_and_is_kept_in_all_places_or_none() -> None:
    b = Builder()
    shard, x, g = b.shard("shard", 64), b.input("x", 8, 8), b.input("tangents_1", 8, 8)
    first, second = b.gather(shard, 8, 8), b.gather(shard, 8, 8)
    y = b.call(aten.mm.default, b.call(aten.mm.default, x, first), second)
    graph = b.done(y, b.call(aten.mm.default, g, b.call(aten.t.default, second)))
    assert set(choose_saved(graph, SavedLimits(0, 4 * 64))) == {first, second}
    assert choose_saved(graph, SavedLimits(0, 4 * 64 - 1)) == []


def test_kept_weights_are_saved_and_their_views_are_not() -> None:
    graph, gathers = joint(8, 8)
    tag_gathers(graph, SavedLimits(small_bytes=0, budget_bytes=4 * 64))
    assert gathers[1].meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert gathers[0].meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    views = [node for node in graph.nodes if node.target is aten.t.default]
    assert {node.meta["recompute"] for node in views} == {CheckpointPolicy.MUST_RECOMPUTE}


def test_a_share_is_of_what_would_be_gathered_again() -> None:
    graph, gathers = joint(8, 8, 8, 8)
    size = 4 * 64
    assert choose_saved(graph, SavedLimits(0, 0, share=0.24)) == []
    assert len(choose_saved(graph, SavedLimits(0, 0, share=0.5))) == 2
    assert set(choose_saved(graph, SavedLimits(0, 0, share=1.0))) == set(gathers)
    # The last group is kept anyway; half of the other three is one and a half.
    assert len(choose_saved(graph, SavedLimits(0, 0, group_bytes=size, parts=4, share=0.5))) == 1 + 1


def drawn(seed: int) -> tuple[random.Random, list[int], set[int]]:
    """Random sizes, many of them equal as in layers, and weights that are already kept."""
    chance = random.Random(seed)
    alike = [chance.randint(1, 60) for _ in range(chance.randint(1, 5))]
    sizes = [chance.choice(alike) for _ in range(chance.randint(1, 40))]
    return chance, sizes, {place for place in range(len(sizes)) if chance.random() < 0.2}


@pytest.mark.parametrize("seed", range(40))
def test_waits_are_those_of_a_queue_whatever_is_kept_and_never_grow(seed: int) -> None:
    chance, sizes, kept = drawn(seed)
    found = BackwardWaits(sizes, [place in kept for place in range(len(sizes))])
    before = [float("inf")] * len(sizes)
    left = [place for place in range(len(sizes)) if place not in kept]
    while left:
        expected = oracle.waits(sizes, kept)
        assert [found.of(place) for place in left] == [expected[place] for place in left]
        assert all(expected[place] <= before[place] for place in left)
        before = expected
        place = left.pop(chance.randrange(len(left)))
        found.keep(place)
        kept.add(place)


@pytest.mark.parametrize("seed", range(80))
def test_the_same_weights_are_kept_in_the_same_order(seed: int) -> None:
    chance, sizes, kept = drawn(seed)
    weights = [_Weight([], size, 0, 0, place) for place, size in enumerate(sizes)]
    budget = chance.random() * sum(sizes)
    found = _within(weights, {weights[place] for place in kept}, budget)
    assert [weight.again for weight in found] == oracle.within(sizes, kept, budget)


def test_of_ten_thousand_weights_each_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, looks, wait = random.Random(0), Counter[int](), BackwardWaits.of

    def of(self: BackwardWaits, place: int) -> float:
        looks[place] += 1
        return wait(self, place)

    monkeypatch.setattr(BackwardWaits, "of", of)
    weights = [_Weight([], chance.choice([8, 16, 22, 88]), 0, 0, place) for place in range(10_000)]
    assert _within(weights, set(), sum(weight.size for weight in weights) / 2)
    assert looks.total() < 5 * len(weights)
