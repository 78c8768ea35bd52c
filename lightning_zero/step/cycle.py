"""State machine of a training step, and the work at each transition.

``trainer.fit`` repeats IDLE -> FORWARD -> BACKWARD -> IDLE -> STEP -> IDLE. Other orders are valid: several backwards
for one step (accumulation), forward, backward and step of several optimizers in one ``train_step`` (manual
optimization), a step without a backward, and evaluation between any two. An exception may end any of them early.

:class:`StepCycle` raises for orders that lose data: a training step or an evaluation inside a training step would free
the graphs and weights that its backward needs. A forward, a backward, an evaluation or another optimizer's step between
:meth:`StepCycle.begin_step` and the optimizer's own ``step`` would change the final gradients.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_zero.compile.session import CompiledStepHooks
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Phase, Watchdog
from lightning_zero.sharding.buffers import BufferBroadcast
from lightning_zero.sharding.flat_memory import check_single_micro_batch
from lightning_zero.sharding.grad_hooks import GradientHooks
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.stepper import OptimizerStepper

log = logging.getLogger(__name__)

Callback = Callable[[], None]


class State(enum.Enum):
    """State of an engine in its cycle.

    FORWARD: in ``train_step`` until a backward begins. BACKWARD: from ``before_backward`` to ``after_backward``. STEP:
    from final gradients until the optimizer has stepped. EVALUATION: from ``eval_step`` until another state. IDLE:
    between them.
    """

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    STEP = enum.auto()
    EVALUATION = enum.auto()


@dataclass
class StepEvents:
    """Callbacks at points of the cycle. Parts of the engine append theirs when they are built."""

    forward_begin: list[Callback] = field(default_factory=list)
    backward_begin: list[Callback] = field(default_factory=list)
    accumulation_begin: list[Callback] = field(default_factory=list)


class StepCycle:
    """Propagates user writes to shards, invalidates weight copies and sets the watchdog's phase.

    Attributes:
        events: Callbacks of the parts that act at the begin of a forward, a backward or an accumulation.
        accumulates: True once the caller has used :meth:`accumulating`.
    """

    def __init__(
        self,
        executor: Executor,
        watchdog: Watchdog,
        sharder: Sharder,
        buffers: BufferBroadcast,
        compiled: CompiledStepHooks,
    ) -> None:
        self.state = State.IDLE
        self.accumulates = False
        self.events = StepEvents()
        self._in_train_step = False
        self._step: OptimizerStepper | None = None  # the one that began last
        self._expects_backward = False  # no backward has ended since a training step began or an optimizer stepped
        self._executor = executor
        self._watchdog = watchdog
        self._sharder = sharder
        self._buffers = buffers
        self._compiled = compiled
        self._hooks = GradientHooks(sharder)

    def begin_stage(self) -> None:
        """Begin a stage: from here on the other ranks notice if this rank does not arrive."""
        self._watchdog.begin()
        self._enter(State.IDLE, Phase.SETUP)
        self._compiled.begin_stage()

    def clean_up(self) -> None:
        """End a stage and free its memory. After an exception, log cleanup errors instead of raising them.

        Every call fails once a device is lost, and users must see the first error.
        """
        self._enter(State.IDLE, Phase.OUTSIDE)
        self._sharder.reader.end_forward()
        try:
            self.reset()
            self._executor.gradients.release_buffers()
        except RuntimeError as error:
            if not self._watchdog.failed:
                raise
            log.warning("Cleanup after the failed step also failed (%s: %s).", type(error).__name__, error)

    def reset(self) -> None:
        """Drop unfinished work and gathered weights after an exception. Not collective."""
        self.state, self._in_train_step, self._step = State.IDLE, False, None
        self._expects_backward = False
        self._compiled.reset()
        self._executor.gradients.abort()
        self._sharder.sync.flush_user_writes()
        self._executor.weights.drop()  # a traceback may keep them alive for long
        self._buffers.reset()

    def close(self) -> None:
        """Give the users' gradient hooks back to autograd: parameters are unsharded."""
        self._hooks.restore_post_hooks()

    @contextmanager
    def train_step(self) -> Iterator[None]:
        """Surround the forward of a training step; in manual optimization also backward and optimizer steps.

        Raises:
            RuntimeError: The caller is in another training step, or an optimizer step is in progress.
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
            _run(self.events.forward_begin)
            self._find_hooks(forward_ran=False)
            self._buffers.before_forward()
            self._sharder.reader.begin_forward()
            with self._compiled.surround():
                yield
            self._buffers.notice()
        finally:
            # Keep the watchdog's phase: an error belongs to the phase in which it was raised, and callers may omit
            # before_backward().
            self.state, self._in_train_step = State.IDLE, False

    def before_backward(self) -> None:
        """Prepare for a backward. Recommended before each one."""
        self._check_transition(State.BACKWARD, "before_backward()")
        self._enter(State.BACKWARD, Phase.BACKWARD)
        self._find_hooks(forward_ran=True)
        self._buffers.notice()
        self._compiled.backward_begins()
        _run(self.events.backward_begin)
        self._expects_backward = True

    def on_backward_end(self) -> None:
        """Finish a backward. The executor calls this at the end of each one, announced or not."""
        self._expects_backward = False
        self._sharder.reader.end_forward()  # users' hooks run next
        self._hooks.run_post_hooks(self._executor.gradients.last_attached())

    def after_backward(self) -> None:
        """Propagate user writes of gathered weights. Call after each backward.

        Otherwise pending writes of gathered weights overwrite later writes to ``param.data``.
        """
        self.end_backward()
        self._enter(State.IDLE, Phase.BETWEEN)
        self._sharder.sync.before_reading()

    def end_backward(self) -> None:
        """Take part in the other ranks' backward if this rank has made none since the training step began.

        A loss that reaches no weight, or a step without a loss, gives no gradient on this rank. Its gradients count as
        zero. Do nothing if a backward has ended. Must be called before this rank uses gradients or enters another
        collective.
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
        """Surround forward and backward of a micro-batch that is not the last one before the optimizer step.

        With ``stage=1``, gradients stay full on their ranks until the last micro-batch's backward. With several hosts
        and ``cross_host_reduce="step"``, they stay on their hosts. Neither applies if a
        ``register_post_accumulate_grad_hook`` hook exists, which would see partial gradients. Use it on all ranks
        alike.

        Raises:
            UnsupportedError: Gradients alias the compute shards, which the next micro-batch needs.
        """
        _run(self.events.accumulation_begin)
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
        """Reduce the deferred gradients, if any. Call before reading gradients. Collective."""
        self.end_backward()
        self._executor.gradients.reduce_deferred()

    def end_accumulation(self) -> None:
        """Finish an interrupted accumulation before options change, and free the memory of deferred gradients."""
        self.finalize_gradients()
        self._sharder.memory.free_deferred_gradients()

    def before_step(self, stepping: bool = False) -> None:
        """Propagate user writes of gathered weights. Call before shards are overwritten.

        Args:
            stepping: True for an optimizer of this engine; False for other writers, such as an exchange with averages.
        """
        self._compiled.stepped()
        self._buffers.stepped()
        self._sharder.sync.before_overwriting(stepping)

    def begin_step(self, step: OptimizerStepper) -> None:
        """Make gradients final: the optimizer's own ``step`` is next."""
        if step is not self._step:
            self._check_transition(State.STEP, "the step of an optimizer")
        self.end_backward()
        self._step = step
        self._enter(State.STEP, Phase.STEP)
        self.finalize_gradients()
        self.before_step(stepping=True)

    def end_step(self, step: OptimizerStepper, changed: bool) -> None:
        """Finish an optimizer step, successful or not. Idempotent.

        Args:
            changed: True if the optimizer stepped. If False, unsharded weights in the cache stay valid.
        """
        if step is not self._step and self._step is not None and self._step.in_progress:
            return  # this step was rejected, and the other one continues
        self._step = None
        self._expects_backward = self._in_train_step
        self._enter(State.IDLE, Phase.BETWEEN)
        if changed:
            self._sharder.sync.invalidate_copies()
            self._compiled.end_step(forward_follows=self._in_train_step)
        self._sharder.sync.after_writing()

    def eval_step(self) -> None:
        """Prepare for a forward outside of training: weights may have changed since the last one.

        Raises:
            RuntimeError: The caller is in a training step, or an optimizer step is in progress.
        """
        in_train_step = "Evaluate before or after it: the graphs that its backward needs would be given up"
        self._check_transition(State.EVALUATION, "eval_step()", in_train_step)
        self._enter(State.EVALUATION, Phase.EVALUATION)
        self._sharder.memory.finalize_layout()
        self._compiled.release_memory()
        self._sharder.sync.before_reading()
        self._sharder.sync.invalidate_copies()
        self._compiled.before_evaluation()
        self._buffers.before_forward()

    def after_eval(self) -> None:
        """Propagate user writes after an evaluation forward, so that they do not overwrite later writes to
        ``param.data``.
        """
        self._sharder.sync.flush_user_writes()

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


def _run(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        callback()
