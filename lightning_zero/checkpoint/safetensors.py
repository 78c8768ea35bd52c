"""Load and export weights as Hugging Face's safetensors: one file, or several with an index.

Loading reads each rank's part of a tensor. Exporting writes different files on different ranks, and gathers each tensor
when its file is next.

Kept although safetensors has ``get_slice``: it slices whole dimensions, and a shard is a range of elements.
https://huggingface.co/docs/safetensors/index describes the format.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_zero.checkpoint.atomic import (
    INCOMPLETE,
    PinnedDirectory,
    concurrent_save_error,
    make_folders,
    remove,
    sibling_path,
    sync_folder,
)
from lightning_zero.checkpoint.file_writers import WRITE_BYTES, WritebackQueue
from lightning_zero.checkpoint.integrity import parse_json, wrap_read_errors
from lightning_zero.checkpoint.quantized_weights import dequantized, torchao_descriptions
from lightning_zero.checkpoint.rank_tasks import RankTasks
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointTensor, RangeReader, StoredTensor
from lightning_zero.compat.modules import extra_state_suffix
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.module_patching import SHAPES

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
MAX_KEYS_SHOWN = 5  # in a message


# -- loading


def open_safetensors(path: str | Path) -> dict[str, CheckpointTensor]:
    """Return lazily read tensors by key, and the values of weights that were saved quantized.

    Args:
        path: of a ``.safetensors`` file, of an index, or of a folder with either.

    Raises:
        CheckpointError: there is none, or a file is missing, damaged or quantized in an unknown way.
    """
    found: dict[str, CheckpointTensor] = {}
    descriptions: dict[str, Any] = {}
    for file, wanted in _files(Path(path)).items():
        try:
            with wrap_read_errors(file):
                opened, offsets = safe_open(file, "pt"), _Offsets(file)
                held = set(opened.keys())
                descriptions |= torchao_descriptions(opened.metadata() or {})
                for key in sorted(held) if wanted is None else wanted:
                    if key not in held:
                        raise CheckpointError(f"{file} lacks {key!r}, which the index beside it says is there.")
                    found[key] = _lazy_tensor(opened, offsets, file, key)
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Download it again.") from error
    return dequantized(found, descriptions)


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Return the keys of each file that are used; None: all."""
    if path.is_dir():
        index = path / INDEX
        if index.exists():
            path = index
        elif (path / SINGLE).exists():
            path = path / SINGLE
        else:
            raise CheckpointError(f"{path} holds neither {SINGLE!r} nor {INDEX!r}. Give the file itself.")
    if not path.exists():
        raise CheckpointError(f"There is nothing at {path}.")
    if path.suffix != ".json":
        return {path: None}
    try:
        weight_map: dict[str, str] = parse_json(path.read_bytes())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for key, name in weight_map.items():
            if not name or Path(name).name != name or name == "..":
                raise CheckpointError(f"{path} names {name!r}, which is not a file of its folder.")
            files.setdefault(path.with_name(name), []).append(key)  # type: ignore[union-attr]
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors: {error}.") from error
    return files


