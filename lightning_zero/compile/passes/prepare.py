"""Passes on single gathers and reduces before grouping: split, sink, share, view, merge, cast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.graphs import CUSTOM, RECOMPUTE
from lightning_zero.compat.tensors import OpOverload, wait_tensor
from lightning_zero.compile.fx_utils import (
    READ_IN_PLACE,
    WEIGHT_VIEW,
    InPlaceReads,
    NodeReplacer,
    cast_dtype,
    gathers,
    is_dequantize,
    is_view_or_cast,
    narrowing_casts,
    ops,
    output_node,
    reduces,
    repeat_views,
    shard_of,
    users_of_forms,
    views_and_casts,
)
from lightning_zero.compile.passes.gather_groups import size_of
from lightning_zero.native.ops import Op, fake_full, register_op


def split_gathers(graph: Graph) -> Graph:
    """Replace ``w = gather(s)`` by ``f = gather_start(s); w = wait_tensor(f)``, in place.

    The start launches the all-gather and returns the weight's memory; the compute stream waits at ``wait_tensor``.
    """
    waits = NodeReplacer(graph)
    for node in gathers(graph):
        with graph.inserting_before(node):
            start = graph.call_function(ops("gather_start"), node.args[:3])
            ready = graph.call_function(wait_tensor, (start,))
        for new in (start, ready):
            new.meta.update({key: value for key, value in node.meta.items() if key != RECOMPUTE})
        waits.replace(node, ready)
    waits.done()
    return graph


def sink_gathers(graph: Graph) -> Graph:
    """Move each gather, with views, casts and dequantization, to the weight's first use, in place.

    The partitioner orders recomputed nodes arbitrarily. Later passes rely on gathers in order of use.
    """
    return sink(graph, gathers(graph))


def sink(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """Move these nodes, with views and casts, to their first use."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in nodes:
        chain, first = _chain_and_first_use(node, position)
        if first is None:
            continue
        for link in chain:
            first.prepend(link)
    return graph


def _chain_and_first_use(node: Node, position: dict[Node, int]) -> tuple[list[Node], Node | None]:
    """Return a node with the views, casts and dequantization of it in order, and the first other user."""
    chain, uses = {node: None}, []
    pending = [node]
    while pending:
        for user in pending.pop().users:
            # Dequantization in fp8 also reads a number, which an earlier node computes.
            follows = is_dequantize(user) or (is_view_or_cast(user) and len(user.all_input_nodes) == 1)
            if follows and user.args[0] in chain:
                if user not in chain:
                    chain[user] = None
                    pending.append(user)
            else:
                uses.append(user)
    first = min(uses, key=position.__getitem__, default=None)
    ordered = sorted(chain, key=position.__getitem__)
    return [link for link in ordered if first is None or position[link] < position[first]], first


def share_gathers(graph: Graph, within_bytes: int, small_bytes: int) -> Graph:
    """Replace a gather by an earlier one of the same weight and dtype, in place.

    A tied weight that is used much later is gathered again, since keeping it would cost memory.

    Args:
        within_bytes: bound on bytes of other weights gathered in between.
        small_bytes: weights up to this size are always shared; they are kept anyway.
    """
    latest: dict[tuple[object, ...], tuple[Node, int]] = {}
    travelled = 0
    for node in gathers(graph):
        size = size_of(node)
        key = (shard_of(node), node.args[2])
        earlier, at = latest.get(key, (None, 0))
        if earlier is not None and (size <= small_bytes or travelled - at <= within_bytes):
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            node = earlier
        else:
            travelled += size
        latest[key] = (node, travelled)
    return graph


register_op(Op(WEIGHT_VIEW, shards=0, fake=fake_full))


def read_in_place(graph: Graph, reads: InPlaceReads) -> Graph:
    """Replace gathers by views of memory that holds the whole weight, in place, if this rank has it.

    A matrix in its shard's dtype becomes a view of the graph input. Others become ``weight_view``, which returns the
    executor's copy in another dtype. So does a weight in its shard's own shape: Inductor would pass the parameter
    itself to functions of torch, and in backward these would apply the rules for users' code.

    A weight that the graph returns stays a copy, because torch lets backward overwrite values that forward returns.
    """
    views, output = NodeReplacer(graph), output_node(graph)
    for node in gathers(graph):
        shard, forms = shard_of(node), views_and_casts(node)
        if not reads.covers(node) or output in users_of_forms(node):
            continue
        packed = not (shard.meta["val"].dtype.is_floating_point or shard.meta["val"].dtype.is_complex)
        own_shape = any(_shape(form) == _shape(shard) for form in forms if isinstance(form.meta["val"], Tensor))
        with graph.inserting_before(node):
            if reads.covers_shard(node) and (packed or not own_shape):
                weight = _view_of_shard(graph, shard, list(node.meta["val"].shape))
                weight.meta.update({key: meta for key, meta in node.meta.items() if key not in (RECOMPUTE, "val")})
            else:
                weight = graph.call_function(ops(WEIGHT_VIEW), node.args[:3])
                weight.meta.update({key: node.meta[key] for key in (CUSTOM, "val") if key in node.meta})
        shard.meta[READ_IN_PLACE] = True
        views.replace(node, weight)
    views.done()
    return graph


