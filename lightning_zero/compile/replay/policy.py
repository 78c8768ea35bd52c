"""Replays what a compiled graph does, forward and backward, as two CUDA graphs: the host then starts a step's thousand
kernels with two calls.

Protocol: ``replays = Replays(...)``; ``replays.wrap(compiled)`` is called instead of ``compiled``, what a backend of
``torch.compile`` returns. It runs ``compiled`` while that is warming up and wherever a replay would not do the same,
and else replays. :meth:`Replays.drop` gives the graphs' memory back; they are captured again when training goes on.

A replay writes to the memory that the one before it wrote to. So a forward is replayed only once the backward of the
one before has run, or nobody can run it any more; outputs are copies; and inputs other than parameters and buffers are
copied in.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.autograd import graph_task_id, keeps_graph
from lightning_zero.compile.replay.pairs import CapturedPair, EmulatedPair, Job, Pair
from lightning_zero.compile.replay.variant import Replay, Token, Variant, unfit
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor

__all__ = ["Replays"]

Compiled = Callable[..., Any]

WARMUPS = 3  # runs with a backward before a capture: kernels are compiled, and buckets have found their order
MOST_WAITS = 50  # runs in which nothing could be captured before there are no more tries
WORTH = 20  # replays that a capture is worth
PATIENCE = 3  # captures in a row that were not worth it before there are no more


class Replays:
    """One engine's.

    Args:
        executor: keeps the books of what is gathered and reduced.
        device: where graphs run.
        config: whether to, and whether really.
        ready: a method that tells whether what is compiled now is what will stay.
        lasting: one that gives the tensors whose memory stays where it is: parameters and buffers.
        report: shows a line to the user.
        impossible: why there cannot be any here; empty where there can.

    Raises:
        UnsupportedError: replays were asked for and are impossible; here or when compiled code runs.
    """

    def __init__(
        self,
        executor: Executor,
        device: torch.device,
        config: EngineConfig,
        ready: Callable[[], bool],
        lasting: Callable[[], Iterable[Tensor]],
        report: Callable[[str], None],
        impossible: str = "",
    ) -> None:
        self.executor = executor
        self.device = device
        self._impossible = f"the device is {device}" if device.type != "cuda" else impossible
        self._said: set[str] = set()
        # torch keeps what it has compiled for as long as it lives, and with it everything that this knows: nothing here
        # may keep the engine, or its process groups would outlive it, on some ranks longer than on others.
        self._ready, self._lasting = weakref.WeakMethod(ready), weakref.WeakMethod(lasting)
        self._report = report
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._pairs: weakref.WeakSet[Pair] = weakref.WeakSet()
        weakref.finalize(self, _end, self._calls, self._pairs).atexit = False
        # Process groups may be destroyed at exit, by who registered that before there was an engine.
        atexit.register(_close, weakref.ref(self))
        self.configure(config)

    def check(self, config: EngineConfig) -> None:
        """Raises :class:`UnsupportedError` where options demand replays, and there can be none here."""
        if config.cuda_graph_model is True and not self._enabled(config):
            raise _refusal(config.named("cuda_graph_model"), self._objection(config))

    def _enabled(self, config: EngineConfig) -> bool:
        emulated = config.tuning.emulate_cuda_graph_model
        return emulated or (bool(config.cuda_graph_model) and not self._objection(config))

    def _objection(self, config: EngineConfig) -> str:
        tuning = config.tuning
        debugged = [name for name in ("sync_collectives", "poison") if getattr(tuning, name)]
        return self._impossible or (f"{' and '.join(debugged)} looks at each collective" if debugged else "")

    def configure(self, config: EngineConfig, impossible: str | None = None) -> None:
        """Other options; what was captured with the old ones is dropped. ``impossible``: and why there can be no more
        replays here."""
        self.drop()
        if impossible is not None and self.device.type == "cuda":
            self._impossible = impossible
        emulated = config.tuning.emulate_cuda_graph_model
        self.pair: type[CapturedPair] | type[EmulatedPair] = EmulatedPair if emulated else CapturedPair
        self.enabled = self._enabled(config)
        self._must = config.cuda_graph_model is True
        self._option = config.named("cuda_graph_model")
        self.check(config)

    @property
    def wrap(self) -> Callable[[Compiled], Compiled]:
        """Gives what to call instead of something compiled."""
        weak = weakref.ref(self)

        def wrap(compiled: Compiled) -> Compiled:
            replays = weak()
            if replays is None:
                return compiled
            call = _Call(compiled, weak)
            replays._calls.add(call)
            return call

        return wrap

    def ready(self) -> bool:
        ready = self._ready()
        return ready is not None and ready()

    def lasting(self) -> Iterable[Tensor]:
        lasting = self._lasting()
        return () if lasting is None else lasting()

    def drop(self) -> None:
        """Gives the graphs' memory back."""
        _drop(self._calls)

    def close(self) -> None:
        """Likewise, of all graphs, even where a backward may still come: a process group that is destroyed waits for
        whoever holds its collectives."""
        _end(self._calls, self._pairs)

    def capture(self, job: Job) -> Pair:
        """See :class:`Pair`."""
        pair = self.pair(job)
        self._pairs.add(pair)
        return pair

    def runs(self, call: _Call) -> None:
        """``call`` is not replayed. Graphs that are called in its stead at other times make room for it."""
        for other in self._calls:
            if other is not call and not other.goes_with(call):
                other.interrupt("batches of other shapes come between")

    def refused(self, reason: str) -> None:
        """Tells the user; raises :class:`UnsupportedError` where replays were asked for."""
        if self._must:
            raise _refusal(self._option, reason)
        if reason not in self._said:
            self._said.add(reason)
            self._report(f"Compiled code is not replayed as a CUDA graph: {reason}.")


