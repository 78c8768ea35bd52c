"""Merge the products of thin weights that read one activation, such as the adapters of LoRA.

A product with 16 columns takes as long as one with 48, since both read the whole activation. Therefore adapters ``A``
of the query, key and value projections, which read the same ``x``, are multiplied as one weight:

    forward:          x @ A1.T, x @ A2.T               ->  parts of the columns of x @ cat(A1, A2).T
    weight gradients: dh1.T @ x, dh2.T @ x             ->  parts of the rows of cat(dh1, dh2).T @ x
    input gradient:   ... + dh1 @ A1 + ... + dh2 @ A2  ->  ... + cat(dh1, dh2) @ cat(A1, A2)

``x`` has shape (tokens, k), each ``A`` has (n, k), and each ``dh`` has (tokens, n).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compat.tensors import OpOverload
from lightning_zero.compile.fp8.linear_products import LinearProduct, ProductKind, find_products
from lightning_zero.compile.fx_utils import REDUCE, calls, cast_dtype, is_view_or_cast
from lightning_zero.compile.scaled_mm_op import SCALED_MM

_aten = torch.ops.aten
# Inductor's joint graphs have ``permute`` in place of ``t``.
_MM, _ADD, _PERMUTE = _aten.mm.default, _aten.add.Tensor, _aten.permute.default
_PRODUCTS = (_MM, _aten.addmm.default, SCALED_MM)
# Columns of a product that is merged, and of merged ones: on an H200, 64 take at most 15 % longer than 16.
MAX_COLUMNS, MAX_MERGED = 64, 128
# Columns are multiples of this number, by which rows of a part of a 16-bit result begin at multiples of 16 bytes.
ALIGNMENT = 8
# A thin weight has at least this many times as many columns as rows. Copying it takes less time than a product.
RATIO = 4

_Group = list[LinearProduct]


def merge_thin_products(graph: Graph) -> Graph:
    """Merge thin products of a joint graph, or an inference graph, in place, after ``tag_gathers``."""
    if sum(map(_is_thin, graph.find_nodes(op="call_function", target=_MM))) > 1:
        products = [product for product in find_products(graph) if product.node.target is _MM]
        merger = _Merger(graph, products)
        for group in _groups(product for product in products if product.kind == "forward"):
            merger.merge(group)
    return graph


def _is_thin(product: Node) -> bool:
    """Return True for a product of shape (tokens, n) with an n that is small, and small beside k."""
    assert isinstance(product.args[1], Node)
    k, n = product.args[1].meta["val"].shape
    return type(n) is int and type(k) is int and n <= min(MAX_COLUMNS, k // RATIO) and n % ALIGNMENT == 0


def _groups(products: Iterable[LinearProduct]) -> list[_Group]:
    """Return groups of thin products, in forward order, each of several weights with one activation."""
    found: dict[object, _Group] = {}
    for product in products:
        if _is_thin(product.node) and product.right.transposed and _may_have_gaps(product.node):
            tags = product.node.meta.get(AC_GRAPH_ID), product.node.meta.get(RECOMPUTE)
            group = found.setdefault((product.left, product.dtype, *tags), [])
            if product.shard not in [other.shard for other in group]:
                group.append(product)
    return [part for group in found.values() for part in _parts(group) if len(part) > 1]


def _parts(group: _Group) -> list[_Group]:
    """Split a group where it has more columns than one product should have."""
    parts: list[_Group] = [[]]
    for product in group:
        if sum(other.sizes[2] for other in [*parts[-1], product]) > MAX_MERGED:
            parts.append([])
        parts[-1].append(product)
    return parts


def _may_have_gaps(product: Node) -> bool:
    """Return True if a product's rows need not be neighbours in memory."""
    value = product.meta["val"]
    return _read_with_gaps(product, torch.cat([value, value], 1)[:, : value.shape[1]])


