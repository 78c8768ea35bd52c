"""``checkpoint export``: the weights of a checkpoint as safetensors."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.checkpoint.together import Alone
from lightning_zero.checkpoint.weights.exporting import Weight, export, to_cpu
from lightning_zero.checkpoint.weights.files import parse_size
from lightning_zero.cli.checkpoint.found import Found
from lightning_zero.cli.progress import progress_bar
from lightning_zero.cli.show import print_progress
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.folders import to_trainer_keys
from lightning_zero.sharding.mapped import copy_mapped

__all__ = ["DTYPES", "export_weights"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_weights(arguments: Namespace) -> int:
    """Compares the checkpoint with its checksums, and writes the files; holds one file's tensors at most."""
    found = Found(arguments.path)
    with progress_bar("compares", sum(found.sizes().values())) as read:
        found.check(read)
    state = to_trainer_keys(found.load()).get("state_dict") or {}
    chosen = {
        key.removeprefix(arguments.prefix): value
        for key, value in state.items()
        if isinstance(value, Tensor) and key.startswith(arguments.prefix)
    }
    if not chosen:
        raise CheckpointError(
            f"{arguments.path} holds no weights whose names begin with {arguments.prefix!r}. There are: "
            f"{', '.join(list(state)[:5])}, ..."
        )
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    weights: dict[str, Weight] = {}
    known: set[object] = set()
    for key, value in chosen.items():
        place = id(value) if isinstance(value, CheckpointTensor) else (value.data_ptr(), value.shape, value.stride())
        if place in known and value.numel():
            continue  # it is tied, and stands there under its first name
        known.add(place)
        size = (dtype or value.dtype).itemsize if value.is_floating_point() else value.itemsize
        weights[key] = Weight(value.numel() * size, partial(_read, value), partial(_keep, value, dtype))
    with progress_bar("writes", sum(weight.bytes for weight in weights.values())) as wrote:
        names = export(weights, Path(arguments.output), parse_size(arguments.max_shard_size), Alone(), {}, wrote)
    print(json.dumps({"output": arguments.output, "files": names}) if arguments.json else arguments.output)
    module = _only_module(chosen)
    if module and not arguments.prefix:
        print_progress(
            f"All names in it begin with {module!r}, as in your LightningModule. Libraries look for those without: "
            f"for them pass --prefix {module}"
        )
    return 0


def _only_module(names: Collection[str]) -> str:
    """``"model."`` where everything belongs to one attribute of the LightningModule."""
    first, *others = {name.partition(".")[0] for name in names}
    return f"{first}." if not others and all("." in name for name in names) else ""


def _read(value: Tensor) -> Tensor:
    if isinstance(value, CheckpointTensor):
        return value.whole()
    whole = torch.empty_like(value)
    copy_mapped(value, whole)
    return whole


def _keep(value: Tensor, dtype: torch.dtype | None, whole: Tensor) -> Tensor:
    return to_cpu(whole, dtype, copy=whole is value)
