"""Find the products of weights with activations in a joint graph or an inference graph.

Autograd makes three products for ``y = linear(x, w)``: ``x @ w.T`` in forward, and ``dy @ w`` and ``dy.T @ x`` in
backward. A product belongs to a weight if one operand is that weight as a whole, or if its result is only the weight's
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compile.fx_utils import (
    REDUCE,
    TRANSPOSES,
    calls,
    cast_dtype,
    gathers,
    is_dequantize,
    is_view_or_cast,
    shard_of,
    weight_name,
)
from lightning_zero.compile.passes.saved_weights import backward_nodes
from lightning_zero.compile.subgraphs.node_kinds import is_kernel

ProductKind = Literal["forward", "input_gradient", "weight_gradient"]
KINDS: tuple[ProductKind, ...] = ("forward", "input_gradient", "weight_gradient")

_aten = torch.ops.aten
_MM, _ADDMM = _aten.mm.default, _aten.addmm.default
_ADDITION = _aten.add.Tensor


@dataclass(frozen=True)
class Operand:
    """A matrix that a product reads, possibly transposed.

    Attributes:
        source: node of the matrix before transposes.
        transposed: True if the product reads the transpose of ``source``.
    """

    source: Node
    transposed: bool


@dataclass(frozen=True, eq=False)
class LinearProduct:
    """One product of a linear layer. Compared by identity.

    Attributes:
        node: call of ``mm`` or ``addmm``.
        shard: graph input of the weight's shard.
        weight: name of the weight.
        sizes: ``m, k, n`` of ``[m, k] @ [k, n]``; an entry may be symbolic.
        gradient_operand: position of the operand that depends on the loss's gradient; None in forward.
    """

    node: Node
    kind: ProductKind
    shard: Node
    weight: str
    left: Operand
    right: Operand
    sizes: tuple[Any, Any, Any]
    gradient_operand: Literal[0, 1] | None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of operands and result."""
        return self.node.meta["val"].dtype

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Return both operands."""
        return self.left, self.right

    @property
    def bias(self) -> Node | None:
        """Return the bias of an ``addmm``."""
        bias = self.node.args[0] if self.node.target is _ADDMM else None
        assert bias is None or isinstance(bias, Node)
        return bias


def find_products(graph: Graph) -> list[LinearProduct]:
    """Return the products of linear layers, in order."""
    weights = _whole_weights(graph)
    backward = backward_nodes(graph)
    first_equal = _FirstEqual()
    found = []
    for node in graph.nodes:
        if node.target not in (_MM, _ADDMM) or not _is_plain(node):
            continue
        left, right = (_operand(arg, first_equal) for arg in node.args[-2:])
        product = _product(node, left, right, weights, backward)
        if product is not None:
            found.append(product)
    return found


def _product(
    node: Node, left: Operand, right: Operand, weights: dict[Node, Node], backward: AbstractSet[Node]
) -> LinearProduct | None:
    of_weight = [operand.source in weights for operand in (left, right)]
    of_gradient = [operand.source in backward for operand in (left, right)]
    rows: Any = node.args[-2]
    sizes = (*rows.meta["val"].shape, node.meta["val"].shape[1])
    place: Any = of_gradient.index(True) if any(of_gradient) else None
    if sum(of_weight) == 1:
        gather = weights[left.source if of_weight[0] else right.source]
        kind: ProductKind = "forward" if place is None else "input_gradient"
        return LinearProduct(node, kind, shard_of(gather), weight_name(gather), left, right, sizes, place)
    reduce = _only_gradient(node) if sum(of_gradient) == 1 and not any(of_weight) else None
    if reduce is None:
        return None
    return LinearProduct(node, "weight_gradient", shard_of(reduce), weight_name(reduce), left, right, sizes, place)


def _whole_weights(graph: Graph) -> dict[Node, Node]:
    """Return matrices that have all elements of a weight, with the weight's gather."""
    found: dict[Node, Node] = {}
    for gather in gathers(graph):
        pending = [gather]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found[node] = gather
            pending += [user for user in node.users if is_dequantize(user) or _keeps_elements(user, node)]
    return found