def _read_with_gaps(node: Node, value: Any) -> bool:
    """Return True if readers accept a node's value with these strides: casts and products accept any."""
    for user in node.users:
        if user.target in _PRODUCTS or cast_dtype(user) is not None:
            continue
        if not is_view_or_cast(user) or _has_own_strides(user):
            return False
        try:
            view = _run(user, {node: value})
        except (RuntimeError, ValueError):  # a view of several rows as one
            return False
        if not _read_with_gaps(user, view):
            return False
    return True


def _has_own_strides(view: Node) -> bool:
    """Return True for ``as_strided`` and its like, which do not read the strides of their input."""
    target = view.target
    return isinstance(target, OpOverload) and any(argument.name == "stride" for argument in target._schema.arguments)


class _Merger:
    """Merges groups of products of one graph."""

    def __init__(self, graph: Graph, products: Iterable[LinearProduct]) -> None:
        self._graph = graph
        self._of_weight: dict[tuple[ProductKind, Node], _Group] = {}
        for product in products:
            self._of_weight.setdefault((product.kind, product.shard), []).append(product)

    def merge(self, group: _Group) -> None:
        """Merge products of forward, and those of backward with the same weights."""
        x, sources = group[0].left, [product.right.source for product in group]
        gradients, inputs = self._one_each("weight_gradient", group), self._one_each("input_gradient", group)
        weight = self._merge_forward(group, sources)
        if gradients and all(product.left.transposed and product.right == x for product in gradients):
            self._merge_weight_gradients(gradients)
        plain = not any(operand.transposed for product in inputs for operand in product.operands)
        if inputs and plain and [product.right.source for product in inputs] == sources:
            self._merge_input_gradients(inputs, weight)

    def _one_each(self, kind: ProductKind, group: _Group) -> _Group:
        """Return the product of this kind of each weight; none unless each has exactly one."""
        found = [self._of_weight.get((kind, product.shard), []) for product in group]
        return [products[0] for products in found] if all(len(products) == 1 for products in found) else []

    def _merge_forward(self, group: _Group, sources: Sequence[Node]) -> Node:
        """Replace products by parts of one, at the place of the first, and return the merged weight."""
        first = min(product.node for product in group)
        self._move_weights(sources, first)
        with self._graph.inserting_before(first):
            weight = self._call(_aten.cat.default, sources[0], list(sources))
            merged = self._call(_MM, first, first.args[0], self._call(_PERMUTE, sources[0], weight, [1, 0]))
            parts = self._parts_of(merged, group, 1)
        self._replace(group, parts)
        return weight

    def _move_weights(self, sources: Iterable[Node], first: Node) -> None:
        """Move weights before a node, with the gathers and casts that make them."""
        needed = set(sources)
        pending = list(needed)
        for node in pending:  # the list grows
            makers = [maker for maker in node.all_input_nodes if maker.op != "placeholder" and maker not in needed]
            needed.update(makers)
            pending += makers
        for node in sorted(needed):
            if node > first:
                first.prepend(node)

    def _merge_weight_gradients(self, group: _Group) -> None:
        """Replace products by parts of one, at the place of the last, behind which their readers move."""
        last = max(product.node for product in group)
        readers = _all_readers(product.node for product in group)
        if not all(is_view_or_cast(node) or node.target is _ADD or calls(node, REDUCE) for node in readers):
            return
        with self._graph.inserting_before(last):
            turned = self._call(_PERMUTE, last, self._join(group), [1, 0])
            merged = self._call(_MM, last, turned, last.args[1])
            parts = self._parts_of(merged, group, 0)
        for reader in sorted(readers):
            if reader < last:
                last.prepend(reader)
        self._replace(group, parts)

    def _merge_input_gradients(self, group: _Group, weight: Node) -> None:
        """Replace terms of one sum by one term, at the place of the last."""
        *others, last = sorted(product.node for product in group)
        if not _are_terms(others, last):
            return
        with self._graph.inserting_before(last):
            total = self._call(_MM, last, self._join(group), weight)
        last.replace_all_uses_with(total)
        self._graph.erase_node(last)
        for node in others:
            *_, end = chain = _chain(node)
            addition = next(iter(end.users))
            [rest] = [operand for operand in addition.all_input_nodes if operand is not end]
            addition.replace_all_uses_with(rest)
            for unread in (addition, *reversed(chain)):
                self._graph.erase_node(unread)

    def _join(self, group: _Group) -> Node:
        """Return gradients of the results, side by side."""
        return self._call(_aten.cat.default, group[0].node, [product.left.source for product in group], 1)

    def _parts_of(self, merged: Node, group: _Group, dim: int) -> list[Node]:
        parts, begin = [], 0
        for product in group:
            end = begin + product.node.meta["val"].shape[dim]
            parts.append(self._call(_aten.slice.Tensor, product.node, merged, dim, begin, end))
            begin = end
        return parts

    def _replace(self, group: _Group, parts: Iterable[Node]) -> None:
        for product, part in zip(group, parts, strict=True):
            product.node.replace_all_uses_with(part)
            self._graph.erase_node(product.node)
            _update_views(part)

    def _call(self, target: OpOverload, like: Node, *args: Any) -> Node:
        """Insert a call with the tags of another one."""
        node = self._graph.call_function(target, args)
        node.meta = {**like.meta, "val": _run(node)}
        return node


