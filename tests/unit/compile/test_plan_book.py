"""Which plans later graphs follow, and which are only remembered."""

from lightning_zero.compile.plan import GraphPlan
from lightning_zero.compile.plan_book import PlanBook

FIRST, SECOND, THIRD = (GraphPlan("forward", nodes, (), ()) for nodes in (1, 2, 3))


def test_graphs_follow_plans_of_the_same_passes_and_no_others() -> None:
    book = PlanBook()
    book.turn_to("default")
    book.add(FIRST)
    book.turn_to("minimal")
    assert book.agreed == ()
    book.add(SECOND)
    assert book.agreed == (SECOND,)
    book.turn_to("default")
    book.add(THIRD)
    assert book.agreed == (FIRST, THIRD)
    assert book.plan.graphs == (FIRST, SECOND, THIRD)
    assert book.count == 3


def test_with_other_options_no_plan_is_followed_and_all_are_remembered() -> None:
    book = PlanBook()
    book.add(FIRST)
    book.forget()
    assert book.agreed == ()
    assert book.plan.graphs == (FIRST,)
