"""Typed handle of the C++ executor and its transport. See ``csrc/executor.h`` for its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native.build import compile_cuda, kernel_source
from lightning_zero.native.executor_stubs import Gradients, Graphs, Parameters, Weights
from lightning_zero.native.load import load
from lightning_zero.native.watchdog import SequenceId, Watchdog


class Transport:
    """Peer memory and kernels of one executor, see ``csrc/transport/transport.h``.

    Args:
        mesh: Mesh of the ranks; those of one host copy between their memories.
    """

    def __init__(self, native: Any, mesh: Mesh) -> None:
        self._native = native
        self._device, self._ranks = mesh.device, mesh.intra_host.size
        self._several_hosts = mesh.inter_host is not None
        self._limit: float | None = None

    @property
    def staging_unit(self) -> int:
        """Bytes of which the size of staging memory must be a multiple."""
        return self._native.staging_unit()

    def set_staging(self, staging: list[Tensor], group: dist.ProcessGroup, timeout_s: float = 1800.0) -> None:
        """Send gradients through staging memory of each rank instead of a reduce-scatter. Call on every rank.

        Args:
            staging: Memory of each rank, as bytes, that this rank can write. Equal sizes, multiples of
                :attr:`staging_unit`; on an accelerator, symmetric memory of ``group``.
            group: Process group of the memory.
            timeout_s: A rank that waits longer for another one ends with a device error.
        """
        self._native.set_staging(staging, group.group_name, int(1000 * timeout_s))

    def set_barrier(self, rows: list[Tensor]) -> None:
        """Use our own kernel for device barriers; the host can end its waits.

        Call on every rank before :meth:`set_staging`.

        Args:
            rows: For each rank, memory that all ranks can write: ``2 * ranks`` int32 zeros.
        """
        code = self._kernels("signal_kernels.cu", RANKS=self._ranks)
        words = torch.zeros(16, dtype=torch.int32, pin_memory=True)  # see csrc/sync/signal_pads.h
        self._native.set_barrier(code, rows, words)

    def compile_means(self) -> None:
        """Compile the kernel that averages received gradients on NVIDIA devices, in half the time of torch's."""
        self._native.set_mean_kernels(self._kernels("kernels.cu", ROWS=self._ranks))

    def limit_cross_host_bandwidth(self, gbs: float | None) -> None:
        """Limit the bandwidth across hosts to ``gbs`` GB/s per rank, for debugging; None removes the limit.

        Raises:
            RuntimeError: The kernel that waits on the device cannot be compiled or loaded.
        """
        if gbs == self._limit:
            return
        on_device = gbs is not None and self._several_hosts and self._device.type == "cuda"
        code = self._kernels("kernels.cu") if on_device else None
        self._native.limit_cross_host_bandwidth(code, 1e9 * (gbs or 0.0))
        self._limit = gbs

    def set_epoch_lock(self, numbers: list[Tensor]) -> None:
        """Make ranks take turns to read and write shards in shared memory (``parameters.set_peer_shards``).

        Call on every rank.

        On an accelerator, call it after :meth:`set_barrier`.

        Args:
            numbers: For each rank, zeros in memory that all ranks can write: one int64, or ``ranks`` int32 on an
                accelerator.
        """
        if self._device.type == "cpu":
            self._native.set_epoch_lock(numbers)
        else:
            self._native.set_device_epoch_lock(self._kernels("signal_kernels.cu", RANKS=self._ranks), numbers)

    def set_remote_signals(self, numbers: list[Tensor]) -> None:
        """Let ranks of this host signal which parts of inter-host exchanges have arrived.

        With several hosts; not in a graph.

        Args:
            numbers: For each rank, zeros in memory that all ranks can write: one int64, or ``ranks`` int32 on an
                accelerator. On an accelerator whose memory no other rank reads: one int32 of this rank.
        """
        if self._device.type == "cpu":
            self._native.set_remote_signals(numbers)
        else:
            self._native.set_device_remote_signals(self._kernels("signal_kernels.cu", RANKS=len(numbers)), numbers)

    def _kernels(self, source: str, **macros: int) -> Tensor:
        capability = torch.cuda.get_device_capability(self._device)
        return compile_cuda(kernel_source(source), capability, [f"-D{n}={value}" for n, value in macros.items()])