def dequantization(matrix: Node) -> Node | None:
    """Return the op that dequantizes a matrix, if only casts follow; None for other matrices."""
    while cast_dtype(matrix) is not None:
        [matrix] = matrix.all_input_nodes
    return matrix if is_dequantize(matrix) else None


def _keeps_elements(user: Node, source: Node) -> bool:
    value = user.meta.get("val")
    return (
        is_view_or_cast(user)
        and user.args[0] is source
        and isinstance(value, Tensor)
        and _static_numel(value) == _static_numel(source.meta["val"]) is not None
    )


def _static_numel(value: Tensor) -> int | None:
    numel = 1
    for size in value.shape:
        if type(size) is not int:
            return None
        numel *= size
    return numel


def _is_plain(node: Node) -> bool:
    """Return True for matrices of one dtype, without factors in ``addmm`` or an expanded bias."""
    if node.kwargs:
        return False
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, Node)]
    tensors = [value for value in values if isinstance(value, Tensor) and value.dtype.is_floating_point]
    if len(tensors) != len(node.args) or len({tensor.dtype for tensor in tensors}) > 1:
        return False
    if len(tensors) == 2:
        return True
    return tensors[0].dim() == 1 and tensors[0].shape[0] == node.meta["val"].shape[1]


class _FirstEqual:
    """Finds equal views and casts of one value: each linear layer of a 3-D activation makes its own.

    Torch removes them later, but costs and casts are shared by node.
    """

    def __init__(self) -> None:
        self._known: dict[object, Node] = {}

    def of(self, node: Node) -> Node:
        """Return the first of the nodes that are equal to this one, in the order of calls."""
        if not is_view_or_cast(node):
            return node
        read = map_arg((node.args, node.kwargs), self.of)
        # Regions of checkpoints recompute their own.
        key = node.target, str(read), node.meta.get(AC_GRAPH_ID), node.meta.get(RECOMPUTE)
        return self._known.setdefault(key, node)


def _operand(node: Any, first_equal: _FirstEqual) -> Operand:
    """Remove transposes of a matrix."""
    assert isinstance(node, Node)
    transposed = False
    while node.target in TRANSPOSES and node.meta["val"].dim() == 2:
        source = node.args[0]
        assert isinstance(source, Node)
        transposed ^= list(node.args[1:]) not in ([[0, 1]], [0, 0], [1, 1])
        node = source
    return Operand(first_equal.of(node), transposed)


def _only_gradient(node: Node) -> Node | None:
    """Return the node that reduces a gradient, if the product's result is read for nothing else."""
    found: Node | None = None
    pending = [node]
    for made in pending:  # the list grows
        for user in made.users:
            if calls(user, REDUCE):
                if found is not None and shard_of(found) is not shard_of(user):
                    return None
                found = user
            elif is_view_or_cast(user) or user.target is _ADDITION:  # gradients of a weight that is used twice
                pending.append(user)
            else:
                return None
    return found


def reads_embedding(graph: Graph) -> set[Node]:
    """Return the shards of weights that an embedding reads, which are tied if a product reads them too."""
    weights = _whole_weights(graph)
    lookups = graph.find_nodes(op="call_function", target=_aten.embedding.default)
    return {shard_of(weights[node.args[0]]) for node in lookups if node.args[0] in weights}


def last_products(products: Iterable[LinearProduct], graph: Graph) -> set[LinearProduct]:
    """Return the forward products from which no other kernel of forward, product or attention, reads."""
    backward = backward_nodes(graph)
    kernels: set[Node] = {node for node in graph.nodes if is_kernel(node)} - backward
    leading: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in backward and any(user in kernels or user in leading for user in node.users):
            leading.add(node)
    return {product for product in products if product.kind == "forward" and product.node not in leading}
