"""How a backend traces the joint graph of a part of a graph: with what it has for whole ones, up to there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.fx import Graph, GraphModule

from lightning_zero.compat.compiler import (
    CustomGraphPass,
    aot_autograd,
    inductor_config,
    lookup_backend,
    stable_topological_sort,
)
from lightning_zero.compile.layer_dedup.layer_call import DedupFailed

__all__ = ["JointGraph", "TraceJoint", "joint_tracer"]


@dataclass(frozen=True)
class JointGraph:
    """A joint graph.

    Attributes:
        traced: as AOTAutograd makes it.
        passed: after the backend's own passes over joint graphs, but for the one that gives seeds to random numbers;
            None where it has none.
    """

    traced: Graph
    passed: Graph | None = None


# Gives the joint graph of a module.
TraceJoint = Callable[[GraphModule, Sequence[Tensor]], JointGraph]


def joint_tracer(backend: str) -> TraceJoint:
    """For "aot_eager", or Inductor, which has its own decompositions."""
    return partial(_traced, _by_aot_eager if backend == "aot_eager" else _by_inductor)


class _Taken(Exception):
    """The joint graph, which is all that was wanted."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint


def _traced(compile_with: Callable[..., Any], module: GraphModule, inputs: Sequence[Tensor]) -> JointGraph:
    try:
        compile_with(module, inputs)
    except _Taken as taken:
        return taken.joint
    raise DedupFailed("a layer needs no backward")


def _by_aot_eager(module: GraphModule, inputs: Sequence[Tensor]) -> None:
    def partition(module: GraphModule, *args: Any, **settings: Any) -> NoReturn:
        raise _Taken(JointGraph(module.graph))

    def compiler(module: GraphModule, inputs: Any) -> Any:
        return module

    aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(module, inputs)


def _by_inductor(module: GraphModule, inputs: Sequence[Tensor]) -> None:
    compile_fx: Any = lookup_backend("inductor")
    with ExitStack() as until_taken:
        keep = _Keep(until_taken)
        patches = {"joint_custom_pre_pass": keep, "joint_custom_post_pass": _Take(keep)}
        compile_fx(module, inputs, config_patches=patches)


class _Keep(CustomGraphPass):
    graph: Graph

    def __init__(self, until_taken: ExitStack) -> None:
        self._until_taken = until_taken

    def __call__(self, graph: Graph) -> None:
        # Seeds are drawn for a whole graph at once.
        self._until_taken.enter_context(inductor_config.patch(fallback_random=True))
        self.graph = Graph(graph.owning_module)
        self.graph.output(self.graph.graph_copy(graph, {}))

    def uuid(self) -> None:
        return None


class _Take(CustomGraphPass):
    def __init__(self, kept: _Keep) -> None:
        self._kept = kept

    def __call__(self, graph: Graph) -> NoReturn:
        stable_topological_sort(graph)  # Inductor does so behind all of its passes
        raise _Taken(JointGraph(self._kept.graph, graph))

    def uuid(self) -> None:
        return None
