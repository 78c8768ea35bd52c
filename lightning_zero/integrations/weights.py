"""``lightning_zero.load_safetensors`` and ``export_safetensors``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.weights.exporting import Weight, export, to_cpu
from lightning_zero.checkpoint.weights.files import parse_size, plan_files
from lightning_zero.checkpoint.weights.loading import Incompatible, load_safetensors_into
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.full import gather_full
from lightning_zero.sharding.record import ShardedParameter

__all__ = ["export_safetensors", "load_safetensors"]


def load_safetensors(
    module: nn.Module, path: str | Path, strict: bool = True, rename: Callable[[str], str | None] | None = None
) -> Incompatible:
    """Loads Hugging Face's files into a module, sharded or not: each rank reads what it holds, and converts it to the
    module's dtypes. In ``configure_model()`` after the module was built, or at any time between steps; on every rank.

    Args:
        module: whose keys are those of the files.
        path: of a ``.safetensors`` file, of ``model.safetensors.index.json``, or of a folder with either.
        strict: raise where keys are missing or unexpected. (A tied weight is there when one of its names is.)
        rename: turns a key of the files into one of the module's, or into None, which leaves it out.

    Returns:
        ``missing_keys`` and ``unexpected_keys``.

    Raises:
        ValueError: keys or shapes differ, or the module is on the meta device.
        CheckpointError: a file is missing or damaged.
    """
    engine = _find(module)
    if engine is None:
        return load_safetensors_into(module, path, strict, rename)
    with engine.checkpoints.hooks.overriding_values(lambda record: record.param):  # nothing is gathered for names
        keys = list(module.state_dict())
    sync = engine.sharder.sync
    sync.before_overwriting()
    what = f"load weights from {path}"

    def attempt() -> Incompatible | ValueError:
        try:
            with engine.checkpoints.loading_weights(path):
                return load_safetensors_into(module, path, strict, rename, keys)
        except ValueError as error:  # the same on every rank, where they see the same files
            return error

    try:
        ends = engine.checkpoints.together.each(what, attempt)
        wrong = next((end for end in ends if isinstance(end, ValueError)), None)
        if wrong is not None:
            raise wrong
        return Incompatible(*ends[engine.rank])  # type: ignore[misc]
    finally:
        sync.invalidate_copies()
        sync.after_writing()


def export_safetensors(
    module: nn.Module,
    folder: str | Path,
    max_shard_size: str | int = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes a sharded module's weights as Hugging Face lays them out, all ranks different files at once; with an index
    where there are several. What is tied is written once, by its first name. On every rank; each holds one file's
    tensors at most.

    Args:
        module: sharded, or a part of such a one.
        folder: on a file system that all hosts share. What else is in it stays.
        max_shard_size: of a file: bytes, or a text such as ``"5GB"``.
        dtype: of numbers with a point in the files; by default the module's.
        metadata: into each file.

    Returns:
        The names of the files.

    Raises:
        UnsupportedError: the module is not sharded.
        CheckpointError: on every rank, when one could not write.
    """
    engine = _find(module)
    if engine is None:
        raise UnsupportedError(
            f"{type(module).__name__} is not sharded. Use safetensors.torch.save_model(), or save_pretrained()."
        )
    most = parse_size(max_shard_size)
    weights: dict[str, Weight] = {}
    stand_ins: dict[int, Tensor] = {}  # by record: of the whole shape, without memory
    records: dict[int, ShardedParameter] = {}  # by stand-in

    def show(record: ShardedParameter) -> Tensor:
        if record.index not in stand_ins:
            made = torch.empty(record.layout.shape, dtype=record.param.dtype, device="meta")
            stand_ins[record.index], records[id(made)] = made, record
        return stand_ins[record.index]

    with engine.checkpoints.hooks.overriding_values(show):
        state = module.state_dict()
    known: set[int] = set()
    for key, value in state.items():
        if not isinstance(value, Tensor) or id(value) in known:
            continue
        known.add(id(value))
        record = records.get(id(value))
        size = (dtype or value.dtype).itemsize if value.is_floating_point() else value.itemsize
        weights[key] = Weight(value.numel() * size, partial(_gather, value, record), partial(_keep, dtype))
    together = engine.checkpoints.together
    files = plan_files({key: weight.bytes for key, weight in weights.items()}, most)
    mine = sum(weights[key].bytes for part in files[together.rank :: together.world_size] for key in part.keys)
    with engine.checkpoints.telling(f"Exporting weights to {folder}", "written", mine) as wrote:
        return export(weights, Path(folder), most, together, metadata or {}, wrote)


def _gather(value: Tensor, record: ShardedParameter | None) -> Tensor:
    return value if record is None else gather_full(record)


def _keep(dtype: torch.dtype | None, whole: Tensor) -> Tensor:
    # The copy holds neither padding nor what a buffer becomes while it is written.
    return to_cpu(whole, dtype, copy=True)


def _find(module: nn.Module) -> Engine | None:
    return next((engine for child in module.modules() if (engine := engine_of(child)) is not None), None)
