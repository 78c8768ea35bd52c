"""Capture and replay compiled graphs as CUDA graphs, which need two launches per step.

:meth:`CUDAGraphManager.wrap` returns the callable that replaces compiled code. It runs the code during warm-up and
wherever a replay would give other results, and replays otherwise. :meth:`CUDAGraphManager.drop` frees the captures;
training captures again.

A replay overwrites the memory of the previous one. Therefore a forward is replayed only after the previous backward has
run or become impossible; a graph called twice before has a capture per call. Outputs are copies, and inputs other than
parameters and buffers are copied in. Gradients are reduced with the replay: see [Note: segments of a backward] in
csrc/gradients/layout.h.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.compat.tensors import graph_task_id, retains_graph
from lightning_zero.compile.cuda_graphs.captured_call import (
    CapturedCall,
    GraphReplay,
    PendingBackward,
    unsupported_input,
)
from lightning_zero.compile.cuda_graphs.graph_pairs import (
    BackwardMemory,
    CaptureSpec,
    CUDAGraphPair,
    EmulatedGraphPair,
    GraphPair,
)
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor


class CUDAGraphManager:
    """CUDA graphs of one engine.

    Args:
        ready: bound method that returns True once compiled code is final.
        static_tensors: bound method that returns tensors with fixed addresses: parameters and buffers.
        unsupported_here: reason why capturing is impossible here; "" if it is possible.

    Attributes:
        in_step: True during a training step, which includes calls without gradients.
        memory: of the backwards of all captures.

    Raises:
        UnsupportedError: CUDA graphs are required and impossible, here or when compiled code runs.
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
        # torch keeps compiled code for the life of the process. A strong reference would keep the engine and its
        # process groups, on some ranks longer than on others.
        self._ready, self._static_tensors = weakref.WeakMethod(ready), weakref.WeakMethod(static_tensors)
        self._report = report
        self._calls: weakref.WeakSet[GraphDispatcher] = weakref.WeakSet()
        self._pairs: weakref.WeakSet[GraphPair] = weakref.WeakSet()
        self._hooked: set[int] = set()  # ids of parameters with gradient hooks
        self._hooked_late: set[int] = set()  # and of those that got a hook between forward and backward
        self._stepped = -1, -1  # epoch of weights, and the number of backwards that had ended then
        self.in_step = False
        weakref.finalize(self, _end, self._calls, self._pairs).atexit = False
        # Process groups may be destroyed at exit by a handler registered before the engine existed.
        atexit.register(_close, weakref.ref(self))
        self.configure(config)

    def check(self, config: EngineConfig) -> None:
        """Raise :class:`UnsupportedError` if options require CUDA graphs that are impossible here."""
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
        """Return the reason why these options prevent all captures; "" if they do not."""
        tuning = config.tuning
        debugged = [name for name in ("sync_collectives", "nan_fill") if getattr(tuning, name)]
        return self._unsupported_here or (f"{' and '.join(debugged)} checks each collective" if debugged else "")

    def configure(self, config: EngineConfig, unsupported_here: str | None = None) -> None:
        """Set new options and drop captures.

        Args:
            unsupported_here: new reason why capturing is impossible here; None to keep it.
        """
        self._share_memory = config.tuning.share_capture_memory
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
        """Return True if captures are allowed."""
        return not self._disabled_reason

    def disabled_reason(self) -> str:
        """Return the reasons why nothing, or not everything, is replayed; "" without any."""
        return self._disabled_reason or "; ".join(sorted(self._reported))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all captures."""
        return sum(call.nbytes for call in self._calls)

    @property
    def wrap(self) -> Callable[..., Compiled]:
        """Return a function that wraps compiled code in a :class:`GraphDispatcher`."""
        weak = weakref.ref(self)

        def wrap(compiled: Compiled) -> Compiled:
            replays = weak()
            if replays is None:
                return compiled
            call = GraphDispatcher(compiled, weak)
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
        """Free the memory of all captures."""
        _drop(self._calls)
        self.memory = BackwardMemory(self._share_memory)

    def close(self) -> None:
        """Free all captures, even with a pending backward: destroying a process group waits for its captured
        collectives."""
        _end(self._calls, self._pairs)
        self.drop()

    def is_one_of_several(self, call: GraphDispatcher) -> bool:
        """Return True if a step calls other graphs, or this one several times before its backward."""
        return call.slots > 1 or any(o is not call and o.slots and o.is_in_same_pass(call) for o in self._calls)

    def capture(self, spec: CaptureSpec) -> GraphPair:
        pair = self.pair(spec)
        self._pairs.add(pair)
        return pair

    def in_training_step(self) -> bool:
        """Return True if the current call belongs to a training step."""
        return (torch.is_grad_enabled() or self.in_step) and not torch.is_inference_mode_enabled()

    def set_hooked_parameters(self, params: set[int], forward_ran: bool) -> None:
        """Set the ids of all parameters with gradient hooks."""
        if forward_ran:
            self._hooked_late |= params - self._hooked
        self._hooked = params | self._hooked_late

    def has_gradient_hooks(self, args: Iterable[object]) -> bool:
        """Return True if an argument is a parameter with gradient hooks, which a replay would not run."""
        return bool(self._hooked) and any(id(arg) in self._hooked for arg in args)

    def accumulates(self, epoch: int, backwards: int) -> bool:
        """Return True if the next backward accumulates into gradients since the optimizer step."""
        if epoch != self._stepped[0]:
            self._stepped = epoch, backwards
        return backwards != self._stepped[1]

    def release_memory(self, call: GraphDispatcher | None = None) -> None:
        """Free captures if uncaptured code (``call``, or an evaluation) may need their memory.

        Captures of other steps are freed if the free memory is below their size. Captures of ``call`` itself, such as
        of other batch sizes, are freed if it is not enough for one more run.
        """
        reason = "other code needs the memory"
        others = [other for other in self._calls if call is None or not other.is_in_same_pass(call)]
        own = None if call is None or call.has_pending_backward else call  # a pending backward delays its release
        held = sum(other.nbytes for other in others) + (0 if own is None else own.nbytes)
        if held > 0 and self.free_bytes() < held:
            for other in others:
                other.invalidate(reason)
            if own is not None:
                own.yield_memory(reason)

    def drop_unrelated(self, call: GraphDispatcher) -> bool:
        """Free captures of other steps regardless of free memory, and return True if there were any."""
        others = [other for other in self._calls if other.nbytes > 0 and not other.is_in_same_pass(call)]
        for other in others:
            other.invalidate("other code needs the memory")
        return bool(others)

    def free_bytes(self) -> float:
        """Return the device bytes available without freeing captures."""
        if self.device.type != "cuda":
            return float("inf")
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + max(0, cached - sum(call.nbytes for call in self._calls))

    def disable(self, reason: str) -> bool:
        """Stop capturing with these options unless they require it, and return True if that changed anything."""
        if self._disabled_reason or self._required:
            return False
        self._disabled_reason = reason
        self.drop()
        self._report_reason(reason)
        return True

    def report_unsupported(self, reason: str) -> None:
        """Report a reason to the user, or raise :class:`UnsupportedError` if CUDA graphs are required."""
        if self._required:
            raise _unsupported_error(self._option, reason)
        if reason not in self._reported:
            self._reported.add(reason)
            self._report_reason(reason)

    def _report_reason(self, reason: str) -> None:
        self._report(f"Compiled code is not replayed as a CUDA graph: {reason}.")


def _unsupported_error(option: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{option}=True, but compiled code cannot be replayed as a CUDA graph: {reason}. Pass {option}='auto' to run "
        "it without replays."
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

WARMUP_RUNS = 3  # runs with backward before a capture: compile kernels and settle the order of buckets
MAX_CAPTURE_WAITS = 50  # runs without a possible capture before giving up
MIN_REPLAYS = 20  # replays that make up for the cost of a capture
MAX_FAILED_CAPTURES = 3  # captures in a row with too few replays before giving up
# Calls before the backward of the first one. If graphs break in each layer, all layers call one graph; 128 is above the
# layers of common models. A call needs the memory of its activations, captured or not.
MAX_PENDING_CALLS = 128
MAX_CAPTURED_SIZES = 16  # batch sizes captured at the same time
MAX_REPLACEMENTS = 3  # times that captures of smaller sizes are made again in the memory of a larger one
MAX_REPLACED = 4  # captures at a time; each takes up to a second


@dataclass(frozen=True)
class CaptureKey:
    """Conditions of a capture.

    Attributes:
        slot: index among calls with a pending backward, or with other weights; each has its own memory.
        first: True for the graph's first call since the optimizer stepped.
        accumulates: True if a backward has added gradients since then.
        deferred: whether its gradients are reduced later, and whether some wait for that.
    """

    slot: int
    first: bool
    accumulates: bool
    deferred: tuple[bool, bool]
    sizes: tuple[Any, ...]


class GraphDispatcher:
    """Decide for each call of one compiled graph whether to run, capture or replay it.

    Args:
        compiled: takes flat inputs: tensors, and sizes if these vary.
    """

    def __init__(self, compiled: Compiled, manager: weakref.ref[CUDAGraphManager]) -> None:
        self._compiled = compiled
        self._cuda_graphs = manager
        self._captures: dict[CaptureKey, CapturedCall] = {}  # least recently used first
        self._replayed: dict[CaptureKey, int] = {}
        self._runs: dict[CaptureKey, int] = {}  # since the last invalidation
        self._segments: dict[int, int] = {}  # by slot: number of the gradients that its backward produces
        # By slot: alive while the backward may still run, and the id of a weight. Layers whose graphs break share this
        # graph, and a step may skip one.
        self._pending_backwards: list[weakref.ref[PendingBackward] | None] = []
        self._weights: list[int] = []
        self._elements: dict[CaptureKey, int] = {}  # of the inputs of warm-up runs
        self._larger_waits = self._replacements = 0
        self._failures = self._waits = 0
        self._epoch = self._backwards = self._backwards_before = -1
        self._disabled = False

    def __call__(self, *args: Any) -> Any:
        manager = self._cuda_graphs()
        # Inside a backward (recompute) gradients are in flight, and a capture would take their memory.
        if manager is None or not manager.enabled or not manager.in_training_step() or graph_task_id() != -1:
            return self._compiled(*args)
        if manager.has_gradient_hooks(args):
            self._runs.clear()
            self.drop()
            return self._compiled(*args)
        epoch, backwards = manager.executor.weights.shard_version(), manager.executor.gradients.completed_backwards()
        first, self._epoch = epoch != self._epoch, epoch
        self._backwards_before, self._backwards = self._backwards, backwards
        key = CaptureKey(
            self._find_free_slot(_first_weight(args)),
            first,
            manager.accumulates(epoch, backwards),
            (manager.executor.gradients.defers(), manager.executor.gradients.has_deferred()),
            tuple(a for a in args if not isinstance(a, Tensor)),
        )
        captured = None if self._disabled else self._find_capture(manager, args, key)
        if captured is None:
            manager.release_memory(self)
            return self._run(args, key)
        self._replayed[key] += 1
        try:
            outputs = captured.with_known_outputs(GraphReplay.apply(captured, *args), args)
        except NotImplementedError as error:  # an emulated capture runs no earlier; it has restored what it changed
            self.disable(str(error))
            return self._run(args, key)
        self._pending_backwards[key.slot] = captured.pending_backward
        return outputs

    def _find_free_slot(self, weight: int) -> int:
        """Return a slot without a pending backward: one of the same weight, a new one, or any."""
        free = [slot for slot, token in enumerate(self._pending_backwards) if not _is_pending(token)]
        for slot in free:
            if self._weights[slot] == weight:
                return slot
        if len(self._pending_backwards) < MAX_PENDING_CALLS:
            self._pending_backwards.append(None)
            self._weights.append(weight)
        elif free:
            self._weights[free[0]] = weight
            return free[0]
        return len(self._pending_backwards) - 1

    def _run(self, args: Sequence[Any], key: CaptureKey) -> Any:
        outputs = self._compiled(*args)
        if key not in self._elements:
            self._elements[key] = sum(a.numel() for a in args if isinstance(a, Tensor))
        nodes = {o.grad_fn for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None}
        if self._disabled:
            return outputs
        if not nodes:
            self._count_run(key)
            return outputs
        token = PendingBackward()
        self._pending_backwards[key.slot] = weakref.ref(token)
        held = [token]  # referenced by the outputs' nodes until a backward reaches one of them

        def begins(grads: Any) -> None:
            held.clear()
            self._on_backward_begin()

        warmed = False  # False for a skipped batch

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
        """Disable replays if this backward retains its graph or computes only some gradients."""
        manager = self._cuda_graphs()
        if manager is None:
            return
        if retains_graph() or not manager.executor.gradients.is_full_backward():
            self.disable("a backward pass retains its graph, or computes only some gradients")
        manager.executor.gradients.mark()

    def _on_backward_end(self, slot: int) -> None:
        manager = self._cuda_graphs()
        if manager is not None and manager.executor.gradients.mark():
            self._segments[slot] = manager.executor.gradients.segment()

    def _find_capture(self, manager: CUDAGraphManager, args: Sequence[Any], key: CaptureKey) -> CapturedCall | None:
        if _is_pending(self._pending_backwards[key.slot]):
            self.disable(f"a module is called {MAX_PENDING_CALLS} times before the backward pass of its first call")
            return None
        captured = self._captures.pop(key, None)
        if captured is None:
            return self._capture(manager, args, key)
        self._captures[key] = captured
        if not captured.fits(args):
            self.invalidate("addresses of parameters, gradients or buffers change, or requires_grad does")
            return None
        return captured

    def _capture(self, manager: CUDAGraphManager, args: Sequence[Any], key: CaptureKey) -> CapturedCall | None:
        # Kernels are compiled and buckets have their order for any size and micro-batch. Libraries need one run per
        # size. More runs would need memory in addition to existing captures.
        warm = sum(runs for other, runs in self._runs.items() if other.slot == key.slot)
        if key not in self._runs or warm < WARMUP_RUNS or not manager.ready():
            return None
        segment = self._segments.get(key.slot, -1)
        manager.executor.weights.sync_user_writes()  # also forgets weights that eager code has released
        if reason := manager.executor.graphs.disabled_reason(segment):
            self._waits += 1
            if self._waits >= MAX_CAPTURE_WAITS:
                self.disable(reason)
            return None
        if reason := unsupported_input(args, manager.device):
            self.disable(reason)
            return None
        if self._awaits_larger(key):
            return None
        if sum(other.slot == key.slot for other in self._captures) >= MAX_CAPTURED_SIZES:
            self._evict_oldest(key.slot)
        self._drop_smaller(key)
        if self._disabled:
            return None
        try:
            captured = self._captured(manager, args, key, segment)
        except RuntimeError as error:  # includes out of memory, and operations that cannot be captured
            self.disable(str(error).splitlines()[0])
            return None
        self._captures[key] = captured
        self._replayed[key] = 0
        return captured

    def _captured(self, manager: CUDAGraphManager, args: Sequence[Any], key: CaptureKey, segment: int) -> CapturedCall:
        # Calls in one slot never have pending backwards at the same time, so they share memory.
        shared: GraphPair | None = next((v.pair for other, v in self._captures.items() if other.slot == key.slot), None)

        def capture(inputs: Sequence[Any], copied: Sequence[Tensor]) -> GraphPair:
            memory, several = manager.memory, manager.is_one_of_several(self)
            return manager.capture(
                CaptureSpec(
                    self._compiled, inputs, copied, manager.executor, key.accumulates, shared, segment, memory, several
                )
            )

        try:
            return CapturedCall(args, manager.static_tensors(), manager.executor.gradients, capture)
        except torch.OutOfMemoryError:
            if not manager.drop_unrelated(self):
                raise
            return CapturedCall(args, manager.static_tensors(), manager.executor.gradients, capture)

    def _awaits_larger(self, key: CaptureKey) -> bool:
        """Return True if a larger size than all captured ones is warm and likely to be next.

        Captures share one pool, whose blocks serve smaller tensors, but not larger ones.
        """
        largest = max((k for k in self._runs if k.slot == key.slot), key=self._elements.__getitem__)
        is_captured = any(self._elements[k] >= self._elements[largest] for k in self._captures if k.slot == key.slot)
        if is_captured or self._elements[key] >= self._elements[largest]:
            self._larger_waits = 0
            return False
        self._larger_waits += 1
        return self._larger_waits <= MAX_CAPTURED_SIZES

    def _drop_smaller(self, key: CaptureKey) -> None:
        """Free the slot's captures if all are of smaller sizes, so that a larger pool replaces theirs."""
        others = [k for k in self._captures if k.slot == key.slot]
        if not 0 < len(others) <= MAX_REPLACED or self._replacements >= MAX_REPLACEMENTS:
            return
        if all(self._elements[k] < self._elements[key] for k in others):
            self._replacements += 1
            for other in others:
                self._captures.pop(other).close()

    def _evict_oldest(self, slot: int) -> None:
        oldest = next(key for key in self._captures if key.slot == slot)
        self._count_failure(self._replayed[oldest])
        self._captures.pop(oldest).close()
        if self._failures > MAX_FAILED_CAPTURES:
            self.disable("batch sizes vary")

    def _count_failure(self, replayed: int) -> None:
        self._failures = 0 if replayed > MIN_REPLAYS else self._failures + 1

    def is_in_same_pass(self, other: GraphDispatcher) -> bool:
        """Return True if both graphs are called in one pass."""
        return self._backwards in (other._backwards, other._backwards_before)

    @property
    def slots(self) -> int:
        """Return the number of calls with a pending backward at the same time."""
        return len(self._pending_backwards)

    @property
    def has_pending_backward(self) -> bool:
        """Return True if a call's backward may still run."""
        return any(map(_is_pending, self._pending_backwards))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all captures."""
        return sum(captured.pair.nbytes for captured in self._captures.values())

    def invalidate(self, reason: str) -> None:
        """Drop captures that are out of date, or whose memory is needed, and warm up again."""
        self._runs.clear()
        self._end(reason)

    def yield_memory(self, reason: str) -> None:
        """Drop captures for another kind of run of this graph, keeping it warm; at most once per kind."""
        self._larger_waits = MAX_CAPTURED_SIZES  # the other kind may not fit in addition to any capture
        if len(self._runs) < MAX_CAPTURED_SIZES:
            self.drop()
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._captures:
            return
        self._count_failure(max(self._replayed[key] for key in self._captures))
        self.drop()
        if self._failures > MAX_FAILED_CAPTURES:
            self.disable(reason)

    def drop(self) -> None:
        """Free the memory of all captures."""
        for captured in self._captures.values():
            captured.close()
        self._captures.clear()

    def disable(self, reason: str) -> None:
        """Stop capturing this graph."""
        if self._disabled:
            return
        self._disabled = True
        self.drop()
        manager = self._cuda_graphs()
        if manager is not None:
            manager.report_unsupported(reason)


def _first_weight(args: Iterable[object]) -> int:
    """Return the id of the first parameter; 0 without one."""
    return next((id(arg) for arg in args if type(arg) is not Tensor and isinstance(arg, nn.Parameter)), 0)


def _is_pending(token: weakref.ref[PendingBackward] | None) -> bool:
    return token is not None and token() is not None