def _view_of_shard(graph: Graph, shard: Node, shape: list[Any]) -> Node:
    numel, held = math.prod(shape), shard.meta["val"].numel()
    flat = _call(graph, torch.ops.aten.view.default, shard, [held])
    if held > numel:
        flat = _call(graph, torch.ops.aten.slice.Tensor, flat, 0, 0, numel)
    return flat if len(shape) == 1 else _call(graph, torch.ops.aten.view.default, flat, shape)


def _shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _call(graph: Graph, target: OpOverload, source: Node, *args: Any) -> Node:
    node = graph.call_function(target, (source, *args))
    node.meta["val"] = target(source.meta["val"], *args)
    return node


def merge_reduces(graph: Graph) -> Graph:
    """Replace ``reduce(a, s); reduce(b, s)`` by ``reduce(a + b, s)``, in place.

    No other reduce may be in between.

    Gradients must have one dtype; a sum in the wider one would need a copy.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    previous: Node | None = None
    for node in reduces(graph):
        if previous is not None and _mergeable(previous, node, position):
            grad, other = node.args[0], previous.args[0]
            assert isinstance(grad, Node)
            assert isinstance(other, Node)
            with graph.inserting_before(node):
                total = graph.call_function(torch.ops.aten.add.Tensor, (other, grad))
            total.meta["val"] = torch.empty_like(grad.meta["val"])
            node.args = (total, *node.args[1:])
            previous.replace_all_uses_with(node)
            graph.erase_node(previous)
        previous = node
    return graph


def _mergeable(first: Node, second: Node, position: dict[Node, int]) -> bool:
    same = shard_of(first) is shard_of(second) and _dtype(first) == _dtype(second)
    return same and all(position[user] > position[second] for user in first.users)


def _dtype(node: Node) -> torch.dtype:
    grad = node.args[0]
    assert isinstance(grad, Node)
    return grad.meta["val"].dtype


def fuse_casts(graph: Graph) -> Graph:
    """Replace ``cast(gather(s, shape, wide), narrow)`` by ``gather(s, shape, narrow)``, in place.

    Under autocast this halves the transfer. The executor has low-precision shards ready, written once per step. A
    weight used in both dtypes (an embedding tied to the head) is gathered in both.
    """
    casts, wide = NodeReplacer(graph), gathers(cast_before_views(graph))
    for node in wide:
        shard, shape, own, *cache = node.args
        assert isinstance(own, torch.dtype)
        narrow: dict[torch.dtype, Node] = {}
        for user in list(node.users):
            dtype = cast_dtype(user)
            if dtype is None or not dtype.is_floating_point or dtype.itemsize >= own.itemsize:
                continue
            if dtype not in narrow:
                with graph.inserting_before(node):
                    narrow[dtype] = graph.call_function(ops("gather"), (shard, shape, dtype, *cache))
                narrow[dtype].meta.update({key: value for key, value in user.meta.items() if key != RECOMPUTE})
                narrow[dtype].meta[CUSTOM] = node.meta.get(CUSTOM, {})  # the weight's name
            casts.replace(user, narrow[dtype])
    casts.done()
    for node in wide:
        if not node.users:
            graph.erase_node(node)
    return graph


def cast_before_views(graph: Graph) -> Graph:
    """Replace narrowing ``cast(view(gather))`` by ``view(cast(gather))``, in place.

    Weights in ``channels_last`` and transposed weights of experts are viewed before autocast casts them. Views of views
    count, too.
    """
    for gather in gathers(graph):
        for cast, views in narrowing_casts(gather):
            if not views:
                continue
            with graph.inserting_before(cast):
                narrow = graph.call_function(cast.target, (gather, *cast.args[1:]), cast.kwargs)  # type: ignore[arg-type]
                narrow.meta.update(cast.meta)
                narrow.meta["val"] = gather.meta["val"].to(cast_dtype(cast))
                cast.replace_all_uses_with(repeat_views(graph, narrow, views))
            graph.erase_node(cast)
            for view in reversed(views):
                if not view.users:
                    graph.erase_node(view)
    return graph
