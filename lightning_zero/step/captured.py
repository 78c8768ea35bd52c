"""The whole step as one replay of a CUDA graph, of which the optimizer's own ``step`` sees nothing."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.kernel import StepKernel
from lightning_zero.optim.support import is_torch_optimizer
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.layouts import StepLayouts
from lightning_zero.step.substitute import OwnParams, FlatParams

__all__ = ["CapturedRunner", "reason_not_captured"]


def reason_not_captured(
    optimizer: torch.optim.Optimizer, device: torch.device, capture: bool | str, emulate: bool
) -> str | None:
    """Why the optimizer's step cannot be captured, as it is now; None if it can."""
    if not capture:
        return "it is not to be captured"
    if device.type != "cuda" and not emulate:
        return f"there are no CUDA graphs on device {str(device)!r}"
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    for wide in dtypes & {torch.float64, torch.complex128}:
        return f"replays compute in float32, and it steps parameters of {str(wide).removeprefix('torch.')}"
    pairs = [dtype for dtype in dtypes if dtype.is_complex]
    if pairs and not is_torch_optimizer(optimizer):
        return f"it steps parameters of {str(pairs[0]).removeprefix('torch.')}, which its rule may not take for pairs"
    if not StepKernel.supports(optimizer, optimizer.param_groups):
        return (
            "its update rule is not one that is known here (elementwise ones of torch.optim, no subclasses). "
            "lightning_zero.register_rule makes one known"
        )
    return None


class CapturedRunner:
    """Replays a layout's step once the optimizer itself has made the first, and its state with it.

    Args:
        optimizer: whose update rule is known.
        layouts: of the optimizer.
        device: of all tensors.
        compile_kernels: compile the update with inductor; otherwise it runs op by op.
        ring: through which the state passes that lies on the host; None: it lies on the device.
        captures: whether steps are replays. Otherwise only what the optimizer cannot step by itself is taken: all of a
            layout that has narrow state.

    Attributes:
        replays: steps that were one launch.
    """

    can_clip = can_skip = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layouts: StepLayouts,
        device: torch.device,
        compile_kernels: bool,
        ring: StagingRing | None = None,
        captures: bool = True,
    ) -> None:
        self._optimizer = optimizer
        self._layouts = layouts
        self._device = device
        self._compile = compile_kernels
        self._ring = ring
        self._captures = captures
        self._kernels: WeakKeyDictionary[StepLayout, StepKernel] = WeakKeyDictionary()
        self.replays = 0

    def kernel(self, layout: StepLayout) -> StepKernel | None:
        """What steps this layout; None before it was first taken."""
        return self._kernels.get(layout)

    def forget(self) -> None:
        """Each layout is captured once more; their state stays as it is."""
        self._kernels.clear()

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        if layout in self._kernels:
            return True
        bf16_state = any(run.bf16_state for run in layout.runs)
        # What the optimizer has stepped before and after must not show in how its narrow state is rounded.
        if not bf16_state and (layout.eager_steps == 0 or not self._captures):
            return False
        if not layout.runs:
            return False
        if not StepKernel.supports(self._optimizer, own.groups, layout.runs):
            return False
        moved = [run.move_counts(self._device) for run in layout.runs]
        if any(moved):
            # The others look at the counts where they were, and would step with what they were.
            self._layouts.drop_others(layout)
        self._kernels[layout] = StepKernel(
            self._optimizer, own.groups, layout.runs, self._device, self._compile, self._ring, self._captures
        )
        for run in layout.runs:
            run.export_state(own.state)
        self._layouts.remember_state(own.state)
        return True

    def begin(self, layout: StepLayout, own: OwnParams, max_norm: float | None, skip: Tensor | None) -> FlatParams:
        with torch.no_grad():
            self.replays += self._kernels[layout].run(own.groups, layout.squared, max_norm, skip)
        return FlatParams([], layout.state, [])

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        pass
