"""Find the weights that a graph can gather in fp8: those that only fp8 products read.

The executor casts such a weight's shard, once per optimizer step, see ``sharding/fp8_shards.py``. Its op
``weight_factor`` returns the number by which it has divided the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compile.fp8.linear_products import LinearProduct
from lightning_zero.compile.fx_utils import GATHER, TRANSPOSES, calls, cast_dtype, views_and_casts
from lightning_zero.native.ops import Op, register_op

WEIGHT_FACTOR = "weight_factor"


def _number(shard: Tensor) -> Tensor:
    return shard.new_empty((), dtype=torch.float32)


register_op(Op(WEIGHT_FACTOR, shards=0, fake=_number))


def find_fp8_gathers(graph: Graph, chosen: Sequence[LinearProduct]) -> dict[Node, Node]:
    """Return operands of ``chosen`` products that are whole weights, and the gather of each.

    The master weight is float32 and has no unsharded cache, which holds 16 bits. All other readers would need another
    gather, so there are none.
    """
    products = {product.node for product in chosen}
    found: dict[Node, Node] = {}
    for product in chosen:
        for operand in product.operands:
            source = operand.source
            gather = _gather_of(source)
            if gather is not None and source not in found and _is_read_only_by(products, gather, source):
                found[source] = gather
    return found


def _gather_of(source: Node) -> Node | None:
    """Return the gather of a weight that is cast and nothing else."""
    node = source
    while cast_dtype(node) is not None:
        [node] = node.all_input_nodes
    if not calls(node, GATHER) or any(node.args[3:]):
        return None
    shard = node.args[0]
    assert isinstance(shard, Node)
    return node if shard.meta["val"].dtype is torch.float32 else None


def _is_read_only_by(products: AbstractSet[Node], gather: Node, source: Node) -> bool:
    pending = [gather]
    while pending:
        for user in pending.pop().users:
            if user in products:
                continue
            if user.target not in TRANSPOSES and cast_dtype(user) is None:
                return False
            pending.append(user)
    return True


def erase_unread(graph: Graph, weight: Node) -> None:
    """Erase a weight if only its own views and casts read it."""
    forms = views_and_casts(weight)
    if all(user in forms for form in forms for user in form.users):
        for form in reversed(forms):
            graph.erase_node(form)
