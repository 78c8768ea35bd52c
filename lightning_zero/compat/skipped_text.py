"""Text that torch writes of graphs, and questions that it asks of each node. Nobody reads the text, and for a model of
many layers it has thousands of lines."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx import graph as fx_graph
from torch.fx.immutable_collections import immutable_dict, immutable_list

from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch, swap_attribute

guards = module("torch._dynamo.guards")
output_graph = module("torch._dynamo.output_graph")
autograd_cache = module("torch._functorch._aot_autograd.autograd_cache")
graph_compile = module("torch._functorch._aot_autograd.graph_compile")
codecache = module("torch._inductor.codecache")
library = module("torch._library.utils")
_internal = module("torch._logging._internal")
# A module whose code is written when it is called. (torch 2.11+)
_LazyGraphModule = private("torch.fx._lazy_graph_module._LazyGraphModule")
pytree = module("torch.utils._pytree")
_traceback = module("torch.utils._traceback")

_SEQUENCES = {tuple, list, immutable_list}
_DICTS = {dict, immutable_dict}
_SINGLE = {Node, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


_COMPILE = "torch._functorch._aot_autograd.graph_compile"
_TEXT = Patch(
    "graphs are not written as text that no log shows",
    {
        # Writes a forward and a backward as text, for logs and for what is kept of them in the cache. (torch 2.11+)
        f"{_COMPILE}._log_fw_bw_graphs": "fw_module, bw_module, maybe_subclass_meta, fw_metadata, aot_config",
        # Writes a joint graph as text. (torch 2.11+)
        f"{_COMPILE}._log_joint_graph": "fx_g, aot_config",
        # Says of each part of a graph's key in the cache what it was. (torch 2.11+; 2.13 does where asked)
        "torch._inductor.codecache.FxGraphCachePickler.debug_lines": "self, inp",
    },
    needs=(
        # Who hears of graphs: TORCH_LOGS="aot_graphs", TORCH_LOGS="aot_joint_graph", TORCH_TRACE. (torch 2.11+)
        f"{_COMPILE}.aot_graphs_log",
        f"{_COMPILE}.aot_joint_log",
        "torch._inductor.codecache.log",
        "torch._functorch._aot_autograd.autograd_cache.log",
        "torch._logging._internal.trace_log",
    ),
)
_NODES = Patch(
    "nodes of graphs are made and looked at in less time",
    {
        # Each node that is made is searched for symbols that should be nodes, more than half of what making it takes.
        # (torch 2.13+; earlier ones do not ask)
        "torch.fx.graph.pytree.tree_iter": "tree, is_leaf",
        # Tells ops with side effects; called eight times for each node. (torch 2.11+)
        "torch._library.utils.is_impure": "op, args, kwargs, impure_random",
    },
)
_MODULES = Patch(
    "a graph that Dynamo looks through does not become code first",
    {
        # The module torch.fx, whose GraphModule Dynamo constructs. (torch 2.11+)
        "torch._dynamo.output_graph.fx": None,
    },
    needs=(
        # A module whose code is written when it is called. (torch 2.11+)
        "torch.fx._lazy_graph_module._LazyGraphModule",
    ),
)
_PATHS = Patch(
    "each path of a source file is shortened once for all guards",
    {
        # Leaves out what a path has in common with torch's own. (torch 2.11+)
        "torch.utils._traceback.shorten_filename": "fn, base",
        # Says of which variable around a function it is a guard, for which it goes through its whole path.
        # (torch 2.11+)
        "torch._dynamo.guards._get_closure_var_hint": "source",
    },
)


@contextmanager
def unwritten() -> Iterator[None]:
    """Inside, AOTAutograd writes text only where somebody listens, and nodes are made without such questions."""
    with _without_text(), _nodes_made_fast():
        yield


@_TEXT
@contextmanager
def _without_text() -> Iterator[None]:
    halves = _where_heard(graph_compile._log_fw_bw_graphs, (None, None), graph_compile.aot_graphs_log)
    joint = _where_heard(graph_compile._log_joint_graph, None, graph_compile.aot_joint_log)
    both = codecache.log, autograd_cache.log
    lines = _where_heard(codecache.FxGraphCachePickler.debug_lines, [], *both, level=logging.DEBUG)

    with (
        swap_attribute(graph_compile, "_log_fw_bw_graphs", halves),
        swap_attribute(graph_compile, "_log_joint_graph", joint),
        swap_attribute(codecache.FxGraphCachePickler, "debug_lines", lines),
    ):
        yield


@_NODES
@contextmanager
def _nodes_made_fast() -> Iterator[None]:
    with (
        swap_attribute(fx_graph, "pytree", With(fx_graph.pytree, tree_iter=leaves_of)),
        swap_attribute(library, "is_impure", _by_op(library.is_impure)),
    ):
        yield


@_MODULES
@contextmanager
def written_when_called() -> Iterator[None]:
    """Inside, the module that Dynamo puts around a graph while it looks for assertions of sizes becomes code when it is
    called, which nobody does; what it hands to a compiler does so by itself."""
    with swap_attribute(output_graph, "fx", With(torch.fx, GraphModule=_Lazy)):
        yield


@_PATHS
@contextmanager
def paths_shortened_once() -> Iterator[None]:
    """Inside, each path of a source file is shortened once, and a variable of a closure is looked for only in paths
    through one. Guards have the line in their text that asked for them: 260 for each layer of GPT-2, from a dozen
    files."""
    hint = guards._get_closure_var_hint

    def closure_hint(source: Any) -> str | None:
        return hint(source) if source is not None and "cell_contents" in source.name else None

    with (
        swap_attribute(_traceback, "shorten_filename", lru_cache(None)(_traceback.shorten_filename)),
        swap_attribute(guards, "_get_closure_var_hint", closure_hint),
    ):
        yield


def _by_op(plain: Callable[..., bool]) -> Callable[..., bool]:
    known: dict[Any, bool] = {}

    def is_impure(op: Any, *, impure_random: bool = True, **given: Any) -> bool:
        if not isinstance(op, torch._ops.OpOverload):  # of others it may depend on what they are given
            return plain(op, impure_random=impure_random, **given)
        if (op, impure_random) not in known:
            known[op, impure_random] = plain(op, impure_random=impure_random, **given)
        return known[op, impure_random]

    return is_impure


def _where_heard(
    write: Callable[..., Any], nothing: Any, *logs: logging.Logger, level: int = logging.INFO
) -> Callable[..., Any]:
    def written(*args: Any, **kwargs: Any) -> Any:
        listens = any(log.isEnabledFor(level) for log in logs) or _internal.trace_log.handlers
        return write(*args, **kwargs) if listens else nothing

    return written


def leaves_of(tree: Any) -> list[Any]:
    """What torch's ``tree_iter`` gives: an argument of a node is seldom anything else than these."""
    found, pending = [], [tree]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _SEQUENCES:
            pending += value[::-1]
        elif kind in _DICTS:
            pending += [*value.values()][::-1]
        elif kind in _SINGLE:
            found.append(value)
        else:
            found += pytree.tree_leaves(value)
    return found


class _Kind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _LazyGraphModule(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, GraphModule)


class _Lazy(metaclass=_Kind):
    """GraphModule, but that calls of it make one that is written late, as Inductor's are. (torch 2.11+)"""


class With:
    """A module with other attributes."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
