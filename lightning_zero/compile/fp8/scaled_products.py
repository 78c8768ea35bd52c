"""Replace chosen products by fp8 ones: cast both operands, each with its scales, and multiply.

A cast is a few elementwise ops and a maximum, which Inductor fuses with the kernel that computes the matrix. With one
scale for each matrix, an operand that two products read is cast once. With one for each row or column, an operand is
cast for each side that it is contracted along.

Backward casts a weight from its gathered bytes again, so no fp8 copy of it stays in memory. Scales are saved. A packed
frozen weight is dequantized in fp8, in the layout of each product, by the scale that its bytes have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compat.tensors import FakeTensor, fake_like, no_dispatch_modes, no_python_dispatcher
from lightning_zero.compile.fp8.fp8_gathers import WEIGHT_FACTOR, erase_unread
from lightning_zero.compile.fp8.health_numbers import insert_health, insert_shares
from lightning_zero.compile.fp8.linear_products import LinearProduct, ProductKind, dequantization
from lightning_zero.compile.fx_utils import ops, weight_nodes
from lightning_zero.compile.partitioner.partition import OUTSIDE
from lightning_zero.compile.passes.saved_weights import backward_nodes
from lightning_zero.compile.scaled_mm_op import SCALED_MM
from lightning_zero.sharding.fp8_health import MATRICES
from lightning_zero.sharding.weight_format import DEQUANTIZE, largest_value

_aten = torch.ops.aten
_permute = _aten.permute.default
_cast = torch.ops.prims.convert_element_type.default
# Bounds a maximum from below, so that the scale of a matrix of zeros is finite.
MIN_AMAX = 1e-12
# Meta of numbers that forward saves for backward.
_SAVED = {AC_GRAPH_ID: OUTSIDE, RECOMPUTE: CheckpointPolicy.MUST_SAVE}
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Fp8Recipe:
    """Formats and accumulation of fp8 products.

    Attributes:
        forward_dtype: of weights and activations.
        gradient_dtype: of gradients of results.
        fast: kinds of products that accumulate in the tensor cores' registers only, which is faster and less exact.
        by_row: one scale for each row of the left and each column of the right operand, instead of one for each matrix.
        health: note amax, underflow and overflow of casts in graphs that have a backward.
    """

    forward_dtype: torch.dtype = torch.float8_e4m3fn
    gradient_dtype: torch.dtype = torch.float8_e5m2
    fast: frozenset[ProductKind] = frozenset({"forward"})
    by_row: bool = False
    health: bool = False


def scale_products(
    graph: Graph,
    chosen: Sequence[LinearProduct],
    products: Sequence[LinearProduct],
    recipe: Fp8Recipe,
    gathered: Mapping[Node, Node] = MappingProxyType({}),
) -> Graph:
    """Replace ``chosen`` ones of all products of a graph, in place. Call it after ``tag_gathers``.

    Args:
        gathered: weights to gather in fp8, and their gathers; see :func:`find_fp8_gathers`.
    """
    if not chosen:
        return graph
    insert = _Inserter(graph)
    casts = _Casts(graph, insert, products, recipe, gathered)
    for product in chosen:
        (left, left_scale), (right, right_scale) = casts.rows(product, 0), casts.columns(product, 1)
        with graph.inserting_before(product.node):
            result = insert.call(
                SCALED_MM,
                left,
                right,
                left_scale,
                right_scale,
                product.bias,
                product.dtype,
                product.kind in recipe.fast,
            )
        result.meta = {**product.node.meta, "val": result.meta["val"]}
        product.node.replace_all_uses_with(result)
        casts.results[product.node] = result
    for product in chosen:
        graph.erase_node(product.node)
    for weight in dict.fromkeys([*gathered.values(), *casts.dequantized]):
        erase_unread(graph, weight)
    return graph


# A matrix, its fp8 format, and the dimensions that share a scale.
_Key = tuple[Node, torch.dtype, tuple[int, ...]]


class _Fp8Matrix(NamedTuple):
    """A matrix in fp8, and the numbers by which its elements are multiplied to get the original ones."""

    node: Node
    inverse_scale: Node


class _Casts:
    """Casts of one graph, each of which is inserted once, before its first reader.

    Attributes:
        results: replaced products, which later ones may read, and the nodes that replace them.
        dequantized: packed weights in 16 bits, which fp8 products do not read.
    """

    def __init__(
        self,
        graph: Graph,
        insert: _Inserter,
        products: Sequence[LinearProduct],
        recipe: Fp8Recipe,
        gathered: Mapping[Node, Node],
    ) -> None:
        self._graph, self._insert, self._recipe, self._gathered = graph, insert, recipe, gathered
        self.results: dict[Node, Node] = {}
        self.dequantized: list[Node] = []
        self._weights, self._backward = weight_nodes(graph), backward_nodes(graph)
        self._notes_health = recipe.health and bool(self._backward)
        self._policies: dict[Node, dict[str, Any]] = {}
        for product in products:  # the first reader of an activation is in forward
            for operand in product.operands:
                self._policies.setdefault(operand.source, _recompute_policy(product.node))
        self._inverse_scales: dict[_Key, Node] = {}
        self._cast: dict[_Key, Node] = {}
        self._transposed: dict[_Key, Node] = {}
        self._factors: dict[_Key, Node] = {}

    def rows(self, product: LinearProduct, place: int) -> _Fp8Matrix:
        """Return an operand, with contiguous rows."""
        operand = product.operands[place]
        return self._in_layout(product, place, operand.transposed)

    def columns(self, product: LinearProduct, place: int) -> _Fp8Matrix:
        """Return the transpose of an operand, with contiguous rows."""
        operand = product.operands[place]
        return self._in_layout(product, place, not operand.transposed)

    def _in_layout(self, product: LinearProduct, place: int, transposed: bool) -> _Fp8Matrix:
        """Return the source of an operand, or its transpose, with contiguous rows."""
        key = product.operands[place].source, self._dtype(product, place), self._contracted(transposed)
        packed = None if self._recipe.by_row else dequantization(key[0])
        if packed is not None:
            return self._dequantize(key, packed, product, transposed)
        if key not in self._cast:
            self._add(key, product, place)
        if transposed and key not in self._transposed:
            with self._graph.inserting_before(product.node):
                turned = self._turn(self._cast[key])
                packed = self._insert.call(_aten.clone.default, turned, memory_format=torch.contiguous_format)
            packed.meta |= _recompute_policy(turned)
            self._transposed[key] = packed
        return _Fp8Matrix((self._transposed if transposed else self._cast)[key], self._inverse_scales[key])

    def _turn(self, node: Node) -> Node:
        turned = self._insert.call(_permute, node, [1, 0])
        turned.meta |= _recompute_policy(node)
        return turned

    def _contracted(self, transposed: bool) -> tuple[int, ...]:
        """Return the dimensions of a source that share a scale, if its rows or its columns are contracted."""
        if not self._recipe.by_row:
            return 0, 1
        return (0,) if transposed else (1,)

    def _dtype(self, product: LinearProduct, place: int) -> torch.dtype:
        # torch's rowwise kernels take e5m2 on the left only.
        is_gradient = place == product.gradient_operand and not (place and self._recipe.by_row)
        return self._recipe.gradient_dtype if is_gradient else self._recipe.forward_dtype

    def _add(self, key: _Key, product: LinearProduct, place: int) -> None:
        source, dtype, dims = key
        if (gather := self._gathered.get(source)) is not None:
            self._add_gathered(key, gather, product)
            return
        call, policy = self._insert.call, self._policy(source)
        matrix = self.results.get(source, source)
        with self._graph.inserting_before(product.node):
            amax = call(_aten.amax.default, call(_aten.abs.default, matrix), list(dims), len(dims) == 1)
            precise = call(_cast, amax, torch.float32)
            inverse = self._inverse_scale(precise, dtype)
            steps = [call(_aten.reciprocal.default, inverse), call(_cast, matrix, torch.float32)]
            steps.append(call(_aten.mul.Tensor, steps[1], steps[0]))
            # No clamp: rounding exceeds the largest number by less than half of its last place.
            steps.append(call(_cast, steps[2], dtype))
            if not _has_contiguous_rows(steps[-1].meta["val"]):
                steps.append(call(_aten.clone.default, steps[-1], memory_format=torch.contiguous_format))
            used = inverse
            if self._notes_health:
                shares = insert_shares(call, matrix, steps[0], dtype)
                used = insert_health(call, inverse, precise, shares, product.shard, self._row(product, place))
        for node in steps:
            node.meta |= policy
        if source not in self._backward:
            # Saving scales is cheaper than another maximum over the matrix.
            for node in (inverse, used):
                node.meta |= {AC_GRAPH_ID: policy.get(AC_GRAPH_ID, OUTSIDE), RECOMPUTE: CheckpointPolicy.MUST_SAVE}
        self._inverse_scales[key], self._cast[key] = used, steps[-1]

    def _row(self, product: LinearProduct, place: int) -> int:
        if product.operands[place].source in self._weights:
            return MATRICES.index("weight")
        return MATRICES.index("output_gradient" if place == product.gradient_operand else "input")

    def _add_gathered(self, key: _Key, gather: Node, product: LinearProduct) -> None:
        source, dtype, _ = key
        shard, shape = gather.args[:2]
        call = self._insert.call
        with self._graph.inserting_before(product.node):
            weight = call(gather.target, shard, shape, dtype)
            factor = call(ops(WEIGHT_FACTOR), shard)
            if self._notes_health:
                factor = self._note_amax(factor, call(_aten.mul.Tensor, factor, torch.finfo(dtype).max), product)
        # The weight is gathered again for backward, or saved, as ``source`` would have been.
        tags = {key: source.meta[key] for key in (AC_GRAPH_ID, RECOMPUTE) if key in source.meta}
        weight.meta = {**gather.meta, **tags, "val": weight.meta["val"]}
        factor.meta |= _SAVED
        self._inverse_scales[key], self._cast[key] = factor, weight

    def _dequantize(self, key: _Key, whole: Node, product: LinearProduct, transposed: bool) -> _Fp8Matrix:
        source, dtype, _ = key
        packed, shape, _, kind, *_ = whole.args
        known = self._transposed if transposed else self._cast
        call = self._insert.call
        with self._graph.inserting_before(product.node):
            if key not in self._factors:
                self.dequantized.append(whole)
                amax = largest_value(call, packed, packed.meta["val"].shape[0])  # type: ignore[union-attr]
                inverse = self._inverse_scale(amax, dtype)
                self._factors[key] = call(_aten.reciprocal.default, inverse)
                self._inverse_scales[key] = self._note_amax(inverse, amax, product) if self._notes_health else inverse
                for number in (self._factors[key], self._inverse_scales[key]):
                    number.meta |= _SAVED
            if key not in known:
                known[key] = call(DEQUANTIZE, packed, shape, dtype, kind, self._factors[key], transposed)
                known[key].meta |= self._policy(source)
        return _Fp8Matrix(known[key], self._inverse_scales[key])

    def _inverse_scale(self, amax: Node, dtype: torch.dtype) -> Node:
        bounded = self._insert.call(_aten.clamp_min.default, amax, MIN_AMAX)
        return self._insert.call(_aten.mul.Tensor, bounded, 1 / torch.finfo(dtype).max)

    def _note_amax(self, inverse: Node, amax: Node, product: LinearProduct) -> Node:
        """Report the largest value of a weight, whose shares of elements no rank knows."""
        row = MATRICES.index("weight")
        return insert_health(self._insert.call, inverse, amax, (None, None), product.shard, row)

    def _policy(self, source: Node) -> dict[str, Any]:
        """Return the meta that decides whether backward recomputes a cast.

        Casts of weights are recomputed with the weights. In a checkpointed region casts are recomputed.
        """
        if source in self._weights:
            return _recompute_policy(source) | {RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
        return self._policies[source]


def _recompute_policy(node: Node) -> dict[str, Any]:
    """Return a node's region, and its policy if that is to recompute it."""
    policy = {key: node.meta[key] for key in (AC_GRAPH_ID, RECOMPUTE) if key in node.meta}
    if policy.get(RECOMPUTE) not in _RECOMPUTED:
        policy.pop(RECOMPUTE, None)
    return policy


