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

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_zero.compile.captured import CapturedPair, EmulatedPair, Pair
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor

__all__ = ["Replays"]

log = logging.getLogger(__name__)

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
        say: shows a line to the user.

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
        say: Callable[[str], None],
    ) -> None:
        self.executor = executor
        self.device = device
        # torch keeps what it has compiled for as long as it lives, and with it everything that this knows: nothing here
        # may keep the engine, or its process groups would outlive it, on some ranks longer than on others.
        self._ready, self._lasting = weakref.WeakMethod(ready), weakref.WeakMethod(lasting)
        self._say = say
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Other options; what was captured with the old ones is dropped."""
        self.drop()
        self.pair: type[CapturedPair] | type[EmulatedPair] = EmulatedPair if config.emulate_graphs else CapturedPair
        self.enabled = bool(config.capture_graphs) and (self.device.type == "cuda" or config.emulate_graphs)
        self._must = config.capture_graphs is True
        if self._must and not self.enabled:
            self.refused(f"the device is {self.device}")

    def __del__(self) -> None:
        self.drop()

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
        for call in self._calls:
            call.drop()

    def runs(self, call: _Call) -> None:
        """``call`` is not replayed. Graphs that are called in its stead at other times make room for it."""
        for other in self._calls:
            if other is not call and not other.goes_with(call):
                other.interrupt("batches of other shapes come between")

    def refused(self, reason: str) -> None:
        """Tells the user; raises :class:`UnsupportedError` where replays were asked for."""
        if self._must:
            raise UnsupportedError(
                f"capture_graphs=True, but compiled code cannot be replayed as a CUDA graph: {reason}. Pass "
                "capture_graphs='auto' to run it where it cannot be replayed."
            )
        self._say(f"Compiled code is not replayed as a CUDA graph: {reason}.")


class _Call:
    """One compiled graph, which is called with its flat inputs: tensors, and sizes where these vary."""

    def __init__(self, compiled: Compiled, replays: weakref.ref[Replays]) -> None:
        self._compiled = compiled
        self._replays = replays
        self._variants: dict[bool, _Variant] = {}  # by whether it is the first since the optimizer stepped
        self._sizes: tuple[Any, ...] = ()
        self._runs = {False: 0, True: 0}
        self._replayed = 0  # since the last capture
        self._failures = self._waits = 0
        self._epoch = -1
        self._backwards = self._backwards_before = -1
        self._off = False

    def __call__(self, *args: Any) -> Any:
        replays = self._replays()
        if replays is None or not replays.enabled or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return self._compiled(*args)
        epoch, backwards = replays.executor.epoch(), replays.executor.backwards()
        first, again = epoch != self._epoch, backwards == self._backwards
        self._epoch, self._backwards_before, self._backwards = epoch, self._backwards, backwards
        variant = None if self._off else self._variant(args, first, again)
        if variant is None:
            replays.runs(self)
            return self._compiled(*args)
        self._replayed += 1
        return _Replay.apply(variant, *args)

    def _variant(self, args: Sequence[Any], first: bool, again: bool) -> _Variant | None:
        """What to replay."""
        if again:
            # Gradients of both calls meet in one backward, of which only one could be replayed.
            self._give_up("a module is called again before the backward pass of its first call")
            return None
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

    def _capture(self, args: Sequence[Any], first: bool) -> _Variant | None:
        replays = self._replays()
        assert replays is not None
        self._runs[first] += 1
        if self._runs[first] <= WARMUPS or not replays.ready():
            return None
        if reason := replays.executor.why_not_recorded():
            self._waits += 1
            if self._waits >= MOST_WAITS:
                self._give_up(reason)
            return None
        if reason := _unfit(args, replays.device):
            self._give_up(reason)
            return None
        beside: Pair | None = next((variant.pair for variant in self._variants.values()), None)
        try:
            variant = _Variant(self._compiled, args, replays, adding=not first, beside=beside)
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
        self._off = True
        self.drop()
        replays = self._replays()
        if replays is not None:
            replays.refused(reason)


def _unfit(args: Sequence[Any], device: torch.device) -> str:
    """Why these inputs cannot be copied to where a graph reads them; empty if they can."""
    for arg in args:
        if not isinstance(arg, Tensor):
            continue
        if arg.device.type != device.type:
            return "an input lies on another device"
        if arg.layout != torch.strided or _may_overlap(arg):
            return "elements of an input share memory"
    return ""


class _Token:
    """Lives as long as somebody can run a backward."""


class _Variant:
    """A captured forward and backward, and the memory they read and write.

    Raises:
        NotImplementedError: these cannot be replayed; the message says why.
    """

    def __init__(
        self, compiled: Compiled, args: Sequence[Any], replays: Replays, adding: bool, beside: Pair | None
    ) -> None:
        self._executor = replays.executor
        lasting = {id(tensor) for tensor in replays.lasting()}
        self._addresses = [(n, arg.data_ptr()) for n, arg in enumerate(args) if id(arg) in lasting]
        fixed = {n for n, _ in self._addresses}
        inputs = [_alike(a) if isinstance(a, Tensor) and n not in fixed else a for n, a in enumerate(args)]
        self._copied = [(n, t) for n, t in enumerate(inputs) if n not in fixed and isinstance(t, Tensor)]
        self._into = [(n, tensor) for n, tensor in self._copied if tensor.requires_grad]
        self._width = len(args)
        self._pending: weakref.ref[_Token] | None = None
        self._closed = False
        self._copy_in(args)
        self.pair = replays.pair(compiled, inputs, [t for _, t in self._copied], self._executor, adding, beside)

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a replay does what a run would do."""
        still = all(args[n].data_ptr() == address for n, address in self._addresses)
        return still and not self._awaits_backward and self.pair.fits()

    @property
    def _awaits_backward(self) -> bool:
        return self._pending is not None and self._pending() is not None

    def close(self) -> None:
        """Gives the memory back, as soon as a backward that may still come has run."""
        self._closed = True
        if not self._awaits_backward:
            self.pair.close()

    def forward(self, args: Sequence[Any]) -> tuple[list[Tensor], _Token]:
        self._copy_in(args)
        outputs = [output.detach().clone() for output in self.pair.forward()]
        token = _Token()
        self._pending = weakref.ref(token)
        return outputs, token

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs; None for parameters, whose gradients the executor has."""
        for _, tensor in self._into:
            tensor.grad = None
        self.pair.backward(grads)
        self._pending = None
        results: list[Tensor | None] = [None] * self._width
        for (n, _), grad in zip(self._into, self.pair.input_grads([t for _, t in self._into]), strict=True):
            results[n] = None if grad is None else grad.clone()
        if self._closed:
            self.pair.close()
        return results

    def _copy_in(self, args: Sequence[Any]) -> None:
        with torch.no_grad():
            for n, tensor in self._copied:
                tensor.copy_(args[n])


def _may_overlap(tensor: Tensor) -> bool:
    """Whether elements may share memory, as in what ``expand`` returns: they could not be copied one by one."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def _alike(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.requires_grad_(tensor.requires_grad)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variant: _Variant, *args: Any) -> tuple[Tensor, ...]:
        outputs, token = variant.forward(args)
        differentiable = variant.pair.differentiable
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, yes in zip(outputs, differentiable, strict=True) if not yes))
        ctx.variant, ctx.token = variant, token
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.token is None:
            raise RuntimeError(
                "lightning_zero: backward ran twice through one call of compiled code that is replayed as a CUDA "
                "graph, whose activations are gone after the first time. Call the module again for the second, or "
                "pass capture_graphs=False to the strategy."
            )
        ctx.token = None
        return (None, *ctx.variant.backward(grads))
