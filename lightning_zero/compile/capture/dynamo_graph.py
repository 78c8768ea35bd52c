"""Checks and annotations of Dynamo's graphs, before AOTAutograd traces them.

Only these graphs contain parameter names and in-place edits. Each gather gets its weight's name, which later graphs
inherit. In-place edits of gathered weights would be lost and raise an error.

Regions of ``torch.utils.checkpoint`` are graphs of their own here, which AOTAutograd inlines. Dynamo traces reentrant
checkpoints like the others.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_zero.compat.graphs import CUSTOM, EXAMPLE_VALUE, GRAPH_ARG
from lightning_zero.compat.tensors import CHECKPOINTS, OpOverload, OpOverloadPacket, storage_key
from lightning_zero.compile.fx_utils import ON_HOST, WEIGHT
from lightning_zero.errors import UnsupportedError
from lightning_zero.native.ops import NAMESPACE
from lightning_zero.sharding.shard_tensor import ShardSpec
from lightning_zero.sharding.weight_format import DEQUANTIZE

_DISTRIBUTED = "torch.distributed"

_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem,
}  # fmt: skip


def tag_weights(module: GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Tag gathers with their weights' names, and with shards on the host, and return all names.

    See ``weight_name`` and ``InPlaceReads``.
    """
    names, given = [], _inputs(module, inputs)
    for gather, shard in _gathers(module):
        names.append(_name(shard))
        gather.meta[CUSTOM] = {**gather.meta.get(CUSTOM, {}), WEIGHT: names[-1]}
        spec: ShardSpec | None = getattr(given.get(shard), "_zero_spec", None)
        if spec is not None and spec.on_host:
            gather.meta[CUSTOM][ON_HOST] = True
    return names


def last_read(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """Return the graph input (a shard) of the last gather; None without gathers."""
    found = list(_gathers(module))
    return _inputs(module, inputs).get(found[-1][1]) if found else None


def _inputs(module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    return dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False))


def _gathers(module: GraphModule, outside: Mapping[Node, Node] | None = None) -> Iterator[tuple[Node, Node]]:
    """Yield gathers in execution order, with the inputs of the outermost graph that they read.

    Args:
        outside: maps inputs of the graph to those of the outermost graph; None for that graph itself.
    """
    op = torch.ops.lightning_zero.gather
    inputs = {node: node for node in module.graph.find_nodes(op="placeholder")} if outside is None else outside
    for node in module.graph.nodes:
        if getattr(node.target, "overloadpacket", node.target) is op:
            yield node, inputs.get(node.args[0], node.args[0])
        elif (body := checkpoint_body(module, node)) is not None:
            yield from _gathers(body, outer_values(body, node, inputs))


def outer_values(body: GraphModule, call: Node, outside: Mapping[Node, Any]) -> dict[Node, Any]:
    """Return the value of each input of a called graph, replaced by its value in ``outside`` if there."""
    given = [outside.get(value, value) if isinstance(value, Node) else value for value in call.args[1:]]
    return dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=False))


def checkpoint_body(module: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph of a checkpointed region that the node calls; None for other nodes.

    Its inputs are the call's other arguments.
    """
    if node.op != "call_function" or node.target not in CHECKPOINTS:
        return None
    called = node.args[0]
    assert isinstance(called, Node), f"{node} calls {called!r}"
    assert isinstance(called.target, str), f"{node} calls {called}, which is no graph"
    body = module.get_submodule(called.target)
    assert isinstance(body, GraphModule), f"{called.target} is a {type(body).__name__}"
    return body


def walk_nodes(module: GraphModule) -> Iterator[Node]:
    """Yield all nodes, including those of checkpointed regions."""
    for node in module.graph.nodes:
        yield node
        if (body := checkpoint_body(module, node)) is not None:
            yield from walk_nodes(body)


def has_collectives(module: GraphModule) -> bool:
    """Return True if the graph or one that it calls has collectives other than our ops."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return any("c10d" in str(t) or (getattr(t, "__module__", "") or "").startswith(_DISTRIBUTED) for t in targets)


def check_weight_edits(module: GraphModule) -> None:
    """Raise :class:`UnsupportedError` naming the weight if the graph writes to a gathered weight."""
    weights: dict[int, Node] = {}  # maps storages to gathered inputs
    for gather, shard in _gathers(module):
        storage = node_storage(gather)
        if storage is not None:
            weights[storage] = shard
        for user in gather.users:
            if getattr(user.target, "overloadpacket", user.target) is DEQUANTIZE.overloadpacket:
                weights[node_storage(user) or -1] = shard
    if not weights:
        return
    for node in walk_nodes(module):
        for written in mutated_inputs(node):
            edited = weights.get(node_storage(written) or -1)
            if edited is not None:
                raise UnsupportedError(
                    f"The weight {_name(edited)!r} is edited in place inside compiled code, where the edit would be "
                    "lost. Edit it between steps (in on_train_batch_end, say), or decorate the method that edits it "
                    "with torch.compiler.disable."
                )


def node_storage(node: Node) -> int | None:
    """Return a key of the storage of a node's value; None if it is not a tensor."""
    value = node.meta.get(EXAMPLE_VALUE)
    return storage_key(value) if isinstance(value, Tensor) else None


def mutated_inputs(node: Node) -> list[Node]:
    """Return the tensors that the node writes to."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return []
    written = [value for value in [node.kwargs.get("out")] if isinstance(value, Node)]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    # operator.and_ and similar names end in an underscore for another reason.
    in_place = name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not target
    if (in_place or target in _IN_PLACE or node.kwargs.get("inplace") is True) and isinstance(node.args[0], Node):
        written.append(node.args[0])
    return written


def _name(shard: Node) -> str:
    assert isinstance(shard, Node)
    source = getattr(shard.meta.get(GRAPH_ARG), "source", None)
    path = getattr(source, "name", "")
    keys = re.findall(r"_(?:modules|parameters)\['?([^'\]]+)'?\]", path() if callable(path) else path)
    return ".".join(keys) or shard.name


def check_foreach_on_shards(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Raise :class:`UnsupportedError` if the graph computes with a shard that was not gathered.

    Dynamo does not dispatch to shard subclasses in lists, such as ``torch._foreach_norm(list(module.parameters()))``.
    Such a graph would use this rank's shard, and edit it too late.
    """
    given = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False)
    for user, spec in _uses(module, {node: s for node, value in given if (s := _sight(value)) is not None}):
        raise UnsupportedError(
            f"{getattr(user.target, '__name__', user.target)} was given this rank's shard of {spec.name!r}, from "
            "module.parameters(), in a list inside compiled code, which cannot distinguish it from the full weight. "
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
            elif user.op != "output" and not _is_own_op(user.target):
                yield user, spec


def _is_own_op(target: Any) -> bool:
    return isinstance(target, OpOverload | OpOverloadPacket) and str(target).startswith(f"{NAMESPACE}.")
