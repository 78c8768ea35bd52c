"""Arguments of the compiler, its joint-graph passes, and the debugging backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat.compiler import CustomGraphPass, CustomPartitionerFn, inductor_config, lookup_backend
from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compile.backend import Compiler, JointPasses, _boxed
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.graph_plan import PlanStore
from lightning_zero.compile.layer_dedup import dedup_layers, joint_tracer
from lightning_zero.compile.passes import run_passes
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.compile.passes.publish_plan import read_plan
from lightning_zero.compile.passes.selection import PassSelection
from lightning_zero.config import CompileConfig
from lightning_zero.native import load
from lightning_zero.task_progress import TaskProgress
from tests.unit.compile.graphs import named_products
from tests.unit.compile.layer_dedup.modules import LAYERS, WIDTH, Block, described


class Silent:
    wants_graphs = wants_passes = False
    tasks = TaskProgress()

    def graph(self, what: str, graph: Graph) -> None:
        pass

    def pass_ran(self, trace: PassTrace) -> None:
        pass

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        pass

    def add_metric(self, what: str, amount: float) -> None:
        pass

    def report(self, line: str) -> None:
        self.lines.append(line)

    def __init__(self) -> None:
        self.lines: list[str] = []


def test_inputs_are_freed_after_their_last_use() -> None:
    alive: list[bool] = []
    reference: list[weakref.ref[Tensor]] = []

    def look(value: Tensor) -> Tensor:
        alive.append(reference[0]() is not None)
        return value

    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.mul, (x, 2))
    graph.output((graph.call_function(look, (y,)),))
    run = _boxed(GraphModule(torch.nn.Module(), graph))
    inputs = [torch.ones(3)]
    reference.append(weakref.ref(inputs[0]))
    (result,) = run(inputs)
    assert result.tolist() == [2, 2, 2]
    assert inputs == []
    assert alive == [False]


def test_the_reason_is_reported_in_words_when_something_is_compiled_again() -> None:
    load()
    told = Silent()
    for_users = Compiler(PassContext(CompileConfig(backend="aot_eager"), 2), PassSelection(), PlanStore(), told)
    for _ in range(2):  # other arguments are not a guard of Dynamo
        doubled = torch.compile(_doubled, **for_users.arguments())
        assert doubled(torch.ones(4)).tolist() == [2.0] * 4
    assert told.lines == []
    doubled(torch.ones(5))
    (line,) = told.lines
    assert line == "Recompiling a module for training: 'x' changed in dimension 0 from 4 to 5."
    doubled(torch.ones(6))
    assert len(told.lines) == 1, "sizes are symbols by now"
    with torch.no_grad():
        doubled(torch.ones(6))
    assert len(told.lines) == 1, "an evaluation is expected"


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def compiler(**options: object) -> Compiler:
    return made(PassContext(CompileConfig(**options), 2))  # type: ignore[arg-type]


def made(context: PassContext, plans: PlanStore | None = None) -> Compiler:
    return Compiler(context, PassSelection(), plans or PlanStore(), Silent())


def test_what_decides_how_graphs_are_rewritten_decides_what_a_cache_may_return() -> None:
    digest = compiler()._digest()
    assert digest == compiler()._digest()
    assert digest != compiler(unsharded_cache_mb=1)._digest()
    assert digest != made(PassContext(CompileConfig(), 3))._digest()
    plans = PlanStore()
    later = made(PassContext(CompileConfig(), 2), plans)
    plans.add(read_plan(run_passes(named_products(), later.passes())))
    assert later._digest() != digest


@pytest.mark.parametrize("name", ["fast_partitioner.py", "backend.py", "cost_model.py", "ops.py"])
def test_a_cache_returns_nothing_that_other_code_has_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, plain = compiler()._digest(), Path.read_bytes
    changed: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        if path.name == name:
            changed.append(path)
        return plain(path) + b"# mended" * (path.name == name)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert compiler()._digest() != before
    assert changed


def test_backwards_are_not_written_as_code_before_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    lazy: list[bool] = []
    monkeypatch.setattr(
        "lightning_zero.compile.backend._boxed",
        lambda module: lazy.append(isinstance(module, _LazyGraphModule)) or _boxed(module),
    )
    compiler = Compiler(PassContext(CompileConfig(backend="aot_eager"), 2), PassSelection(), PlanStore(), Silent())
    x = torch.ones(3, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(_doubled, **compiler.arguments())(x).sum().backward()
    torch._dynamo.reset()
    assert lazy[-1], "the backward"


class Wasteful(Block):
    """Nodes that Inductor's passes remove again."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        wide = F.gelu(self.wide(x)) * torch.ones(2 * WIDTH)
        return x + (self.narrow(wide.clone()) + torch.zeros(WIDTH)).view_as(x)


