"""Streams simulated on graphs of a few nodes, against intervals worked out by hand."""

import pytest

from lightning_zero.report.timeline import Compute, Gather, Interval, Reduce, simulate


def nodes(*seconds: float) -> list[Compute]:
    return [Compute(f"n{index}", value) for index, value in enumerate(seconds)]


def test_a_gather_started_early_enough_is_hidden() -> None:
    found = simulate(nodes(2, 3, 4), [Gather("w", 0, 2, 4.5)], [])
    assert found.compute == (Interval(0, 2, "n0"), Interval(2, 5, "n1"), Interval(5, 9, "n2"))
    assert found.gathers == (Interval(0, 4.5, "w"),)
    assert found.exposed == (0,)
    assert found.seconds == 9


def test_compute_waits_for_the_rest_of_a_gather() -> None:
    found = simulate(nodes(2, 3, 4), [Gather("w", 1, 2, 4.5)], [])
    assert found.gathers == (Interval(2, 6.5, "w"),)
    assert found.compute[2] == Interval(6.5, 10.5, "n2")
    assert found.exposed == (1.5,)


def test_a_gather_that_is_waited_for_where_it_starts_is_exposed_whole() -> None:
    found = simulate(nodes(1, 1), [Gather("w", 1, 1, 5)], [])
    assert found.exposed == (5,)
    assert found.seconds == 7


def test_gathers_queue_behind_each_other() -> None:
    found = simulate(nodes(1, 1, 1), [Gather("a", 0, 1, 2), Gather("b", 0, 2, 3)], [])
    assert found.gathers == (Interval(0, 2, "a"), Interval(2, 5, "b"))
    # n0 ends at 1, a at 2; n1 ends at 3, b at 5
    assert found.exposed == (1, 2)
    assert found.compute[-1] == Interval(5, 6, "n2")


def test_gathers_waited_for_together_share_the_idle_time_between_them() -> None:
    found = simulate(nodes(1, 1), [Gather("late", 1, 1, 3), Gather("early", 0, 1, 2)], [])
    assert found.exposed == (3, 1)
    assert sum(found.exposed) == found.compute[-1].start - found.compute[0].end


def test_gathers_come_back_in_the_order_given() -> None:
    found = simulate(nodes(1, 1, 1), [Gather("late", 2, 2, 1), Gather("early", 0, 1, 1)], [])
    assert [interval.label for interval in found.gathers] == ["late", "early"]
    assert found.gathers[0].start == 2


def test_reduces_run_behind_compute_and_beyond_its_end() -> None:
    found = simulate(nodes(1, 1), [], [Reduce("a", 0, 3), Reduce("b", 1, 2)])
    assert found.reduces == (Interval(1, 4, "a"), Interval(4, 6, "b"))
    assert (found.tail, found.seconds) == (4, 6)
    assert found.compute[-1].end == 2


def test_reduces_do_not_delay_gathers() -> None:
    found = simulate(nodes(1, 1, 1), [Gather("w", 1, 2, 1)], [Reduce("g", 0, 9)])
    assert found.gathers == (Interval(1, 2, "w"),)
    assert found.exposed == (0,)


def test_nodes_that_take_no_time_are_left_out_but_keep_their_index() -> None:
    found = simulate(nodes(0, 2, 0, 1), [Gather("w", 0, 2, 3)], [])
    assert found.compute == (Interval(0, 2, "n1"), Interval(3, 4, "n3"))
    assert found.exposed == (1,)


def test_nothing_takes_no_time() -> None:
    found = simulate([], [], [])
    assert (found.seconds, found.tail, found.compute) == (0, 0, ())


@pytest.mark.parametrize("gather", [Gather("w", 2, 1, 1), Gather("w", 0, 3, 1), Gather("w", -1, 1, 1)])
def test_a_gather_outside_the_graph_is_refused_by_name(gather: Gather) -> None:
    with pytest.raises(ValueError, match=r"label='w'.*does not fit a graph of 3 nodes"):
        simulate(nodes(1, 1, 1), [gather], [])


def test_a_reduce_outside_the_graph_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"label='g', at=3.*of 3 nodes"):
        simulate(nodes(1, 1, 1), [], [Reduce("g", 3, 1)])
