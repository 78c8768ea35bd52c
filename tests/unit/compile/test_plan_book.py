"""Which plans later graphs follow, and which are only remembered."""

from dataclasses import replace

from lightning_zero.budget.curve import Point
from lightning_zero.compile.graph_plan import GraphPlan, PlanStore

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


def test_what_graphs_say_of_other_budgets_holds_until_others_say_it() -> None:
    book, chart = PlanStore(), (Point(1.0, 2, 3),)
    assert book.charts == []
    book.add(replace(FIRST, chart=chart))
    book.add(SECOND)
    assert book.charts == [chart]
    book.forget()  # and a graph that was announced before is not announced again
    assert book.charts == [chart]
    other = (Point(1.0, 4, 5),)
    book.add(replace(THIRD, chart=other))
    assert book.charts == [other]


def test_with_other_options_no_plan_is_followed_and_all_are_remembered() -> None:
    book = PlanStore()
    book.add(FIRST)
    book.forget()
    assert book.agreed_plans == ()
    assert book.plan.graphs == (FIRST,)
