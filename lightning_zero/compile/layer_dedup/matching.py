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
from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compat.ops import function_call
from lightning_zero.compile.layer_dedup.hop_bodies import hop_body, is_region, describe_policy, regions
from lightning_zero.native.ops import NAMESPACE

if TYPE_CHECKING:
    from lightning_zero.compile.layer_dedup.find_layers import LayerMatch

__all__ = ["NodeFingerprints", "describe_layout", "find_undescribed"]

_LITERALS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def describe_layout(value: Any) -> str | None:
    """What a graph may depend on of a value's form; None for what it would have to be known for itself: symbolic sizes,
    subclasses, objects."""
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride())
        if value.layout != torch.strided or not all(type(size) is int for size in sizes):
            return None
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{value.requires_grad}"
    if isinstance(value, tuple | list):
        parts = ["None" if part is None else describe_layout(part) for part in value]  # attention may return no weights
        return None if None in parts else f"[{','.join(map(str, parts))}]"
    return repr(value) if type(value) in (int, float, bool) else None


class NodeFingerprints:
    """What nodes of a graph do, as texts, of which each is made once: a value's form is asked for by all that read it.
    The graph and its values stay as they are meanwhile."""

    def __init__(self) -> None:
        self._layouts: dict[Node, str | None] = {}
        self._keys: dict[Node, str | None] = {}
        self._safe: dict[Any, bool] = {}

    def node_key(self, node: Node) -> str | None:
        """Equal for nodes that do the same with values of the same form; None for what cannot be compared."""
        if node not in self._keys:
            self._keys[node] = self._key(node)
        return self._keys[node]

    def layer_digest(self, region: LayerMatch) -> str | None:
        """Equal for regions that do the same, in every process; None where a text cannot say what they do."""
        names = {node: f"%{number}" for number, node in enumerate((*region.given, *region.nodes))}
        lines = [f"given {self.describe_layout(node)} {node.op == 'placeholder'}" for node in region.given]
        for node in region.nodes:
            if not self._is_safe(node):
                return None
            reads: list[Node] = []  # one by one: of two values of one form the key does not say which is read where
            map_arg((node.args, node.kwargs), reads.append)
            lines.append(f"{self.node_key(node)} {[names.get(read) for read in reads]}")
        lines += [names[node] for node in region.results]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def describe_layout(self, node: Node) -> str | None:
        """:func:`describe_layout` its value."""
        if node not in self._layouts:
            self._layouts[node] = describe_layout(node.meta.get(EXAMPLE_VALUE))
        return self._layouts[node]

    def arguments(self, node: Node, names: dict[Node, str] | None = None) -> str | None:
        """With values called as in ``names``, or described; None where no text describes one."""
        known = names or {}
        described = {read: known.get(read) or self._described(read) for read in node.all_input_nodes}
        if None in described.values():
            return None
        arguments = map_arg((node.args, node.kwargs), lambda read: _Named(described[read]))
        return repr(arguments) if _plain([arguments]) else None

    def _key(self, node: Node) -> str | None:
        if node.op not in ("call_function", "call_method"):
            return None
        # Experts of transformers' mixtures are sorted so.
        layout = "nothing" if node.target is operator.setitem else self.describe_layout(node)
        arguments = None if layout is None else self.arguments(node)
        return None if arguments is None else f"{node.op} {_name(node)} {arguments} {layout}"

    def _is_safe(self, node: Node) -> bool:
        if node.op != "call_function":  # of a method it matters what it is called on
            return _safe(node)
        if node.target not in self._safe:
            self._safe[node.target] = _safe(node)
        return self._safe[node.target]

    def _described(self, node: Node) -> str | None:
        if (body := hop_body(node)) is not None:
            return self._text_of(body, is_region(node))
        # What is taken of a region's result belongs to it: to the one before, where two kinds of layers meet.
        made_by = [str(self._text_of(body, True)) for body in regions(node)]
        return f"<{self.describe_layout(node)} {made_by}>"

    def _text_of(self, body: GraphModule, region: bool) -> str | None:
        """What it does; None where a text cannot say it, and where functions read weights, each of which has a name:
        what they do is not told apart later on, as what regions do is."""
        names = {node: f"%{number}" for number, node in enumerate(body.graph.nodes)}
        lines = [describe_policy(body)]
        for node in body.graph.nodes:
            inner = hop_body(node) if region else None
            arguments, called = self.arguments(node, names) if inner is None else self._described(node), _name(node)
            value = node.meta.get(EXAMPLE_VALUE)
            layout = self.describe_layout(node)
            if arguments is None or not self._is_safe(node) or (node.op == "get_attr" and inner is None):
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


def find_undescribed(nodes: Iterable[Node]) -> Node | None:
    """The first call that no text describes."""
    calls = [node for node in nodes if node.op in ("call_function", "call_method")]
    fingerprints = NodeFingerprints()
    return next((node for node in calls if not _safe(node) or fingerprints.arguments(node) is None), None)


def _name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    if hasattr(target, "overloadpacket") or not hasattr(target, "__qualname__"):
        return str(target)
    return f"{getattr(target, '__module__', None)}.{target.__qualname__}"


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
