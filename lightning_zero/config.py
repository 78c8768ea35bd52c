"""What can be chosen, as frozen dataclasses that check themselves. Imports nothing of ours but errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["CompileConfig", "EngineConfig", "ReduceConfig"]

BACKENDS = ("inductor", "aot_eager")

RecomputePolicy = Callable[[str, int, str], bool | None]


def _check_size(name: str, value: float, example: int) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a positive number of MiB. Try {example}.")


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients travel.

    Args:
        bucket_mb: capacity of one reduce bucket in MiB, over all ranks' parts. A larger gradient gets a bucket of its
            own.
        double_buffer: two buckets per dtype, so that one fills while the other is reduced; otherwise one.
        dtype: dtype on the wire and in the bucket; ``None`` keeps each parameter's own.
        free_buckets: give the buckets' memory back after each backward.
    """

    bucket_mb: float = 64.0
    double_buffer: bool = True
    dtype: torch.dtype | None = None
    free_buckets: bool = False

    def __post_init__(self) -> None:
        _check_size("bucket_mb", self.bucket_mb, 64)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(
                f"reduce_dtype={self.dtype} is no floating point type. Try torch.bfloat16 or torch.float32."
            )


@dataclass(frozen=True)
class CompileConfig:
    """What is compiled, and by whom.

    Args:
        enabled: compile the outermost modules that the training step calls; otherwise everything runs eagerly.
        backend: ``"inductor"`` or ``"aot_eager"`` (same graphs and passes, no code generation; for debugging).
        dynamic: passed to ``torch.compile``: ``None`` lets sizes become dynamic when they change.
        prefetch: gather weights in groups, in the dtype they are used in, ahead of their use; otherwise one by one.
        gather_group_mb: at most so many MiB of whole weights in a group.
        prefetch_mb: at most so many MiB of whole weights are in flight or in use at once, as far as groups are started
            more than one ahead of their use; ``None`` for two groups. More hides more of the transfers where compute is
            short, for memory.
        reduce_group_mb: at most so many MiB of gradients wait until they are handed over together.
        persist_mb: so many MiB of whole weights, in the dtype they are used in, live from forward to backward on every
            rank instead of being gathered twice; ``math.inf`` for all; ``"auto"`` for what the first steps leave free,
            with which everything is compiled once more.
        persist_until: ``"backward"``; or ``"step"``: the weights within ``persist_mb`` stay until the optimizer steps,
            so that of all gathers in a window of accumulated micro-batches only the first forward's remain.
        activation_memory_budget: share, from 0 to 1, of the memory for activations that compiled code would like to
            save for backward; what does not fit is computed again, the cheapest first.
        recompute: decides for single activations: called with an op's name, the bytes of its result and the path of the
            module that it belongs to; True: compute it again in backward, False: save it, None: no opinion.
    """

    enabled: bool = True
    backend: str = "inductor"
    dynamic: bool | None = None
    prefetch: bool = True
    gather_group_mb: float = 128.0
    reduce_group_mb: float = 64.0
    prefetch_mb: float | None = None
    persist_mb: float | str = 0.0
    persist_until: str = "backward"
    activation_memory_budget: float = 1.0
    recompute: RecomputePolicy | None = None

    def __post_init__(self) -> None:
        _check_size("gather_group_mb", self.gather_group_mb, 128)
        _check_size("reduce_group_mb", self.reduce_group_mb, 64)
        if self.prefetch_mb is not None:
            _check_size("prefetch_mb", self.prefetch_mb, 256)
        if self.persist_mb != "auto" and (not isinstance(self.persist_mb, int | float) or not self.persist_mb >= 0):
            raise ValueError(
                f"persist_mb={self.persist_mb!r} must be a number of MiB: 0 to keep no weight for backward, "
                "float('inf') to keep all; or 'auto', for what the first steps leave free."
            )
        if not 0 <= self.activation_memory_budget <= 1:
            raise ValueError(
                f"activation_memory_budget={self.activation_memory_budget!r} must lie between 0 (save only the inputs) "
                "and 1 (save what makes backward fastest)."
            )
        if self.persist_until not in ("backward", "step"):
            raise ValueError(f"persist_until={self.persist_until!r} must be 'backward' or 'step'.")
        if self.persist_until == "step" and not (self.persist_mb and self.prefetch):
            raise ValueError(
                "persist_until='step' keeps nothing without a budget and the passes. Set persist_mb, to float('inf') "
                "for all weights, and leave prefetch on."
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"compile_backend={self.backend!r} is unknown. Choose one of {', '.join(BACKENDS)}.")

    @property
    def persist_bytes(self) -> float:
        """``persist_mb`` in bytes; 0 for ``"auto"``, whose number is not chosen but measured."""
        return 0.0 if isinstance(self.persist_mb, str) else self.persist_mb * 2**20


@dataclass(frozen=True)
class EngineConfig:
    """Everything an :class:`~lightning_zero.engine.Engine` is built from.

    Args:
        compute_dtype: what autocast computes in; shards are kept in this dtype too (a shadow), written once per step,
            and weights that are used in it are gathered in it. ``None`` without autocast.
        sync_collectives: debugging: wait on the host before and after every collective.
        poison: debugging, on a CPU: weights and gradients are NaN until they have been waited for and after they have
            been released, and ranks run at random speeds. Results must stay the same.
        gather_by: ``"collective"``: weights come by all-gathers; ``"copy"``: compiled code with mixed precision copies
            them out of its peers' memory, which takes no multiprocessors; ``"auto"``: copy between GPUs of one host,
            with CUDA 13.
        reduce_by: ``"collective"``: gradients are reduce-scattered; ``"copy"``: they are copied into peers' memory and
            added up there, in float32; ``"auto"``: as above.
        capture_step: replay the optimizer's step as a CUDA graph: ``"auto"`` where that is possible; ``True``, or raise
            where it is not; ``False`` never.
        capture_graphs: replay forward and backward of compiled code as CUDA graphs: ``"auto"`` where that is possible;
            ``True``, or raise where it is not; ``False`` never.
        broadcast_buffers: rank 0's buffers are sent to all ranks before the first forward after each optimizer step,
            as DDP does: those of modules in which some rank has seen one change.
        emulate_graphs: debugging: on any device, do what such a replay does, without the graphs.
        emulate_capture: debugging: on any device, do what a captured step does, without the graph.
        agreement_timeout_s: how long, in seconds, a rank with a newly compiled graph waits for ranks that are not
            compiling, before it says that they do something else.
        report_stall_after_s: after how many seconds of waiting for another rank every rank says which one is missing,
            and where.
    """

    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    compute_dtype: torch.dtype | None = None
    sync_collectives: bool = False
    poison: bool = False
    agreement_timeout_s: float = 25.0
    report_stall_after_s: float = 30.0
    gather_by: str = "auto"
    reduce_by: str = "auto"
    capture_step: bool | str = "auto"
    emulate_capture: bool = False
    capture_graphs: bool | str = "auto"
    emulate_graphs: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        for name, example in (("agreement_timeout_s", 25), ("report_stall_after_s", 30)):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a positive number of seconds. Try {example}.")
        for name in ("gather_by", "reduce_by"):
            if getattr(self, name) not in ("auto", "collective", "copy"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be 'auto', 'collective' or 'copy'.")
        for name in ("capture_step", "capture_graphs"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True, False or 'auto'.")
