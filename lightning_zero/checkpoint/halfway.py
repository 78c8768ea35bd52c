"""What a load leaves behind that ends half way. Files are compared with their checksums before anything is touched; but
who is interrupted later has some weights of the checkpoint, and some that were there before. Nobody may go on with
those unaware."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_zero.sharding.state_dict import StateDictHooks

__all__ = ["Halfway"]

log = logging.getLogger(__name__)


class Halfway:
    """Of one engine's module.

    Args:
        hooks: know which weights were replaced.

    Attributes:
        left: what there is to tell of a load that has ended half way; None: none has, or a whole one came afterwards.
    """

    def __init__(self, hooks: StateDictHooks) -> None:
        self._hooks = hooks
        self.left: str | None = None

    @contextmanager
    def weights(self, path: object) -> Iterator[None]:
        """Surrounds what puts a checkpoint's weights in place."""
        before = self._hooks.loaded_bytes
        try:
            yield
        except BaseException as error:
            if self._hooks.loaded_bytes > before:
                self._tell(path, error, "some weights of the module are the checkpoint's now, and some are not")
            raise
        self.left = None

    @contextmanager
    def optimizers(self, path: object) -> Iterator[None]:
        """Surrounds what puts its optimizers' state in place, once the weights are."""
        try:
            yield
        except BaseException as error:
            self._tell(path, error, "the module's weights are the checkpoint's, and the optimizer's state is not")
            raise

    @contextmanager
    def after_weights(self, path: object) -> Iterator[None]:
        """Surrounds what loads all of a checkpoint, in whatever order; what :meth:`weights` has told is not told
        again."""
        before, self.left = self._hooks.loaded_bytes, None
        try:
            yield
        except BaseException:
            if self._hooks.loaded_bytes > before and self.left is None:
                with self.optimizers(path):
                    raise
            raise

    def _tell(self, path: object, error: BaseException, what: str) -> None:
        self.left = (
            f"Loading {path} ended half way ({type(error).__name__}): {what}. Load a checkpoint to its end, or build "
            "the module anew, before you train, evaluate or save it."
        )
        log.error("%s", self.left)
