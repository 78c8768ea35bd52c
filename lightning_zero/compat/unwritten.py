"""Code and text that torch writes of graphs. Nobody runs the one or reads the other, and for a model of many layers
both have thousands of lines."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._logging import _internal
from torch.fx import _lazy_graph_module


@contextmanager
def unwritten() -> Iterator[None]:
    """Inside, the partitioner and AOTAutograd leave a graph's code to whoever runs it, and write text only where
    somebody listens."""
    log = graph_compile._log_fw_bw_graphs
    reorder: Any = partitioners.reordering_to_mimic_autograd_engine

    def logged(*args: Any, **kwargs: Any) -> Any:
        # Who hears of graphs: TORCH_LOGS="aot_graphs", TORCH_TRACE. (torch 2.11+)
        listens = graph_compile.aot_graphs_log.isEnabledFor(logging.INFO) or _internal.trace_log.handlers
        return log(*args, **kwargs) if listens else (None, None)

    with (
        # Puts a backward in the order of autograd, as a graph whose code is written, and is then written anew for each
        # copy of it. (torch 2.11+)
        patch.object(partitioners, "reordering_to_mimic_autograd_engine", _leaving_code(reorder)),
        # Writes a forward and a backward as text, for logs and for what is kept of them in the cache. (torch 2.11+)
        patch.object(graph_compile, "_log_fw_bw_graphs", logged),
    ):
        yield


def _leaving_code(function: FunctionType) -> Callable[..., Any]:
    """The function, with ``torch.fx.GraphModule`` one whose code is not written."""
    # What torch makes of graphs elsewhere: its code is written once somebody calls it. (torch 2.11+)
    fx = _With(torch.fx, GraphModule=_lazy_graph_module._LazyGraphModule)
    names = function.__globals__ | {"torch": _With(torch, fx=fx)}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


class _With:
    """A module with other attributes."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
