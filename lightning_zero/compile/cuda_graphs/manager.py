"""Replays what a compiled graph does, forward and backward, as two CUDA graphs: the host then starts a step's thousand
kernels with two calls.

Protocol: ``replays = CUDAGraphManager(...)``; ``replays.wrap(compiled)`` is called instead of ``compiled``, what a backend of
``torch.compile`` returns. It runs ``compiled`` while that is warming up and wherever a replay would not do the same,
and else replays. :meth:`CUDAGraphManager.drop` gives the graphs' memory back; they are captured again when training goes on.

A replay writes to the memory that the one before it wrote to. So a forward is replayed only once the backward of the
one before has run, or nobody can run it any more; of a graph that is called twice before, each call has captures of its
own. Outputs are copies; and inputs other than parameters and buffers are copied in. Each graph's gradients leave with
its replay: see [Note: segments of a backward] in csrc/gradients/segments.h.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.autograd import graph_task_id, retains_graph
from lightning_zero.compile.cuda_graphs.captured_call import (
    CapturedCall,
    GraphReplay,
    PendingBackward,
    unsupported_input,
)
from lightning_zero.compile.cuda_graphs.graph_pairs import CaptureSpec, CUDAGraphPair, EmulatedGraphPair, GraphPair
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor

__all__ = [
    "CUDAGraphManager",
    "Compiled",
    "GraphDispatcher",
    "MAX_CAPTURED_SIZES",
    "MAX_CAPTURE_WAITS",
    "MAX_FAILED_CAPTURES",
    "MAX_PENDING_CALLS",
    "MIN_REPLAYS",
    "WARMUP_RUNS",
]


class CUDAGraphManager:
    """One engine's.

    Args:
        executor: keeps the books of what is gathered and reduced.
        device: where graphs run.
        config: whether to, and whether really.
        ready: a method that tells whether what is compiled now is what will stay.
        lasting: one that gives the tensors whose memory stays where it is: parameters and buffers.
        report: shows a line to the user.
        impossible: why there cannot be any here; empty where there can.

    Attributes:
        in_step: a training step is under way: what is called without gradients is a part of it.

    Raises:
        UnsupportedError: replays were asked for and are impossible; here or when compiled code runs.
    """

    def __init__(
        self,
        executor: Executor,
        device: torch.device,
        config: EngineConfig,
        ready: Callable[[], bool],
        static_tensors: Callable[[], Iterable[Tensor]],
        report: Callable[[str], None],
        unsupported_here: str = "",
    ) -> None:
        self.executor = executor
        self.device = device
        self._unsupported_here = f"the device is {device}" if device.type != "cuda" else unsupported_here
        self._reported: set[str] = set()
        # torch keeps what it has compiled for as long as it lives, and with it everything that this knows: nothing here
        # may keep the engine, or its process groups would outlive it, on some ranks longer than on others.
        self._ready, self._static_tensors = weakref.WeakMethod(ready), weakref.WeakMethod(static_tensors)
        self._report = report
        self._calls: weakref.WeakSet[GraphDispatcher] = weakref.WeakSet()
        self._pairs: weakref.WeakSet[GraphPair] = weakref.WeakSet()
        self._hooked: set[int] = set()  # ids of parameters whose gradients hooks see,
        self._hooked_late: set[int] = set()  # and of those that got a hook between forward and backward
        self._stepped = -1, -1  # epoch of weights, and how many backwards had ended then
        self.in_step = False
        weakref.finalize(self, _end, self._calls, self._pairs).atexit = False
        # Process groups may be destroyed at exit, by who registered that before there was an engine.
        atexit.register(_close, weakref.ref(self))
        self.configure(config)

    def check(self, config: EngineConfig) -> None:
        """Raises :class:`UnsupportedError` where options demand replays, and there can be none here."""
        if config.cuda_graph_model is True and not self._enabled(config):
            raise _unsupported_error(config.controlling_option("cuda_graph_model"), self.unsupported_reason(config))

    def _enabled(self, config: EngineConfig) -> bool:
        return not self._find_disabled_reason(config)

    def _find_disabled_reason(self, config: EngineConfig) -> str:
        if config.tuning.emulate_cuda_graph_model:
            return ""
        chosen = "" if config.cuda_graph_model else f"{config.controlling_option('cuda_graph_model')}=False"
        return chosen or self.unsupported_reason(config)

    def unsupported_reason(self, config: EngineConfig) -> str:
        """Why nothing is ever replayed here with these options, in words; empty where it may be."""
        tuning = config.tuning
        debugged = [name for name in ("sync_collectives", "poison") if getattr(tuning, name)]
        return self._unsupported_here or (f"{' and '.join(debugged)} looks at each collective" if debugged else "")

    def configure(self, config: EngineConfig, unsupported_here: str | None = None) -> None:
        """Other options; what was captured with the old ones is dropped. ``unsupported_here``: and why there can be no more
        replays here."""
        self.drop()
        if unsupported_here is not None and self.device.type == "cuda":
            self._unsupported_here = unsupported_here
        emulated = config.tuning.emulate_cuda_graph_model
        self.pair: type[CUDAGraphPair] | type[EmulatedGraphPair] = EmulatedGraphPair if emulated else CUDAGraphPair
        self._disabled_reason = self._find_disabled_reason(config)
        self._required = config.cuda_graph_model is True
        self._option = config.controlling_option("cuda_graph_model")
        self.check(config)

    @property
    def enabled(self) -> bool:
        """Whether what can be replayed is."""
        return not self._disabled_reason

    def disabled_reason(self) -> str:
        """Why nothing is replayed, or why something was found that cannot be, in words; empty where nothing is known
        against it."""
        return self._disabled_reason or "; ".join(sorted(self._reported))

    @property
    def nbytes(self) -> int:
        """Of memory that captures hold."""
        return sum(call.nbytes for call in self._calls)

    @property
    def wrap(self) -> Callable[..., Compiled]:
        """Gives what to call instead of something compiled, of which a second argument may tell what it takes: see
        :class:`GraphDispatcher`."""
        weak = weakref.ref(self)

        def wrap(compiled: Compiled, peak_bytes: Callable[[], int] = lambda: 0) -> Compiled:
            replays = weak()
            if replays is None:
                return compiled
            call = GraphDispatcher(compiled, weak, peak_bytes)
            replays._calls.add(call)
            return call

        return wrap

    def ready(self) -> bool:
        ready = self._ready()
        return ready is not None and ready()

    def static_tensors(self) -> Iterable[Tensor]:
        static_tensors = self._static_tensors()
        return () if static_tensors is None else static_tensors()

    def drop(self) -> None:
        """Gives the graphs' memory back."""
        _drop(self._calls)

    def close(self) -> None:
        """Likewise, of all graphs, even where a backward may still come: a process group that is destroyed waits for
        whoever holds its collectives."""
        _end(self._calls, self._pairs)

    def capture(self, job: CaptureSpec) -> GraphPair:
        """See :class:`GraphPair`."""
        pair = self.pair(job)
        self._pairs.add(pair)
        return pair

    def in_training_step(self) -> bool:
        """Whether what is called now belongs to a training step."""
        return (torch.is_grad_enabled() or self.in_step) and not torch.is_inference_mode_enabled()

    def set_hooked_parameters(self, params: set[int], forward_ran: bool) -> None:
        """Hooks see the gradients of the parameters with these ids, and of no others."""
        if forward_ran:
            self._hooked_late |= params - self._hooked
        self._hooked = params | self._hooked_late

    def has_gradient_hooks(self, args: Iterable[object]) -> bool:
        """Return True if hooks see the gradient of one of these: a replay would not run them."""
        return bool(self._hooked) and any(id(arg) in self._hooked for arg in args)

    def accumulates(self, epoch: int, backwards: int) -> bool:
        """Whether a backward has brought gradients since the optimizer stepped, to which the next one adds; by the
        executor's counts now."""
        if epoch != self._stepped[0]:
            self._stepped = epoch, backwards
        return backwards != self._stepped[1]

    def release_memory(self, call: GraphDispatcher | None = None) -> None:
        """Something runs that is not replayed: ``call``, or an evaluation. Captures of other steps give their memory
        back, if what is left would not be enough for another step like theirs; and those of ``call`` itself, such as of
        batches of other sizes, if it would not be enough for one more run of it."""
        reason = "something else needs the memory"
        others = [other for other in self._calls if call is None or not other.is_in_same_pass(call)]
        own = (
            None if call is None or call.has_pending_backward else call
        )  # its memory would not be given back before that
        held = sum(other.nbytes for other in others) + (0 if own is None else own.nbytes)
        if held > 0 and self.free_bytes() < held:
            for other in others:
                other.invalidate(reason)
            if own is not None:
                own.yield_memory(reason)

    def drop_unrelated(self, call: GraphDispatcher) -> bool:
        """The same, whatever is left. Whether that has helped."""
        others = [other for other in self._calls if other.nbytes > 0 and not other.is_in_same_pass(call)]
        for other in others:
            other.invalidate("something else needs the memory")
        return bool(others)

    def free_bytes(self) -> float:
        """Bytes of the device that can be had without taking captures' memory."""
        if self.device.type != "cuda":
            return float("inf")
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + max(0, cached - sum(call.nbytes for call in self._calls))

    def disable(self, reason: str) -> bool:
        """Nothing is replayed any more with these options, unless one of them demands it. Whether that has changed
        anything."""
        if self._disabled_reason or self._required:
            return False
        self._disabled_reason = reason
        self.drop()
        self._tell(reason)
        return True

    def report_unsupported(self, reason: str) -> None:
        """Tells the user; raises :class:`UnsupportedError` where replays were asked for."""
        if self._required:
            raise _unsupported_error(self._option, reason)
        if reason not in self._reported:
            self._reported.add(reason)
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        self._report(f"Compiled code is not replayed as a CUDA graph: {reason}.")


