"""``lightning_zero.load_safetensors`` and ``export_safetensors``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.safetensors import (
    ExportWeight,
    IncompatibleKeys,
    export_weights,
    load_safetensors_into,
    parse_size,
    plan_files,
    to_cpu,
)
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.full_params import gather_full
from lightning_zero.sharding.param_record import ShardedParameter


def load_safetensors(
    module: nn.Module, path: str | Path, strict: bool = True, rename: Callable[[str], str | None] | None = None
) -> IncompatibleKeys:
    """Load Hugging Face's files into a module, sharded or not, in the module's dtypes.

    Each rank reads only its shards. Call it on every rank, in ``configure_model()`` after the module was built, or
    between steps. Weights that bitsandbytes or torchao (``Int8Tensor``) has saved quantized are dequantized.

    Args:
        module: Module whose keys and shapes are those of the files. Values are converted to its dtypes.
        path: A ``.safetensors`` file, a ``model.safetensors.index.json``, or a folder with either.
        strict: Raise if keys are missing or unexpected. One name of tied weights is enough.
        rename: Returns the module's key for a key in the files, or None to leave that key out.

    Returns:
        A named tuple of the lists ``missing_keys`` and ``unexpected_keys``.

    Raises:
        ValueError: Keys or shapes differ, or the module is on the meta device.
        CheckpointError: A file is missing or damaged.

    Examples:
        In a LightningModule::

            def configure_model(self):
                if self.model is None:
                    self.model = LlamaForCausalLM(self.config)
                    lightning_zero.load_safetensors(self.model, "Llama-3.1-8B", strict=False)
    """
    engine = _find_engine(module)
    if engine is None:
        return load_safetensors_into(module, path, strict, rename)
    with engine.checkpoints.hooks.overriding_values(lambda record: record.param):  # names need no all-gather
        keys = list(module.state_dict())
    sync = engine.sharder.sync
    sync.before_overwriting()

    def attempt() -> IncompatibleKeys | ValueError:
        try:
            with engine.checkpoints.loading_weights(path):
                return load_safetensors_into(module, path, strict, rename, keys)
        except ValueError as error:  # the same on every rank that sees the same files
            return error

    try:
        results = engine.checkpoints.ranks.run_on_all(f"load weights from {path}", attempt)
        error = next((result for result in results if isinstance(result, ValueError)), None)
        if error is not None:
            raise error
        engine.checkpoints.after_loading()
        return IncompatibleKeys(*results[engine.rank])  # type: ignore[misc]
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
    """Write a sharded module's weights as Hugging Face lays them out.

    All ranks write different files concurrently, with an index if there are several; each holds the tensors of at most
    one file. Tied weights are written once, by their first name. Call it on every rank.

    Args:
        module: A sharded module, or a child of one.
        folder: Folder on a file system that all hosts share. Other files in it remain.
        max_shard_size: Largest size of a file: bytes, or a text such as ``"5GB"``.
        dtype: Dtype of floating-point tensors in the files; by default the module's.
        metadata: Entries for the header of each file.

    Returns:
        The names of the files.

    Raises:
        UnsupportedError: The module is not sharded.
        CheckpointError: On every rank, if one rank could not write.

    Examples:
        After a training, on every rank::

            trainer.fit(module)
            lightning_zero.export_safetensors(module.model, "exported", dtype=torch.bfloat16)
    """
    engine = _find_engine(module)
    if engine is None:
        raise UnsupportedError(
            f"{type(module).__name__} is not sharded. Use safetensors.torch.save_model(), or save_pretrained()."
        )
    max_bytes = parse_size(max_shard_size)
    weights: dict[str, ExportWeight] = {}
    placeholders: dict[int, Tensor] = {}  # by record: meta tensors of the full shape
    records: dict[int, ShardedParameter] = {}  # by id of the placeholder

    def placeholder_of(record: ShardedParameter) -> Tensor:
        if record.index not in placeholders:
            made = torch.empty(record.shape, dtype=record.dtype, device="meta")
            placeholders[record.index], records[id(made)] = made, record
        return placeholders[record.index]

    with engine.checkpoints.hooks.overriding_values(placeholder_of):
        state = module.state_dict()
    known: set[int] = set()
    for key, value in state.items():
        if not isinstance(value, Tensor) or id(value) in known:
            continue
        known.add(id(value))
        record = records.get(id(value))
        size = (dtype or value.dtype).itemsize if value.is_floating_point() else value.itemsize
        weights[key] = ExportWeight(value.numel() * size, partial(_gather, value, record), partial(_keep, dtype))
    ranks = engine.checkpoints.ranks
    files = plan_files({key: weight.bytes for key, weight in weights.items()}, max_bytes)
    mine = sum(weights[key].bytes for file in files[ranks.rank :: ranks.world_size] for key in file.keys)
    with engine.checkpoints.progress(f"Exporting weights to {folder}", "written", mine) as on_write:
        return export_weights(weights, Path(folder), max_bytes, ranks, metadata or {}, on_write)


def _gather(value: Tensor, record: ShardedParameter | None) -> Tensor:
    return value if record is None else gather_full(record)


def _keep(dtype: torch.dtype | None, full: Tensor) -> Tensor:
    # A copy: the gathered memory has padding, and buffers may change while the file is written.
    return to_cpu(full, dtype, copy=True)


def _find_engine(module: nn.Module) -> Engine | None:
    return next((engine for child in module.modules() if (engine := engine_of(child)) is not None), None)
