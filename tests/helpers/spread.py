"""Check that every rank has enough of a model for a comparison over ranks.

Shards are multiples of 128 bytes, so rank 0 has all of a [7, 5] weight: a wrong sum of norms over ranks, or a load of
rank 0's part on every rank, would change nothing.
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