def _has_contiguous_rows(value: Tensor) -> bool:
    """Return False also if a symbolic size leaves it open."""
    strides = value.stride()
    return all(type(stride) is int for stride in strides) and tuple(strides) == (value.shape[1], 1)


class _Inserter:
    """Inserts calls with the values of their results.

    Equal layers have equal calls, whose values are computed once: torch's dispatcher takes most of the time otherwise.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Any, Tensor] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), lambda read: read.meta["val"])  # type: ignore[return-value]
        node.meta["val"] = self._value(target, given, named)
        return node

    def _value(self, target: Any, given: Sequence[Any], named: dict[str, Any]) -> Tensor:
        like = given[0]
        described = [_description(value) for value in given]
        if target is _permute or type(like) is not FakeTensor or None in described:
            return target(*given, **named)
        key = target, *described, *named.items()
        if (known := self._known.get(key)) is None:
            known = self._known[key] = target(*given, **named)
            return known
        with no_dispatch_modes(), no_python_dispatcher():
            memory = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
            return fake_like(like, memory)


def _description(value: Any) -> object:
    """Return a hashable description of an argument; None for a tensor with symbolic sizes."""
    if not isinstance(value, Tensor):
        return type(value), str(value)
    sizes = (*value.shape, *value.stride())
    return (value.dtype, *sizes) if all(type(size) is int for size in sizes) else None
