"""Launchers of the other processes of a node, for the Trainer and for Fabric."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zero.compat.lightning_private import FabricScriptLauncher, SubprocessScriptLauncher, bound_threads
from lightning_zero.integrations.children import ChildWatch, terminate_after_grace
from lightning_zero.integrations.process_group import check_world_size

__all__ = ["FabricLauncher", "TrainerLauncher", "check_interactive"]


def is_interactive() -> bool:
    """Return True in a notebook or a Python shell, by Lightning's criterion."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def check_interactive(cluster: ClusterEnvironment, processes: int, what: str) -> None:
    """Raise if a notebook or a shell would have to start other processes: these run a script from its beginning.

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


class _Launcher:
    """Starts the other processes of a node, unless they were started from outside, and watches them.

    After :func:`check_interactive` nothing is left that a notebook could not do.
    """

    api_name: str
    cluster_environment: ClusterEnvironment
    num_processes: int
    num_nodes: int
    procs: list[subprocess.Popen[bytes]]
    _call_children_scripts: Callable[[], None]

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def _start(self) -> None:
        """Start the other processes.

        Raises:
            ValueError: ``devices`` or ``num_nodes`` contradict what has started the processes.
            MisconfigurationException: This process is in a process group of another size.
        """
        cluster = self.cluster_environment
        cluster.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        check_world_size(self.api_name, self.num_processes, self.num_nodes)
        if not cluster.creates_processes_externally:
            self._call_children_scripts()
            ChildWatch(self.procs, cluster.node_rank() * self.num_processes).start()
        bound_threads(num_processes=self.num_processes)


class TrainerLauncher(_Launcher, SubprocessScriptLauncher):
    """The Trainer's."""

    api_name = "Trainer"
    _strategy: Any = None  # of the Trainer that has started the processes

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function``, e.g. the Trainer's ``fit``, in each process, and wait until it has ended on all ranks."""
        self._start()
        self._strategy = None if trainer is None else trainer.strategy
        result = function(*args, **kwargs)
        if trainer is not None:
            trainer.strategy.end_stage()
        return result

    def kill(self, signum: Any) -> None:
        """Pass a signal on. The Trainer sends SIGKILL after Ctrl-C, when the others are about to end by themselves."""
        if signum == signal.SIGKILL:
            if self._strategy is not None:
                self._strategy.leave()
            terminate_after_grace(self.procs)
        else:
            super().kill(signum)


class FabricLauncher(_Launcher, FabricScriptLauncher):
    """Fabric's."""

    api_name = "Fabric"

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start()
        return function(*args, **kwargs)
