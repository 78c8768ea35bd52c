"""What the parts of the C++ executor can be asked, for readers and for type checkers: the objects themselves are C++'s.

Their methods and arguments are named in ``csrc/bindings/``; ``tests/native/test_bindings.py`` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Gradients", "Graphs", "Parameters", "Weights"]


class Parameters(Protocol):
    """Which parameters there are, and what memory belongs to each."""

    def add(
        self, name: str, param: Tensor, shard: Tensor, shape: Sequence[int], order: Sequence[int] | None = None
    ) -> int:
        """Registers a parameter: ``shard`` is its 1-D part in an arena, ``shape`` the whole parameter's, ``order`` that
        of its dimensions in memory, by default their own. Returns its index."""

    def move(self, index: int, shard: Tensor) -> None:
        """The parameter's shard lies elsewhere now, with the same values."""

    def drop(self, index: int) -> None:
        """No module reads this parameter any more."""

    def install_gradient_hooks(self, index: int) -> None:
        """Make backward raise ``ValueError`` if autograd brings this shard a gradient, and hand this rank's whole
        gradient to hooks of ``register_hook``. Again after the first of these, which takes ours away."""

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """Gives a parameter its 1-D part of the gradient arena, of the shard's size and dtype, or the memory of its
        compute copy; None: takes it away. Between steps, when nobody wants a gradient any more."""

    def set_resident(self, index: int, memory: Tensor | None) -> None:
        """Memory for the whole parameter, 1-D with padding, where it stays until the optimizer steps; None: it does not
        stay any more."""

    def set_deferred_gradient(self, index: int, memory: Tensor | None, full: bool) -> None:
        """Memory for the gradient of the host shard, or for the ``full`` one, 1-D, in float32 or wider, where
        ``Gradients.defer`` leaves it; None: there is none any more."""

    def set_compute_shard(self, index: int, copy: Tensor) -> None:
        """Memory for the shard's values in another dtype, 1-D, of the shard's size; what gathers in that dtype read."""

    def add_compute_shard_memory(self, copies: Tensor, shards: Tensor) -> None:
        """Compute copies that are neighbours in memory, and their shards likewise:
        :meth:`Weights.refresh_compute_shards` writes them in one kernel."""

    def mark_on_host(self, index: int) -> None:
        """The parameter's shard lies in the host's memory, which the device reads over its link: who changes it says
        so, and optimizers write its compute copy."""

    def set_peer_compute_shards(self, index: int, peers: list[Tensor]) -> None:
        """The parameter's compute copy on each rank, in memory that this process can read. Compiled code then copies
        from there instead of gathering. The same parameters on every rank."""

    def set_full_precision_shard(self, index: int, copy: Tensor, peers: list[Tensor]) -> None:
        """Memory for a copy of the shard in its own dtype, on this rank and on each: for weights that compiled code
        with mixed precision reads in full precision. After :meth:`set_peer_compute_shards`."""

    def set_peer_shards(self, index: int, shards: list[Tensor]) -> None:
        """The parameter's shard on each rank, in memory that this process can read; after ``set_epoch_lock``."""


class Weights(Protocol):
    """When shards change, and what eager code does to whole weights."""

    def uses_epoch_lock(self) -> bool:
        """Whether a gather needs no other rank."""

    def begin_writing(self, stepping: bool = False) -> None:
        """Must come before shards change, on every rank: whoever still reads them is waited for. Harmless when
        repeated. ``stepping``: an optimizer changes them, which says itself what it does to copies of shards that lie
        on the host."""

    def end_writing(self) -> None:
        """Should come once they have changed: other ranks, which may want to read, wait for it. The next gather on this
        rank does it, too."""

    def expire_compute_shards(self) -> None:
        """Shards may have changed without :meth:`begin_writing`: each compute copy is written again before it is next
        read. Where ranks take turns nothing happens."""

    def refresh_compute_shards(self) -> None:
        """Before the forward of a training step: writes all compute copies. Collective where peers read them."""

    def sync_compute_shards(self, ahead: bool = False) -> bool:
        """Writes weights in the dtype that is computed in where they changed. Collective where peers read them.

        ``ahead``: before a graph is captured, and then replayed: done only where what is captured depends on it, and
        then not once more before the replay. Returns whether it was done.
        """
        ...

    def user_write_count(self) -> int:
        """Changes whenever somebody who is no optimizer has said that shards change."""
        ...

    def shard_version(self) -> int:
        """Changes whenever shards may have changed."""

    def valid_compute_shards(self) -> list[int]:
        """Indices of the parameters with a shard on the host whose compute copy is as it should be."""
        ...

    def mark_compute_shards_written(self, indices: list[int], written: bool) -> None:
        """The compute copies of these, whose shards lie on the host, are as they should be; or are not."""

    def sync_user_writes(self, forget: bool = False) -> None:
        """Copies in-place edits of weights read outside compiled code into their shards.

        ``forget`` also stops watching them; needed before shards are changed behind autograd's back.
        """

    def drop(self) -> None:
        """Lets go of all weights that eager code was given; edits to come of those it still holds are not seen."""

    def serve_eager_from_resident(self, on: bool) -> None:
        """From now on code that is not compiled reads weights from where they stay until the optimizer steps, as far as
        they do, in its dtype; a backward always does."""

    def find_gathered(self, tensor: Tensor) -> int:
        """Index of the parameter that ``tensor`` is a gathered weight, or a view of one, of; otherwise -1."""


