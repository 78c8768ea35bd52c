"""Replace constant causal attention masks by ``is_causal=True``.

Attention kernels with a mask compute all scores; causal kernels compute half and are faster. transformers builds masks
when it is compiled, since one graph has to serve padded inputs, too. For a fixed length the mask is a constant of the
graph, so its value can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compile.capture.dynamo_graph import (
    checkpoint_body,
    mutated_inputs,
    node_storage,
    outer_values,
    walk_nodes,
)
from lightning_zero.compile.fx_utils import ForbidRandomOps

MAX_MASK_ELEMENTS = 2**28  # elements of a mask that is evaluated, which needs memory for a moment
_ATTENTION = F.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # positional arguments


class _NotConstant(Exception):
    """The mask's value depends on the graph's inputs."""


def drop_causal_masks(module: GraphModule) -> int:
    """Replace causal masks in place, also inside checkpointed regions, and return the number of calls.

    Bool and additive masks are recognized by value, for queries and keys of one length where each query attends to the
    keys up to its own position.
    """
    edited = {node_storage(value) for node in walk_nodes(module) for value in mutated_inputs(node)}
    known: dict[Node, bool] = {}
    dropped = 0
    for owner, call, mask in _masked_calls(module, {}):
        if mask not in known:
            known[mask] = _is_causal(mask, edited)
        if known[mask]:
            arguments = dict(zip(_NAMES, call.args, strict=False)) | call.kwargs
            call.args, call.kwargs = (), arguments | {"attn_mask": None, "is_causal": True}
            owner.recompile()
            dropped += 1
    return dropped


def _masked_calls(module: GraphModule, outside: Mapping[Node, Node]) -> Iterator[tuple[GraphModule, Node, Node]]:
    """Yield attention calls with masks: the module, the call, and the mask's node in the outermost graph.

    Args:
        outside: maps the graph's inputs to nodes of the outermost graph.
    """
    called = Counter(node.target for node in module.graph.find_nodes(op="get_attr"))
    for node in list(module.graph.nodes):
        if node.target is _ATTENTION:
            arguments = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
            mask = arguments.get("attn_mask")
            if isinstance(mask, Node) and not arguments.get("is_causal") and _is_square(arguments):
                yield module, node, outside.get(mask, mask)
        elif (body := checkpoint_body(module, node)) is not None and called[node.args[0].target] == 1:
            given = outer_values(body, node, outside)
            inside = {name: value for name, value in given.items() if isinstance(value, Node)}
            yield from _masked_calls(body, inside)


def _is_square(arguments: Mapping[str, Any]) -> bool:
    """Return True if there are as many keys as queries; False for symbolic sizes, which would add a guard."""
    lengths = [_sizes(arguments.get(name))[-2:-1] for name in ("query", "key")]
    return lengths[0] == lengths[1] and all(isinstance(length, int) for (length,) in lengths if lengths[0])


def _sizes(node: Any) -> tuple[Any, ...]:
    value = node.meta.get(EXAMPLE_VALUE) if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) and value.dim() > 1 else ()


def _is_causal(mask: Node, edited: set[int | None]) -> bool:
    try:
        value = _evaluate(mask, edited)
    except Exception:  # unusual masks must not fail the compilation
        return False
    length = value.shape[-1] if value.dim() > 1 else -1
    if value.shape[-2:] != (length, length):
        return False
    seen = torch.ones(length, length, dtype=torch.bool, device=value.device).tril()
    if value.dtype is torch.bool:
        return bool((value == seen).all())
    added = torch.zeros(length, length, dtype=value.dtype, device=value.device).masked_fill(~seen, -torch.inf)
    return value.is_floating_point() and bool((value == added).all())


@torch.no_grad()
def _evaluate(mask: Node, edited: set[int | None]) -> Tensor:
    """Return the mask's value.

    Raises:
        _NotConstant: it depends on an input.
        RandomOpFound: it depends on random numbers.
    """
    values: dict[Node, Any] = {}
    with ForbidRandomOps():
        for node in _ancestors(mask, edited):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                target: Any = node.target
                values[node] = target(*args, **kwargs)
    if not isinstance(values[mask], Tensor):
        raise _NotConstant
    return values[mask]


def _ancestors(mask: Node, edited: set[int | None]) -> list[Node]:
    """Return all nodes that the mask is computed from, in order, and the mask.

    Raises:
        _NotConstant: one is an input of the graph, is mutated, or is too large.
    """
    found: set[Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        value = node.meta.get(EXAMPLE_VALUE)
        if node.op not in ("call_function", "call_method"):
            raise _NotConstant
        if isinstance(value, Tensor) and (node_storage(node) in edited or not _is_small(value)):
            raise _NotConstant
        found.add(node)
        pending += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in found]


def _is_small(value: Tensor) -> bool:
    # Expanded tensors need only the memory of their base.
    elements = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if not isinstance(size, int):
            return False
        elements *= size if stride else 1
    return elements <= MAX_MASK_ELEMENTS
