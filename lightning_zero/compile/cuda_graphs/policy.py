"""Replays what a compiled graph does, forward and backward, as two CUDA graphs: the host then starts a step's thousand
kernels with two calls.

Protocol: ``replays = CUDAGraphManager(...)``; ``replays.wrap(compiled)`` is called instead of ``compiled``, what a backend of
``torch.compile`` returns. It runs ``compiled`` while that is warming up and wherever a replay would not do the same,
and else replays. :meth:`CUDAGraphManager.drop` gives the graphs' memory back; they are captured again when training goes on.

A replay writes to the memory that the one before it wrote to. So a forward is replayed only once the backward of the
one before has run, or nobody can run it any more; of a graph that is called twice before, each call has captures of its
own. Outputs are copies; and inputs other than parameters and buffers are copied in. Each graph's gradients leave with
its replay: see [Note: segments of a backward] in csrc/gradients/layout.h.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_zero.compile.cuda_graphs.dispatch import Compiled, GraphDispatcher
from lightning_zero.compile.cuda_graphs.pairs import CaptureSpec, CUDAGraphPair, EmulatedGraphPair, GraphPair
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor

__all__ = ["CUDAGraphManager"]


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
        debugged = [name for name in ("sync_collectives", "nan_fill") if getattr(tuning, name)]
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
