"""Replace layer calls in a joint graph by the nodes of the traced layer.

The copies get the memory, names and module metadata of their own layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from lightning_zero.compat.graphs import AC_GRAPH_ID, CUSTOM, MUST_BE_IN_BACKWARD, PARTITIONER_TAG
from lightning_zero.compat.tensors import SYMBOLIC, FakeTensor, fake_like, layout_key, size_key, storage_key
from lightning_zero.compile.fx_utils import NodeReplacer
from lightning_zero.compile.layer_dedup.layer_call import SIZES, TANGENTS, TENSORS, DedupFailed
from lightning_zero.compile.layer_dedup.layer_graph import LayerGraph, NodeTemplate, View
from lightning_zero.compile.layer_dedup.matching import LayerMatch
from lightning_zero.sharding.layout import is_dense


class ComputedNumbers:
    """Nodes of a graph whose values follow from its symbols, by their formulas."""

    def __init__(self) -> None:
        self._nodes: dict[Any, Node] = {}

    def add(self, node: Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC) and (formula := size_key(value)) is not None:
            self._nodes.setdefault((type(value), formula), node)

    def find(self, value: Any) -> Node | None:
        """Return an earlier node with this value."""
        return self._nodes.get((type(value), size_key(value))) if isinstance(value, SYMBOLIC) else None


class LayerExpansion:
    """Expansion of one layer in a joint graph.

    Args:
        numbers: maps checkpoint region ids of the traced graph to ids of this layer.
        computed: numbers computed from sizes, which layers share as if they were traced together.

    Attributes:
        moved: maps the storage of the layer call's results to the tensor that replaces it.
    """

    def __init__(
        self,
        graph: Graph,
        layer_calls: NodeReplacer,
        number: int,
        region: LayerMatch,
        body: LayerGraph,
        numbers: Mapping[int, int],
        computed: ComputedNumbers,
    ) -> None:
        self._graph = graph
        self._layer_calls = layer_calls
        self._number = number
        self._region = region
        self._body = body
        self._numbers = numbers
        self._computed = computed
        self._new: dict[Node, Any] = {}
        self._memory: dict[int, Tensor] = {}
        self.moved: dict[int, Tensor] = {}

    def forward(self, call: Node) -> None:
        tensors, sizes = call.args[TENSORS], call.args[SIZES]
        assert isinstance(tensors, Sequence)
        assert isinstance(sizes, Sequence)
        self._bind_sizes(self._body.inputs[: len(sizes)], sizes)
        self._bind_inputs(self._body.inputs[len(sizes) :], tensors)
        self._copy_nodes(call, self._body.forward)
        self._replace(call, self._body.results)

    def backward(self, call: Node) -> None:
        tangents = call.args[TANGENTS]
        assert isinstance(tangents, Sequence)
        with self._graph.inserting_before(call):
            tangents = [self._match_layout(*pair) for pair in zip_longest(tangents, self._body.tangents)]
        self._bind_inputs(self._body.tangents, tangents)
        self._copy_nodes(call, self._body.backward)
        self._replace(call, [grad for grad in self._body.grads if grad is not None])

    def _match_layout(self, tangent: Any, like: Node | None) -> Any:
        """Return a tangent of the whole graph in the layout that the traced layer was given.

        AOTAutograd guesses another layout for results that the layer returns to the graph's caller (keys and values of
        GPT-2, views of one product).
        """
        if like is None or not isinstance(tangent, Node) or tangent.op != "placeholder":
            return tangent
        value, wanted = tangent.meta["val"], like.meta["val"]
        shapes = [list(map(size_key, tensor.shape)) for tensor in (value, wanted)]
        if layout_key(value) == layout_key(wanted) or shapes[0] != shapes[1] or not _is_contiguous(wanted):
            return tangent
        form = torch.contiguous_format
        copy = self._graph.call_function(torch.ops.aten.clone.default, (tangent,), {"memory_format": form})
        with value.fake_mode:
            copy.meta["val"] = value.clone(memory_format=form)
        copy.meta[PARTITIONER_TAG] = MUST_BE_IN_BACKWARD
        return copy

    def _bind_sizes(self, inputs: Sequence[Node], actual: Sequence[Any]) -> None:
        for node, value in zip(inputs, actual, strict=True):
            size = value.meta["val"] if isinstance(value, Node) else value
            if size_key(node.meta["val"]) != size_key(size):
                raise DedupFailed("a size of a layer is another one", self._number)
            self._new[node] = value

    def _bind_inputs(self, inputs: Sequence[Node], actual: Sequence[Any]) -> None:
        if len(inputs) != len(actual):
            raise DedupFailed("a result of a layer has no gradient", self._number)
        for node, value in zip(inputs, actual, strict=True):
            if layout_key(node.meta["val"]) != layout_key(value.meta["val"]):
                strides = _strides(actual) if inputs is self._body.tangents else None
                raise DedupFailed("inputs of a layer have another layout", self._number, strides)
            self._new[node] = value
            self._memory[storage_key(node.meta["val"])] = value.meta["val"]

    def _copy_nodes(self, call: Node, nodes: Sequence[Node]) -> None:
        with self._graph.inserting_before(call):
            for node in nodes:
                args, kwargs = map_arg((node.args, node.kwargs), self._new.__getitem__)
                template = self._body.templates[node]
                if (known := self._computed.find(template.view)) is not None:
                    self._new[node] = known
                    continue
                new = self._graph.create_node(node.op, node.target, args, kwargs, template.name, node.type)
                self._new[node] = new
                if node.op == "get_attr":
                    new.target = self._constant(self._body.constants[str(node.target)])
                new.meta = self._meta(template)
                self._computed.add(new)

    def _constant(self, value: Tensor) -> str:
        """Return the name of an attribute with this tensor, shared by all layers of a kind."""
        module = self._graph.owning_module
        name = next(n for n in map("_layer_constant{}".format, count()) if getattr(module, n, value) is value)
        setattr(module, name, value)
        return name

    def _replace(self, call: Node, results: Sequence[Node]) -> None:
        for part in list(call.users):
            at = part.args[1]
            assert isinstance(at, int)
            new = self._new[results[at]]
            self.moved[storage_key(part.meta["val"])] = new.meta["val"]
            self._layer_calls.replace(part, new)
        self._layer_calls.erase(call)

    def _meta(self, template: NodeTemplate) -> dict[str, Any]:
        meta = dict(template.meta)
        if "val" in meta:
            meta["val"] = self._rebase(template.view)
        if template.region is not None:
            meta[AC_GRAPH_ID] = self._numbers[template.region]
        if CUSTOM in meta:
            meta[CUSTOM] = dict(meta[CUSTOM])
        place = template.place if template.within is None else template.within
        if place is not None:
            source = self._region.places[place].meta
            meta |= {key: source[origin] for key, origin in template.origins if origin in source}
            if template.within is None and CUSTOM in source:
                meta[CUSTOM] = dict(source[CUSTOM])
        return meta

    def _rebase(self, view: Any) -> Any:
        """Return a value of the same layout in this layer's memory; views stay views."""
        if isinstance(view, tuple | list):
            return type(view)(map(self._rebase, view))
        if not isinstance(view, View):
            return view
        memory, value = self._memory.get(view.memory), view.value
        if memory is None:
            numel = value.untyped_storage().nbytes() // value.itemsize
            memory = self._memory[view.memory] = torch.empty(numel, dtype=value.dtype, device="meta")
        return _view(memory, view)


