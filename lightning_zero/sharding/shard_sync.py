"""Who may read and who may write shards, and when: the only caller of the four functions of the executor that say so.

Weights that eager code was given are copies. What was done to them in place must reach the shards before anybody reads
these, and what overwrites shards must win over copies that were given out before. Where ranks read each other's shards,
whoever writes waits for the readers first, and lets them go on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_zero.native import Executor

__all__ = ["ShardSync"]


class ShardSync:
    """Asked by whatever reads or writes shards otherwise than by a gather."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.on_before_write: Callable[[], None] = lambda: None  # waits for whoever copies shards beside training

    def before_reading(self) -> None:
        """Edits of gathered weights are in the shards from here on."""
        self._executor.weights.sync_user_writes()

    def settle(self) -> None:
        """Likewise; and what is still done to copies given out so far does not count any more."""
        self._executor.weights.sync_user_writes(forget=True)

    def before_overwriting(self, stepping: bool = False) -> None:
        """Shards are about to get values that win over copies given out before. ``stepping``: from an optimizer."""
        self.settle()
        self.before_writing(stepping)

    def before_writing(self, stepping: bool = False) -> None:
        """Shards are about to change: ranks that still read them are waited for. Harmless when repeated. The next
        gather on this rank ends it, if :meth:`after_writing` does not."""
        self.on_before_write()
        self._executor.weights.begin_writing(stepping)

    def after_writing(self) -> None:
        """Other ranks may read what this one has written. Harmless where nothing was."""
        self._executor.weights.end_writing()

    def invalidate_copies(self) -> None:
        """Shards may have changed without a word, as under an exchange of ``param.data``: what was made of them is made
        anew before it is next read."""
        self._executor.weights.expire_compute_shards()
