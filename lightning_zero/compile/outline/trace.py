"""How a backend traces the joint graph of a part of a graph: with what it has for whole ones, up to there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.fx import Graph, GraphModule

from lightning_zero.compat.compiler import CustomGraphPass, aot_autograd, lookup_backend
from lightning_zero.compile.outline.standin import NotOutlined

__all__ = ["TraceJoint", "tracer"]

# Gives the joint graph of a module, as AOTAutograd makes it.
TraceJoint = Callable[[GraphModule, Sequence[Tensor]], Graph]


def tracer(backend: str) -> TraceJoint:
    """For "aot_eager", or Inductor, which has its own decompositions."""
    return partial(_traced, _by_aot_eager if backend == "aot_eager" else _by_inductor)


class _Taken(Exception):
    """The joint graph, which is all that was wanted."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph


def _traced(compile_with: Callable[..., Any], module: GraphModule, inputs: Sequence[Tensor]) -> Graph:
    try:
        compile_with(module, inputs)
    except _Taken as taken:
        return taken.graph
    raise NotOutlined("a layer needs no backward")


def _by_aot_eager(module: GraphModule, inputs: Sequence[Tensor]) -> None:
    def partition(module: GraphModule, *args: Any, **settings: Any) -> NoReturn:
        raise _Taken(module.graph)

    def compiler(module: GraphModule, inputs: Any) -> Any:
        return module

    aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(module, inputs)


def _by_inductor(module: GraphModule, inputs: Sequence[Tensor]) -> None:
    compile_fx: Any = lookup_backend("inductor")
    compile_fx(module, inputs, config_patches={"joint_custom_pre_pass": _Take()})


class _Take(CustomGraphPass):
    def __call__(self, graph: Graph) -> NoReturn:
        raise _Taken(graph)

    def uuid(self) -> None:
        return None
