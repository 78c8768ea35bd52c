"""Reads safetensors into a module: into shards, where it has been cut, each rank its own part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.checkpoint.weights.files import open_safetensors
from lightning_zero.compat.modules import extra_state_suffix
from lightning_zero.sharding.module_patching import SHAPES

__all__ = ["Incompatible", "load_safetensors_into"]

log = logging.getLogger(__name__)

SHOWN = 5  # keys in a message


class Incompatible(NamedTuple):
    """As ``load_state_dict()`` returns it.

    Attributes:
        missing_keys: that the module has, and the files lack.
        unexpected_keys: the other way round.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors_into(
    module: nn.Module,
    path: str | Path,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    keys: Iterable[str] | None = None,
) -> Incompatible:
    """See :func:`lightning_zero.load_safetensors`. ``keys``: of the module's state dict, which need not be made for
    them."""
    _refuse_meta(module)
    values: dict[str, CheckpointTensor] = {}
    for key, value in open_safetensors(path).items():
        name = key if rename is None else rename(key)
        if name is None:
            continue
        if name in values:
            raise ValueError(
                f"rename= makes {name!r} of {key!r} and of another key in {path}. Return a name of its own for each, "
                "or None to leave one out."
            )
        values[name] = value
    have = dict(_named(module))
    misfits = [
        f"{key!r}: {tuple(value.shape)} in the files, {shape} in the module"
        for key, value in values.items()
        if (shape := _shape(module, key)) is not None and shape != tuple(value.shape)
    ]
    if misfits:
        raise ValueError(f"{path} does not fit {type(module).__name__}. Other shapes: {_some(misfits)}.")
    wanted = [key for key in (module.state_dict() if keys is None else keys) if not key.endswith(extra_state_suffix)]
    found = {id(have[key]) for key in values if key in have}
    # Files hold what is tied once.
    missing = [key for key in wanted if key not in values and (key not in have or id(have[key]) not in found)]
    unexpected = [key for key in values if key not in set(wanted)]
    if missing or unexpected:
        text = (
            f"{path} does not fit {type(module).__name__}. The files lack: {_some(missing) or 'nothing'}. The module "
            f"lacks: {_some(unexpected) or 'nothing'}. "
        )
        if strict:
            raise ValueError(
                text + "Pass the submodule that the files are of, or rename=, which turns a key of theirs into one of "
                "the module's (None: leave it out), or strict=False."
            )
        log.warning("%s", text.strip())
    module.load_state_dict(values, strict=False)
    return Incompatible(missing, unexpected)


def _refuse_meta(module: nn.Module) -> None:
    for name, value in _named(module):
        if value.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, where it has no memory to load into. Build the module without "
                "torch.device('meta'): inside configure_model() each layer is sharded as soon as it is built, so that "
                "no rank holds all of it."
            )


def _named(module: nn.Module) -> Any:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _shape(module: nn.Module, key: str) -> tuple[int, ...] | None:
    """Of the whole value, which a shard's own shape is not."""
    path, _, name = key.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    shape = owner.__dict__.get(SHAPES, {}).get(name)
    if shape is not None:
        return tuple(shape)
    value = owner._parameters.get(name, owner._buffers.get(name))
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
