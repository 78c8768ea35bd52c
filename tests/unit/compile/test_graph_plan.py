"""Plans that graphs publish, and the store of plans."""

from pathlib import Path

import pytest
import torch
from torch.fx import Graph

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.fx_utils import LINEAR_PRODUCTS
from lightning_zero.compile.graph_plan import Gather, GraphPlan, Linear, Plan, PlanStore, Reduce, first_difference
from lightning_zero.compile.passes import default_passes, run_passes
from lightning_zero.compile.passes.publish_plan import publish_plan, read_plan
from lightning_zero.config import CompileConfig
from tests.unit.compile.graphs import Builder, named_products, order

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_weight_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.compile.context.SMALL_BYTES", 0)


def planned(graph: Graph, prefetch: bool = True, agreed_plans: tuple[GraphPlan, ...] = ()) -> GraphPlan:
    config = CompileConfig(prefetch=prefetch, gather_group_mb=0.04)
    return read_plan(run_passes(graph, default_passes(PassContext(config, 2, agreed_plans=agreed_plans))))


def test_the_plan_says_what_is_gathered_when_and_for_whom() -> None:
    plan = planned(named_products())
    assert plan.kind == "forward"
    assert [g.weights for g in plan.gathers] == [("layer.a",), ("layer.b",), ("layer.c",)]
    assert {(g.dtype, g.bytes, g.until) for g in plan.gathers} == {("float32", 64 * 64 * 4, "last use")}
    assert [g.used for g in plan.gathers] == ["mm_default", "mm_default_1", "mm_default_2"]
    # One group ahead: each starts before the product that uses the previous one, and is waited for after it.
    assert [g.before for g in plan.gathers] == ["mm_default", "mm_default", "mm_default_1"]
    assert all(g.started < g.waited for g in plan.gathers)
    assert plan.nodes == 3 + 3 * 4


@pytest.mark.parametrize("prefetch", [True, False])
def test_gradients_are_in_the_plan(prefetch: bool) -> None:
    plan = planned(named_products(backward=True), prefetch)
    assert plan.kind == "backward"
    names = [name for reduce in plan.reduces for name in reduce.weights]
    assert names == ["layer.a", "layer.b", "layer.c"]
    assert sum(reduce.bytes for reduce in plan.reduces) == 3 * 64 * 64 * 4


def test_the_graph_announces_its_plan_before_its_first_collective() -> None:
    graph = run_passes(named_products(), default_passes(PassContext(CompileConfig(), 2)))
    assert order(graph).startswith("check_plan(primals_a) gather_group(")
    check = next(node for node in graph.nodes if "check_plan" in str(node.target))
    assert check.args[1] == read_plan(graph).digest
    assert GraphPlan.from_json(str(check.args[2])) == read_plan(graph)


def test_a_graph_without_collectives_announces_nothing() -> None:
    b = Builder()
    x = b.input("x", 2, 2)
    assert "check_plan" not in order(publish_plan(b.done(b.call(aten.mm.default, x, x))))


def test_what_ranks_compare_does_not_depend_on_the_batch() -> None:
    assert planned(named_products(rows=64)).digest == planned(named_products(rows=3)).digest
    assert planned(named_products("abc")).digest != planned(named_products("abe")).digest
    assert planned(named_products("abc")).digest != planned(named_products("acb")).digest
    assert planned(named_products()).digest != planned(named_products(backward=True)).digest


def test_what_is_kept_for_backward_is_another_plan() -> None:
    until = [
        GraphPlan("forward", 9, (Gather(("a",), "float32", 8, 0, "mm", 1, "mm", until),), ())
        for until in ("last use", "backward")
    ]
    assert until[0].digest != until[1].digest


def test_gradients_may_come_in_another_order() -> None:
    gathers = (Gather(("a",), "float32", 8, 0, "mm", 1, "mm"),)
    plans = [
        GraphPlan("backward", 9, gathers, tuple(Reduce((name,), "float32", 8, at) for at, name in enumerate(names)))
        for names in ("xy", "yx", "xz")
    ]
    assert plans[0].digest == plans[1].digest != plans[2].digest


def test_a_later_graph_follows_the_plan_that_was_agreed_on() -> None:
    first = planned(named_products("abcd"))
    # Exchange a and b: the same weights in another order of use.
    graph = run_passes(
        named_products("bacd"),
        default_passes(PassContext(CompileConfig(gather_group_mb=0.04), 2, agreed_plans=(first,))),
    )
    assert [g.weights for g in read_plan(graph).gathers] == [g.weights for g in first.gathers]
    assert read_plan(graph).digest == first.digest
    # Every use follows its wait, and launches keep their order.
    graph.lint()
    starts = [g.started for g in read_plan(graph).gathers]
    assert starts == sorted(starts)


def test_a_plan_for_other_weights_is_not_followed() -> None:
    first = planned(named_products("abc"))
    assert planned(named_products("abe"), agreed_plans=(first,)) == planned(named_products("abe"))
    # A backward does not follow a forward's plan either.
    assert planned(named_products("cba", backward=True), agreed_plans=(first,)) == planned(
        named_products("cba", backward=True)
    )


def test_a_plan_prints_as_a_table() -> None:
    lines = str(planned(named_products())).splitlines()
    assert lines[0] == "forward graph of 15 nodes: 3 gathers of 0.05 MiB, 0 gradients of 0.00 MiB"
    assert " ".join(lines[1].split()) == "bucket weights dtype MiB started before waited for by kept until"
    assert lines[2].split()[:4] == ["0", "layer.a", "float32", "0.02"]
    assert len(lines) == 5


def test_fp8_products_and_reasons_of_others_are_in_the_plan() -> None:
    graph = named_products("abc")
    a, b, _ = (node for node in graph.nodes if node.op == "placeholder" and node.name != "x")
    a.meta[LINEAR_PRODUCTS] = "layer.a", {"forward": "fp8", "weight_gradient": "fp8"}
    b.meta[LINEAR_PRODUCTS] = "layer.b", {"forward": "the output head"}
    plan = planned(graph)
    # Products of backward are in backward's plan.
    assert plan.linears == (
        Linear("layer.a", (("forward", "fp8"),)),
        Linear("layer.b", (("forward", "the output head"),)),
    )
    assert GraphPlan.from_json(plan.to_json()) == plan
    assert "fp8 products: 1 of 2\n  in 16 bits, the output head: layer.b" in str(plan)
    assert plan.collectives() == planned(named_products("abc")).collectives()


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    plan = Plan((planned(named_products()), planned(named_products(backward=True))))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99, "graphs": []}', '{"format": 1, "graphs": [{}]}'])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a plan that this version"):
        Plan.load(path)


def test_the_first_difference_of_two_lists() -> None:
    assert first_difference("ab", "ac") == (1, "b", "c")
    assert first_difference("ab", "a") == (1, "b", "(nothing)")


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
