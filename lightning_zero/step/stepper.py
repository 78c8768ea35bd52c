"""Steps one optimizer over flat runs of shards.

For each step, call ``clip_norm()`` if gradients are clipped, ``begin()`` when they are final, the optimizer's own
``step``, and ``end()``. Between begin and end the optimizer sees a few flat parameters instead of its own ones, and so
launches few kernels. It sees none if the whole step is replayed: by ``begin()`` in a ``step(closure)``, otherwise at
the beginning of its ``step``. The optimizer's hooks, counters and schedulers work as usual.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.modules import global_post_hooks, global_pre_hooks
from lightning_zero.errors import UnsupportedError
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.optim.flat_runs import StateOnHost
from lightning_zero.optim.grad_norms import all_reduce_sum
from lightning_zero.optim.matrix_exchange import MatrixGroup
from lightning_zero.optim.state_dtypes import NO_ROUNDING, Rounding
from lightning_zero.optim.update_rules import needs_matrices
from lightning_zero.sharding.shard_tensor import no_shard_dispatch, without_shard_dispatch
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.chunked_step import ChunkedRunner
from lightning_zero.step.elementwise_check import (
    CHECKED_STEPS,
    ElementwiseCheck,
    explain_shape_error,
    needs_elementwise_check,
)
from lightning_zero.step.matrix_agreement import MatrixAgreement
from lightning_zero.step.runners import CapturedRunner, EagerRunner, StepRunner, reason_not_captured
from lightning_zero.step.step_layouts import FlatParams, Groups, OwnParams, StepDemands, StepLayout, StepLayouts

log = logging.getLogger(__name__)


class ParamSwap:
    """Swaps ``param_groups`` and ``state`` of one optimizer during its ``step``.

    The optimizer's own ones are restored when ``step`` ends, before users' post-hooks run.

    Attributes:
        stepped: True if ``step`` has ended since the last swap.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own: OwnParams | None = None  # set while flat parameters are shown
        self._flat_params = FlatParams([], defaultdict(dict), [])
        self._before: Groups = []
        self._after: Callable[[OwnParams], None] = lambda own: None
        self._hook: Any = None
        self.stepped = False
        self._around: AbstractContextManager[Any] | None = None

    @property
    def swapped(self) -> bool:
        """True while the optimizer sees flat parameters: its ``step`` is next or in progress."""
        return self._own is not None

    @property
    def own(self) -> OwnParams:
        return self._own or OwnParams(self._optimizer.param_groups, self._optimizer.state)

    def swap_in(
        self,
        flat_params: FlatParams,
        after: Callable[[OwnParams], None],
        around: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Show flat parameters until the optimizer's next ``step`` ends, or until :meth:`end`.

        Args:
            after: Called with the own ones after they are restored.
        """
        self._own, self._flat_params, self._after = self.own, flat_params, after
        self._before = [dict(group) for group in flat_params.groups]
        self._optimizer.param_groups, self._optimizer.state = flat_params.groups, flat_params.state
        self.stepped = False
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self._restore(stepped=True))
        # Users' hooks run after this one.
        hooks: Any = self._optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._hook.id, last=False)
        if around is not None:
            around.__enter__()
            self._around = around

    def end(self) -> bool:
        """Restore the optimizer's own parameters. Idempotent; return True if there was a swap to end."""
        self._restore()
        if self._hook is None:
            return False
        self._hook.remove()
        self._hook = None
        return True

    @contextmanager
    def swap_groups(self, groups: Groups) -> Iterator[None]:
        """Show these groups in this context; the optimizer must not step in it."""
        own = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            yield
        finally:
            self._optimizer.param_groups = own

    def _restore(self, stepped: bool = False) -> None:
        self.stepped = self.stepped or stepped
        if self._own is None:
            return
        if self._around is not None:
            around, self._around = self._around, None
            around.__exit__(None, None, None)
        own, self._own = self._own, None
        self._optimizer.param_groups, self._optimizer.state = own
        for origin, now, before in zip(self._flat_params.origins, self._flat_params.groups, self._before, strict=True):
            # Some optimizers keep counters and averages in their groups.
            changes = {k: v for k, v in now.items() if k != "params" and before.get(k, self) is not v}
            own.groups[origin].update(changes)
        # Chunks may have gradients that were cast for the step.
        self._flat_params, self._before = FlatParams([], defaultdict(dict), []), []
        self._after(own)
        self._after = lambda own: None


class StepGuard:
    """Find steps that hooks make before the announced one, as a pre-hook of the optimizer.

    Args:
        in_progress: Returns True once the announced step has begun.
        check: Called before any other step of the optimizer's own code.
    """

    def __init__(self, in_progress: Callable[[], bool], check: Callable[[], None]) -> None:
        self._in_progress = in_progress
        self._check = check
        self._closure: Any = None

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._closure is None:
            self._closure = closure
        # A subclass calls super().step(closure).
        if not self._in_progress() and (closure is None or closure is not self._closure):
            self._check()


class OptimizerStepper:
    """Finds the layout of each step and the runner for it.

    Args:
        capture: ``"auto"`` or True: capture if possible; False: never.
        emulate: Debugging: compute on any device as a captured step does, without a graph.
        host: Host memory of shard-sized state; None keeps it on the shards' device.
        matrix_bucket_bytes: See :class:`~lightning_zero.optim.step_kernel.StepKernel`.

    Attributes:
        eager_reason: Why steps are never captured; None if they are.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharder: Sharder,
        capture: bool | str = "auto",
        emulate: bool = False,
        host: StateOnHost | None = None,
        rounding: Rounding = NO_ROUNDING,
        matrix_bucket_bytes: int = 1 << 28,
    ) -> None:
        device = sharder.executor.device
        self._sharder, self._weights = sharder, sharder.executor.weights
        self._may_be_on_host = host is not None  # master shards are offloaded only with state
        self._swap = ParamSwap(optimizer)
        self._optimizer = optimizer
        self._checked_steps = 0
        self._check: ElementwiseCheck | None = None
        self._reads_shapes = False
        self._layouts = StepLayouts(optimizer, sharder, host.memory if host else None, rounding)
        self.eager_reason = reason_not_captured(optimizer, device, capture, emulate)
        self._agreement = MatrixAgreement(optimizer, sharder)
        self._graphs = bool(capture) and (emulate or device.type == "cuda")
        if self.eager_reason is not None:
            log.debug(
                "Optimizer step: not captured (optimizer=%s, reason=%s)", type(optimizer).__name__, self.eager_reason
            )
        self._captured = CapturedRunner(
            optimizer,
            self._layouts,
            device,
            device.type == "cuda",
            host,
            self._graphs,
            lambda: MatrixGroup.from_mesh(sharder.mesh, sharder.executor.start_collective),
            matrix_bucket_bytes,
            self._sum_over_ranks if sharder.mesh.shard_group.size > 1 else None,
        )
        # The first runner that can step a layout is used.
        in_chunks = host is not None or rounding.state_dtype is not None
        own: StepRunner = ChunkedRunner(optimizer, self._layouts, host) if in_chunks else EagerRunner(self._layouts)
        # Also if nothing is captured: a group of matrices may be added later.
        self._runners: Sequence[StepRunner] = (self._captured, own)
        self.runner: StepRunner | None = None
        self._clip: tuple[StepLayout, float] | None = None  # clipping left to the step
        self._step_pre_hook: Any = None  # runs after users' pre-hooks
        self._begins_in_step = False  # the pre-hook has not run yet
        self._dropped_gradients = False  # by a step in this training step

    @property
    def layout(self) -> StepLayout | None:
        return self._layouts.last

    @property
    def replays(self) -> int:
        """Number of steps that were one graph launch."""
        return self._captured.replays

    @property
    def update_bytes(self) -> int:
        """Bytes of full updates of matrices that exist between steps."""
        return self._captured.update_bytes

    @property
    def in_progress(self) -> bool:
        """True from :meth:`begin` until the optimizer's own ``step`` has ended."""
        return self._swap.swapped or self._begins_in_step

    def explain_error(self, error: Exception) -> None:
        """Raise :class:`UnsupportedError` if shards may have caused an error of the optimizer's own code."""
        if self._swap.swapped:
            explain_shape_error(self._optimizer, error)

    @without_shard_dispatch
    def clip_norm(self, max_norm: float, later: bool = False) -> Tensor:
        """Scale gradients to a global 2-norm of at most ``max_norm``; return the norm before. Collective.

        The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``. The host does not
        read it.

        Args:
            later: Let the step scale gradients while it uses them, which saves one read and write.
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
    def clip_value(self, limit: float) -> None:
        """Clamp gradients to [-most, most]."""
        self._layouts.current(self._swap.own).clip_value(limit)

    def _sum_over_ranks(self, values: Tensor) -> None:
        collective = partial(self._sharder.executor.collective, "sums over parameters", SequenceId.GATHER)
        all_reduce_sum(values, self._sharder.mesh, collective)

    def prefetch_from_host(self) -> None:
        """Start to copy offloaded state to the device for a step like the last one."""
        layout = self._layouts.last
        kernel = None if layout is None else self._captured.kernel(layout)
        if kernel is not None:
            kernel.prefetch_from_host()

    def forward_begins(self) -> None:
        """Expect new gradients."""
        self._dropped_gradients = False

    def drop_captures(self) -> None:
        """Free captured steps. A step is captured again after one eager step."""
        self._captured.forget()

    @contextmanager
    def show_flat_params(self) -> Iterator[None]:
        """Show the flat parameters and their gradients as the optimizer's; do not step in this context."""
        own = self._swap.own
        with no_shard_dispatch():
            groups = self._layouts.current(own).flat_groups(own.groups)
        with self._swap.swap_groups(groups):
            yield

    def begin(self, skip: Tensor | None = None, in_closure: bool = True) -> None:
        """Make gradients final: the optimizer's ``step`` is next.

        Args:
            skip: 0-dim float32 on the device; if not zero, nothing changes. Only for optimizers that ``may_skip``.
            in_closure: True if called in ``step(closure)``, after the pre-hooks. False begins the step after users'
                pre-hooks: they see the optimizer's own parameters and may change them, and nothing is stepped if one
                raises.

        Raises:
            UnsupportedError: Gradients that this step uses again were dropped by an earlier one.
        """
        self.end()
        if self._dropped_gradients and not any(
            p.grad is not None for group in self._swap.own.groups for p in group["params"]
        ):
            raise UnsupportedError(
                f"{type(self._optimizer).__name__}.step() was called twice after one backward. With grad_aliasing, "
                "gradients use the memory of compute shards, which the first step has overwritten. Pass "
                "Tuning(grad_aliasing=False), or compute the gradients again."
            )
        self._choose_layouts()
        self._begins_in_step = not in_closure

        def before_step(*_: Any) -> None:
            if self._begins_in_step:
                self._begins_in_step = False
                self._begin(skip)
            elif self._swap.stepped:
                self.check_own_step()

        if in_closure:
            self._begin(skip)
        self._step_pre_hook = self._optimizer.register_step_pre_hook(before_step)

    @without_shard_dispatch
    def check_own_step(self) -> None:
        """Raise :class:`UnsupportedError` if the optimizer's own code, which now runs, cannot step its shards."""
        runs = self._layouts.current(self._swap.own).runs
        exchanges = self._may_be_on_host or needs_matrices(self._optimizer)
        aliased = self._dropped_gradients or any(run.aliases_compute_shard for run in runs)
        if exchanges or aliased or any(run.rounds for run in runs):
            raise UnsupportedError(
                f"{type(self._optimizer).__name__}.step() was called again inside a step, as by "
                "on_before_optimizer_step() or a function passed to register_step_pre_hook() or "
                "register_step_post_hook(). Its values are rounded, offloaded, exchanged with other ranks or written "
                "over its gradients once per step. Set `self.automatic_optimization = False`, call `optimizer.step()` "
                "twice in training_step(), and pass Tuning(grad_aliasing=False)."
            )

    @property
    def _has_pre_hooks(self) -> bool:
        own: Any = self._optimizer._optimizer_step_pre_hooks
        return bool(global_pre_hooks) or any(not isinstance(hook, StepGuard) for hook in own.values())

    @property
    def _has_post_hooks(self) -> bool:
        own: Any = self._optimizer._optimizer_step_post_hooks
        return bool(global_post_hooks) or bool(own)

    @without_shard_dispatch
    def _begin(self, skip: Tensor | None) -> None:
        own = self._swap.own
        # Nothing changes between clip_norm(later=True) and the step.
        clip, self._clip = self._clip, None
        layout, max_norm = clip or (self._layouts.current(own), None)
        self._agreement.check(layout, own)
        runner = self.runner = self._choose_runner(layout, own)
        self._mark_written(layout, False)
        flat_params = runner.begin(layout, own, StepDemands(max_norm, skip, self._has_post_hooks))

        def after(own: OwnParams) -> None:
            with no_shard_dispatch():
                try:
                    runner.end(layout, own)
                finally:
                    self._announce_step(layout, own)

        self._swap.swap_in(flat_params, after, self._elementwise_check(layout, flat_params))

    def _elementwise_check(self, layout: StepLayout, flat_params: FlatParams) -> ElementwiseCheck | None:
        """Return a checking mode if the optimizer is not known to be elementwise."""
        if not flat_params.groups or not needs_elementwise_check(self._optimizer):
            return None
        self._checked_steps += 1
        self._check = ElementwiseCheck(self._optimizer, layout)
        return self._check

    def _choose_layouts(self) -> None:
        """Make each parameter a run of its own while the optimizer's code may read shapes."""
        if self._check is not None and self._check.reads_shapes:
            self._reads_shapes = True
        watched = needs_elementwise_check(self._optimizer)
        self._layouts.split_parameters(watched and (self._reads_shapes or self._checked_steps < CHECKED_STEPS))

    @without_shard_dispatch
    def end(self) -> bool:
        """Restore the optimizer's own parameters. Idempotent; return True if there was a step to end."""
        if self._step_pre_hook is not None:
            self._step_pre_hook.remove()
            self._begins_in_step, self._step_pre_hook = False, None
        if not self._swap.end():
            return False
        if self._swap.stepped and self.layout is not None:
            for run in self.layout.runs:
                run.drop_aliased_gradient()
                self._dropped_gradients |= run.aliases_compute_shard
        return True

    def _announce_step(self, layout: StepLayout, own: OwnParams) -> None:
        """Mark what a step has written, before users' post-hooks, which may change weights again."""
        # Writing flat parameters changes no parameter's version: without this, a backward that needs the old values
        # would silently use the new ones.
        params = [param for group in own.groups for param in group["params"]]
        if not any(run.copy is not None for run in layout.runs):
            torch.autograd.graph.increment_version(params)
            return
        still_valid = self._weights.valid_compute_shards()  # not written by this step
        torch.autograd.graph.increment_version(params)
        self._weights.mark_compute_shards_written(still_valid, True)
        self._mark_written(layout, True)

    def _mark_written(self, layout: StepLayout, written: bool) -> None:
        """Mark compute shards that steps write as invalid before a step, or valid if written."""
        indices = []
        for run in layout.runs:
            run.copied = run.copied and written
            if run.copy is not None and (run.copied or not written):
                indices += [record.index for record in run.members]
        if indices:
            self._weights.mark_compute_shards_written(indices, written)

    @without_shard_dispatch
    def may_skip(self) -> bool:
        """Return True if ``begin`` can skip the step by a flag on the device."""
        own = self._swap.own
        return not self._has_pre_hooks and self._choose_runner(self._layouts.current(own), own).can_skip

    def _choose_runner(self, layout: StepLayout, own: OwnParams) -> StepRunner:
        return next(runner for runner in self._runners if runner.can_step(layout, own))