def _unsupported_error(option: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{option}=True, but compiled code cannot be replayed as a CUDA graph: {reason}. Pass {option}='auto' to run "
        "it where it cannot be replayed."
    )


def _drop(calls: Iterable[GraphDispatcher]) -> None:
    for call in calls:
        call.drop()


def _end(calls: Iterable[GraphDispatcher], pairs: Iterable[GraphPair]) -> None:
    _drop(calls)
    for pair in pairs:
        pair.close()


def _close(reference: weakref.ref[CUDAGraphManager]) -> None:
    replays = reference()
    if replays is not None:
        replays.close()


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

    def __init__(
        self, compiled: Compiled, manager: weakref.ref[CUDAGraphManager], peak_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self._compiled = compiled
        self._peak_bytes = peak_bytes
        self._cuda_graphs = manager
        self._variants: dict[CaptureKey, CapturedCall] = {}  # the one that was used last comes last
        self._replayed: dict[CaptureKey, int] = {}
        self._runs: dict[CaptureKey, int] = {}  # since something changed
        self._segments: dict[int, int] = {}  # by place: the gradients that its backward brings
        self._pending_backwards: list[
            weakref.ref[PendingBackward] | None
        ] = []  # by place: lives while its backward may come
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
            job = CaptureSpec(
                self._compiled, inputs, copied, manager.executor, key.accumulates, shared, segment, peak_bytes
            )
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
