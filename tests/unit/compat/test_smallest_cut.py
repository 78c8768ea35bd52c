"""Cuts of networks that fall apart, against networkx'."""

from math import inf
from random import Random
from typing import Any

import networkx
import pytest

from lightning_zero.compat import smallest_cut
from lightning_zero.compat.smallest_cut import minimum_cut

INSIDE = 9


def network_of(seeds: list[int]) -> Any:
    """A part for each seed, between source and sink, with few capacities, so that many cuts cost the same."""
    network: Any = networkx.DiGraph()
    network.add_nodes_from("st")
    for part, seed in enumerate(seeds):
        draw = Random(seed)
        nodes = [f"{part}.{number}" for number in range(INSIDE)]
        for _ in range(3 * INSIDE):
            first, last = draw.sample(nodes, 2)
            network.add_edge(first, last, capacity=draw.choice([0, 1, 1, 2, inf] if first < last else [0, 1, 3]))
        network.add_edge("s", nodes[0], capacity=inf)
        network.add_edge("s", nodes[1], capacity=draw.choice([1, 2]))
        network.add_edge(nodes[-1], "t", capacity=inf)
        network.add_edge(nodes[-2], "t", capacity=draw.choice([1, inf]))
        network.add_edge(nodes[-1], nodes[0], capacity=inf)  # backwards: costs nothing
    return network


@pytest.mark.parametrize("alike", [True, False])
def test_it_is_the_one_that_networkx_finds(alike: bool) -> None:
    cut = unbounded = 0
    for seed in range(100):
        network = network_of([seed] * 3 if alike else [seed, seed + 1, seed + 2])
        if seed % 2:
            network.add_edge("0.3", "1.5", capacity=1)  # two parts hang together
        try:
            expected = networkx.minimum_cut(network, "s", "t")
        except networkx.NetworkXUnbounded:
            unbounded += 1
            with pytest.raises(networkx.NetworkXUnbounded):
                minimum_cut(network, "s", "t")
        else:
            cut += 1
            assert minimum_cut(network, "s", "t") == expected
    assert min(cut, unbounded) > 5


def test_equal_parts_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    plain = smallest_cut._cut

    def counted(part: Any) -> Any:
        nonlocal seen
        seen += 1
        return plain(part)

    monkeypatch.setattr(smallest_cut, "_cut", counted)
    network: Any = networkx.DiGraph()
    for layer in range(20):
        for before, behind, capacity in (("s", "a", 5), ("a", "b", 3), ("b", "c", 3), ("c", "t", 4)):
            network.add_edge(*(n if n in "st" else f"{layer}{n}" for n in (before, behind)), capacity=capacity)
    value, (near, beyond) = minimum_cut(network, "s", "t")
    assert (value, seen) == (60, 1)
    assert beyond == {"t", *(f"{layer}c" for layer in range(20))}, "of equal ones, that next to the sink"
    assert near == set(network) - beyond
