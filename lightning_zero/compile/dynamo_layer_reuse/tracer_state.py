"""What a trace depends on beside what it is given and what it guards, and what it may leave behind beside nodes."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import traceback as fx_traceback

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    ConstantVariable,
    DictVariable,
    ListVariable,
    SubclassVariable,
    TupleVariable,
    is_written,
    was_there,
)
from lightning_zero.compat.graphs import CUSTOM
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike

__all__ = ["Around"]

DEVICES = ("cpu", "cuda")
TENSORS = (TensorVariable, SubclassVariable)


@dataclass(frozen=True)
class Around:
    """At one moment of a trace.

    Attributes:
        settings: that code makes and unmakes while it is traced.
        written: what was there before the trace, and tensors, if something has been written to them, with what it was.
        hooks: of tensors, and what functions with a backward of their own have put away.
        objects: that were there before the trace and have been written to, by their ids.
    """

    settings: tuple[Any, ...]
    written: tuple[Any, ...]
    hooks: tuple[int, int]
    objects: Set[int] = field(compare=False)

    @classmethod
    def of(cls, tx: Any) -> Around:
        """
        Raises:
            Unlike: nobody can tell what has been written.
        """
        effects = tx.output.side_effects
        found = effects.id_to_variable.items()
        # Most are tensors, of which only attributes are written; this is asked for each layer.
        others = [(number, variable) for number, variable in found if type(variable) not in TENSORS]
        containers = {number: variable for number, variable in others if is_written(effects, variable)}
        written, owners = [*map(_held, containers.values())], set()
        for owner, attributes in effects.store_attr_mutations.items():
            if was_there(owner) or isinstance(owner, TensorVariable):
                written.append((owner, *((name, _held(value)) for name, value in attributes.items())))
                owners.add(owner)
        objects = {*containers, *(number for number, variable in (found if owners else ()) if variable in owners)}
        hooks = len(effects.tensor_hooks), len(effects.save_for_backward)
        return cls(_settings(tx), tuple(written), hooks, objects)


def _held(value: Any) -> tuple[Any, ...]:
    """It, and what is in it now. Dynamo's variables are equal only to themselves."""
    # First: to ask one that nobody has looked at for its class is to look, which changes what is gone through.
    if not value.is_realized() or isinstance(value, TensorVariable | ConstantVariable):
        return (value,)
    if type(value) in (TupleVariable, ListVariable):
        return (value, *map(_held, value.items))
    if type(value) is DictVariable:
        return (value, *((key.vt, _held(item)) for key, item in value.items.items()))
    raise Unlike(f"nobody knows what is in a {type(value).__name__} that was written to")


def _settings(tx: Any) -> tuple[Any, ...]:
    """Dynamo makes them while it traces what makes them."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]
    grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    modes = tuple(tx.symbolic_torch_function_state.mode_stack), torch.get_default_dtype()
    notes = repr(fx_traceback.current_meta.get(CUSTOM))  # of torch.fx.traceback.annotate
    return (*casts, *grads, *modes, torch.are_deterministic_algorithms_enabled(), notes)
