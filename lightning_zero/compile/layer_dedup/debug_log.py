"""Says at DEBUG why checkpointed regions are each traced by themselves."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet

from torch.fx import Graph, Node

from lightning_zero.compat.ops import CHECKPOINTS
from lightning_zero.compile.layer_dedup.hop_bodies import with_regions
from lightning_zero.compile.layer_dedup.matching import undescribed

__all__ = ["tell_others"]

log = logging.getLogger(__name__)


def tell_others(graph: Graph, inside: AbstractSet[Node]) -> None:
    """``inside``: what belongs to layers that are differentiated once."""
    for node in graph.nodes:
        if node.target not in CHECKPOINTS or node in inside:
            continue
        call = undescribed(reversed(with_regions([node])))
        why = "few are like it, or they share what one by itself would not"
        if call is not None:
            why = f"no text says what {call} does"
        log.debug("The checkpointed region %s is traced by itself: %s", node, why)
