"""Says at DEBUG why checkpointed regions are each traced by themselves."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet

from torch.fx import Graph, Node

from lightning_zero.compat.ops import CHECKPOINTS
from lightning_zero.compile.layer_dedup.hop_bodies import expand_regions
from lightning_zero.compile.layer_dedup.matching import find_undescribed

__all__ = ["log_unmatched_regions"]

log = logging.getLogger(__name__)


def log_unmatched_regions(graph: Graph, inside: AbstractSet[Node]) -> None:
    """``inside``: what belongs to layers that are differentiated once."""
    for node in graph.nodes:
        if node.target not in CHECKPOINTS or node in inside:
            continue
        call = find_undescribed(reversed(expand_regions([node])))
        why = "few are like it, or they share what one by itself would not"
        if call is not None:
            why = f"no text says what {call} does"
        log.debug("The checkpointed region %s is traced by itself: %s", node, why)
