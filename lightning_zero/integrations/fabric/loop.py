"""Where a user's own loop is in a training step.

The Trainer says when a step begins. A loop only calls the model: a forward with gradients begins a training step, or
goes on with one whose backward has not come yet; one without is an evaluation, or a part of such a step (a target
that the model computes for itself).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.optim import Optimizer

from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.oom_hint import explain
from lightning_zero.report.engine_report import startup_summary
from lightning_zero.report.startup_timer import StartupTimer

__all__ = ["LoopTracker"]


class LoopTracker:
    """Tells one engine what happens to its model.

    Args:
        engine: of a model that is sharded.
        compiler: the backend, by the name that torch has for it.
        show: a line to the user.

    Attributes:
        begun: there was a training step.
    """

    def __init__(self, engine: Engine, compiler: str, show: Callable[[str], None]) -> None:
        self.engine = engine
        self.has_trained = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        steppers = self._optimizers  # a clock that held this loop would keep the model after its last user
        self._start = StartupTimer(lambda: engine.session.progress.metrics, compiler, lambda: _run_summary(engine, steppers))
        self._show = show
        self._in_forward = False  # of a forward
        self._backward_pending = False  # a backward

    @property
    def is_unsharded(self) -> bool:
        """Whether the model is a plain one again."""
        module = self.engine.module
        return module is None or engine_of(module) is not self.engine

    @property
    def optimizers(self) -> list[Optimizer]:
        """That step its parameters, in the order of their setup, which is the same on every rank."""
        return _live_optimizers(self._optimizers)

    def add(self, optimizer: Optimizer) -> None:
        """It steps these parameters from now on."""
        self._optimizers.append(weakref.ref(optimizer))

    # -- steps

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds each call of the model.

        Raises:
            RuntimeError: while an optimizer steps.
        """
        if self._in_forward:  # the model calls itself
            yield
            return
        training = torch.is_grad_enabled() or self._backward_pending
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # What is made here must not be an inference tensor, which training could not use afterwards.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            stack.enter_context(self._training() if training else self._evaluation())
            stack.callback(setattr, self, "_in_forward", False)
            self._in_forward = True
            yield

    @contextmanager
    def _training(self) -> Iterator[None]:
        for line in () if self._backward_pending else self._start.batch():
            self._show(line)
        with self.engine.cycle.train_step():
            self.has_trained = True
            try:
                yield
            except BaseException as error:
                self.reset(error)
                raise
            self._backward_pending = self._backward_pending or torch.is_grad_enabled()

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        self.engine.cycle.eval_step()
        yield
        self.engine.cycle.after_eval()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds each backward.

        Raises:
            RuntimeError: while an optimizer steps.
            UnsupportedError: in place of torch's error, where compiled code is asked for more than it can.
        """
        self.engine.cycle.before_backward()
        try:
            with self.engine.session.explain_errors():
                yield
        except BaseException as error:
            self.reset(error)
            raise
        self._backward_pending = False
        self.engine.cycle.after_backward()

    def after_step(self) -> None:
        """An optimizer has stepped: what was computed before is of older weights."""
        self._backward_pending = False

    def reset(self, error: BaseException) -> None:
        """After an exception: what is half done is dropped, and the next step begins anew."""
        explain(error, self.engine)
        self._backward_pending = False
        self.engine.cycle.reset()


def _live_optimizers(references: list[weakref.ref[Optimizer]]) -> list[Optimizer]:
    return [optimizer for reference in references if (optimizer := reference()) is not None]


def _run_summary(engine: Engine, optimizers: list[weakref.ref[Optimizer]]) -> str:
    return startup_summary(engine, _live_optimizers(optimizers))
