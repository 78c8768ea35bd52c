"""Runners: the ways to carry out an optimizer's step.

:class:`CapturedRunner` replays a CUDA graph, :class:`EagerRunner` lets the optimizer step flat parameters, and
:class:`~lightning_zero.step.chunked_step.ChunkedRunner` steps them in chunks. The stepper uses the first runner that
can step a layout; the last one can step all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.flat_runs import State, StateOnHost
from lightning_zero.optim.matrix_exchange import ExchangeMemory, MatrixGroup
from lightning_zero.optim.matrix_rules import MatrixRule
from lightning_zero.optim.parameter_sums import of_run
from lightning_zero.optim.reduction_rules import shared_shapes
from lightning_zero.optim.state_dtypes import fill_state
from lightning_zero.optim.step_kernel import StepKernel
from lightning_zero.optim.support import is_torch_optimizer
from lightning_zero.optim.update_rules import AnyRule, Rule, begins_by_rule, needs_matrices, needs_ranks, rule_for
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.step.step_layouts import FlatParams, OwnParams, StepDemands, StepLayout, StepLayouts


class StepRunner(Protocol):
    """One way to step a layout.

    Attributes:
        can_clip: The runner scales gradients while it uses them, which saves one read and write.
        can_skip: The device may decide if anything changes.
    """

    can_clip: bool
    can_skip: bool

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        """Return True if the runner can step this layout now, and prepare the layout at the first call.

        Called before each step and before clipping.
        """
        ...

    def begin(self, layout: StepLayout, own: OwnParams, demands: StepDemands) -> FlatParams:
        """Run before the optimizer's own ``step``.

        Args:
            layout: A layout for which :meth:`can_step` returned True.
            own: The optimizer's own groups and state.

        Returns:
            The parameters and state that the optimizer steps by itself.
        """
        ...

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        """Run after the optimizer's own ``step``, with its own parameters restored."""
        ...


class EagerRunner:
    """Shows flat parameters to the optimizer, and copies their state to its own parameters."""

    can_clip = can_skip = False

    def __init__(self, layouts: StepLayouts) -> None:
        self._layouts = layouts

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        return True

    def begin(self, layout: StepLayout, own: OwnParams, demands: StepDemands) -> FlatParams:
        assert demands.skip is None, "only the captured runner can skip"
        layout.prepare_eager_step(own.state, demands.max_norm)
        flat = layout.flat_groups(own.groups)
        layout.state.update(_shared_state(own.state))
        return FlatParams(flat, layout.state, range(len(flat)))

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        for run in layout.runs:
            run.state = layout.state[run.param]
        layout.finish_eager_step(own.state)
        own.state.update(_shared_state(layout.state))
        self._layouts.remember_state(own.state)


def _shared_state(state: State) -> dict[Any, Any]:
    """Return state that an optimizer keeps once for all parameters, such as MADGRAD's step count."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def reason_not_captured(
    optimizer: torch.optim.Optimizer, device: torch.device, capture: bool | str, emulate: bool
) -> str | None:
    """Return why the optimizer's step cannot be captured at present; None if it can."""
    if not capture:
        return "capture is switched off"
    if device.type != "cuda" and not emulate:
        return f"there are no CUDA graphs on device {str(device)!r}"
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    for wide in dtypes & {torch.float64, torch.complex128}:
        return f"replays compute in float32, and it steps parameters of {str(wide).removeprefix('torch.')}"
    pairs = [dtype for dtype in dtypes if dtype.is_complex]
    if pairs and not is_torch_optimizer(optimizer):
        return f"it steps parameters of {str(pairs[0]).removeprefix('torch.')}, which its rule may not treat as pairs"
    rules = [rule_for(optimizer, group) for group in optimizer.param_groups]
    if any(isinstance(rule, MatrixRule) and not rule.captured for rule in rules):
        return "its rule makes the host wait for the device"
    if not StepKernel.supports(optimizer, optimizer.param_groups):
        return (
            "its update rule is not known (only elementwise optimizers of torch.optim, no subclasses). "
            "Register it with lightning_zero.register_rule"
        )
    return None


