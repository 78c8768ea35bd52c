"""A typed handle on the C++ executor. See ``csrc/executor.h`` for the protocol."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native.build import kernel_source
from lightning_zero.native.load import load
from lightning_zero.native.nvrtc import compile_cuda
from lightning_zero.native.watchdog import Lane, Watchdog

__all__ = ["Executor"]


class Executor:
    """Gathers weights and reduces gradients for one engine.

    Args:
        mesh: of the ranks that share the weights; on its control group they agree at the end of each backward.
        config: options.
        on_backward_end: called after gradients have been attached, once per backward.
        watchdog: watches over what this executor waits for.
        on_new_plan: called with the digest and the text of a compiled graph's plan before the first such graph runs.
            What it raises ends the run of the graph before its first collective.
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
        self._native = torch.classes.lightning_zero.Executor(
            mesh.shard_group.group_name,
            mesh.reduce_group.group_name,
            mesh.control_group.group_name,
            str(mesh.device),
        )
        self.device, self.rank, self.world_size = mesh.device, mesh.rank, mesh.world_size
        self.configure(config)
        self._library: torch.library.Library | None = torch.library.Library("lightning_zero", "FRAGMENT")
        self._watchdog = watchdog
        if watchdog is not None:
            self._native.watch(watchdog.native)
        if on_backward_end is not None:
            self._native.on_backward_end(self._define("on_backward_end", "()", on_backward_end))
        if on_new_plan is not None:
            self._native.on_new_plan(self._define("on_new_plan", "(str digest, str plan)", on_new_plan))

    def waiting(self, what: str, lane: Lane) -> AbstractContextManager[None]:
        """Surrounds a collective called ``what``, of the process group of that lane, that Python starts."""
        return nullcontext() if self._watchdog is None else self._watchdog.waiting(what, lane)

    def collective(self, what: str, lane: Lane, start: Callable[[bool], dist.Work | None]) -> None:
        """The same for one that ``start`` starts, asynchronously if it is given True: a wait that can be ended."""
        if self._watchdog is None:
            start(False)
            return
        self._watchdog.collective(what, lane, start, lane is Lane.CONTROL or self.device.type == "cpu")

    def configure(self, config: EngineConfig) -> None:
        """Applies options; legal only outside a backward pass."""
        reduce = config.reduce
        self._native.configure(
            int(reduce.bucket_mb * 2**20),
            reduce.double_buffer,
            reduce.average == "predivide",
            reduce.free_buckets,
            config.sync_collectives,
            config.poison,
            reduce.dtype,
        )

    def _define(self, event: str, arguments: str, callback: Callable[..., None]) -> str:
        # C++ finds Python through an op of this executor's own, so no table of engines is needed. The op must not keep
        # the engine alive, hence the weak reference.
        method = weakref.WeakMethod(callback) if hasattr(callback, "__self__") else (lambda: callback)
        name = f"{event}_{id(self)}"

        def run(*args: str) -> None:
            target = method()
            if target is not None:
                target(*args)

        assert self._library is not None
        self._library.define(f"{name}{arguments} -> ()")
        self._library.impl(name, run, "CompositeExplicitAutograd")
        return f"lightning_zero::{name}"

    def add_parameter(
        self, name: str, param: Tensor, shard: Tensor, shape: torch.Size, order: Sequence[int] | None = None
    ) -> int:
        """Registers a parameter: ``shard`` is its 1-D part in an arena, ``shape`` the whole parameter's, ``order`` that
        of its dimensions in memory, by default their own. Returns its index."""
        own = list(order or range(len(shape)))
        return self._native.add_parameter(name, param, shard, shape.numel(), list(shape), own)

    def move_parameter(self, index: int, shard: Tensor) -> None:
        """The parameter's shard lies elsewhere now, with the same values."""
        self._native.move_parameter(index, shard)

    def drop_parameter(self, index: int) -> None:
        """No module reads this parameter any more."""
        self._native.drop_parameter(index)

    def guard_gradient(self, index: int) -> None:
        """From now on backward raises ``ValueError`` when autograd itself brings this shard a gradient."""
        self._native.guard_gradient(index)

    def set_grad(self, index: int, grad: Tensor) -> None:
        """Gives a parameter its 1-D part of the gradient arena, of the shard's size and dtype."""
        self._native.set_grad(index, grad)

    def set_kept(self, index: int, kept: Tensor) -> None:
        """Memory for the whole parameter, 1-D with padding, where it stays until the optimizer steps."""
        self._native.set_kept(index, kept)

    def set_staging(self, staging: list[Tensor], group: dist.ProcessGroup, timeout_s: float = 1800.0) -> None:
        """Memory of each rank that this one can write, as bytes: gradients are pushed there instead of being
        reduce-scattered. Of one size, a multiple of 1024 bytes a rank; on an accelerator, symmetric memory of
        ``group``. Legal outside backward; on every rank. A rank that waits longer than ``timeout_s`` for another ends
        with a device error."""
        self._native.set_staging(staging, group.group_name, int(1000 * timeout_s))

    def set_barrier(self, rows: list[Tensor]) -> None:
        """Ranks meet on their devices by a kernel of our own from now on, whose waits the host can end.

        On every rank, before :meth:`set_staging`. ``rows``: of each rank, memory that all ranks can write,
        ``2 * ranks`` int32 zeros.

        Raises:
            RuntimeError: the kernel cannot be compiled or loaded here.
        """
        code = self._kernels("barrier.cu", RANKS=self.world_size, LANES=2)
        words = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        self._native.set_barrier(code, rows, words)

    def begin_stage(self) -> None:
        """A stage begins, on every rank, wherever an exception may have ended the one before. Collective."""
        self._native.begin_stage()

    def begin_epoch(self) -> None:
        """A training step begins, on every rank: what a rank missed in an interrupted one is not waited for."""
        self._native.begin_epoch()

    def compile_means(self) -> None:
        """Makes the kernel that adds up pushed gradients on an NVIDIA device, in half the time of torch's.

        Raises:
            RuntimeError: it cannot be compiled or loaded here.
        """
        self._native.use_means(self._kernels("row_means.cu", ROWS=self.world_size))

    def _kernels(self, source: str, **macros: int) -> Tensor:
        capability = torch.cuda.get_device_capability(self.device)
        return compile_cuda(kernel_source(source), capability, [f"-D{n}={value}" for n, value in macros.items()])

    def mean_rows(self, to: Tensor, rows: Tensor, add: bool = False) -> bool:
        """Writes, or adds, the mean over dimension 0 of ``rows`` to ``to`` (1-D, contiguous, float32); returns whether
        there is a kernel for these."""
        return self._native.mean_rows(to, rows, add)

    def set_shadow(self, index: int, shadow: Tensor) -> None:
        """Memory for the shard's values in another dtype, 1-D, of the shard's size; what gathers in that dtype read."""
        self._native.set_shadow(index, shadow)

    def take_turns(self, numbers: list[Tensor]) -> None:
        """Shards will lie in memory that all ranks can read (:meth:`set_shards`); ranks take turns to read and to write
        them. ``numbers``: of each rank, zeros in memory that all ranks can write, one int64, or on an accelerator
        ``ranks`` int32. On every rank; there, after :meth:`set_barrier`.

        Raises:
            RuntimeError: the kernels of an accelerator cannot be compiled or loaded here.
        """
        if self.device.type == "cpu":
            self._native.take_turns(numbers)
        else:
            self._native.take_device_turns(self._kernels("turns.cu", RANKS=self.world_size), numbers)

    def set_shards(self, index: int, shards: list[Tensor]) -> None:
        """The parameter's shard on each rank, in memory that this process can read; after :meth:`take_turns`."""
        self._native.set_shards(index, shards)

    @property
    def takes_turns(self) -> bool:
        """Whether a gather needs no other rank."""
        return bool(self._native.takes_turns())

    def begin_writing(self) -> None:
        """Must come before shards change, on every rank: whoever still reads them is waited for. Harmless when
        repeated."""
        self._native.begin_writing()

    def end_writing(self) -> None:
        """Should come once they have changed: other ranks, which may want to read, wait for it. The next gather on this
        rank does it, too."""
        self._native.end_writing()

    def expire_shadows(self) -> None:
        """Shards may have changed without :meth:`begin_writing`: each shadow is written again before it is next read.
        Where ranks take turns nothing happens."""
        self._native.expire_shadows()

    def add_shadow_memory(self, copies: Tensor, shards: Tensor) -> None:
        """Shadows that are neighbours in memory, and their shards likewise: :meth:`write_shadows` writes them in one
        kernel."""
        self._native.add_shadow_memory(copies, shards)

    def set_peers(self, index: int, peers: list[Tensor]) -> None:
        """The parameter's shadow on each rank, in memory that this process can read. Compiled code then copies from
        there instead of gathering. The same parameters on every rank."""
        self._native.set_peers(index, peers)

    def set_exact(self, index: int, copy: Tensor, peers: list[Tensor]) -> None:
        """Memory for a copy of the shard in its own dtype, on this rank and on each: for weights that compiled code
        with mixed precision reads in full precision. After :meth:`set_peers`."""
        self._native.set_exact(index, copy, peers)

    def write_shadows(self) -> None:
        """Before the forward of a training step: writes all shadows. Collective where peers read them."""
        self._native.write_shadows()

    def sync_edits(self, forget: bool = False) -> None:
        """Copies in-place edits of weights read outside compiled code into their shards.

        ``forget`` also stops watching them; needed before shards are changed behind autograd's back.
        """
        self._native.sync_edits(forget)

    def drop_weights(self) -> None:
        """Lets go of all weights that eager code was given; edits to come of those it still holds are not seen."""
        self._native.drop_weights()

    def find_gathered(self, tensor: Tensor) -> int:
        """Index of the parameter that ``tensor`` is a gathered weight, or a view of one, of; otherwise -1."""
        return self._native.find_gathered(tensor)

    def attached(self) -> list[int]:
        """Indices of the parameters that the last backward gave a gradient."""
        return self._native.attached()

    def gradients_key(self) -> int:
        """A number that changes whenever a parameter's gradient comes, goes or lies elsewhere."""
        return self._native.gradients_key()

    def abort_backward(self) -> None:
        """Drops what an interrupted backward left behind."""
        self._native.abort_backward()

    def release_buffers(self) -> None:
        """Frees the buckets' memory."""
        self._native.release_buffers()

    def why_not_recorded(self) -> str:
        """Why what compiled code does cannot be recorded now; empty when it can."""
        return self._native.why_not_recorded()

    def record_graph(self, backward: bool, adding: bool) -> None:
        """What follows, up to :meth:`end_recording`, is noted, and agreed on with nobody: a compiled graph's forward,
        or its backward, whose gradients overwrite those that are there, or are added to them."""
        self._native.record_graph(backward, adding)

    def end_recording(self) -> int:
        """Ends it; returns its number.

        Raises:
            NotImplementedError: a replay would not do what a run does; the message says why.
        """
        return self._native.end_recording()

    def abort_recording(self) -> None:
        """Forgets it; harmless when nothing is recorded."""
        self._native.abort_recording()

    def never_ran(self, number: int) -> None:
        """What was recorded has only been captured; nothing that it leaves behind is there."""
        self._native.never_ran(number)

    def drop_graph(self, number: int) -> None:
        """Forgets what was recorded."""
        self._native.drop_graph(number)

    def fits(self, forward: int, backward: int) -> bool:
        """Whether replays of a forward and its backward, by their numbers, would still do what runs do."""
        return self._native.fits(forward, backward)

    def meet_peers(self) -> None:
        """Writes weights in the dtype that is computed in where they changed. Collective where peers read them."""
        self._native.meet_peers()

    def before_replay(self, number: int) -> None:
        """Must come before each replay, for a backward inside of autograd's. Collective as :meth:`meet_peers`."""
        self._native.before_replay(number)

    def after_replay(self, number: int) -> None:
        """Must come after each replay: enters into the books what was done."""
        self._native.after_replay(number)

    def is_whole_backward(self) -> bool:
        """Whether the backward pass that goes on is for all gradients, not those of ``backward(inputs=...)`` only."""
        return self._native.is_whole_backward()

    def has_gradients(self) -> bool:
        """Whether some trainable parameter has a gradient."""
        return self._native.has_gradients()

    def epoch(self) -> int:
        """Changes whenever shards may have changed."""
        return self._native.epoch()

    def backwards(self) -> int:
        """How many backward passes have ended."""
        return self._native.backwards()

    def say_at_agreement(self, yes: bool) -> None:
        """What the end of each backward, where ranks agree, tells the others from now on."""
        self._native.say_at_agreement(yes)

    def was_said(self) -> bool:
        """Whether some rank has said yes there since the last question; the same on every rank."""
        return self._native.was_said()

    def counters(self) -> dict[str, int]:
        """Counts since the last reset: ``gathers``, ``gather_bytes``, ``eager_gathers``, ``reduces``, ``flushes``,
        ``reduce_bytes``, ``late_flushes``, ``grown_buckets``, ``allocated_buckets``, ``agreements``, ``plans``; and, as
        they are now, ``buckets``, ``bucket_bytes``, ``watched_weights``. Bytes are those of the whole gathered weight,
        or of the whole bucket."""
        return dict(self._native.counters())

    def reset_counters(self) -> None:
        """Sets the running counts to zero."""
        self._native.reset_counters()

    def close(self) -> None:
        """Unregisters every parameter; harmless when called twice."""
        self._native.close()
        self._library = None
