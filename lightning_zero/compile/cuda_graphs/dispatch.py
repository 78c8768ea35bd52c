"""One compiled graph that is called: when its runs are captured, and which capture a call replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.compat.autograd import graph_task_id, retains_graph
from lightning_zero.compile.cuda_graphs.pairs import CaptureSpec, GraphPair
from lightning_zero.compile.cuda_graphs.variant import GraphReplay, PendingBackward, CapturedCall, unsupported_input

if TYPE_CHECKING:
    from lightning_zero.compile.cuda_graphs.policy import CUDAGraphManager

__all__ = ["MAX_PENDING_CALLS", "MAX_CAPTURED_SIZES", "MAX_CAPTURE_WAITS", "MAX_FAILED_CAPTURES", "WARMUP_RUNS", "MIN_REPLAYS", "GraphDispatcher", "Compiled"]

Compiled = Callable[..., Any]

WARMUP_RUNS = 3  # runs with a backward before a capture: kernels are compiled, and buckets have found their order
MAX_CAPTURE_WAITS = 50  # runs in which nothing could be captured before there are no more tries
MIN_REPLAYS = 20  # replays that a capture is worth
MAX_FAILED_CAPTURES = 3  # captures in a row that were not worth it before there are no more
MAX_PENDING_CALLS = 8  # before the backward of the first one
MAX_CAPTURED_SIZES = 16  # of batches, that are captured side by side


@dataclass(frozen=True)
class CaptureKey:
    """What a capture is for.

    Args:
        place: among the calls whose backward is still to come; each has memory of its own.
        first: whether it is this graph's first call since the optimizer stepped.
        adding: whether a backward has added gradients since then.
        deferred: whether its backward's gradients are reduced later, and whether some wait for that.
        sizes: inputs that are not tensors.
    """

    slot: int
    first: bool
    accumulates: bool
    deferred: tuple[bool, bool]
    sizes: tuple[Any, ...]


class GraphDispatcher:
    """Called with flat inputs: tensors, and sizes where these vary. ``peak_bytes``: tells what a run has in tensors at most,
    in bytes, as far as that was looked at."""

    def __init__(self, compiled: Compiled, manager: weakref.ref[CUDAGraphManager], peak_bytes: Callable[[], int] = lambda: 0) -> None:
        self._compiled = compiled
        self._peak_bytes = peak_bytes
        self._cuda_graphs = manager
        self._variants: dict[CaptureKey, CapturedCall] = {}  # the one that was used last comes last
        self._replayed: dict[CaptureKey, int] = {}
        self._runs: dict[CaptureKey, int] = {}  # since something changed
        self._segments: dict[int, int] = {}  # by place: the gradients that its backward brings
        self._pending_backwards: list[weakref.ref[PendingBackward] | None] = []  # by place: lives while its backward may come
        self._failures = self._waits = 0
        self._epoch = self._backwards = self._backwards_before = -1
        self._disabled = False

    def __call__(self, *args: Any) -> Any:
        manager = self._cuda_graphs()
        # Within a backward pass, which computes something again, gradients are on their way: records would take their
        # memory.
        if manager is None or not manager.enabled or not manager.in_training_step() or graph_task_id() != -1:
            return self._compiled(*args)
        if manager.has_gradient_hooks(args):
            self._runs.clear()
            self.drop()
            return self._compiled(*args)
        epoch, backwards = manager.executor.weights.epoch(), manager.executor.gradients.completed_backwards()
        first, self._epoch = epoch != self._epoch, epoch
        self._backwards_before, self._backwards = self._backwards, backwards
        key = CaptureKey(
            self._find_free_slot(),
            first,
            manager.accumulates(epoch, backwards),
            (manager.executor.gradients.defers(), manager.executor.gradients.has_deferred()),
            tuple(a for a in args if not isinstance(a, Tensor)),
        )
        variant = None if self._disabled else self._variant(manager, args, key)
        if variant is None:
            manager.release_memory(self)
            return self._run(args, key)
        self._replayed[key] += 1
        outputs = GraphReplay.apply(variant, *args)
        self._pending_backwards[key.slot] = variant.pending_backward
        return outputs

    def _find_free_slot(self) -> int:
        """The first one whose backward has run, or can be run by nobody any more."""
        for slot, token in enumerate(self._pending_backwards):
            if not _is_pending(token):
                return slot
        if len(self._pending_backwards) < MAX_PENDING_CALLS:
            self._pending_backwards.append(None)
        return len(self._pending_backwards) - 1

    def _run(self, args: Sequence[Any], key: CaptureKey) -> Any:
        outputs = self._compiled(*args)
        nodes = {o.grad_fn for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None}
        if self._disabled:
            return outputs
        if not nodes:
            self._count_run(key)
            return outputs
        token = PendingBackward()
        self._pending_backwards[key.slot] = weakref.ref(token)
        held = [token]  # by the outputs' nodes, until a backward comes to one of them or nobody has them any more

        def begins(grads: Any) -> None:
            held.clear()
            self._on_backward_begin()

        warmed = False  # which a batch that is skipped is not

        def has_ended(grads: Any, given: Any) -> None:
            nonlocal warmed
            if not warmed:
                self._count_run(key)
            warmed = True
            self._on_backward_end(key.slot)

        for node in nodes:
            node.register_prehook(begins)
            node.register_hook(has_ended)
        return outputs

    def _count_run(self, key: CaptureKey) -> None:
        self._runs[key] = self._runs.get(key, 0) + 1

    def _on_backward_begin(self) -> None:
        """What a replay would raise at is known after the first step, and nobody has to be told."""
        manager = self._cuda_graphs()
        if manager is None:
            return
        if retains_graph() or not manager.executor.gradients.is_full_backward():
            self.disable("a backward pass keeps its graph, or is for some gradients only")
        manager.executor.gradients.mark()

    def _on_backward_end(self, slot: int) -> None:
        manager = self._cuda_graphs()
        if manager is not None and manager.executor.gradients.mark():
            self._segments[slot] = manager.executor.gradients.segment()

    def _variant(self, manager: CUDAGraphManager, args: Sequence[Any], key: CaptureKey) -> CapturedCall | None:
        """What to replay."""
        if _is_pending(self._pending_backwards[key.slot]):
            self.disable(f"a module is called {MAX_PENDING_CALLS} times before the backward pass of its first call")
            return None
        variant = self._variants.pop(key, None)
        if variant is None:
            return self._capture(manager, args, key)
        self._variants[key] = variant
        if not variant.fits(args):
            self.invalidate("parameters, gradients or buffers move, or what is trained changes")
            return None
        return variant

    def _capture(self, manager: CUDAGraphManager, args: Sequence[Any], key: CaptureKey) -> CapturedCall | None:
        # Kernels have been compiled, and buckets have their order, whatever the sizes and whichever micro-batch it is;
        # libraries ask for one run each. More of them would need memory beside what is captured by then.
        warm = sum(runs for other, runs in self._runs.items() if other.slot == key.slot)
        if key not in self._runs or warm < WARMUP_RUNS or not manager.ready():
            return None
        segment = self._segments.get(key.slot, -1)
        if reason := manager.executor.graphs.disabled_reason(segment):
            self._waits += 1
            if self._waits >= MAX_CAPTURE_WAITS:
                self.disable(reason)
            return None
        if reason := unsupported_input(args, manager.device):
            self.disable(reason)
            return None
        if sum(other.slot == key.slot for other in self._variants) >= MAX_CAPTURED_SIZES:
            self._evict_oldest(key.slot)
        if self._disabled:
            return None
        try:
            variant = self._captured(manager, args, key, segment)
        except RuntimeError as error:  # out of memory, too, and what no graph can hold
            self.disable(str(error).splitlines()[0])
            return None
        self._variants[key] = variant
        self._replayed[key] = 0
        return variant

    def _captured(self, manager: CUDAGraphManager, args: Sequence[Any], key: CaptureKey, segment: int) -> CapturedCall:
        # Calls in one place never wait for their backward at the same time, so they can share memory.
        shared: GraphPair | None = next((v.pair for other, v in self._variants.items() if other.slot == key.slot), None)
        peak_bytes = self._peak_bytes()

        def capture(inputs: Sequence[Any], copied: Sequence[Tensor]) -> GraphPair:
            job = CaptureSpec(self._compiled, inputs, copied, manager.executor, key.accumulates, shared, segment, peak_bytes)
            return manager.capture(job)

        try:
            return CapturedCall(args, manager.static_tensors(), manager.executor.gradients, capture)
        except torch.OutOfMemoryError:
            if not manager.drop_unrelated(self):
                raise
            return CapturedCall(args, manager.static_tensors(), manager.executor.gradients, capture)

    def _evict_oldest(self, slot: int) -> None:
        """Of the sizes that are captured, the ones that were not needed for longest make room for others."""
        oldest = next(key for key in self._variants if key.slot == slot)
        self._count_failure(self._replayed[oldest])
        self._variants.pop(oldest).close()
        if self._failures > MAX_FAILED_CAPTURES:
            self.disable("the sizes of batches vary")

    def _count_failure(self, replayed: int) -> None:
        self._failures = 0 if replayed > MIN_REPLAYS else self._failures + 1

    def is_in_same_pass(self, other: GraphDispatcher) -> bool:
        """Whether both are called in one pass."""
        return self._backwards in (other._backwards, other._backwards_before)

    @property
    def has_pending_backward(self) -> bool:
        """Whether that of a call may still come."""
        return any(map(_is_pending, self._pending_backwards))

    @property
    def nbytes(self) -> int:
        """Of memory that captures hold."""
        return sum(variant.pair.nbytes for variant in self._variants.values())

    def invalidate(self, reason: str) -> None:
        """What was captured serves no longer, or something else needs the memory."""
        self._runs.clear()
        self._end(reason)

    def yield_memory(self, reason: str) -> None:
        """Another kind of run of this graph needs the memory, and is captured, too, when it comes again: what has
        warmed up stays warm, and as many kinds as fit side by side may each do so once."""
        if len(self._runs) < MAX_CAPTURED_SIZES:
            self.drop()
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._variants:
            return
        self._count_failure(max(self._replayed[key] for key in self._variants))
        self.drop()
        if self._failures > MAX_FAILED_CAPTURES:
            self.disable(reason)

    def drop(self) -> None:
        """Gives the memory back."""
        for variant in self._variants.values():
            variant.close()
        self._variants.clear()

    def disable(self, reason: str) -> None:
        """Nothing is captured any more."""
        if self._disabled:
            return
        self._disabled = True
        self.drop()
        manager = self._cuda_graphs()
        if manager is not None:
            manager.report_unsupported(reason)


def _is_pending(token: weakref.ref[PendingBackward] | None) -> bool:
    """Whether the backward that it is for may still come."""
    return token is not None and token() is not None