class CapturedRunner:
    """Replays a layout's step, the first one, too, if the rules tell how state begins.

    Otherwise the optimizer itself has made the first step, and with it the state.

    Args:
        compile_kernels: Compile the update with Inductor; otherwise run it op by op.
        host: Host memory of the state; None if state is on the device.
        captures: Replay steps. If False, only layouts that the optimizer cannot step itself are stepped: those with
            rounded values or matrices.
        make_matrix_group: Returns the ranks that hold each matrix together.
        matrix_bucket_bytes: See :class:`StepKernel`.
        sum_over_ranks: See :class:`StepKernel`.

    Attributes:
        replays: Number of steps that were one graph launch.
    """

    can_clip = can_skip = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layouts: StepLayouts,
        device: torch.device,
        compile_kernels: bool,
        host: StateOnHost | None = None,
        captures: bool = True,
        make_matrix_group: Callable[[], MatrixGroup | None] = lambda: None,
        matrix_bucket_bytes: int = 1 << 28,
        sum_over_ranks: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._layouts = layouts
        self._device = device
        self._compile = compile_kernels
        self._host = host
        self._captures = captures
        self._make_matrix_group, self._matrix_bucket_bytes = make_matrix_group, matrix_bucket_bytes
        self._sum_over_ranks = sum_over_ranks
        self._matrix_memory: ExchangeMemory = {}
        self._kernels: WeakKeyDictionary[StepLayout, StepKernel] = WeakKeyDictionary()
        self.replays = 0

    def kernel(self, layout: StepLayout) -> StepKernel | None:
        """Return the kernel of this layout; None before its first step here."""
        return self._kernels.get(layout)

    @property
    def update_bytes(self) -> int:
        """Bytes of full updates of matrices that exist between steps."""
        buffers = sum(tensor.nbytes for tensors in self._matrix_memory.values() for tensor in tensors)
        return buffers + sum(kernel.workspace_bytes for kernel in self._kernels.values())

    def forget(self) -> None:
        """Capture each layout again at its next step; state stays."""
        self._kernels.clear()
        self._matrix_memory.clear()

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        if layout in self._kernels:
            return True
        rounds = any(run.rounds for run in layout.runs)
        matrices = needs_matrices(self._optimizer)
        # An optimizer's own step takes more memory: for gradients in the weights' dtype, and temporary tensors.
        begins = matrices or all(begins_by_rule(rule_for(self._optimizer, own.groups[r.group])) for r in layout.runs)
        # The rounding must not depend on steps made by the optimizer itself.
        if not rounds and not matrices and not (self._captures and (begins or layout.eager_steps > 0)):
            return False
        if not layout.runs:
            return False
        name = type(self._optimizer).__name__
        if matrices or (begins and StepKernel.supports(self._optimizer, own.groups)):
            self._make_state(layout, own, matrices)
        if not StepKernel.supports(self._optimizer, own.groups, layout.runs):
            if matrices:
                raise UnsupportedError(
                    f"{name} cannot step these parameters: each group needs a rule, and complex parameters are not "
                    "supported. Give them to another optimizer."
                )
            if any(run.rounds_param for run in layout.runs):  # the optimizer itself would round to the nearest
                raise UnsupportedError(
                    f"bf16_stochastic_round=True needs the state of {name} as its rule names it, in tensors. Load the "
                    "state of the same optimizer, or leave bf16_stochastic_round out."
                )
            return False
        moved = [run.move_counts(self._device) for run in layout.runs]
        if any(moved):
            # The other layouts view the old counts.
            self._layouts.drop_others(layout)
        self._kernels[layout] = StepKernel(
            self._optimizer,
            own.groups,
            layout.runs,
            self._device,
            self._compile,
            None if self._host is None else self._host.ring,
            self._captures,
            self._make_matrix_group() if matrices else None,
            self._matrix_bucket_bytes,
            self._matrix_memory,
            self._sum_over_ranks,
        )
        for run in layout.runs:
            run.export_state(own.state)
        self._layouts.remember_state(own.state)
        return True

    def _make_state(self, layout: StepLayout, own: OwnParams, matrices: bool) -> None:
        """Make the state that the rules read, as far as it is missing.

        Other optimizers of runs that are not rounded complete state that they have begun, such as loaded state.
        """
        memory = None if self._host is None else self._host.memory
        for run in layout.runs:
            group = own.groups[run.group]
            rule = rule_for(self._optimizer, group)
            if rule is None:
                continue
            rule = of_run(rule, run)
            initial = rule.initial(group) if isinstance(rule, Rule) and rule.initial is not None else {"step": 0.0}
            counts = [*(["step"] if isinstance(rule, Rule) and "step" in initial else []), *rule.counts]
            names = rule.state
            if run.state and not matrices and not run.rounds_param:
                counts, names = [name for name in counts if name in run.counts], ()
            if run.rounds and "step" not in (*counts, *run.counts):
                counts.append(ROUNDING_COUNT)
            for name in counts:  # first, as in state that torch's optimizers make
                if name not in run.counts:
                    number = run.state.get(name)  # old checkpoints have counts that are no tensors
                    begin = number if isinstance(number, int | float) else initial.get(name, 0.0)
                    run.state[name] = torch.zeros((), dtype=torch.float32, device=self._device).fill_(begin)
            for name in names:
                new = run.allocate_state(name, run.stored_dtypes.get(name, run.param.dtype), memory)
                fill_state(new, initial.get(name, 0.0))
            run.export_state(own.state)
            if needs_ranks(rule):
                run.shared = [
                    self._make_shared_state(rule, record, own.state, run.rounds_param) for record in run.members
                ]

    def _make_shared_state(
        self, rule: AnyRule, record: ShardedParameter, state: State, rounds_param: bool
    ) -> dict[str, Tensor]:
        """Return the state of a parameter that every rank stores in full; make it as far as it is missing."""
        entries = state[record.param]
        shapes = shared_shapes(rule, record.layout.shape)
        for name, shape in shapes.items():
            old = entries.get(name)
            if old is None:
                # Few elements, which all ranks store: they would not be rounded stochastically.
                dtype = torch.float32 if rounds_param else record.param.dtype
                entries[name] = torch.zeros(shape, dtype=dtype, device=self._device)
            elif old.shape != shape:
                raise ValueError(
                    f"The state {name!r} of {record.name!r} has shape {tuple(old.shape)}, but its rule keeps "
                    f"{tuple(shape)}. Load the state of the same optimizer."
                )
            else:
                entries[name] = old.to(device=self._device)
        return {name: entries[name] for name in shapes}

    def begin(self, layout: StepLayout, own: OwnParams, demands: StepDemands) -> FlatParams:
        with torch.no_grad():
            self.replays += self._kernels[layout].run(own.groups, layout.squared, *demands)
        return FlatParams([], layout.state, [])

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        pass
