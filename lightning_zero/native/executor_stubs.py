"""Types and docstrings of the C++ executor's parts. The objects themselves are in C++.

``csrc/bindings/`` names their methods and arguments; ``tests/native/test_bindings.py`` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Parameters(Protocol):
    """Registry of parameters and of each parameter's memory."""

    def add(
        self, name: str, param: Tensor, shard: Tensor, shape: Sequence[int], order: Sequence[int] | None = None
    ) -> int:
        """Register a parameter and return its index.

        Args:
            shard: Its 1-D part of a flat buffer.
            order: Order of its dimensions in memory; by default contiguous.
        """

    def move(self, index: int, shard: Tensor) -> None:
        """Move the parameter's shard to other memory with equal values."""

    def drop(self, index: int) -> None:
        """Unregister a parameter that no module reads any more."""

    def install_gradient_hooks(self, index: int) -> None:
        """Make backward raise ``ValueError`` if autograd accumulates into this shard.

        Pass full gradients to hooks of ``register_hook``.

        Call it again after the first ``register_hook``, which removes the guard.
        """

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """Set the 1-D memory of the parameter's gradient, of the shard's size; None removes it.

        The memory is part of the flat gradient buffer, in the shard's dtype, or aliases the compute shard. Call between
        steps, after gradients are used.
        """

    def set_unsharded_cache(self, index: int, memory: Tensor | None) -> None:
        """Set 1-D padded memory to cache the unsharded parameter until the step; None removes it."""

    def set_deferred_gradient(self, index: int, memory: Tensor | None, full: bool) -> None:
        """Set 1-D memory for deferred gradients, in float32 or wider; None removes it.

        It is of the size of the host shard, or of the full parameter if ``full``. See :meth:`Gradients.defer`.
        """

    def set_compute_shard(self, index: int, copy: Tensor) -> None:
        """Set 1-D memory for the shard's values in another dtype. Gathers in that dtype read it."""

    def set_fp8_factor(self, index: int, factor: Tensor) -> None:
        """Set the number by which gathers in fp8 divide the weight, equal on all ranks.

        The caller keeps its memory current.
        """

    def set_fp8_health(self, index: int, memory: Tensor) -> None:
        """Set memory for numbers of the layer's fp8 matrices, float32, of shape (matrices, numbers).

        The op ``fp8_health`` raises numbers there, and the caller resets them.
        """

    def set_fp8_shard(self, index: int, copy: Tensor, peers: list[Tensor]) -> None:
        """Set memory for the parameter's shard in fp8, on this rank and on each rank.

        ``peers`` is empty if this process cannot read them; otherwise it needs an epoch lock.
        """

    def add_compute_shard_memory(self, copies: Tensor, shards: Tensor) -> None:
        """Register compute shards that are adjacent in memory, and their shards.

        :meth:`Weights.refresh_compute_shards` then writes them in one kernel.
        """

    def mark_on_host(self, index: int) -> None:
        """Mark the parameter's shard as offloaded: the device reads it over its link.

        Code that changes the shard must report it, and optimizers must write the compute shard.
        """

    def set_peer_compute_shards(self, index: int, peers: list[Tensor]) -> None:
        """Set the parameter's compute shard on each rank, in memory that this process can read.

        Compiled code then copies from there instead of gathering. Register the same parameters on every rank.
        """

    def set_full_precision_shard(self, index: int, copy: Tensor, peers: list[Tensor]) -> None:
        """Set memory for a copy of the shard in its own dtype, on this rank and on each rank.

        Call after :meth:`set_peer_compute_shards`.

        It is for weights that compiled mixed-precision code reads in full precision.
        """

    def set_peer_shards(self, index: int, shards: list[Tensor]) -> None:
        """Set the parameter's shard on each rank, in memory that this process can read.

        Call after ``set_epoch_lock``.
        """


