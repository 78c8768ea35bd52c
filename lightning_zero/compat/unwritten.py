"""Text that torch writes of graphs, and questions that it asks of each node. Nobody reads the text, and for a model of
many layers it has thousands of lines."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd import graph_compile
from torch._logging import _internal
from torch.fx import Node
from torch.fx import graph as fx_graph
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree
from torch.utils import _traceback

_SEQUENCES = {tuple, list, immutable_list}
_DICTS = {dict, immutable_dict}
_SINGLE = {Node, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


@contextmanager
def unwritten() -> Iterator[None]:
    """Inside, AOTAutograd writes text only where somebody listens, and nodes are made without such questions."""
    # Who hears of graphs: TORCH_LOGS="aot_graphs", TORCH_LOGS="aot_joint_graph", TORCH_TRACE. (torch 2.11+)
    halves = _where_heard(graph_compile._log_fw_bw_graphs, graph_compile.aot_graphs_log, (None, None))
    joint = _where_heard(graph_compile._log_joint_graph, graph_compile.aot_joint_log, None)

    with (
        # Writes a forward and a backward as text, for logs and for what is kept of them in the cache. (torch 2.11+)
        patch.object(graph_compile, "_log_fw_bw_graphs", halves),
        # Likewise a joint graph. (torch 2.11+)
        patch.object(graph_compile, "_log_joint_graph", joint),
        # Each node that is made is searched for symbols that should be nodes, more than half of what making it takes.
        # (torch 2.13+; earlier ones do not ask)
        patch.object(fx_graph, "pytree", _With(fx_graph.pytree, tree_iter=_leaves)),
    ):
        yield


@contextmanager
def paths_shortened_once() -> Iterator[None]:
    """Inside, each path of a source file is shortened once. Guards have the line in their text that asked for them: 260
    for each layer of GPT-2, from a dozen files."""
    # Leaves out what a path has in common with torch's own. (torch 2.11+)
    with patch.object(_traceback, "shorten_filename", lru_cache(None)(_traceback.shorten_filename)):
        yield


def _where_heard(write: Callable[..., Any], log: logging.Logger, nothing: Any) -> Callable[..., Any]:
    def written(*args: Any, **kwargs: Any) -> Any:
        listens = log.isEnabledFor(logging.INFO) or _internal.trace_log.handlers
        return write(*args, **kwargs) if listens else nothing

    return written


def _leaves(tree: Any) -> list[Any]:
    """What torch's ``tree_iter`` gives, in another order: an argument of a node is seldom anything else than these."""
    found, pending = [], [tree]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _SEQUENCES:
            pending += value
        elif kind in _DICTS:
            pending += value.values()
        elif kind in _SINGLE:
            found.append(value)
        else:
            found += pytree.tree_leaves(value)
    return found


class _With:
    """A module with other attributes."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
