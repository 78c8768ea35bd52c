"""The cycle of a training step, and what must happen where one part of it follows another.

    IDLE -> FORWARD -> BACKWARD -> IDLE -> STEP -> IDLE

is how ``trainer.fit`` goes round. Other orders are as good: several backwards for one step, as accumulation has them;
forward, backward and step of several optimizers by turns inside one ``train_step``, as manual optimization has them; a
step without a backward; evaluation between any two, but not inside. Whatever ends by an exception may be left halfway.

What cannot be right is refused by name: a training step inside a training step or an evaluation inside one, where the
one in progress would lose the graphs and the weights that its backward needs; and a forward, a backward, an evaluation
or the step of another optimizer where gradients have been declared final and the optimizer has not yet made its step,
which would change what it steps by.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Phase, Watchdog
from lightning_zero.sharding.buffers import BufferBroadcast
from lightning_zero.sharding.flat_memory import check_single_micro_batch
from lightning_zero.sharding.grad_hooks import GradientHooks
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.sharder import Sharder

__all__ = ["CompiledPart", "State", "StepCycle", "UnderWay"]

log = logging.getLogger(__name__)


class State(enum.Enum):
    """Where in its cycle an engine is.

    FORWARD is inside ``train_step``, until a backward begins there; BACKWARD from ``before_backward`` to
    ``after_backward``; STEP from the moment at which gradients are final until the optimizer has made its step;
    EVALUATION from ``eval_step`` until something else begins; and IDLE is between all of these.
    """

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    STEP = enum.auto()
    EVALUATION = enum.auto()


class CompiledPart(Protocol):
    """What compiled code needs in each cycle."""

    def allocate(self) -> None:
        """Memory that peers read and write, once it is known what for; before the epoch of a forward begins."""

    def prepare(self) -> None:
        """Before each forward of a training step; collective."""

    def surround(self) -> AbstractContextManager[None]:
        """Around each forward of a training step."""
        ...

    def stepped(self) -> None:
        """An optimizer steps now. Harmless when repeated."""

    def set_hooked_parameters(self, hooked: Collection[ShardedParameter], forward_ran: bool) -> None:
        """Hooks see the gradients of these parameters, and of no others. ``forward_ran``: their backward is next."""

    def backward_begins(self) -> None:
        """A forward is over, and its backward comes."""

    def release_memory(self) -> None:
        """Memory of CUDA graphs of forward and backward is given back where little is left."""

    def reset(self) -> None:
        """Likewise, and what was half done is forgotten."""


class UnderWay(Protocol):
    """A step of an optimizer.

    Attributes:
        in_progress: the optimizer's own ``step`` is still to come, or not over.
    """

    @property
    def in_progress(self) -> bool: ...


class StepCycle:
    """Says when edits of weights reach their shards, when shards are written, and in which phase the watchdog is.

    Attributes:
        state: where in its cycle the engine is.
        on_forward_begin, on_backward_begin: are called where either begins, for what may go on beside it.
        accumulates: micro-batches have been announced whose gradients may wait.
        on_accumulation_begin: is called before that is so, where a step was to have but one.
    """

    def __init__(
        self, executor: Executor, watchdog: Watchdog, sharder: Sharder, buffers: BufferBroadcast, compiled: CompiledPart
    ) -> None:
        self.state = State.IDLE
        self.accumulates = False
        self.on_forward_begin: Callable[[], None] = lambda: None
        self.on_backward_begin: Callable[[], None] = lambda: None
        self.on_accumulation_begin: Callable[[], None] = lambda: None
        self._in_train_step = False  # of train_step
        self._step: UnderWay | None = None  # that began last
        self._expects_backward = False  # a training step began, or an optimizer stepped, and none has ended since
        self._executor = executor
        self._watchdog = watchdog
        self._sharder = sharder
        self._buffers = buffers
        self._compiled = compiled
        self._hooks = GradientHooks(sharder)

    # -- stages

    def begin_stage(self) -> None:
        """From here on the other ranks notice what keeps this one away."""
        self._watchdog.begin()
        self._enter(State.IDLE, Phase.SETUP)

    def clean_up(self) -> None:
        """After a stage: gives memory back. After an exception has ended it, as far as that goes: once a device is lost
        every call raises, and users must see what came first."""
        self._enter(State.IDLE, Phase.OUTSIDE)
        self._sharder.reader.end_forward()
        try:
            self.reset()
            self._executor.gradients.release_buffers()
        except RuntimeError as error:
            if not self._watchdog.failed:
                raise
            log.warning("What was under way could not be dropped (%s: %s).", type(error).__name__, error)

    def reset(self) -> None:
        """After an exception: drops half-done work and gathered weights. Not collective."""
        self.state, self._in_train_step, self._step = State.IDLE, False, None
        self._expects_backward = False
        self._compiled.reset()
        self._executor.gradients.abort()
        self._sharder.sync.flush_user_writes()
        self._executor.weights.drop()  # a traceback may hold them for long
        self._buffers.reset()

    def close(self) -> None:
        """Autograd calls the users' hooks again: parameters are whole."""
        self._hooks.restore_post_hooks()

    # -- training

    @contextmanager
    def train_step(self) -> Iterator[None]:
        """Surrounds the forward of a training step; in manual optimization, everything else as well.

        Raises:
            RuntimeError: inside another, or while an optimizer steps.
        """
        self._check_transition(
            State.FORWARD, "train_step()", in_train_step="Leave the training step first, then begin the next one"
        )
        self._enter(State.FORWARD, Phase.FORWARD)
        self._in_train_step = self._expects_backward = True
        try:
            self._compiled.allocate()
            self._sharder.memory.allocate_gradients()
            self._executor.begin_training_step()
            self._compiled.prepare()
            self.on_forward_begin()
            self._find_hooks(forward_ran=False)
            self._buffers.before_forward()
            self._sharder.reader.begin_forward()
            with self._compiled.surround():
                yield
            self._buffers.notice()
        finally:
            # The watchdog is left as it was: what failed, failed there; and nobody need announce a backward.
            self.state, self._in_train_step = State.IDLE, False

    def before_backward(self) -> None:
        """Should come before each backward.

        Raises:
            RuntimeError: while an optimizer steps.
        """
        self._check_transition(State.BACKWARD, "before_backward()")
        self._enter(State.BACKWARD, Phase.BACKWARD)
        self._find_hooks(forward_ran=True)
        self._buffers.notice()
        self._compiled.backward_begins()
        self.on_backward_begin()
        self._expects_backward = True

    def on_backward_end(self) -> None:
        """At the end of each backward, announced or not; called by the executor."""
        self._expects_backward = False
        self._sharder.reader.end_forward()  # users' hooks come next
        self._hooks.run_post_hooks(self._executor.gradients.last_attached())

    def after_backward(self) -> None:
        """Should come after each backward: weights that forward read win over what is then written to
        ``param.data``."""
        self.end_backward()
        self._enter(State.IDLE, Phase.BETWEEN)
        self._sharder.sync.before_reading()

    def end_backward(self) -> None:
        """End the backward that other ranks may have made since the training step began, if this rank made none.

        A loss that reaches no weight, or a step without a loss, brings no gradient on this rank. Its gradients count as
        zero: this rank takes part in the collectives of the other ranks' backward. Do nothing if a backward has ended.
        Must be called before this rank uses gradients or enters another collective.
        """
        if not self._expects_backward:
            return
        self._expects_backward = False
        if self._executor.world_size == 1:
            return
        self._enter(State.BACKWARD, Phase.BACKWARD)
        self._executor.gradients.end_empty_backward()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """May surround forward and backward of a micro-batch after which others come before the optimizer steps. With
        ``stage=1`` its gradients stay whole on their ranks until the last one's backward; with several hosts and
        ``cross_host_reduce="step"``, on their hosts; unless a hook of ``register_post_accumulate_grad_hook`` would see
        only a part of each. On every rank alike.

        Raises:
            UnsupportedError: gradients lie over compute copies, which the next micro-batch needs.
        """
        self.on_accumulation_begin()
        check_single_micro_batch(self._sharder.memory.alias_gradients)
        gradients, whole = self._executor.gradients, self._executor.reduces_once
        self.accumulates = True
        if not self._executor.defers or self._hooks.has_post_hooks():
            yield
            self.end_backward()
            return
        self._sharder.memory.allocate_gradients()
        self._sharder.memory.allocate_deferred_gradients(whole)
        gradients.defer(True, whole)
        try:
            yield
            self.end_backward()
        finally:
            gradients.defer(False)

    def finalize_gradients(self) -> None:
        """Before anything is made of gradients: what waits to be reduced is reduced now. Collective; harmless where
        nothing waits, as behind the backward of a last micro-batch."""
        self.end_backward()
        self._executor.gradients.reduce_deferred()

    def end_accumulation(self) -> None:
        """Before other options hold: likewise, where micro-batches were left halfway, and the memory in which gradients
        waited is given back."""
        self.finalize_gradients()
        self._sharder.memory.free_deferred_gradients()

    def before_step(self, stepping: bool = False) -> None:
        """Must come before shards are overwritten, by an optimizer or by whatever does the same (an exchange with
        averages): edits of gathered weights reach them first. ``stepping``: by an optimizer of ours."""
        self._compiled.stepped()
        self._buffers.stepped()
        self._sharder.sync.before_overwriting(stepping)

    def begin_step(self, step: UnderWay) -> None:
        """Gradients are final, and the optimizer's own ``step`` is next.

        Raises:
            RuntimeError: while another optimizer steps.
        """
        if step is not self._step:
            self._check_transition(State.STEP, "the step of an optimizer")
        self.end_backward()
        self._step = step
        self._enter(State.STEP, Phase.STEP)
        self.finalize_gradients()
        self.before_step(stepping=True)

    def end_step(self, step: UnderWay, changed: bool) -> None:
        """After the optimizer's ``step``, whether it succeeded or not. Harmless when repeated.

        changed: there was a step; in the last of several accumulated micro-batches, resident weights are still good
        """
        if step is not self._step and self._step is not None and self._step.in_progress:
            return  # it was refused, and the other one goes on
        self._step = None
        self._expects_backward = self._in_train_step
        self._enter(State.IDLE, Phase.BETWEEN)
        if changed:
            self._sharder.sync.invalidate_copies()
        self._sharder.sync.after_writing()

    # -- evaluation

    def eval_step(self) -> None:
        """Must come before a forward outside of training: weights may have been exchanged since the last one.

        Raises:
            RuntimeError: inside a training step, or while an optimizer steps.
        """
        in_train_step = "Evaluate before or after it: the graphs that its backward needs would be given up"
        self._check_transition(State.EVALUATION, "eval_step()", in_train_step)
        self._enter(State.EVALUATION, Phase.EVALUATION)
        self._sharder.memory.finalize_layout()
        self._compiled.release_memory()
        self._sharder.sync.before_reading()
        self._sharder.sync.invalidate_copies()
        self._buffers.before_forward()

    def after_eval(self) -> None:
        """Should come after such a forward: weights that it read, and that something still holds, would win over what
        is then written to ``param.data``."""
        self._sharder.sync.flush_user_writes()

    # --

    def _find_hooks(self, forward_ran: bool) -> None:
        before = self._hooks.hooked
        self._hooks.find()
        if before or self._hooks.hooked:
            self._compiled.set_hooked_parameters(self._hooks.hooked.values(), forward_ran)

    def _enter(self, state: State, phase: Phase) -> None:
        self.state = state
        self._watchdog.enter(phase)

    def _check_transition(self, wanted: State, what: str, in_train_step: str = "") -> None:
        if self._step is not None and self._step.in_progress:
            way_out = "Let the optimizer make its step first, or end it (end_step())"
        elif (
            self._in_train_step
            and in_train_step
            and (wanted is State.FORWARD or self.state in (State.FORWARD, State.BACKWARD))
        ):
            way_out = in_train_step
        else:
            return
        raise RuntimeError(
            f"{what} was called in the state {self.state.name}, and leads to {wanted.name}, which cannot follow here. "
            f"{way_out}."
        )
