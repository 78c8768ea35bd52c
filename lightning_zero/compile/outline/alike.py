"""Whether nodes of Dynamo's graph do the same, and what they do as a text that another process would write, too."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lightning_zero.compat.compiler import BypassCache, check_node_safe
from lightning_zero.compat.graphs import EXAMPLE
from lightning_zero.compat.ops import function_call
from lightning_zero.compile.outline.called import called_body, is_region, policy_of, regions
from lightning_zero.native.ops import NAMESPACE

if TYPE_CHECKING:
    from lightning_zero.compile.outline.find import Region

__all__ = ["digest_of", "key_of", "layout_of", "undescribed"]

_LITERALS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def layout_of(value: Any) -> str | None:
    """What a graph may depend on of a value's form; None for what it would have to be known for itself: symbolic sizes,
    subclasses, objects."""
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride())
        if value.layout != torch.strided or not all(type(size) is int for size in sizes):
            return None
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{value.requires_grad}"
    if isinstance(value, tuple | list):
        parts = ["None" if part is None else layout_of(part) for part in value]  # attention may return no weights
        return None if None in parts else f"[{','.join(map(str, parts))}]"
    return repr(value) if type(value) in (int, float, bool) else None


def key_of(node: Node) -> str | None:
    """Equal for nodes that do the same with values of the same form; None for what cannot be compared."""
    if node.op not in ("call_function", "call_method") or (layout := _returned(node)) is None:
        return None
    arguments = _arguments(node, {})
    return None if arguments is None else f"{node.op} {_name(node)} {arguments} {layout}"


def _returned(node: Node) -> str | None:
    if node.target is operator.setitem:
        return "nothing"  # experts of transformers' mixtures are sorted so
    return layout_of(node.meta.get(EXAMPLE))


def _text_of(body: GraphModule, region: bool) -> str | None:
    """What it does; None where a text cannot say it, and where functions read weights, each of which has a name: what
    they do is not told apart later on, as what regions do is."""
    names = {node: f"%{number}" for number, node in enumerate(body.graph.nodes)}
    lines = [policy_of(body)]
    for node in body.graph.nodes:
        inner = called_body(node) if region else None
        arguments, called = _arguments(node, names) if inner is None else _described(node), _name(node)
        value = node.meta.get(EXAMPLE)
        layout = layout_of(value)
        if arguments is None or not _safe(node) or (node.op == "get_attr" and inner is None):
            return None
        if (value is not None and layout is None) if region else f"{NAMESPACE}." in called:
            return None
        lines.append(f"{node.op} {called if node.op[:5] == 'call_' else ''} {arguments} {layout}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _safe(node: Node) -> bool:
    if node.target is function_call:
        return True  # its graphs say what it does
    try:
        check_node_safe(node)
    except BypassCache:
        return False  # its name does not say what it does
    return True


def undescribed(nodes: Iterable[Node]) -> Node | None:
    """The first call that no text describes."""
    calls = [node for node in nodes if node.op in ("call_function", "call_method")]
    return next((node for node in calls if not _safe(node) or _arguments(node, {}) is None), None)


def digest_of(region: Region) -> str | None:
    """Equal for regions that do the same, in every process; None where a text cannot say what they do."""
    names = {node: f"%{number}" for number, node in enumerate((*region.given, *region.nodes))}
    lines = [f"given {layout_of(node.meta[EXAMPLE])} {node.op == 'placeholder'}" for node in region.given]
    for node in region.nodes:
        if not _safe(node):
            return None
        lines.append(f"{node.op} {_name(node)} {_arguments(node, names)} {_returned(node)}")
    lines += [names[node] for node in region.results]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    if hasattr(target, "overloadpacket") or not hasattr(target, "__qualname__"):
        return str(target)
    return f"{getattr(target, '__module__', None)}.{target.__qualname__}"


def _arguments(node: Node, names: dict[Node, str]) -> str | None:
    """As a text, with values called as in ``names``, or described."""
    described = {read: names.get(read) or _described(read) for read in node.all_input_nodes}
    if None in described.values():
        return None
    arguments = map_arg((node.args, node.kwargs), lambda read: _Named(described[read]))
    return repr(arguments) if _plain([arguments]) else None


def _described(node: Node) -> str | None:
    if (body := called_body(node)) is not None:
        return _text_of(body, is_region(node))
    # What is taken of a region's result belongs to it: to the one before, where two kinds of layers meet.
    made_by = [str(_text_of(body, True)) for body in regions(node)]
    return f"<{layout_of(node.meta.get(EXAMPLE))} {made_by}>"


class _Named(str):
    __repr__ = str.__str__


def _plain(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, dict):
            if not _plain(value.values()):
                return False
        elif isinstance(value, slice):
            if not _plain((value.start, value.stop, value.step)):
                return False
        elif isinstance(value, tuple | list):
            if not _plain(value):
                return False
        elif not (isinstance(value, _Named) or type(value) in _LITERALS or value is Ellipsis):
            return False
    return True
