"""What nodes of a layer's body have in all layers of its kind, looked at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymInt
from torch.fx import Node

from lightning_zero.compat.graphs import (
    CUSTOM,
    FWD_NN_MODULE_STACK,
    FWD_SOURCE_FN_STACK,
    NN_MODULE_STACK,
    AC_GRAPH_ID,
    SOURCE_FN_STACK,
)
from lightning_zero.compat.tensors import FakeTensor
from lightning_zero.compile.frontend import storage_key
from lightning_zero.compile.layer_dedup.region_ids import in_region

__all__ = ["PLACE", "WITHIN", "NodeTemplate", "View"]

PLACE = "lightning_zero.place"  # key in node.meta[CUSTOM]: which node of the layer this comes from
WITHIN = "lightning_zero.within"  # the same, of what a function does that this node calls

_NUMBER = re.compile(r"_\d+$")

# What nodes are told of the modules that they belong to, by where it stands in Dynamo's graph.
ORIGINS = {NN_MODULE_STACK: NN_MODULE_STACK, SOURCE_FN_STACK: SOURCE_FN_STACK, FWD_NN_MODULE_STACK: NN_MODULE_STACK, FWD_SOURCE_FN_STACK: SOURCE_FN_STACK}


@dataclass(frozen=True)
class View:
    """Of a fake tensor: which memory it is in, and how it lies there, in elements."""

    value: FakeTensor
    memory: int
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int | SymInt

    @classmethod
    def of(cls, value: Any) -> Any:
        """Of a node's value, or of each of its values; what is no tensor stays what it is."""
        if isinstance(value, tuple | list):
            return type(value)(map(cls.of, value))
        if not isinstance(value, FakeTensor):
            return value
        return cls(value, storage_key(value), value.shape, value.stride(), value.storage_offset())


@dataclass(frozen=True)
class NodeTemplate:
    """Of one node.

    Attributes:
        name: without its number, with which torch 2.11 would look for one that is free among those of all layers.
        meta: what is noted of it in each layer, where nothing here says otherwise.
        view: its value, as it lies in the layer's memory.
        region: the number of the checkpointed region that it is in.
        place: the node of Dynamo's graph that it comes from, by its number in the layer.
        within: the same, of what a function does that this node calls.
        origins: what it is told of that node, by where it stands there.
    """

    name: str
    meta: dict[str, Any]
    view: Any
    region: int | None
    place: int | None
    within: int | None
    origins: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, node: Node) -> NodeTemplate:
        meta = dict(node.meta)
        view = View.of(meta.get("val"))
        region = meta.pop(AC_GRAPH_ID) if in_region(node) else None
        custom = dict(meta.pop(CUSTOM, {}))
        place, within = custom.pop(PLACE, None), custom.pop(WITHIN, None)
        if within is not None:
            origins = [(key, NN_MODULE_STACK) for key in (NN_MODULE_STACK, FWD_NN_MODULE_STACK) if key in meta]
        elif place is not None:
            origins, custom = [(key, origin) for key, origin in ORIGINS.items() if key in meta], {}
        else:
            origins = []
        if custom:
            meta[CUSTOM] = custom
        return cls(_NUMBER.sub("", node.name), meta, view, region, place, within, origins)
