"""What a joint graph would take under other budgets, against graphs that are compiled with these."""

import warnings
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from lightning_zero.budget.curve import CHARTED, Point
from lightning_zero.compat import fast_partitioner
from lightning_zero.compile.backend import Compiler
from lightning_zero.compile.budget_sweep.sweep import point
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.graph import graph_kind, output_node
from lightning_zero.compile.listener import CompileProgress
from lightning_zero.compile.plan import CHART
from lightning_zero.compile.plan_book import PlanStore
from lightning_zero.compile.selection import PassSelection
from lightning_zero.config import CompileConfig
from lightning_zero.native import load

LAYERS, WIDTH, WORDS = 6, 32, 96


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixes, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixes(self.norms[0](x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Seeing(CompileProgress):
    """Keeps the halves as they were partitioned, and what the forward says of other budgets."""

    def __init__(self) -> None:
        super().__init__(lambda busy: None, report=lambda line: None)
        self.halves: dict[str, Graph] = {}
        self.chart: tuple[Point, ...] = ()
        self.observe(self._see)

    def _see(self, what: str, graph: Graph) -> None:
        if what == "before":
            kept = self.halves[graph_kind(graph)] = Graph()
            kept.output(kept.graph_copy(graph, {}))
            self.chart = output_node(graph).meta.get(CHART) or self.chart


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    load()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(budget: float, sweeps_budgets: bool) -> tuple[Seeing, Tensor, list[int]]:
    """What was seen; a loss and gradients; and where the memory of what forward was given is."""
    seeing = Seeing()
    compiler = Compiler(context(budget), PassSelection(), PlanStore(), seeing)
    compiler.sweeps_budgets = sweeps_budgets
    torch.manual_seed(0)
    model = Model()
    tokens = torch.arange(60).view(2, 30) % WORDS
    loss = torch.compile(model, **compiler.arguments())(tokens)
    loss.backward()
    given = [value.untyped_storage().data_ptr() for value in (tokens, *model.parameters())]
    return seeing, torch.cat([loss.detach().view(1), model.layers[0].up.weight.grad.flatten()]), given


def context(budget: float) -> PassContext:
    return PassContext(CompileConfig(backend="aot_eager", activation_memory_budget=budget), 2)


@pytest.mark.exhaustive_variants("all")
@pytest.mark.parametrize("step", [3, 1], ids=["two", "all"])
def test_each_point_is_what_the_graphs_take_that_are_compiled_with_that_budget(step: int) -> None:
    charted, values, _ = compiled(0.5, sweeps_budgets=True)
    assert tuple(one.budget for one in charted.chart) == CHARTED
    for expected in charted.chart[::step]:  # each takes a compilation
        torch._dynamo.reset()
        real, same, _ = compiled(expected.budget, sweeps_budgets=False)
        halves = real.halves["forward"], real.halves["backward"]
        assert point(*halves, context(expected.budget), expected.budget) == expected
        assert torch.equal(values, same) or expected.budget != 0.5
    least, *_, most = charted.chart
    assert least.saved < most.saved
    assert least.peak < most.peak


def test_what_is_said_to_be_saved_is_what_autograd_keeps() -> None:
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        charted, _, given = compiled(0.5, sweeps_budgets=True)
    for storage in given:
        kept.pop(storage, None)
    [half] = [one for one in charted.chart if one.budget == 0.5]
    assert half.saved == sum(kept.values()) + 4, "and the loss"


def test_nothing_is_reckoned_that_nobody_asks_for() -> None:
    seeing, *_ = compiled(0.5, sweeps_budgets=False)
    assert seeing.chart == ()


def test_users_are_not_warned_of_what_torch_does_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        seeing, *_ = compiled(0.5, sweeps_budgets=True)
    assert seeing.chart


def test_where_some_budget_cannot_be_cut_the_graph_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, values, _ = compiled(0.5, sweeps_budgets=False)
    torch._dynamo.reset()
    real = fast_partitioner.partitioners.choose_saved_values_set
    asked: list[float] = []

    def refuses(*args: object, memory_budget: float) -> object:
        asked.append(memory_budget)
        if memory_budget == CHARTED[1]:
            raise RuntimeError("AOT Autograd failed to partition")
        return real(*args, memory_budget=memory_budget)  # type: ignore[arg-type]

    monkeypatch.setattr(fast_partitioner.partitioners, "choose_saved_values_set", refuses)
    seeing, same, _ = compiled(0.5, sweeps_budgets=True)
    assert asked == [*CHARTED[:0:-1], 0.5]
    assert seeing.chart == ()
    assert torch.equal(values, same)
    assert [str(node) for node in seeing.halves["backward"].nodes] == [
        str(node) for node in plain.halves["backward"].nodes
    ]


def test_what_nobody_has_thought_of_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*args: object) -> int:
        raise KeyError("val")

    monkeypatch.setattr(import_module("lightning_zero.compile.budget_sweep.sweep"), "graph_peak", wrong)
    seeing, *_ = compiled(0.5, sweeps_budgets=True)
    assert seeing.chart == ()
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "KeyError: 'val'" in line
