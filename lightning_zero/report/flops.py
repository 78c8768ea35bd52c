"""Count the floating-point operations of code that runs eagerly, by torch's own formulas.

``torch.utils.flop_counter.FlopCounterMode`` is not used: a formula that raises would fail the training step there, it
counts no attention on CPUs, and it puts hooks on all modules, whose calls the engine records in that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zero.compat.tensors import TorchDispatchMode
from lightning_zero.profiling.node_costs import op_flops


class FlopCount(TorchDispatchMode):
    """Counts while the mode is active, also in backward passes on autograd's threads.

    Attributes:
        total: operations of this rank so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += op_flops(func, args, kwargs or {}, result)
        return result
