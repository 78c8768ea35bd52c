"""Start the processes of a training, and check and join their process group.

:class:`ProcessGroupMixin` is shared by the strategies of the Trainer and of Fabric; each has its own launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import group as _group
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_zero.compat.lightning_private import (
    FabricScriptLauncher,
    SubprocessScriptLauncher,
    bound_threads,
    init_process_group,
    reduce_value,
)
from lightning_zero.mesh import all_max, all_min
from lightning_zero.native.build import kill_compilers
from lightning_zero.native.startup import StartupWatch

T = TypeVar("T")

_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
POLL_S = 0.2
# For a process to end after another rank has failed: its watchdog raises within 3 s, and ends the process 4 s later.
GRACE_S = 8.0


@contextmanager
def without_nccl_abort() -> Iterator[None]:
    """Create process groups whose NCCL watchdog does not abort the process after a device error.

    The abort would hide the traceback. :class:`Watchdog` covers the other failures that NCCL's watchdog finds.
    """
    if _RETHROW in os.environ:
        yield
        return
    os.environ[_RETHROW] = "0"
    try:
        yield
    finally:
        del os.environ[_RETHROW]


def reduce_in_place(tensor: Tensor, group: Any, reduce_op: ReduceOp | str | None) -> Tensor:
    """Reduce as Lightning's strategies do, but keep a NaN in maxima and minima. Collective."""
    ranks: Any = _group.WORLD if group is None else group
    if dist.is_initialized() and tensor.is_floating_point():
        if reduce_op in ("max", "MAX", dist.ReduceOp.MAX):
            return tensor.copy_(all_max(tensor, ranks))
        if reduce_op in ("min", "MIN", dist.ReduceOp.MIN):
            return tensor.copy_(all_min(tensor, ranks))
    return reduce_value(tensor, group, reduce_op=reduce_op)


def is_interactive() -> bool:
    """Return True in a notebook or a Python shell, by Lightning's criterion."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def check_interactive(cluster: ClusterEnvironment, processes: int, api_name: str) -> None:
    """Raise if a notebook or a shell would have to start other processes, which need a script.

    Raises:
        MisconfigurationException: This is a notebook or a shell, and would have to start other processes.
    """
    if processes > 1 and not cluster.creates_processes_externally and is_interactive():
        raise MisconfigurationException(
            f"{api_name}(devices={processes}) cannot start its other processes from a notebook or a Python shell: they "
            f"would run the script again from its beginning, and there is no script. Use {api_name}(devices=1) here. "
            "For several devices, write the code into a file and run `python train.py` (in a notebook: "
            f"`!python train.py`) or `torchrun --nproc-per-node {processes} train.py`."
        )


def check_world_size(api_name: str, devices: int, nodes: int) -> None:
    """Raise if this process is in a process group of another size.

    Raises:
        MisconfigurationException: The sizes differ. Samplers would use the requested size, and collectives the size of
            the group.
    """
    if not dist.is_initialized() or (size := dist.get_world_size()) == devices * nodes:
        return
    requested, fits = _call(api_name, devices, nodes), _call(api_name, size, 1)
    if size % nodes == 0:
        fits = _call(api_name, size // nodes, nodes)
    raise MisconfigurationException(
        f"{requested} asks for a process group of {_ranks(devices * nodes)}, but this process is already in one of "
        f"{_ranks(size)} ({dist.get_backend_config()}), which an earlier Trainer, Fabric or "
        "torch.distributed.init_process_group() has made. A process group keeps its size until its processes end. "
        f"Use {fits} here, or run this training in a script of its own."
    )


def _call(api_name: str, devices: int, nodes: int) -> str:
    return f"{api_name}(devices={devices}{f', num_nodes={nodes}' if nodes > 1 else ''})"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def check_rank(api_name: str, rank: int) -> None:
    """Raise if the process group numbers this process otherwise than the cluster environment does."""
    if dist.is_initialized() and dist.get_rank() != rank:
        raise MisconfigurationException(
            f"This process is rank {dist.get_rank()} of its process group, but rank {rank} for the {api_name}'s "
            "cluster environment, so it would train on another rank's data. Call "
            "torch.distributed.init_process_group() with "
            f"the rank of the environment (RANK, or NODE_RANK and LOCAL_RANK), or let the {api_name} call it."
        )


class ChildWatch(threading.Thread):
    """End this process with a message if a child process fails, after a grace period.

    Lightning's own observer sends SIGKILL to all children at once, so no rank could say which one has failed, and why.

    Args:
        grace_s: for this process to end by itself.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]], first_rank: int, grace_s: float = GRACE_S) -> None:
        super().__init__(name="lightning_zero-children", daemon=True)
        self._children, self._first_rank, self._grace_s = list(children), first_rank, grace_s

    def run(self) -> None:
        while any(child.poll() is None for child in self._children) and not self._failed():
            time.sleep(POLL_S)
        failed = self._failed()
        if failed:
            time.sleep(self._grace_s)  # as a daemon thread, this ends with the process
            self._end(min(failed))

    def _failed(self) -> list[int]:
        return [number for number, child in enumerate(self._children) if child.poll()]

    def _end(self, number: int) -> None:
        child, own = self._children[number], self._first_rank
        text = (
            f"[lightning_zero, rank {own}] The process of rank {own + 1 + number} (number {child.pid}) "
            f"{_how(child.returncode)}. Look for its error first. This is rank {own}, which has started it. It cannot "
            f"go on without it, did not end by itself within {self._grace_s:.0f} s, and is ended now.\n"
        )
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        for other in self._children:
            other.kill()
        kill_compilers()
        os._exit(1)


