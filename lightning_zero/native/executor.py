"""A typed handle on the C++ executor. See ``csrc/executor.h`` for its parts."""

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
    """What compiled graphs call for activations that lie on the host between forward and backward; see
    ``offload/activations.py``."""

    def start_offload(self, value: Tensor) -> Tensor: ...

    def wait_offload(self, value: Tensor, host: Tensor) -> None: ...

    def start_load(self, host: Tensor) -> Tensor: ...

    def wait_load(self, value: Tensor, host: Tensor) -> None: ...


class Executor:
    """Gathers weights and reduces gradients for one engine.

    Args:
        mesh: of the ranks that share the weights; on its control group they agree at the end of each backward.
        config: options.
        on_backward_end: called after gradients have been attached, once per backward.
        watchdog: watches over what this executor waits for.
        on_new_plan: called with the digest and the text of a compiled graph's plan before the first such graph runs.
            What it raises ends the run of the graph before its first collective.

    Attributes:
        parameters, weights, gradients, graphs, transport: its parts.
        device, rank, world_size: of the mesh.
        activations: what it was told of by :meth:`keep_activations`.
        several_hosts: whether there are.
        reduces_across_once: whether these are to reduce gradients once per optimizer step.
        reduces_once: whether all ranks are.
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
        """Surrounds a collective called ``what``, of the process group of that lane, that Python starts."""
        return nullcontext() if self._watchdog is None else self._watchdog.waiting(what, sequence)

    def collective(self, what: str, sequence: SequenceId, start: Callable[[bool], dist.Work | None]) -> None:
        """The same for one that ``start`` starts, asynchronously if it is given True: a wait that can be ended."""
        if self._watchdog is None:
            start(False)
            return
        self._watchdog.collective(what, sequence, start, sequence is SequenceId.CONTROL or self.device.type == "cpu")

    def configure(self, config: EngineConfig) -> None:
        """Applies options; legal only outside a backward pass."""
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
        """Whether gradients of micro-batches wait for the last one's, on their host or on their rank."""
        return (self.reduces_once and self.world_size > 1) or (self.reduces_across_once and self.several_hosts)

    def before_user_writes(self, callback: Callable[[], None]) -> None:
        """``callback`` comes before what eager code does to whole weights changes shards."""
        self._native.before_user_writes(self._define("before_user_writes", "()", callback))

    def keep_activations(self, where: KeepsActivations) -> None:
        """Compiled graphs give activations away to ``where``, and get them back from there."""
        self.activations = where
        one, two = "(Tensor value)", "(Tensor value, Tensor host)"
        self._native.set_activation_ops(
            self._define("on_leave", one, where.start_offload, "Tensor"),
            self._define("on_left", two, where.wait_offload),
            self._define("on_come", "(Tensor host)", where.start_load, "Tensor"),
            self._define("on_came", two, where.wait_load),
        )

    def _define(self, event: str, arguments: str, callback: Callable[..., Any], result: str = "()") -> str:
        # C++ finds Python through an op of this executor's own, so no table of engines is needed. The op must not keep
        # the engine alive, hence the weak reference.
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
        """A stage begins, on every rank, wherever an exception may have ended the one before. Collective."""
        self._native.begin_stage()

    def begin_training_step(self) -> None:
        """A training step begins, on every rank: what a rank missed in an interrupted one is not waited for."""
        self._native.begin_training_step()

    def counters(self) -> dict[str, int]:
        """Counts since the last reset.

        Of weights: ``gathers``, ``gather_bytes`` (of the whole weights), and of these ``eager_gathers``,
        ``resident_gathers`` (into memory where they stay), ``copied_weights`` (without a collective);
        ``gather_groups``, and of these ``prefetched_groups`` (under way since the step began);
        ``compute_shard_writes`` (one by one).

        With several hosts: ``gather_bytes_across`` and ``reduce_bytes_across`` (of what the ranks at one place of all
        hosts have together; of an all-reduce twice, for its way to the sums and back), ``host_shard_refreshes``,
        ``exchanged_parts`` (of these), and on CPUs ``awaited_parts``.

        Of activations that lie on the host until backward: ``offloaded_activations``, ``offload_bytes``,
        ``reload_bytes``.

        Of gradients: ``reduces``, ``flushes`` (buckets), ``reduce_bytes`` (of whole buckets), ``late_flushes`` (of
        gradients whose bucket had left), ``deferred_reductions`` (that no backward took along), ``agreements``,
        ``aborted_backwards``, ``plans`` (layouts of buckets), ``grown_buckets``, ``allocated_buckets``; of both,
        ``replayed_graphs``. Counts that never rose are missing.

        As they are now: ``buckets``, ``bucket_bytes``, ``watched_weights`` (that eager code was given).
        """
        return dict(self._native.counters())

    def reset_counters(self) -> None:
        """Sets the running counts to zero."""
        self._native.reset_counters()

    def close(self) -> None:
        """Unregisters every parameter; harmless when called twice."""
        self._native.close()
        self._library = None
