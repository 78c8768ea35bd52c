"""One compiled graph that is called: when its runs are captured, and which capture a call replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.compat.autograd import graph_task_id, retains_graph
from lightning_zero.compile.cuda_graphs.pairs import Job, Pair
from lightning_zero.compile.cuda_graphs.variant import Replay, Token, Variant, unfit

if TYPE_CHECKING:
    from lightning_zero.compile.cuda_graphs.policy import Replays

__all__ = ["MOST_CALLS", "MOST_SIZES", "MOST_WAITS", "PATIENCE", "WARMUPS", "WORTH", "Call", "Compiled"]

Compiled = Callable[..., Any]

WARMUPS = 3  # runs with a backward before a capture: kernels are compiled, and buckets have found their order
MOST_WAITS = 50  # runs in which nothing could be captured before there are no more tries
WORTH = 20  # replays that a capture is worth
PATIENCE = 3  # captures in a row that were not worth it before there are no more
MOST_CALLS = 8  # before the backward of the first one
MOST_SIZES = 16  # of batches, that are captured side by side


@dataclass(frozen=True)
class Key:
    """What a capture is for.

    Args:
        place: among the calls whose backward is still to come; each has memory of its own.
        first: whether it is this graph's first call since the optimizer stepped.
        adding: whether a backward has added gradients since then.
        deferred: whether its backward's gradients are reduced later, and whether some wait for that.
        sizes: inputs that are not tensors.
    """

    place: int
    first: bool
    adding: bool
    deferred: tuple[bool, bool]
    sizes: tuple[Any, ...]


class Call:
    """Called with flat inputs: tensors, and sizes where these vary. ``takes``: tells what a run has in tensors at most,
    in bytes, as far as that was looked at."""

    def __init__(self, compiled: Compiled, replays: weakref.ref[Replays], takes: Callable[[], int] = lambda: 0) -> None:
        self._compiled = compiled
        self._takes = takes
        self._replays = replays
        self._variants: dict[Key, Variant] = {}  # the one that was used last comes last
        self._replayed: dict[Key, int] = {}
        self._runs: dict[Key, int] = {}  # since something changed
        self._segments: dict[int, int] = {}  # by place: the gradients that its backward brings
        self._awaited: list[weakref.ref[Token] | None] = []  # by place: lives while its backward may come
        self._failures = self._waits = 0
        self._epoch = self._backwards = self._backwards_before = -1
        self._off = False

    def __call__(self, *args: Any) -> Any:
        replays = self._replays()
        # Within a backward pass, which computes something again, gradients are on their way: records would take their
        # memory.
        if replays is None or not replays.enabled or not replays.here() or graph_task_id() != -1:
            return self._compiled(*args)
        if replays.shows_gradients(args):
            self._runs.clear()
            self.drop()
            return self._compiled(*args)
        epoch, backwards = replays.executor.weights.epoch(), replays.executor.gradients.backwards()
        first, self._epoch = epoch != self._epoch, epoch
        self._backwards_before, self._backwards = self._backwards, backwards
        key = Key(
            self._free_place(),
            first,
            replays.adding(epoch, backwards),
            (replays.executor.gradients.defers(), replays.executor.gradients.has_deferred()),
            tuple(a for a in args if not isinstance(a, Tensor)),
        )
        variant = None if self._off else self._variant(replays, args, key)
        if variant is None:
            replays.make_room(self)
            return self._run(args, key)
        self._replayed[key] += 1
        outputs = Replay.apply(variant, *args)
        self._awaited[key.place] = variant.awaited
        return outputs

    def _free_place(self) -> int:
        """The first one whose backward has run, or can be run by nobody any more."""
        for place, token in enumerate(self._awaited):
            if not _lives(token):
                return place
        if len(self._awaited) < MOST_CALLS:
            self._awaited.append(None)
        return len(self._awaited) - 1

    def _run(self, args: Sequence[Any], key: Key) -> Any:
        outputs = self._compiled(*args)
        nodes = {o.grad_fn for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None}
        if self._off:
            return outputs
        if not nodes:
            self._warmed(key)
            return outputs
        token = Token()
        self._awaited[key.place] = weakref.ref(token)
        held = [token]  # by the outputs' nodes, until a backward comes to one of them or nobody has them any more

        def begins(grads: Any) -> None:
            held.clear()
            self._backward_begins()

        warmed = False  # which a batch that is skipped is not

        def has_ended(grads: Any, given: Any) -> None:
            nonlocal warmed
            if not warmed:
                self._warmed(key)
            warmed = True
            self._backward_has_ended(key.place)

        for node in nodes:
            node.register_prehook(begins)
            node.register_hook(has_ended)
        return outputs

    def _warmed(self, key: Key) -> None:
        self._runs[key] = self._runs.get(key, 0) + 1

    def _backward_begins(self) -> None:
        """What a replay would raise at is known after the first step, and nobody has to be told."""
        replays = self._replays()
        if replays is None:
            return
        if retains_graph() or not replays.executor.gradients.is_whole_backward():
            self.give_up("a backward pass keeps its graph, or is for some gradients only")
        replays.executor.gradients.mark()

    def _backward_has_ended(self, place: int) -> None:
        replays = self._replays()
        if replays is not None and replays.executor.gradients.mark():
            self._segments[place] = replays.executor.gradients.segment()

    def _variant(self, replays: Replays, args: Sequence[Any], key: Key) -> Variant | None:
        """What to replay."""
        if _lives(self._awaited[key.place]):
            self.give_up(f"a module is called {MOST_CALLS} times before the backward pass of its first call")
            return None
        variant = self._variants.pop(key, None)
        if variant is None:
            return self._capture(replays, args, key)
        self._variants[key] = variant
        if not variant.fits(args):
            self.interrupt("parameters, gradients or buffers move, or what is trained changes")
            return None
        return variant

    def _capture(self, replays: Replays, args: Sequence[Any], key: Key) -> Variant | None:
        # Kernels have been compiled, and buckets have their order, whatever the sizes and whichever micro-batch it is;
        # libraries ask for one run each. More of them would need memory beside what is captured by then.
        warm = sum(runs for other, runs in self._runs.items() if other.place == key.place)
        if key not in self._runs or warm < WARMUPS or not replays.ready():
            return None
        segment = self._segments.get(key.place, -1)
        if reason := replays.executor.graphs.why_not(segment):
            self._waits += 1
            if self._waits >= MOST_WAITS:
                self.give_up(reason)
            return None
        if reason := unfit(args, replays.device):
            self.give_up(reason)
            return None
        if sum(other.place == key.place for other in self._variants) >= MOST_SIZES:
            self._forget_one(key.place)
        if self._off:
            return None
        try:
            variant = self._captured(replays, args, key, segment)
        except RuntimeError as error:  # out of memory, too, and what no graph can hold
            self.give_up(str(error).splitlines()[0])
            return None
        self._variants[key] = variant
        self._replayed[key] = 0
        return variant

    def _captured(self, replays: Replays, args: Sequence[Any], key: Key, segment: int) -> Variant:
        # Calls in one place never wait for their backward at the same time, so they can share memory.
        beside: Pair | None = next((v.pair for other, v in self._variants.items() if other.place == key.place), None)
        takes = self._takes()

        def capture(inputs: Sequence[Any], copied: Sequence[Tensor]) -> Pair:
            job = Job(self._compiled, inputs, copied, replays.executor, key.adding, beside, segment, takes)
            return replays.capture(job)

        try:
            return Variant(args, replays.lasting(), replays.executor.gradients, capture)
        except torch.OutOfMemoryError:
            if not replays.drop_others(self):
                raise
            return Variant(args, replays.lasting(), replays.executor.gradients, capture)

    def _forget_one(self, place: int) -> None:
        """Of the sizes that are captured, the ones that were not needed for longest make room for others."""
        oldest = next(key for key in self._variants if key.place == place)
        self._judge(self._replayed[oldest])
        self._variants.pop(oldest).close()
        if self._failures > PATIENCE:
            self.give_up("the sizes of batches vary")

    def _judge(self, replayed: int) -> None:
        self._failures = 0 if replayed > WORTH else self._failures + 1

    def goes_with(self, other: Call) -> bool:
        """Whether both are called in one pass."""
        return self._backwards in (other._backwards, other._backwards_before)

    @property
    def awaits_backward(self) -> bool:
        """Whether that of a call may still come."""
        return any(map(_lives, self._awaited))

    @property
    def nbytes(self) -> int:
        """Of memory that captures hold."""
        return sum(variant.pair.nbytes for variant in self._variants.values())

    def interrupt(self, reason: str) -> None:
        """What was captured serves no longer, or something else needs the memory."""
        self._runs.clear()
        self._end(reason)

    def give_way(self, reason: str) -> None:
        """Another kind of run of this graph needs the memory, and is captured, too, when it comes again: what has
        warmed up stays warm, and as many kinds as fit side by side may each do so once."""
        if len(self._runs) < MOST_SIZES:
            self.drop()
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._variants:
            return
        self._judge(max(self._replayed[key] for key in self._variants))
        self.drop()
        if self._failures > PATIENCE:
            self.give_up(reason)

    def drop(self) -> None:
        """Gives the memory back."""
        for variant in self._variants.values():
            variant.close()
        self._variants.clear()

    def give_up(self, reason: str) -> None:
        """Nothing is captured any more."""
        if self._off:
            return
        self._off = True
        self.drop()
        replays = self._replays()
        if replays is not None:
            replays.refused(reason)


def _lives(token: weakref.ref[Token] | None) -> bool:
    """Whether the backward that it is for may still come."""
    return token is not None and token() is not None