def terminate_after_grace(children: Sequence[subprocess.Popen[bytes]], grace_s: float = GRACE_S) -> None:
    """Wait until the processes have ended after a failure, and kill the others after the grace period."""
    deadline = time.monotonic() + grace_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for child in children:
        child.kill()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Launcher:
    """Start the other processes of a node, unless they were started from outside, and watch them."""

    api_name: str
    cluster_environment: ClusterEnvironment
    num_processes: int
    num_nodes: int
    procs: list[subprocess.Popen[bytes]]
    _call_children_scripts: Callable[[], None]

    @property
    def is_interactive_compatible(self) -> bool:
        return True  # check_interactive() refuses the combinations that fail in a notebook

    def _start(self) -> None:
        """Start the other processes.

        Raises:
            ValueError: ``devices`` or ``num_nodes`` contradict the launcher that started the processes.
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
    api_name = "Trainer"
    _strategy: Any = None  # of the Trainer that started the processes

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function``, e.g. the Trainer's ``fit``, in each process, and wait until it ends on all ranks."""
        self._start()
        self._strategy = None if trainer is None else trainer.strategy
        result = function(*args, **kwargs)
        if trainer is not None:
            trainer.strategy.end_stage()
        return result

    def kill(self, signum: Any) -> None:
        """Pass a signal on. The Trainer sends SIGKILL after Ctrl-C, while the others are ending by themselves."""
        if signum == signal.SIGKILL:
            if self._strategy is not None:
                self._strategy.exit_soon()
            terminate_after_grace(self.procs)
        else:
            super().kill(signum)


class FabricLauncher(_Launcher, FabricScriptLauncher):
    api_name = "Fabric"

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start()
        return function(*args, **kwargs)


class ProcessGroupMixin:
    """Run one process per device, all in one process group.

    The strategy provides ranks, devices and the cluster environment, and calls :meth:`_init_processes` in its
    constructor.
    """

    api_name: str  # in messages: "Trainer" or "Fabric"
    launcher_type: type[TrainerLauncher] | type[FabricLauncher]
    _launcher: Any
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Any
    local_rank: Any
    node_rank: Any
    global_rank: Any
    world_size: Any

    def _init_processes(self, backend: str | None, timeout: timedelta | None, stall_report_s: float) -> None:
        self._num_nodes = 1
        self._process_group_backend = backend
        self._timeout = timeout
        self._stall_report_s = stall_report_s
        self._startup: StartupWatch | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_interactive(self.cluster_environment, self.num_processes * self.num_nodes, self.api_name)
        # Always set one: it compares `devices` with the number of processes that were started from outside.
        self._launcher = self.launcher_type(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def setup_environment(self) -> None:
        self.set_world_ranks()
        cluster = self.cluster_environment
        assert cluster is not None
        check_world_size(self.api_name, self.num_processes, self.num_nodes)
        check_rank(self.api_name, self.global_rank)
        if self.world_size > 1 and not torch.distributed.is_initialized():
            first = self.node_rank * self.num_processes
            self._startup = StartupWatch(
                cluster.main_address,
                cluster.main_port,
                self.global_rank,
                self.world_size,
                range(first, first + self.num_processes),
                self._stall_report_s,
            )
        self.accelerator.setup_device(self.root_device)
        backend = self._process_group_backend or torch.distributed.get_default_backend_for_device(self.root_device)
        device = self.root_device if self.root_device.type != "cpu" else None
        init_process_group(cluster, backend, timeout=self._timeout, device_id=device)
        if self._startup is not None:
            self._startup.joined()

    def _close_startup(self) -> None:
        """Stop watching the start, after the engine's watchdog watches the ranks."""
        if self._startup is not None:
            self._startup.close()
            self._startup = None

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    def barrier(self, name: str | None = None) -> None:
        if not torch.distributed.is_initialized() or self._barrier_is_redundant(name):
            return
        with self._watch_collective(f"Lightning's barrier {name!r}" if name else "a barrier of Lightning's"):
            if torch.distributed.get_backend() == "nccl":
                torch.distributed.barrier(device_ids=[self.root_device.index])
            else:
                torch.distributed.barrier()

    def _barrier_is_redundant(self, barrier: str | None) -> bool:
        return False

    def _watch_collective(self, description: str) -> AbstractContextManager[None]:
        """Let the watchdog watch a collective of all ranks within this context."""
        return nullcontext()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``, which the others unpickle: other ranks are trusted. Collective."""
        if not torch.distributed.is_initialized():
            return obj
        objects = [obj]
        with self._watch_collective("a broadcast of Lightning's"):
            torch.distributed.broadcast_object_list(objects, src, group=self._object_group())
        return objects[0]

    def _object_group(self) -> Any:
        """Return the process group of all ranks for objects in host memory."""
        return _group.WORLD