class Gradients(Protocol):
    """What backward passes have brought."""

    def last_attached(self) -> list[int]:
        """Indices of the parameters that the last backward gave a gradient."""

    def attachment_key(self) -> int:
        """A number that changes whenever a parameter's gradient comes, goes or lies elsewhere."""

    def has_gradients(self) -> bool:
        """Whether some trainable parameter has a gradient."""

    def may_write_gradient(self, index: int) -> bool:
        """Whether the memory of this parameter's gradient may be written: where gradients lie over compute copies, once
        a backward has brought one, and until the copy is written again."""
        ...

    def is_full_backward(self) -> bool:
        """Whether the backward pass that goes on is for all gradients, not those of ``backward(inputs=...)`` only."""

    def completed_backwards(self) -> int:
        """How many backward passes have ended."""

    def end_empty_backward(self) -> None:
        """End a backward pass that has reached no weight on this rank, as the other ranks end theirs: the gradients of
        this rank count as zero. Collective. Legal outside a backward."""

    def mark(self) -> bool:
        """A compiled graph's backward begins, or ends: its gradients are sent by themselves. Whether gradients have
        come since the last mark."""

    def segment(self) -> int:
        """A number for the gradients that came before the last mark; the same in each backward pass like this one."""

    def set_consensus_flag(self, yes: bool) -> None:
        """What the end of each backward, where ranks agree, tells the others from now on."""

    def take_consensus_flag(self) -> bool:
        """Whether some rank has said yes there since the last question; the same on every rank."""

    def defer(self, on: bool, full: bool = False) -> None:
        """From now on backwards add gradients up, with several hosts on each of them, or ``full`` on each rank; the
        next backward without this takes them along. Not inside one, and alike on every rank. Parameters that are
        trained need memory for it, see ``Parameters.set_deferred_gradient``. Nothing happens where there is one host,
        or one rank."""

    def defers(self) -> bool:
        """Whether backwards do."""

    def has_deferred(self) -> bool:
        """Whether something that this rank has is still to be reduced."""

    def reduce_deferred(self) -> None:
        """Reduces it. Collective; harmless where there is nothing."""

    def release_buffers(self) -> None:
        """Frees the buckets' memory."""

    def abort(self) -> None:
        """Drops what an interrupted backward left behind."""


class Graphs(Protocol):
    """Compiled code that is replayed as graphs of the device."""

    def disabled_reason(self, segment: int = -1) -> str:
        """Why what compiled code does cannot be recorded now; empty when it can. ``segment``: see :meth:`begin`."""

    def no_collectives_reason(self) -> str:
        """Why collectives of this executor's process groups can never be recorded; empty when they can."""

    def begin(self, backward: bool, adding: bool, segment: int = -1) -> None:
        """What follows, up to :meth:`end`, is noted, and agreed on with nobody: a compiled graph's forward, or its
        backward, whose gradients overwrite those that are there, or are added to them. ``segment``: which part of a
        backward pass they are, as :meth:`Gradients.segment` says where the graph runs."""

    def end(self) -> int:
        """Ends it; returns its number.

        Raises:
            NotImplementedError: a replay would not do what a run does; the message says why.
        """

    def abort(self) -> None:
        """Forgets it; harmless when nothing is recorded."""

    def fits(self, forward: int, backward: int) -> bool:
        """Whether replays of a forward and its backward, by their numbers, would still do what runs do."""

    def mark_not_run(self, number: int) -> None:
        """What was recorded has only been captured; nothing that it leaves behind is there."""

    def drop(self, number: int) -> None:
        """Forgets what was recorded."""

    def before_replay(self, number: int) -> None:
        """Must come before each replay, for a backward inside of autograd's. Collective as
        :meth:`Weights.sync_compute_shards`."""

    def after_replay(self, number: int) -> None:
        """Must come after each replay: enters into the books what was done."""
