"""Track a user's training loop for one model and its optimizers.

The Trainer announces steps; a loop only calls the model. A forward with gradients begins a training step, or continues
one whose backward is still pending. A forward without gradients is evaluation, or part of a pending step (for example a
target that the model computes).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric import wrappers
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.strategy_base import add_error_notes
from lightning_zero.native.watchdog import Phase
from lightning_zero.report.engine_report import startup_summary
from lightning_zero.report.startup_timer import StartupTimer


class LoopTracker:
    """Announce forwards, backwards and steps of one model to its engine.

    Attributes:
        has_trained: True after the first training step began.
    """

    def __init__(self, engine: Engine, show: Callable[[str], None]) -> None:
        self.engine = engine
        self.has_trained = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        optimizers = self._optimizers  # not self: the timer would keep the model alive
        self._start = StartupTimer(
            lambda: engine.session.progress.metrics,
            lambda: "" if _is_unsharded(engine) else startup_summary(engine, _live_optimizers(optimizers)),
        )
        self._show = show
        self._in_forward = False
        self._backward_pending = False
        # A short loop ends before the timer's lines, and its end is not announced.
        self._finalizer = weakref.finalize(self, _show_all, show, self._start)

    @property
    def is_unsharded(self) -> bool:
        """Return True after the model is plain again."""
        return _is_unsharded(self.engine)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the model's optimizers in the order of their setup, which is the same on every rank."""
        return _live_optimizers(self._optimizers)

    def add(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    # -- steps

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround each call of the model."""
        if self._in_forward:  # the model calls itself
            yield
            return
        training = torch.is_grad_enabled() or self._backward_pending
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # Shards must not become inference tensors, which training could not use afterwards.
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
        self.leave()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround each backward.

        Raises:
            UnsupportedError: Compiled code does not support the backward; it replaces torch's error.
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
        self.leave()

    def after_step(self) -> None:
        """Forget a pending backward after an optimizer step: its forward used older weights."""
        self._backward_pending = False
        self.leave()

    def leave(self) -> None:
        """Return to the user's code. The watchdog does not expect another call, since the loop may have ended."""
        self._start.pause()
        self.engine.watchdog.enter(Phase.USER_CODE)

    def fail(self, error: BaseException) -> None:
        """Report an exception that ends this process to the other ranks."""
        self._finalizer.detach()
        self.engine.watchdog.fail(error)

    def reset(self, error: BaseException) -> None:
        """Drop the unfinished step after an exception."""
        add_error_notes(error, self.engine)
        self._backward_pending = False
        self.engine.cycle.reset()


def _is_unsharded(engine: Engine) -> bool:
    return engine.module is None or engine_of(engine.module) is not engine


def _show_all(show: Callable[[str], None], start: StartupTimer) -> None:
    for line in start.ends():
        show(line)


def _live_optimizers(references: list[weakref.ref[Optimizer]]) -> list[Optimizer]:
    return [optimizer for reference in references if (optimizer := reference()) is not None]


class ShardedModule(nn.Module):
    """Announce each call of a module, in whose place Fabric calls this, to a :class:`LoopTracker`."""

    def __init__(self, module: nn.Module, loop: LoopTracker) -> None:
        super().__init__()
        self.module = module
        self.loop = loop

    # Fabric recompiles a module that the user had compiled, around this one; the strategy compiles inside.
    @override
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.loop.is_unsharded:
            return self._target()(*args, **kwargs)
        with self.loop.forward():
            return self._target()(*args, **kwargs)

    def _target(self) -> Any:
        """Return the module, or the method of it that Fabric puts in place of ``forward`` (``training_step``).

        The modules that such a method calls are compiled then, and its logging stays eager.
        """
        forward = self.module.forward
        return forward if getattr(forward, "__module__", None) == wrappers.__name__ else self.module


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the user's own module."""
    return module.module if isinstance(module, ShardedModule) else module