def _run(node: Node, values: Mapping[Node, Any] | None = None) -> Any:
    known = values or {}
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: known.get(read, read.meta["val"]))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _update_views(node: Node) -> None:
    """Compute values of views anew, after strides have changed."""
    for user in node.users:
        if user.target not in _PRODUCTS and is_view_or_cast(user) and cast_dtype(user) is None:
            user.meta["val"] = _run(user)
            _update_views(user)


def _all_readers(nodes: Iterable[Node]) -> set[Node]:
    """Return all nodes but the output that depend on these."""
    pending = list(nodes)
    found: set[Node] = set()
    for node in pending:  # the list grows
        more = [user for user in node.users if user.op != "output" and user not in found]
        found.update(more)
        pending += more
    return found


def _chain(node: Node) -> list[Node]:
    """Return a node with the views and casts that follow, each the only reader of the one before."""
    chain = [node]
    while len(chain[-1].users) == 1 and is_view_or_cast(user := next(iter(chain[-1].users))):
        chain.append(user)
    return chain


def _are_terms(others: Sequence[Node], last: Node) -> bool:
    """Return True if nodes are, in equal views, terms of one sum whose parts nothing else reads."""
    sums = [_addition(node) for node in (*others, last)]
    forms = {str([(link.target, link.args[1:], link.kwargs) for link in _chain(node)[1:]]) for node in (*others, last)}
    if len(forms) > 1 or sums[-1] is None:
        return False
    return all(_leads_to(addition, sums[-1]) for addition in sums)


def _addition(node: Node) -> Node | None:
    """Return the only reader of a node's chain if it adds another value of the same shape and dtype."""
    users = _chain(node)[-1].users
    if len(users) != 1:
        return None
    addition = next(iter(users))
    operands = addition.all_input_nodes
    if addition.target is not _ADD or addition.kwargs or len(operands) != 2:
        return None
    values = [read.meta["val"] for read in (*operands, addition)]
    # Symbolic sizes cannot be hashed, and comparing them would add guards.
    return addition if len({(value.dtype, str(value.shape)) for value in values}) == 1 else None


def _leads_to(addition: Node | None, last: Node) -> bool:
    """Return True if the only reader of a sum, and of each further one, adds to it, until ``last``."""
    while addition is not None and addition is not last:
        users = [user for user in addition.users if user.target is _ADD and len(user.all_input_nodes) == 2]
        addition = users[0] if len(addition.users) == len(users) == 1 and not users[0].kwargs else None
    return addition is not None
