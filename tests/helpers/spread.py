"""Whether every rank holds enough of a model for a comparison over ranks to mean anything.

Shards are multiples of 128 bytes, so of a [7, 5] weight rank 0 holds everything: norms that are summed over ranks in the
wrong way, or every rank loading rank 0's part, would change nothing.
"""

from __future__ import annotations

from typing import Any

from lightning_zero.engine import Engine

__all__ = ["check_spread"]

LEAST = 0.15  # of a matrix, on each rank


def check_spread(engine: Engine, model: Any) -> None:
    """Fails unless every rank holds a good part of each of the model's matrices.

    A model whose parameters are meant to leave ranks empty says so by an attribute: ``empty_ranks = True``.
    """
    if getattr(model, "empty_ranks", False):
        return
    thin = []
    for record in engine.sharder.live:
        layout = record.layout
        if len(layout.shape) < 2:
            continue
        parts = [len(range(*layout.shard_range(rank))) for rank in range(layout.world_size)]
        if min(parts) < LEAST * layout.numel:
            thin.append(f"{record.name} {list(layout.shape)}: {parts}")
    assert not thin, (
        f"{type(model).__name__} leaves ranks nearly empty: {'; '.join(thin)}. Give it wider layers (or, if that is "
        "what is tested, empty_ranks = True)."
    )
