"""Values for modules that were built on the meta device: their own ``reset_parameters()`` gives them, one module at a
time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.full import gather_full
from lightning_zero.sharding.module_patching import SHAPES
from lightning_zero.sharding.record import Records

__all__ = ["Materialiser"]


class Materialiser:
    """Materialises modules and remembers which parameter replaces which: ties are kept by the identity of the object,
    and the other modules of a tie still have the one before.

    Args:
        records: of the parameters that are sharded already.
        device: where values are to be.
    """

    def __init__(self, records: Records, device: torch.device) -> None:
        self._records = records
        self._device = device
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the first is held, so that its id stays its

    def latest(self, param: nn.Parameter) -> nn.Parameter:
        """What stands for ``param`` now."""
        return self._replaced.get(id(param), (param, param))[1]

    def forget(self) -> None:
        """All ties are made."""
        self._replaced.clear()

    def values(self, module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
        """Gives the parameters and buffers that ``module`` owns itself values on the device; returns its parameters,
        by key. Collective where one of them is sharded already.

        Raises:
            UnsupportedError: the module has no ``reset_parameters()``.
        """
        reset = _reset_of(module, name)
        before = dict(module._parameters)
        device, shapes = self._device, module.__dict__.get(SHAPES, {})
        already = {key: self._records.find(param) for key, param in before.items() if param is not None}
        for key, param in before.items():
            record = already.get(key)
            if record is not None:
                # Tied to a module that came before: whole for a while, since reset_parameters() looks at its shape.
                module._parameters[key] = nn.Parameter(gather_full(record), record.param.requires_grad)
                shapes[key] = None
            elif param is not None and param.is_meta:
                module._parameters[key] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
        with torch.no_grad():
            reset()
        for key, record in already.items():
            if record is not None:
                module._parameters[key] = record.param
                shapes[key] = tuple(record.layout.shape)
        for key, old in before.items():
            new = module._parameters[key]
            if old is not None and new is not None and new is not old:
                new.__dict__.update(old.__dict__)
                new._backward_hooks = old._backward_hooks
                new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
                self._replaced[id(old)] = (old, new)
        return [(key, param) for key, param in module._parameters.items() if param is not None]


def _reset_of(module: nn.Module, name: str) -> Any:
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        raise UnsupportedError(
            f"Module {name or 'root'!r} ({type(module).__name__}) has parameters on the meta device but no "
            "reset_parameters() to give them values. Add that method, or build the module inside configure_model() "
            "without the meta device: lightning_zero shards each layer as soon as it is built."
        )
    return reset
