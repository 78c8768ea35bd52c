"""How one kind of tensor travels, by copies or by collectives: what options come to, and the words where they cannot be
followed."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import cannot_change_error
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.sharding.symm_mem.memory import SymmetricMemory

__all__ = ["TransportChoice", "wanted"]

log = logging.getLogger(__name__)


class TransportChoice(ABC):
    """Of weights, or of gradients.

    Args:
        config: options.
        mesh: of the ranks.

    Attributes:
        what: travels, in words.
        option: of :class:`EngineConfig`'s tuning, by which users choose.
        memory: of peers, that is copied out of or into; None: collectives move what travels.
        reason: why there is none, where copies were wanted.
    """

    what: ClassVar[str]
    option: ClassVar[str]

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self.memory: SymmetricMemory | None = None
        self.reason = ""
        self._choice: str = getattr(config.tuning, self.option)

    @abstractmethod
    def copies(self, config: EngineConfig) -> bool:
        """Whether these options mean copies, where memory can be had."""

    def use(self, memory: SymmetricMemory | None, reason: str) -> None:
        """Takes that memory; ``reason`` says why there is none, or none that is of use here.

        Raises:
            UnsupportedError: users chose to copy, and it is impossible.
        """
        if self._choice == "copy" and reason:
            raise self._impossible(reason)
        self.memory, self.reason = memory, reason

    def attempt(self, allocate: Callable[[], None]) -> bool:
        """Whether there was enough of peers' memory for all that ``allocate`` takes of it; where there was not, none is
        kept, and the caller has collectives take over. The same on every rank. Collective.

        Raises:
            UnsupportedError: on every rank, when there is not enough and users chose to copy.
        """
        assert self.memory is not None
        try:
            with self.memory.all_or_nothing():
                allocate()
            return True
        except UnsupportedError as error:  # on every rank
            if self._choice == "copy":
                raise self._impossible(str(error)) from error
            self.reason = str(error)
            if self.mesh.rank == 0:
                log.warning("Collectives move all %s from now on, which is slower: %s.", self.what, error)
            return False

    def check(self, config: EngineConfig) -> None:
        """Raises :class:`UnsupportedError` where other options want otherwise than was settled when the model was
        sharded."""
        before, now = self._choice, getattr(config.tuning, self.option)
        if now != before and self.copies(config) != (self.memory is not None):
            raise cannot_change_error(self.option, before, now)

    def configure(self, config: EngineConfig) -> None:
        """Options that :meth:`check` has nothing against."""
        self._choice = getattr(config.tuning, self.option)

    def describe(self) -> str:
        """How they travel, and why not by copies, in words."""
        if self.memory is not None:
            return (
                "copies in memory that all ranks of a host can read"
                if self.mesh.inter_host
                else "copies in memory that all ranks can read"
            )
        return f"collectives ({self.reason or f'{self.option}={self._choice!r} means that on this device'})"

    def _impossible(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.option}='copy' is impossible here: {reason}. Use {self.option}='auto' to copy where that is "
            "possible."
        )


def wanted(choice: str, device: torch.device, usable: bool, on_cpu: bool) -> bool:
    """Whether ``choice`` means copies on this device.

    Args:
        choice: ``"auto"``, ``"copy"`` or ``"collective"``.
        usable: whether an accelerator has a use for them.
        on_cpu: what ``"auto"`` means between CPUs.
    """
    if device.type == "cpu":
        return choice == "copy" or (choice == "auto" and on_cpu)
    # Before CUDA 13 each piece takes a call of the driver: more of the host's time than copies save on the device.
    one_call = device.type == "cuda" and (torch.version.cuda or "").split(".")[0] == "13"
    return choice == "copy" or (choice == "auto" and usable and one_call)
