"""Copies of a backward that AOTAutograd keeps, in memory and in its cache, for compiled autograd alone: it would trace
the backward as it was before it was compiled. For a model of many layers a copy takes seconds."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd import graph_compile
from torch.fx import GraphModule


@contextmanager
def not_kept_twice() -> Iterator[None]:
    """Inside, backwards that are compiled at once are not copied before, and the cache gets the compiled one only.
    Compiled autograd, turned on later, finds nothing to trace, and says so; while it is on, all is kept."""
    # Whether it is on. (torch 2.11+)
    if torch._dynamo.compiled_autograd.compiled_autograd_enabled:
        yield
        return
    backwards = _Backwards()
    with (
        # AOTAutograd copies a backward right before it compiles it, and no other graph. (torch 2.11+)
        patch.object(graph_compile, "copy", SimpleNamespace(copy=copy.copy, deepcopy=backwards.copied)),
        # What it keeps of it. (torch 2.11+)
        patch.object(graph_compile, "AutogradLazyBackwardCompileInfo", backwards.kept),
        # The same, for its cache. (torch 2.11+)
        patch.object(graph_compile, "serialize_graph_module", lambda module: None),
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