def _refusal(option: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{option}=True, but compiled code cannot be replayed as a CUDA graph: {reason}. Pass {option}='auto' to run "
        "it where it cannot be replayed."
    )


def _drop(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.drop()


def _end(calls: Iterable[_Call], pairs: Iterable[Pair]) -> None:
    _drop(calls)
    for pair in pairs:
        pair.close()


def _close(reference: weakref.ref[Replays]) -> None:
    replays = reference()
    if replays is not None:
        replays.close()


class _Call:
    """One compiled graph, which is called with its flat inputs: tensors, and sizes where these vary."""

    def __init__(self, compiled: Compiled, replays: weakref.ref[Replays]) -> None:
        self._compiled = compiled
        self._replays = replays
        self._variants: dict[bool, Variant] = {}  # by whether it is the first since the optimizer stepped
        self._sizes: tuple[Any, ...] = ()
        self._runs = {False: 0, True: 0}
        self._replayed = 0  # since the last capture
        self._failures = self._waits = 0
        self._epoch = -1
        self._backwards = self._backwards_before = -1
        self._awaited: weakref.ref[Token] | None = None  # lives while a backward of the last call may come
        self._off = False

    def __call__(self, *args: Any) -> Any:
        replays = self._replays()
        # Within a backward pass, which computes something again, gradients are on their way: records would take their
        # memory.
        in_backward = graph_task_id() != -1
        trains = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if replays is None or not replays.enabled or not trains or in_backward:
            return self._compiled(*args)
        epoch, backwards = replays.executor.weights.epoch(), replays.executor.gradients.backwards()
        first, again = epoch != self._epoch, backwards == self._backwards
        self._epoch, self._backwards_before, self._backwards = epoch, self._backwards, backwards
        variant = None if self._off else self._variant(args, first, again)
        if variant is None:
            replays.runs(self)
            return self._run(args)
        self._replayed += 1
        outputs = Replay.apply(variant, *args)
        self._awaited = variant.awaited
        return outputs

    def _run(self, args: Sequence[Any]) -> Any:
        outputs = self._compiled(*args)
        if not self._off:
            token = Token()
            self._awaited = weakref.ref(token)
            held = [token]  # by the outputs' nodes, until a backward comes to one of them or nobody has them any more

            def watch(grads: Any) -> None:
                held.clear()
                self._watch_backward()

            nodes = {output.grad_fn for output in outputs if isinstance(output, Tensor)}
            for node in filter(None, nodes):
                node.register_prehook(watch)
        return outputs

    def _watch_backward(self) -> None:
        """What a replay would raise at is known after the first step, and nobody has to be told."""
        replays = self._replays()
        keeps = keeps_graph()
        if replays is not None and (keeps or not replays.executor.gradients.is_whole_backward()):
            self._give_up("a backward pass keeps its graph, or is for some gradients only")

    def _variant(self, args: Sequence[Any], first: bool, again: bool) -> Variant | None:
        """What to replay."""
        if again:
            if self._awaited is not None and self._awaited() is not None:
                # Gradients of both calls meet in one backward, of which only one could be replayed.
                self._give_up("a module is called again before the backward pass of its first call")
                return None
            # The batch before was skipped: there can be no backward of it, and it has warmed nothing up.
            self._runs = {False: 0, True: 0}
        sizes = tuple(arg for arg in args if not isinstance(arg, Tensor))
        if sizes != self._sizes:
            self.interrupt("the sizes of batches vary")
            self._sizes = sizes
        variant = self._variants.get(first)
        if variant is None:
            return self._capture(args, first)
        if not variant.fits(args):
            self.interrupt("parameters, gradients or buffers move, or what is trained changes")
            return None
        return variant

    def _capture(self, args: Sequence[Any], first: bool) -> Variant | None:
        replays = self._replays()
        assert replays is not None
        self._runs[first] += 1
        if self._runs[first] <= WARMUPS or not replays.ready():
            return None
        if reason := replays.executor.graphs.why_not():
            self._waits += 1
            if self._waits >= MOST_WAITS:
                self._give_up(reason)
            return None
        if reason := unfit(args, replays.device):
            self._give_up(reason)
            return None
        beside: Pair | None = next((variant.pair for variant in self._variants.values()), None)
        try:
            variant = Variant(
                args,
                replays.lasting(),
                lambda inputs, copied: replays.capture(
                    Job(self._compiled, inputs, copied, replays.executor, not first, beside)
                ),
            )
        except RuntimeError as error:  # out of memory, too, and what no graph can hold
            self._give_up(str(error).splitlines()[0])
            return None
        self._variants[first] = variant
        self._replayed = 0
        return variant

    def goes_with(self, other: _Call) -> bool:
        """Whether both are called in one pass."""
        return self._backwards in (other._backwards, other._backwards_before)

    def interrupt(self, reason: str) -> None:
        """Something else runs instead, which may need the memory."""
        self._runs = {False: 0, True: 0}
        if not self._variants:
            return
        self._failures = 0 if self._replayed > WORTH else self._failures + 1
        self.drop()
        if self._failures > PATIENCE:
            self._give_up(reason)

    def drop(self) -> None:
        for variant in self._variants.values():
            variant.close()
        self._variants.clear()

    def _give_up(self, reason: str) -> None:
        if self._off:
            return
        self._off = True
        self.drop()
        replays = self._replays()
        if replays is not None:
            replays.refused(reason)