class Executor:
    """Gathers weights and reduces gradients for one engine.

    Args:
        mesh: Ranks that share the weights. They agree on its control group at the end of each backward.
        on_new_plan: Called with digest and text of a compiled graph's plan before the first such graph runs. An error
            that it raises ends the graph's run before its first collective.

    Attributes:
        parameters, weights, gradients, graphs, transport: Parts of the executor.
        several_hosts: True if the mesh has several hosts.
        reduces_across_once: True if gradients are reduced across hosts once per optimizer step.
        reduces_once: True if gradients are reduced over all ranks once per optimizer step.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: EngineConfig,
        on_backward_end: Callable[[], None] | None = None,
        on_new_plan: Callable[[str, str], None] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        load()
        intra_host, inter_host, inter_host_shard_group = mesh.intra_host, mesh.inter_host, mesh.inter_host_shard_group
        self._native = torch.classes.lightning_zero.Executor(
            intra_host.gather_group.group_name,
            "" if inter_host_shard_group is None else inter_host_shard_group.gather_group.group_name,
            intra_host.reduce_group.group_name,
            "" if inter_host is None else inter_host.reduce_group.group_name,
            mesh.control_group.group_name,
            str(mesh.device),
        )
        self.parameters: Parameters = self._native.parameters()
        self.weights: Weights = self._native.weights()
        self.gradients: Gradients = self._native.gradients()
        self.graphs: Graphs = self._native.graphs()
        self.transport = Transport(self._native.transports(), mesh)
        self.device, self.rank, self.world_size = mesh.device, mesh.rank, mesh.world_size
        self.several_hosts = inter_host is not None
        self.configure(config)
        self._library: torch.library.Library | None = torch.library.Library("lightning_zero", "FRAGMENT")
        self._watchdog = watchdog
        self.activations: Any = None
        if watchdog is not None:
            self._native.watch(watchdog.native)
        if on_backward_end is not None:
            self._native.on_backward_end(self._define("on_backward_end", "()", on_backward_end))
        if on_new_plan is not None:
            self._native.on_new_plan(self._define("on_new_plan", "(str digest, str plan)", on_new_plan))

    def waiting(self, what: str, sequence: SequenceId) -> AbstractContextManager[None]:
        """Surround a collective that Python starts.

        ``what`` describes it; ``sequence`` is that of its process group.
        """
        return nullcontext() if self._watchdog is None else self._watchdog.waiting(what, sequence)

    def collective(self, what: str, sequence: SequenceId, start: Callable[[bool], dist.Work | None]) -> None:
        """Start a collective and wait for it interruptibly.

        ``start`` is passed True if it must be asynchronous.
        """
        if self._watchdog is None:
            start(False)
            return
        self._watchdog.collective(what, sequence, start, sequence is SequenceId.CONTROL or self.device.type == "cpu")

    def start_collective(
        self, what: str, sequence: SequenceId, start: Callable[[bool], dist.Work | None]
    ) -> Callable[[], None]:
        """Start a collective; return a function that waits for it interruptibly.

        On CUDA, the current stream waits and not the host. All ranks must wait in the same order.
        """
        if self._watchdog is None:
            work = start(True)
            assert work is not None
            return lambda: None if work.wait() else None
        return self._watchdog.start_collective(what, sequence, start, self.device.type == "cpu")

    def configure(self, config: EngineConfig) -> None:
        """Apply options. Must not be called in a backward pass."""
        tuning = config.tuning
        self.reduces_across_once = tuning.cross_host_reduce == "step"
        self.reduces_once = config.stage == 1
        self._native.configure(
            int(tuning.reduce_bucket_mb * 2**20),
            tuning.reduce_double_buffer,
            tuning.free_reduce_buckets,
            tuning.sync_collectives,
            tuning.nan_fill,
            config.wire_dtype,
            int(tuning.gather_group_mb * 2**20),
        )
        self.transport.limit_cross_host_bandwidth(tuning.emulate_cross_host_gb_per_s)

    @property
    def defers(self) -> bool:
        """True if gradients of micro-batches wait for the last micro-batch, on their host or on their rank."""
        return (self.reduces_once and self.world_size > 1) or (self.reduces_across_once and self.several_hosts)

    def before_user_writes(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` before user writes of gathered weights change shards."""
        self._native.before_user_writes(self._define("before_user_writes", "()", callback))

    def keep_activations(self, where: Any) -> None:
        """Let compiled graphs offload activations through ``where``, see ``offload/activations.py``."""
        self.activations = where
        one, two = "(Tensor value)", "(Tensor value, Tensor host)"
        self._native.set_activation_ops(
            self._define("on_leave", one, where.start_offload, "Tensor"),
            self._define("on_left", two, where.wait_offload),
            self._define("on_come", "(Tensor host)", where.start_load, "Tensor"),
            self._define("on_came", two, where.wait_load),
        )

    def _define(self, event: str, arguments: str, callback: Callable[..., Any], result: str = "()") -> str:
        # C++ calls Python through an op of this executor, so no table of engines is needed. The op must not keep the
        # engine alive, hence the weak reference.
        method = weakref.WeakMethod(callback) if hasattr(callback, "__self__") else (lambda: callback)
        name = f"{event}_{id(self)}"

        def run(*args: Any) -> Any:
            target = method()
            return None if target is None else target(*args)

        assert self._library is not None
        self._library.define(f"{name}{arguments} -> {result}")
        self._library.impl(name, run, "CompositeExplicitAutograd")
        return f"lightning_zero::{name}"

    def begin_stage(self) -> None:
        """Begin a stage on every rank, even if an exception has ended the one before. Collective."""
        self._native.begin_stage()

    def begin_training_step(self) -> None:
        """Begin a training step on every rank: do not wait for work of an interrupted one."""
        self._native.begin_training_step()

    def counters(self) -> dict[str, int]:
        """Return counts since the last reset. Counts that are zero may be missing.

        Weights: ``gathers``, ``gather_bytes`` (of unsharded weights), and of these ``eager_gathers``,
        ``cached_gathers`` (into the cache of unsharded weights), ``copied_weights`` (without a collective);
        ``gather_groups``, and of these ``prefetched_groups`` (started at the beginning of the step);
        ``compute_shard_writes`` (one by one).

        Several hosts: ``gather_bytes_across`` and ``reduce_bytes_across`` (of all ranks with one local rank together;
        an all-reduce counts twice), ``host_shard_refreshes``, ``exchanged_parts`` (of these), and on CPUs
        ``awaited_parts``.

        Activations: ``offloaded_activations``, ``offload_bytes``, ``reload_bytes``.

        Gradients: ``reduces``, ``flushes`` (buckets), ``reduce_bytes`` (of full buckets), ``late_flushes`` (of
        gradients whose bucket was already sent), ``deferred_reductions`` (outside a backward), ``agreements``,
        ``aborted_backwards``, ``plans`` (bucket layouts), ``grown_buckets``, ``allocated_buckets``. Weights and
        gradients: ``replayed_graphs``.

        Present values: ``buckets``, ``bucket_bytes``, ``watched_weights`` (held by eager code).
        """
        return dict(self._native.counters())

    def reset_counters(self) -> None:
        """Set the running counts to zero."""
        self._native.reset_counters()

    def close(self) -> None:
        """Unregister every parameter. Idempotent."""
        self._native.close()
        self._library = None