class _Offsets:
    """Positions of tensors in a file that safetensors has validated."""

    def __init__(self, file: Path) -> None:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")  # of the header
            self._header = parse_json(opened.read(length))
        self._reader, self._begin = RangeReader(file), 8 + length

    def stored(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
        return StoredTensor(self._reader, self._begin + self._header[key]["data_offsets"][0], dtype, shape)


def _lazy_tensor(opened: Any, offsets: _Offsets, file: Path, key: str) -> CheckpointTensor:
    view = opened.get_slice(key)
    shape, name = tuple(view.get_shape()), view.get_dtype()
    if name not in DTYPES:
        raise CheckpointError(f"{file} holds {key!r} in {name}, which is not known here.")
    dtype = DTYPES[name]
    read = partial(offsets.stored, key, dtype, shape)
    return CheckpointTensor(key, torch.Size(shape), dtype, [(Box.whole(shape), read)])


class IncompatibleKeys(NamedTuple):
    """Keys that do not match, as ``load_state_dict()`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors_into(
    module: nn.Module,
    path: str | Path,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    keys: Iterable[str] | None = None,
) -> IncompatibleKeys:
    """Load files into a module, see :func:`lightning_zero.load_safetensors`."""
    _check_not_meta(module)
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
    own = dict(_named_tensors(module))
    mismatches = [
        f"{key!r}: {tuple(value.shape)} in the files, {shape} in the module"
        for key, value in values.items()
        if (shape := _full_shape(module, key)) is not None and shape != tuple(value.shape)
    ]
    if mismatches:
        raise ValueError(f"{path} does not fit {type(module).__name__}. Other shapes: {_first_words(mismatches)}.")
    wanted = [key for key in (module.state_dict() if keys is None else keys) if not key.endswith(extra_state_suffix)]
    found = {id(own[key]) for key in values if key in own}
    # Files have one key of tied weights.
    missing = [key for key in wanted if key not in values and (key not in own or id(own[key]) not in found)]
    unexpected = [key for key in values if key not in set(wanted)]
    if missing or unexpected:
        text = (
            f"{path} does not fit {type(module).__name__}. The files lack: {_first_words(missing) or 'nothing'}. The "
            f"module lacks: {_first_words(unexpected) or 'nothing'}. "
        )
        if strict:
            raise ValueError(
                text + "Pass the submodule that the files are of, or rename=, which turns a key of theirs into one of "
                "the module's (None: leave it out), or strict=False."
            )
        log.warning("%s", text.strip())
    module.load_state_dict(values, strict=False)
    return IncompatibleKeys(missing, unexpected)


def _check_not_meta(module: nn.Module) -> None:
    for name, value in _named_tensors(module):
        if value.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, where it has no memory to load into. Build the module without "
                "torch.device('meta'): inside configure_model() each layer is sharded as soon as it is built, so that "
                "no rank holds all of it."
            )


def _named_tensors(module: nn.Module) -> Any:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _full_shape(module: nn.Module, key: str) -> tuple[int, ...] | None:
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


def _first_words(words: Sequence[str]) -> str:
    more = f" and {len(words) - MAX_KEYS_SHOWN} more" if len(words) > MAX_KEYS_SHOWN else ""
    return ", ".join(words[:MAX_KEYS_SHOWN]) + more


# -- exporting


@dataclass(frozen=True)
class ExportFile:
    """A file to write: its name, and the keys of its tensors in order."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class ExportWeight:
    """A weight to export.

    Attributes:
        gather: returns the full weight, on any device. Collective for a sharded one.
        keep: returns the tensor to write, on the CPU in memory of its own. A separate step: a rank with too little
            memory for it must still take part in the next gather.
    """

    bytes: int
    gather: Callable[[], Tensor]
    keep: Callable[[Tensor], Tensor]


def plan_files(sizes: Mapping[str, int], max_bytes: int) -> list[ExportFile]:
    """Distribute tensors over files, in order."""
    files = list(_filled(sizes.items(), max_bytes))
    if len(files) == 1:
        return [ExportFile(SINGLE, files[0])]
    return [ExportFile(f"model-{n:05}-of-{len(files):05}.safetensors", keys) for n, keys in enumerate(files, 1)]


def _filled(sizes: Iterable[tuple[str, int]], max_bytes: int) -> Iterator[tuple[str, ...]]:
    keys: list[str] = []
    total = 0
    for key, size in sizes:
        if keys and total + size > max_bytes:
            yield tuple(keys)
            keys, total = [], 0
        keys.append(key)
        total += size
    yield tuple(keys)


def parse_size(size: str | int) -> int:
    """Return the bytes of ``"5GB"``, ``"300MiB"`` or a number."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]?I?B)\s*", str(size).upper()) if isinstance(size, str) else None
    value: Any = float(found[1]) * UNITS[found[2]] if found else size
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or a text such as '5GB' or '300MiB'.")
    return int(value)


def to_cpu(value: Tensor, dtype: torch.dtype | None, copy: bool) -> Tensor:
    """Return a contiguous CPU tensor, in ``dtype`` if it is floating-point; with ``copy``, a new one."""
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", wanted, copy=copy).contiguous()


def export_weights(
    weights: Mapping[str, ExportWeight],
    folder: Path,
    max_bytes: int,
    ranks: RankTasks,
    metadata: Mapping[str, str],
    on_write: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Write weights; each rank holds the tensors of at most one file. Collective.

    Args:
        weights: by name, the same on every rank.
        folder: for the files; other files in it remain.
        max_bytes: in a file.
        ranks: the ranks.
        metadata: for each file.
        on_write: is called, from another thread, with the bytes that this rank has written.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: on every rank. An earlier export into the folder remains, unless the new files were complete.
    """
    files = plan_files({key: weight.bytes for key, weight in weights.items()}, max_bytes)
    what = f"export weights to {folder}"
    locked: list[PinnedDirectory] = []
    ranks.run_on_rank0(what, lambda: locked.append(_make_and_lock(folder)))
    ends: list[Future[None]] = []
    try:
        with ThreadPoolExecutor(1, "lightning_zero-export") as thread:
            for number, file in enumerate(files):
                is_ours = number % ranks.world_size == ranks.rank
                if is_ours and ends:
                    ends[-1].exception()  # wait: no second file in memory
                tensors, error = _gather_file(file, weights, is_ours)
                ranks.run_on_all(what, partial(_raise_first, error, ends))
                if is_ours:
                    ends.append(thread.submit(_write_file, folder / file.name, tensors, dict(metadata), on_write))
                del tensors
        ranks.run_on_all(what, lambda: [end.result() for end in ends] and None)
        ranks.run_on_rank0(what, lambda: _put_in_place(folder, files, weights))
    finally:
        for file in files[ranks.rank :: ranks.world_size]:  # only this rank knows that its writes have ended
            remove(sibling_path(folder / file.name, INCOMPLETE))
        for directory in locked:
            directory.unlock()
    return [file.name for file in files]


def _make_and_lock(folder: Path) -> PinnedDirectory:
    make_folders(folder)
    directory = PinnedDirectory(folder)
    if not directory.try_lock():
        raise concurrent_save_error(folder)
    return directory


def _gather_file(
    file: ExportFile, weights: Mapping[str, ExportWeight], is_ours: bool
) -> tuple[dict[str, Tensor], Exception | None]:
    """Gather the tensors of a file, and return those to write, or why this rank cannot keep them."""
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    for key in file.keys:
        full = weights[key].gather()
        if is_ours and error is None:
            try:
                tensors[key] = weights[key].keep(full)
            except (MemoryError, RuntimeError) as caught:  # torch raises the second if the host has no memory
                error = caught
                tensors.clear()
    return tensors, error


def _raise_first(error: Exception | None, ends: Sequence[Future[None]]) -> None:
    if error is not None:
        raise error
    for end in ends:  # an earlier file may have failed in the meantime
        if end.done():
            end.result()


def _write_file(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], on_write: Callable[[int], None]
) -> None:
    """Write one file under its temporary name, and flush it to the disk.

    Raises:
        ValueError: safetensors has no name for a tensor's dtype.
    """
    work = sibling_path(path, INCOMPLETE)
    work.touch()
    mode = work.stat().st_mode
    try:
        save_file(tensors, work, {"format": "pt"} | metadata)
    except KeyError as error:  # safetensors looks the dtype up
        key, dtype = next((key, value.dtype) for key, value in tensors.items() if value.dtype in error.args)
        instead = "Make it torch.complex64" if dtype.is_complex else "Export with dtype="
        raise ValueError(f"safetensors cannot hold {key!r}, of {dtype}. {instead}, or leave it out.") from None
    except SafetensorError as error:
        raise OSError(f"{error}: {str(path)!r}") from error
    os.chmod(work, mode)  # safetensors 0.8 makes files that only their owner can read
    with open(work, "rb") as file:
        writeback, size = WritebackQueue(file.fileno()), os.fstat(file.fileno()).st_size
        for begin in range(0, size, WRITE_BYTES):
            count = min(WRITE_BYTES, size - begin)
            writeback.add(count)
            on_write(count)
        writeback.drain(lambda: on_write(0))


def _put_in_place(folder: Path, files: Sequence[ExportFile], weights: Mapping[str, ExportWeight]) -> None:
    # A reader must not mix files of two exports, nor may a process that dies here leave such a mix: several files
    # without an index are nothing.
    for path in list(_files_of_export(folder)):
        path.unlink()
    for file in files:
        os.replace(sibling_path(folder / file.name, INCOMPLETE), folder / file.name)
    sync_folder(folder)
    if len(files) > 1:
        total = sum(weight.bytes for weight in weights.values())
        weight_map = {key: file.name for file in files for key in file.keys}
        work = sibling_path(folder / INDEX, INCOMPLETE)
        with open(work, "w") as index:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)
            index.flush()
            os.fsync(index.fileno())
        os.replace(work, folder / INDEX)
        sync_folder(folder)


def _files_of_export(folder: Path) -> Iterator[Path]:
    yield from folder.glob("model-?????-of-?????.safetensors")
    yield from (path for path in (folder / "model.safetensors", folder / INDEX) if path.exists())