class Weights(Protocol):
    """Writes of shards, and user writes of gathered weights."""

    def uses_epoch_lock(self) -> bool:
        """Return True if a gather needs no other rank."""

    def begin_writing(self, stepping: bool = False) -> None:
        """Wait for readers of the shards on all ranks. Call on every rank before shards change. Idempotent.

        ``stepping``: an optimizer changes them, and itself reports which compute shards of offloaded shards it writes.
        """

    def end_writing(self) -> None:
        """Let other ranks read the changed shards. The next gather on this rank does it, too."""

    def expire_compute_shards(self) -> None:
        """Invalidate the compute shards, because shards may have changed without :meth:`begin_writing`.

        Each compute shard is written again before its next read. Do nothing if ranks read each other's shards.
        """

    def refresh_compute_shards(self) -> None:
        """Write all compute shards.

        Call before the forward of a training step. Collective if other ranks read them.
        """

    def sync_compute_shards(self, ahead: bool = False) -> bool:
        """Write the compute shards that are invalid. Collective if other ranks read them.

        ``ahead``: before a graph is captured and replayed. The writes are made only if the capture depends on them, and
        are not repeated before the replay. Return True if they were made.
        """
        ...

    def gathered_in(self, dtype: torch.dtype) -> list[int]:
        """Return the indices of the parameters that compiled code gathered in ``dtype``."""
        ...

    def reads_of_gradients(self) -> int:
        """Return how often code has read a weight whose gradient used, or might have used, its compute shard."""
        ...

    def mark_fp8_shards_written(self) -> None:
        """Mark all fp8 shards as valid: the caller has written them."""

    def user_write_count(self) -> int:
        """Return a number that changes whenever a writer other than an optimizer reports a change of shards."""
        ...

    def shard_version(self) -> int:
        """Return a number that changes whenever shards may have changed."""

    def valid_compute_shards(self) -> list[int]:
        """Return the indices of the parameters whose compute shard was written by a step and is valid."""
        ...

    def mark_compute_shards_written(self, indices: list[int], written: bool) -> None:
        """Mark the compute shards of these parameters as written by a step, or as invalid."""

    def sync_user_writes(self, forget: bool = False) -> None:
        """Copy in-place user writes of gathered weights into their shards.

        ``forget`` also stops watching the weights; needed before shards change without autograd's knowledge.
        """

    def drop(self) -> None:
        """Release all weights held for eager code. Later user writes of weights that it still holds are lost."""

    def serve_eager_from_cache(self, on: bool) -> None:
        """Let eager code read unsharded weights from the cache if they are in its dtype.

        A backward always does.
        """

    def find_gathered(self, tensor: Tensor) -> int:
        """Return the index of the parameter whose gathered weight ``tensor`` is or views; otherwise -1."""


class Gradients(Protocol):
    """Gradients of backward passes."""

    def last_attached(self) -> list[int]:
        """Return the indices of the parameters that got a gradient in the last backward."""

    def attachment_key(self) -> int:
        """Return a number that changes whenever a gradient appears, disappears or moves."""

    def has_gradients(self) -> bool:
        """Return True if some trainable parameter has a gradient."""

    def may_write_gradient(self, index: int) -> bool:
        """Return True if the memory of this parameter's gradient may be written.

        If gradients alias compute shards, that is from the end of a backward until the compute shard is written again.
        """
        ...

    def is_full_backward(self) -> bool:
        """Return True if the current backward computes all gradients (no ``backward(inputs=...)``)."""

    def completed_backwards(self) -> int:
        """Return the number of finished backward passes."""

    def end_empty_backward(self) -> None:
        """End a backward that has reached no weight on this rank; its gradients count as zero. Collective.

        Must be called outside a backward.
        """

    def mark(self) -> bool:
        """Mark the begin or end of a compiled graph's backward, whose gradients are sent separately.

        Return True if gradients have arrived since the last mark.
        """

    def segment(self) -> int:
        """Return a number for the gradients before the last mark. Equal backward passes have equal numbers."""

    def set_consensus_flag(self, yes: bool) -> None:
        """Set the flag that this rank sends to the others at the end of each backward."""

    def take_consensus_flag(self) -> bool:
        """Return True if some rank has sent the flag since the last call; equal on every rank."""

    def defer(self, on: bool, full: bool = False) -> None:
        """Accumulate gradients without reducing them: per host with several hosts, or per rank if ``full``.

        The next backward without deferral reduces them. Do not call in a backward; call alike on every rank. Trained
        parameters need memory for it, see :meth:`Parameters.set_deferred_gradient`. Do nothing with one host, or one
        rank.
        """

    def defers(self) -> bool:
        """Return True if backwards defer reductions."""

    def has_deferred(self) -> bool:
        """Return True if this rank has deferred gradients."""

    def reduce_deferred(self) -> None:
        """Reduce deferred gradients, if any. Collective."""

    def release_buffers(self) -> None:
        """Free the buckets' memory."""

    def abort(self) -> None:
        """Drop the state of an interrupted backward."""


class Graphs(Protocol):
    """Recording of compiled code for CUDA graph replays."""

    def disabled_reason(self, segment: int = -1) -> str:
        """Return why compiled code cannot be recorded at present; empty if it can.

        ``segment``: see :meth:`begin`.
        """

    def no_collectives_reason(self) -> str:
        """Return why collectives of this executor's process groups can never be recorded; empty if they can."""

    def begin(self, backward: bool, adding: bool, segment: int = -1) -> None:
        """Record a compiled graph's forward or backward until :meth:`end`, without agreement between ranks.

        ``adding``: the backward accumulates into gradients instead of overwriting them. ``segment``: the part of a
        backward pass, see :meth:`Gradients.segment`.
        """

    def end(self) -> int:
        """End the recording and return its number.

        Raises:
            NotImplementedError: A replay would differ from a run; the message says why.
        """

    def abort(self) -> None:
        """Drop the current recording, if any."""

    def fits(self, forward: int, backward: int) -> bool:
        """Return True if replays of a forward and its backward, by their numbers, still match eager runs."""

    def mark_not_run(self, number: int) -> None:
        """Mark a recording as only captured: its results do not exist."""

    def drop(self, number: int) -> None:
        """Drop a recording."""

    def before_replay(self, number: int) -> None:
        """Prepare a replay. Call before each one, for a backward in autograd's.

        Collective as :meth:`Weights.sync_compute_shards`.
        """

    def after_replay(self, number: int) -> None:
        """Update the executor's state after a replay. Call after each one."""
