"""Launchers of the other processes, which say in a notebook what can be done there."""

from __future__ import annotations

import sys

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zero.compat.lightning_private import FabricScriptLauncher, SubprocessScriptLauncher

__all__ = ["FabricLauncher", "TrainerLauncher", "check_interactive"]


def is_interactive() -> bool:
    """Whether this is a notebook or a Python shell, as Lightning finds out."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def check_interactive(cluster: ClusterEnvironment, processes: int, what: str) -> None:
    """Other processes run the script again from its beginning; a notebook has none.

    Args:
        processes: on all nodes.
        what: is given devices, e.g. ``"Trainer"``.

    Raises:
        MisconfigurationException: this is a notebook or a shell, and would have to start other processes.
    """
    if processes > 1 and not cluster.creates_processes_externally and is_interactive():
        raise MisconfigurationException(
            f"{what}(devices={processes}) cannot start its other processes from a notebook or a Python shell: each "
            f"runs the script again from its beginning, and there is none. Here, {what}(devices=1) trains. For several "
            "devices write the code into a file and run `python train.py` (in a notebook: `!python train.py`) or "
            f"`torchrun --nproc-per-node {processes} train.py`."
        )


class TrainerLauncher(SubprocessScriptLauncher):
    """The Trainer's. After :func:`check_interactive` nothing is left that a notebook could not do."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True


class FabricLauncher(FabricScriptLauncher):
    """Fabric's, likewise."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True
