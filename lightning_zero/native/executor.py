"""Typed handle of the C++ executor and its transport. See ``csrc/executor.h`` for its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native.executor_stubs import Gradients, Graphs, Parameters, Weights
from lightning_zero.native.load import load
from lightning_zero.native.transport import Transport
from lightning_zero.native.watchdog import SequenceId, Watchdog

__all__ = ["Executor", "KeepsActivations"]


class KeepsActivations(Protocol):
    """The operations of offloaded activations that compiled graphs call, see ``offload/activations.py``."""

    def leave(self, value: Tensor) -> Tensor: ...

    def left(self, value: Tensor, host: Tensor) -> None: ...

    def come(self, host: Tensor) -> Tensor: ...

    def came(self, value: Tensor, host: Tensor) -> None: ...


class Executor:
    """Gathers weights and reduces gradients for one engine.

    Args:
        mesh: Ranks that share the weights. They agree on its control group at the end of each backward.
        config: Options.
        on_backward_end: Called once per backward, after gradients are attached.
        on_new_plan: Called with digest and text of a compiled graph's plan before the first such graph runs. An error
            that it raises ends the graph's run before its first collective.
        watchdog: Watches this executor's waits.

    Attributes:
        parameters, weights, gradients, graphs, transport: Parts of the executor.
        device, rank, world_size: Those of the mesh.
        activations: The argument of :meth:`keep_activations`.
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

    def configure(self, config: EngineConfig) -> None:
        """Apply options. Must not be called in a backward pass."""
        tuning = config.tuning
        self.reduces_across_once = tuning.reduce_across == "step"
        self.reduces_once = config.stage == 1
        self._native.configure(
            int(tuning.reduce_bucket_mb * 2**20),
            tuning.reduce_double_buffer,
            tuning.free_reduce_buckets,
            tuning.sync_collectives,
            tuning.poison,
            config.wire_dtype,
            int(tuning.gather_group_mb * 2**20),
        )
        self.transport.limit_across(tuning.emulate_bandwidth_across_gbs)

    @property
    def defers(self) -> bool:
        """True if gradients of micro-batches wait for the last micro-batch, on their host or on their rank."""
        return (self.reduces_once and self.world_size > 1) or (self.reduces_across_once and self.several_hosts)

    def before_edits(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` before user writes of gathered weights change shards."""
        self._native.before_edits(self._define("before_edits", "()", callback))

    def keep_activations(self, where: KeepsActivations) -> None:
        """Let compiled graphs offload activations through ``where`` and reload them."""
        self.activations = where
        one, two = "(Tensor value)", "(Tensor value, Tensor host)"
        self._native.keep_activations(
            self._define("on_leave", one, where.leave, "Tensor"),
            self._define("on_left", two, where.left),
            self._define("on_come", "(Tensor host)", where.come, "Tensor"),
            self._define("on_came", two, where.came),
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

    def begin_epoch(self) -> None:
        """Begin a training step on every rank: do not wait for work of an interrupted one."""
        self._native.begin_epoch()

    def counters(self) -> dict[str, int]:
        """Return counts since the last reset. Counts that are zero may be missing.

        Weights: ``gathers``, ``gather_bytes`` (of unsharded weights), and of these ``eager_gathers``,
        ``resident_gathers`` (into the cache of unsharded weights), ``copied_weights`` (without a collective);
        ``gather_groups``, and of these ``groups_ahead`` (started at the beginning of the step); ``compute_copy_writes``
        (one by one).

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
