"""A SIGTERM within an evaluation, which may take longer than a scheduler waits before it kills.

Ranks may have different numbers of batches there, so nothing can be asked that all must answer. Who has got the signal
says so in the key-value store, and where all have (a scheduler signals all of them), all stop after the same batch.
Where some have not, the evaluation goes on, and the question before the next batch of training ends it all.
"""

from __future__ import annotations

from lightning_zero.mesh import Mesh

__all__ = ["EvaluationStop"]

# Ranks that gather weights together are at most one batch apart: when the last of them says so, none is further.
MAX_BATCH_SKEW = 2


class EvaluationStop:
    """Of one stage.

    Args:
        mesh: the ranks.
        stage: a number that no earlier stage had, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, stage: int) -> None:
        self._store = mesh.store(f"sigterm/{stage}")
        self._rank, self._names = mesh.rank, [f"{rank}" for rank in range(mesh.world_size)]
        self._batches = 0
        self._posted = False

    def after_batch(self, noted: bool) -> bool:
        """Whether this rank stops now. Not collective; asks the store only once a signal has come.

        noted: this rank has got the signal
        """
        self._batches += 1
        if not noted:
            return False
        if not self._posted:
            self._store.set(f"{self._rank}", f"{self._batches}")
            self._posted = True
        if not self._store.check(self._names):
            return False
        return self._batches >= max(int(self._store.get(name)) for name in self._names) + MAX_BATCH_SKEW
