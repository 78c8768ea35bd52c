"""Steps one optimizer over the arenas.

Protocol, for each step: ``clip_norm()`` if gradients are to be clipped; ``begin()`` when they are final; the
optimizer's own ``step``; ``end()``. Between begin and end the optimizer sees a few flat parameters in place of its own,
so that whatever it does, it does in a few kernels; or none at all, where the whole step has been replayed: by begin()
inside its ``step(closure)``, otherwise where its ``step`` begins. Its hooks, counters and schedulers notice nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.modules import global_pre_hooks
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.optim.chunks import StateOnHost
from lightning_zero.optim.norms import all_reduce_sum
from lightning_zero.sharding.shard_tensor import no_shard_dispatch, without_shard_dispatch
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.captured import CapturedRunner, reason_not_captured
from lightning_zero.step.chunked_step import ChunkedRunner
from lightning_zero.step.eager import EagerRunner
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.layouts import StepLayouts
from lightning_zero.step.runner import StepRunner
from lightning_zero.step.substitute import FlatParams, OwnParams, ParamSwap
from lightning_zero.step.watch import CHECKED_STEPS, ElementwiseCheck, needs_elementwise_check

__all__ = ["OptimizerStepper"]

log = logging.getLogger(__name__)


class OptimizerStepper:
    """Finds the layout of each step, and the runner that carries it out.

    Args:
        optimizer: of shards.
        sharder: knows them.
        capture: ``"auto"`` or True: where possible; False: never.
        emulate: debugging: do on any device what a captured step does, without a graph.
        host: where the state lies that is as large as the shards; None: on their device.
        narrow: keep it in bfloat16, stochastically rounded, for parameters that are not small.

    Attributes:
        eager_reason: why steps are never captured, in words; None if they are.
        runner: that carried out the last step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharder: Sharder,
        capture: bool | str = "auto",
        emulate: bool = False,
        host: StateOnHost | None = None,
        bf16_state: bool = False,
    ) -> None:
        device = sharder.executor.device
        self._sharder = sharder
        self._may_be_on_host = host is not None  # master shards are where state is
        self._swap = ParamSwap(optimizer)
        self._optimizer = optimizer
        self._checked_steps = 0  # steps
        self._check: ElementwiseCheck | None = None
        self._reads_shapes = False
        self._layouts = StepLayouts(optimizer, sharder, host.memory if host else None, bf16_state)
        self.eager_reason = reason_not_captured(optimizer, device, capture, emulate)
        self._graphs = bool(capture) and (emulate or device.type == "cuda")
        if self.eager_reason is not None:
            log.info("%s steps without a captured graph: %s.", type(optimizer).__name__, self.eager_reason)
        compile_kernels, ring = device.type == "cuda", host.ring if host else None
        self._captured = CapturedRunner(optimizer, self._layouts, device, compile_kernels, ring, self._graphs)
        # The first that takes a layout steps it.
        apart = host is not None or bf16_state
        own: StepRunner = ChunkedRunner(optimizer, self._layouts, host) if apart else EagerRunner(self._layouts)
        self._runners: Sequence[StepRunner] = (self._captured, own) if self._graphs or bf16_state else (own,)
        self.runner: StepRunner | None = None
        self._clip: tuple[StepLayout, float] | None = None  # to be done by the step
        self._step_pre_hook: Any = None  # the hook in which the step begins, behind those of users,
        self._begins_in_step = False  # and whether it still has to

    @property
    def layout(self) -> StepLayout | None:
        """Of the last step."""
        return self._layouts.last

    @property
    def replays(self) -> int:
        """Steps that were one launch."""
        return self._captured.replays

    @property
    def in_progress(self) -> bool:
        """Whether the optimizer's own ``step`` is still to come, or is not over, after :meth:`begin`."""
        return self._swap.shown or self._begins_in_step

    # -- gradients

    @without_shard_dispatch
    def clip_norm(self, max_norm: float, later: bool = False) -> Tensor:
        """Scales gradients to a global 2-norm of at most ``max_norm``; returns the norm before. Collective.

        The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``. Nothing is read on
        the host.

        later: gradients may be scaled while they are used, which saves reading and writing them once more
        """
        self._choose_layouts()
        own = self._swap.own
        layout = self._layouts.current(own)
        squared = layout.sum_squares(captured=self._graphs)
        executor = self._sharder.executor
        all_reduce_sum(
            squared, self._sharder.mesh, partial(executor.collective, "norms of gradients", SequenceId.GATHER)
        )
        norm = squared.sqrt()
        self._clip = layout, max_norm
        if not later or self._has_pre_hooks or not self._choose_runner(layout, own).can_clip:
            self._clip = None
            layout.clip_norm(max_norm)
        return norm

    @without_shard_dispatch
    def clip_value(self, most: float) -> None:
        """Clamps gradients to [-most, most]."""
        self._layouts.current(self._swap.own).clip_value(most)

    # -- stepping

    def prefetch_from_host(self) -> None:
        """State that lies on the host begins to come for a step like the last one."""
        layout = self._layouts.last
        kernel = None if layout is None else self._captured.kernel(layout)
        if kernel is not None:
            kernel.prefetch_from_host()

    def drop_captures(self) -> None:
        """State passes through other buffers from now on."""
        self._captured.forget()

    @contextmanager
    def show_flat_params(self) -> Iterator[None]:
        """Inside, the optimizer's parameters are the flat ones, with their gradients; nothing may be stepped."""
        own = self._swap.own
        with no_shard_dispatch():
            groups = self._layouts.current(own).flat_groups(own.groups)
        with self._swap.swap_groups(groups):
            yield

    def begin(self, skip: Tensor | None = None, in_closure: bool = True) -> None:
        """The gradients are final: the optimizer's ``step`` comes next.

        Args:
            skip: 0-dim float32 on the device; where it is not zero, nothing changes. Only for optimizers that
                ``may_skip``.
            inside: of its ``step(closure)``, whose pre-hooks are over. Otherwise it begins inside, behind them: they
                see what is the optimizer's own, and may change it; if anything raises before, nothing is stepped.
        """
        self.end()
        self._choose_layouts()
        if in_closure:
            self._begin(skip)
            return

        def begin_in_step(*_: Any) -> None:
            if self._begins_in_step:
                self._begins_in_step = False
                self._begin(skip)

        self._begins_in_step, self._step_pre_hook = True, self._optimizer.register_step_pre_hook(begin_in_step)

    @property
    def _has_pre_hooks(self) -> bool:
        own: Any = self._optimizer._optimizer_step_pre_hooks
        return bool(own or global_pre_hooks)

    @without_shard_dispatch
    def _begin(self, skip: Tensor | None) -> None:
        own = self._swap.own
        # Between a clipping that is left to the step and the step, nobody has touched anything.
        clip, self._clip = self._clip, None
        layout, max_norm = clip or (self._layouts.current(own), None)
        runner = self.runner = self._choose_runner(layout, own)
        self._mark_written(layout, False)
        shown = runner.begin(layout, own, max_norm, skip)
        self._swap.swap_in(shown, lambda own: runner.end(layout, own), self._elementwise_check(layout, shown))

    def _elementwise_check(self, layout: StepLayout, shown: FlatParams) -> ElementwiseCheck | None:
        """Return the mode for a step that is not known to treat elements one by one."""
        if not shown.groups or not needs_elementwise_check(self._optimizer):
            return None
        self._checked_steps += 1
        self._check = ElementwiseCheck(self._optimizer, layout)
        return self._check

    def _choose_layouts(self) -> None:
        """Step each parameter by itself while the optimizer's code may ask for shapes."""
        if self._check is not None and self._check.reads_shapes:
            self._reads_shapes = True
        watched = needs_elementwise_check(self._optimizer)
        self._layouts.split_parameters(watched and (self._reads_shapes or self._checked_steps < CHECKED_STEPS))

    @without_shard_dispatch
    def end(self) -> bool:
        """The optimizer has its own parameters again. Harmless when repeated; returns whether there was a step to
        end."""
        if self._step_pre_hook is not None:
            self._step_pre_hook.remove()
            self._begins_in_step, self._step_pre_hook = False, None
        if not self._swap.end():
            return False
        # Flat parameters were written, which no parameter's version shows: a backward that needs the old values would
        # take the new ones, and nobody would know.
        own = self._swap.own
        if self._swap.stepped and self.layout is not None:
            for run in self.layout.runs:
                run.drop_aliased_gradient()
        params = [param for group in own.groups for param in group["params"]]
        if not self._may_be_on_host or self.layout is None:
            torch.autograd.graph.increment_version(params)
            return True
        others = self._sharder.executor.weights.valid_compute_shards()  # of which this was no step
        torch.autograd.graph.increment_version(params)
        self._sharder.executor.weights.mark_compute_shards_written(others, True)
        self._mark_written(self.layout, True)
        return True

    def _mark_written(self, layout: StepLayout, written: bool) -> None:
        """Compute copies of shards on the host: the runner is about to write them, and those that it has written."""
        indices = []
        for run in layout.runs:
            run.copied = run.copied and written
            if run.copy is not None and (run.copied or not written):
                indices += [record.index for record in run.members]
        if indices:
            self._sharder.executor.weights.mark_compute_shards_written(indices, written)

    @without_shard_dispatch
    def may_skip(self) -> bool:
        """Whether ``begin`` can skip the step by what the device knows."""
        own = self._swap.own
        return not self._has_pre_hooks and self._choose_runner(self._layouts.current(own), own).can_skip

    def _choose_runner(self, layout: StepLayout, own: OwnParams) -> StepRunner:
        return next(runner for runner in self._runners if runner.can_step(layout, own))