class Masked(Block):
    """Add the input."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(x))) + given[0]


class Attending(Wasteful):
    """Attention as separate ops, which Inductor replaces by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (2, WIDTH // 2)) for part in self.heads(x).split(WIDTH, -1)]
        query, key, value = (part.permute(0, 2, 1, 3) for part in parts)
        attended = torch.softmax(torch.matmul(query, key.permute(0, 1, 3, 2)).div(2.0), -1) @ value
        return super().forward(x + attended.transpose(1, 2).reshape(x.shape))


class Noisy(Block):
    """Draw random numbers and add the input."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return super().forward(x) + given[0]


class Checkpointed(Wasteful):
    """A region of its own, of which nothing is saved."""

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        return checkpoint(super().forward, x, *given, use_reentrant=False)


class Whole(nn.Module):
    def __init__(self, block: type[Block], mask: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask, x = self.mask(x), self.inner(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().sum()


class _Done(Exception):
    pass


class _Pass(CustomGraphPass):
    def __init__(self, function: Callable[[Graph], Any]) -> None:
        self._function = function

    def __call__(self, graph: Graph) -> None:
        self._function(graph)

    def uuid(self) -> None:
        return None


class _Partitioner(CustomPartitionerFn):
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        gm.graph.lint()
        numbers = sorted(
            {node.meta[AC_GRAPH_ID] for node in gm.graph.nodes if AC_GRAPH_ID in node.meta}
        )  # torch counts on
        regions = {None: None} | {number: at for at, number in enumerate(numbers)}
        recomputed = [(regions[node.meta.get(AC_GRAPH_ID)], node.meta.get(RECOMPUTE)) for node in gm.graph.nodes]
        self._lines += [f"{line} {again}" for line, again in zip(described(gm.graph), recomputed, strict=True)]
        raise _Done

    def uuid(self) -> None:
        return None


def passed(module: nn.Module, outlined: bool, first: bool = False) -> tuple[list[str], list[int]]:
    """Return the joint graph that Inductor partitions, and node counts before and after the expansion of layers."""
    lines: list[str] = []
    sizes: list[int] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        layers = dedup_layers(graph, joint_tracer("inductor")) if outlined else None
        assert (layers is not None and len(layers) == LAYERS) == outlined

        def finish(joint: Graph) -> Graph:
            sizes.append(len(joint.nodes))
            if layers is not None:
                layers.expand(joint)
            sizes.append(len(joint.nodes))
            return joint

        compile_fx: Any = lookup_backend("inductor")
        with JointPasses(layers, finish, first) as joint:
            options = joint.options(_Pass) | {"custom_partitioner_fn": _Partitioner(lines)}
            return compile_fx(graph, inputs, config_patches=options)

    torch.compiler.reset()
    torch.manual_seed(0)
    with pytest.raises(BackendCompilerFailed, match="_Done"):
        torch.compile(module, backend=backend)(torch.randn(3, 6, WIDTH))
    return lines, sizes


@pytest.mark.parametrize("block", [Wasteful, Checkpointed, Attending])
@pytest.mark.exhaustive_variants("Attending", "Checkpointed")
def test_what_passes_do_to_one_layer_is_what_they_do_to_each(block: type[Block]) -> None:
    module = Whole(block)
    whole, _ = passed(module, False)
    once, (before, after) = passed(module, True)
    assert sorted(once) == sorted(whole)
    assert len(once) == after > before  # no pass has made it smaller since
    assert not any("aten.ones" in line for line in once)
    # One in forward and one in backward.
    assert sum("_scaled_dot_product" in line.split()[0] for line in once) == (2 * LAYERS if block is Attending else 0)


def test_layers_that_draw_numbers_get_the_seeds_of_the_whole_graph() -> None:
    module = Whole(Noisy, F.dropout)  # one more is drawn outside of them
    whole, _ = passed(module, False)
    once, (before, after) = passed(module, True)
    assert sorted(once) == sorted(whole)
    assert after > before
    assert sum("inductor_lookup_seed" in line for line in once) == LAYERS + 1
    assert not inductor_config.fallback_random


def test_what_layers_are_given_that_is_constant_has_passes_see_all_of_them() -> None:
    module = Whole(Masked, lambda x: torch.zeros(WIDTH))  # the addition is skipped, which a single layer does not show
    whole, _ = passed(module, False)
    once, _ = passed(module, True)
    assert sorted(once) == sorted(whole)


def test_whoever_asks_whose_nodes_are_has_passes_see_all_layers() -> None:
    module = Whole(Wasteful)
    whole, _ = passed(module, False)
    once, (_, after) = passed(module, True, first=True)
    assert sorted(once) == sorted(whole)
    assert len(once) < after  # they were expanded before the passes ran


def test_what_a_user_passes_behind_them_sees_whole_layers() -> None:
    seen: list[str] = []
    with inductor_config.patch(
        joint_custom_post_pass=_Pass(lambda graph: seen.extend(str(n.target) for n in graph.nodes))
    ):
        passed(Whole(Wasteful), True)
    assert sum("gelu" in name or "erf" in name for name in seen) >= LAYERS
    assert not any("outline" in name for name in seen)