def rebase_value(value: Any, moved: dict[int, Tensor]) -> Any:
    """Return views of a layer call's result as views of its replacement, and other values unchanged."""
    if isinstance(value, tuple | list):
        return type(value)(rebase_value(part, moved) for part in value)
    memory = moved.get(storage_key(value)) if isinstance(value, FakeTensor) else None
    return value if memory is None else _view(memory, View.of(value))


def _view(memory: Tensor, view: View) -> Tensor:
    """Return the value in other memory: that of a fake tensor, or all of a plain one."""
    value, shape, stride = view.value, view.shape, view.stride
    offset = memory.storage_offset() * memory.itemsize // value.itemsize + view.offset
    if value.dtype != memory.dtype:  # complex numbers as pairs of real ones
        made = torch.empty(0, dtype=value.dtype, device="meta").set_(memory.untyped_storage(), offset, shape, stride)
        return fake_like(value, made)
    if isinstance(memory, FakeTensor):
        with value.fake_mode:
            return memory.as_strided(shape, stride, offset)
    # A layer has hundreds of values. Making each of them in torch took most of the time of the expansion.
    return fake_like(value, memory.as_strided(shape, stride, offset))


def _is_contiguous(value: Tensor) -> bool:
    """Return True for a contiguous tensor, without a guard."""
    spanned: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size_key(stride) != spanned and size_key(size) != 1:
            return False
        spanned = spanned * size_key(size)
    return True


def _strides(values: Sequence[Any]) -> list[list[int]] | None:
    """Return the strides of values; None if one is symbolic, expanded, or does not fill its memory.

    Such a gradient belongs to a single layer.
    """
    found = [value.meta["val"] for value in values]
    static = all(type(size_key(size)) is int for value in found for size in (*value.shape, *value.stride()))
    return [list(value.stride()) for value in found] if static and all(map(is_dense, found)) else None
