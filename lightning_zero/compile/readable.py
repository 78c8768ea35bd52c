"""A graph as text that people read and compare. Nodes are numbered as in plans: inputs, the output and the announcement
of the plan have no number."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.ops import OpOverload

__all__ = ["is_numbered", "format_nodes", "readable"]


def readable(graph: Graph) -> str:
    """A line for each node: its number, name, op, arguments, and the dtype and shape of its result."""
    lines, number = [], 0
    for node, (_, line) in zip(graph.nodes, format_nodes(graph), strict=True):
        shown = str(number) if is_numbered(node) else ""
        number += is_numbered(node)
        lines.append(f"{shown:>5}  {line}\n")
    return "".join(lines)


def format_nodes(graph: Graph) -> Iterator[tuple[str, str]]:
    """Name and line of each node, without its number: that of a node which a pass leaves alone stays the same."""
    for node in graph.nodes:
        shape = _shape(node.meta.get("val"))
        yield node.name, f"{_call(node)}{f'  # {shape}' if shape else ''}"


def is_numbered(node: Node) -> bool:
    """Whether plans number the node."""
    return (
        node.op not in ("placeholder", "get_attr", "output") and str(node.target) != "lightning_zero.check_plan.default"
    )


def _call(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {node.op}" + (f" {node.target}" if node.target != node.name else "")
    arguments = [*map(_argument, node.args), *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())]
    target = node.target
    name = str(target) if isinstance(target, str | OpOverload) else getattr(target, "__name__", str(target))
    return f"{node.name} = {name}({', '.join(arguments)})"


def _argument(value: object, most: int = 60) -> str:
    # A plan is announced in a text as long as the plan; other texts are short.
    return f"{value[:most]!r}..." if isinstance(value, str) and len(value) > most else str(value)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(map(_shape, value))
    return "" if value is None else str(value)
