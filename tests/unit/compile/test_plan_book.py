"""Which plans later graphs follow, and which are only remembered."""

import pytest

from lightning_zero.compile.graph_plan import Gather, GraphPlan, PlanStore

FIRST, SECOND, THIRD = (GraphPlan("forward", nodes, (), ()) for nodes in (1, 2, 3))


def test_graphs_follow_plans_of_the_same_passes_and_no_others() -> None:
    book = PlanStore()
    book.select("default")
    book.add(FIRST)
    book.select("minimal")
    assert book.agreed_plans == ()
    book.add(SECOND)
    assert book.agreed_plans == (SECOND,)
    book.select("default")
    book.add(THIRD)
    assert book.agreed_plans == (FIRST, THIRD)
    assert book.plan.graphs == (FIRST, SECOND, THIRD)
    assert book.count == 3




def test_with_other_options_no_plan_is_followed_and_all_are_remembered() -> None:
    book = PlanStore()
    book.add(FIRST)
    book.forget()
    assert book.agreed_plans == ()
    assert book.plan.graphs == (FIRST,)


def book(*plans: tuple[str, tuple[tuple[int, int], ...]]) -> PlanStore:
    """Return the plans of graphs of a kind, with groups of (number of weights, bytes)."""
    found = PlanStore()
    for kind, groups in plans:
        gathers = tuple(Gather(("w",) * count, "float32", size, 0, "", 0, "") for count, size in groups)
        found.add(GraphPlan(kind, 9, gathers, (), compute_s=0.5))
    return found


@pytest.mark.parametrize(("share", "fits"), [(0.0, False), (0.24, False), (0.25, True), (1.0, True)])
def test_a_weight_of_a_backward_fits_into_its_share(share: float, fits: bool) -> None:
    # 400 bytes in all; the smallest weight of the first group has at most 100.
    plans = book(("forward", ((1, 1),)), ("backward", ((3, 300), (1, 100))))
    assert plans.keeps_more(share, 0.0, 0) is fits
    assert plans.forward_seconds() == 0.5


def test_shares_are_of_single_graphs() -> None:
    assert not book(*[("backward", ((1, 100),))] * 5).keeps_more(0.9, 0.0, 0)


@pytest.mark.parametrize(("budget", "fits"), [(0, False), (99, False), (100, True), (1e9, True)])
def test_a_weight_that_is_not_small_fits_until_the_step(budget: float, fits: bool) -> None:
    assert book(("forward", ((4, 40), (1, 100)))).keeps_more(0.0, budget, small_bytes=10) is fits


def test_where_nothing_is_gathered_nothing_fits() -> None:
    assert not PlanStore().keeps_more(1.0, 1e9, 0)
    assert not book(("backward", ())).keeps_more(1.0, 1e9, 0)
