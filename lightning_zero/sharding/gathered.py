"""What ``module.weight`` answers outside of a training step's forward, about gradient and flag of its parameter:
a gathered copy knows nothing of these.

In a forward it is a plain tensor, which costs nothing and surprises nobody's code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.compat.tensors import DisableTorchFunctionSubclass, disabled_torch_function
from lightning_zero.errors import UnsupportedError

if TYPE_CHECKING:
    from lightning_zero.sharding.weight_reader import WeightReader

__all__ = ["GatheredWeight"]


class Same(Tensor):
    """The elements of ``module.weight == param`` for one parameter: sets and dicts find it by either."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return True


class GatheredWeight(Tensor):
    """A whole weight that says of ``grad`` and ``requires_grad`` what its parameter says. Results computed with it are
    plain tensors."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    _zero_param: nn.Parameter
    _zero_view: WeightReader

    @staticmethod
    def of(weight: Tensor, param: nn.Parameter, view: WeightReader) -> Tensor:
        """The same object."""
        weight.__class__ = GatheredWeight
        weight.__dict__.update(_zero_param=param, _zero_view=view)
        return weight

    # -- as what the parameter passes for

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """Have ``isinstance(module.weight, nn.Parameter)`` be True, but keep modules from registering it."""
        code, name = sys._getframe(2).f_code.co_name, sys._getframe(2).f_globals.get("__name__")
        return name != "torch.nn.modules.module" or code not in ("__setattr__", "register_parameter")

    def __hash__(self) -> int:
        with DisableTorchFunctionSubclass():
            return hash(self._zero_param)

    def __eq__(self, other: object) -> Any:
        result = Tensor.__eq__(self, other)  # type: ignore[arg-type]
        if isinstance(other, GatheredWeight) and other._zero_param is self._zero_param and type(result) is Tensor:
            result.__class__ = Same
        elif other is self._zero_param:
            result.__dict__["_zero_same"] = True
        return result

    # -- of the parameter

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """None where the parameter has none; with one rank the gradient itself, whole.

        Raises:
            UnsupportedError: its gradient lies in shards, one on each rank.
        """
        with DisableTorchFunctionSubclass():
            grad, record = self._zero_param.grad, self._zero_view.find_record(self._zero_param)
            if grad is None:
                return None
            if record is not None and record.layout.world_size == 1:
                return record.layout.full_view(grad.as_subclass(Tensor).view(-1))
        raise self._no_gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise self._no_gradient()

    def _no_gradient(self) -> UnsupportedError:
        record = self._zero_view.find_record(self._zero_param)
        name = "weight" if record is None else record.name
        return UnsupportedError(
            f"{name!r} was gathered when it was read, and its gradient is not: each rank has a shard. Take "
            f"`param.grad` of the registered parameter, `dict(self.named_parameters())[{name!r}].grad`: norms, sums "
            "and the like of it are those of the whole gradient; what changes it element by element may be done "
            "there, on every rank."
        )

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return self._zero_param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> GatheredWeight:
        """Of the parameter."""
        with DisableTorchFunctionSubclass():
            self._zero_param.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:  # type: ignore[override]
        """Register the hook on the parameter."""
        with DisableTorchFunctionSubclass():
            return self._zero_param.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:  # type: ignore[override]
        """Register the hook on the parameter."""
        with DisableTorchFunctionSubclass():
            return self._zero_param.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        with DisableTorchFunctionSubclass():
            copy.requires_grad_(self._zero_param.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # a file holds the values, and no engine
