"""Let PEFT adapt single parameters of sharded modules, such as stacked experts.

``LoraConfig(target_parameters=...)`` selects them. PEFT registers a parametrization during each forward, which moves
the parameter out of its module. A sharded module reads parameters through properties. :func:`_add_deltas` gives the
property a tensor to add instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_zero.compat.peft_private import ACTIVATE_ADAPTERS

# Module attribute: parameter name -> tensor that reads add to the weight; None outside of the adapter's forward.
DELTAS = "_zero_deltas"


def mark_adapted_parameters(root: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that PEFT adapts, and give them :data:`DELTAS`.

    Adapters that are added later are not found.
    """
    wrapper: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if wrapper is None or not hasattr(wrapper, ACTIVATE_ADAPTERS):
        return []
    found = {}
    for module in root.modules():
        if isinstance(module, wrapper):
            base = module.get_base_layer()
            base.__dict__.setdefault(DELTAS, {})[module.parameter_name] = None
            found[id(base)] = base
    if found and not hasattr(getattr(wrapper, ACTIVATE_ADAPTERS), "_zero_original"):
        setattr(wrapper, ACTIVATE_ADAPTERS, _replace(getattr(wrapper, ACTIVATE_ADAPTERS)))
    return list(found.values())


def _replace(original: Callable[..., Any]) -> Callable[..., Any]:
    def activate(self: Any, active_adapters: Sequence[str]) -> AbstractContextManager[None]:
        sharded = self.get_base_layer().__dict__.get(DELTAS) is not None
        return (_add_deltas if sharded else original)(self, active_adapters)

    activate._zero_original = original  # type: ignore[attr-defined]
    return activate


@contextmanager
def _add_deltas(wrapper: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Inside, reads of the wrapped parameter add the deltas of the active adapters."""
    total: Tensor | None = None
    for adapter in active_adapters:
        if adapter in wrapper.lora_A:
            delta = wrapper.get_delta_weight(adapter)
            total = delta if total is None else total + delta
    deltas = wrapper.get_base_layer().__dict__[DELTAS]
    deltas[wrapper.parameter_name] = total
    try:
        yield
    finally:
        deltas[wrapper.parameter_name] = None


def adapted_property(plain: property, name: str) -> property:
    """Return a property that adds the delta to what ``plain`` reads."""

    def read(self: Any) -> Tensor | None:
        weight: Tensor | None = plain.fget(self)  # type: ignore[misc]
        delta: Tensor | None = self._zero_deltas[name]
        return weight if weight is None or delta is None else weight + delta

    return property(read, doc=plain.__doc__)
