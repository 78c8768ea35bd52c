"""Copies of a backward that AOTAutograd keeps, in memory and in its cache, for compiled autograd alone: it would trace
the backward as it was before it was compiled. For a model of many layers a copy takes seconds."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule

from lightning_zero.compat.lookup import module
from lightning_zero.compat.patches import Patch, swap_attribute

graph_compile = module("torch._functorch._aot_autograd.graph_compile")

_COMPILE = "torch._functorch._aot_autograd.graph_compile"
_COPIES = Patch(
    "no copies of backward graphs are kept for compiled autograd",
    {
        # AOTAutograd copies a backward right before it compiles it, and no other graph. (torch 2.11+)
        f"{_COMPILE}.copy": None,
        # Holds the graph of a backward that is compiled later. (torch 2.11+)
        f"{_COMPILE}.AutogradLazyBackwardCompileInfo": (
            "bw_module, placeholder_list, saved_context, saved_compile_context"
        ),
        # Turns the graph into bytes for AOTAutograd's cache. (torch 2.11+)
        f"{_COMPILE}.serialize_graph_module": "gm",
    },
)


@_COPIES
@contextmanager
def skip_backward_copies() -> Iterator[None]:
    """Inside, backwards that are compiled at once are not copied before, and the cache gets the compiled one only.
    Compiled autograd, turned on later, finds nothing to trace, and says so; while it is on, all is kept."""
    # Whether it is on. (torch 2.11+)
    if torch._dynamo.compiled_autograd.compiled_autograd_enabled:
        yield
        return
    backwards = _Backwards()
    with (
        swap_attribute(graph_compile, "copy", SimpleNamespace(copy=copy.copy, deepcopy=backwards.copied)),
        swap_attribute(graph_compile, "AutogradLazyBackwardCompileInfo", backwards.kept),
        swap_attribute(graph_compile, "serialize_graph_module", lambda module: None),
    ):
        yield


class _Backwards:
    def __init__(self) -> None:
        self._compiled: Any = None
        self._keep = graph_compile.AutogradLazyBackwardCompileInfo

    def copied(self, value: Any) -> Any:
        if not isinstance(value, GraphModule):
            return copy.deepcopy(value)
        self._compiled = value
        return value

    def kept(self, module: Any, *rest: Any) -> Any:
        """What a backward is compiled from that is compiled when it runs first; None for one that is compiled."""
        return None if module is self._compiled else self._keep(module, *rest)
