"""Shards with which a graph of Dynamo's computes, though no rule was asked.

What users do to a shard goes by ``sharding/shard_rules.py``, which are no part of any graph. Dynamo does not look for
them where tensors come in lists (``torch._foreach_norm(list(module.parameters()))``): its graph would take the norm of
this rank's part, and an edit of it would be made too late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from lightning_zero.compat.tensors import OpOverload, OpOverloadPacket
from lightning_zero.compile.frontend import checkpoint_body
from lightning_zero.errors import UnsupportedError
from lightning_zero.native.ops import NAMESPACE
from lightning_zero.sharding.shard_tensor import ShardSpec

__all__ = ["check_foreach_on_shards"]


def check_foreach_on_shards(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Raises :class:`UnsupportedError`, naming operation and weight, where an input is a shard that is not gathered.

    inputs: of the graph, the tensors themselves
    """
    given = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False)
    for user, spec in _uses(module, {node: s for node, value in given if (s := _sight(value)) is not None}):
        raise UnsupportedError(
            f"{getattr(user.target, '__name__', user.target)} was given this rank's shard of {spec.name!r}, as "
            "module.parameters() has it, in a list inside compiled code, where nothing tells it from a whole weight. "
            "Decorate the method that does so with torch.compiler.disable, or call it between steps (in "
            "on_train_batch_end, say)."
        )


def _sight(value: Any) -> ShardSpec | None:
    return getattr(value, "__dict__", {}).get("_zero_spec")


def _uses(module: GraphModule, shards: Mapping[Node, ShardSpec]) -> Iterator[tuple[Node, ShardSpec]]:
    for node, spec in shards.items():
        for user in node.users:
            if (body := checkpoint_body(module, user)) is not None:
                own = zip(body.graph.find_nodes(op="placeholder"), user.args[1:], strict=False)
                yield from _uses(body, {inner: spec for inner, outer in own if outer is node})
            elif user.op != "output" and not _ours(user.target):
                yield user, spec


def _ours(target: Any) -> bool:
    return isinstance(target, OpOverload | OpOverloadPacket) and str(target).startswith(f"{NAMESPACE}.")
