"""Files of safetensors, one or many with an index, as Hugging Face lays them out.

https://huggingface.co/docs/safetensors/index describes the format; the index is a JSON file whose ``weight_map`` says
in which file each tensor lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lightning_zero.checkpoint.damaged import wrap_read_errors, parse_json
from lightning_zero.checkpoint.ranges import RangeReader, Placed
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.errors import CheckpointError

__all__ = ["INDEX", "Part", "parse_size", "plan_files", "open_safetensors"]

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


def open_safetensors(path: str | Path) -> dict[str, CheckpointTensor]:
    """What lies at ``path``, none of it read yet.

    Args:
        path: of a ``.safetensors`` file, of an index, or of a folder with either.

    Raises:
        CheckpointError: there is nothing of the kind, a file is missing or damaged.
    """
    found: dict[str, CheckpointTensor] = {}
    for file, wanted in _files(Path(path)).items():
        try:
            with wrap_read_errors(file):
                opened, lies = safe_open(file, "pt"), _Lies(file)
                held = set(opened.keys())
                for key in sorted(held) if wanted is None else wanted:
                    if key not in held:
                        raise CheckpointError(f"{file} lacks {key!r}, which the index beside it says is there.")
                    found[key] = _value(opened, lies, file, key)
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Download it again.") from error
    return found


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Of each file the keys that count; None: all."""
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
        where: dict[str, str] = parse_json(path.read_bytes())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for key, name in where.items():
            if not name or Path(name).name != name or name == "..":
                raise CheckpointError(f"{path} names {name!r}, which is not a file of its folder.")
            files.setdefault(path.with_name(name), []).append(key)  # type: ignore[union-attr]
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors: {error}.") from error
    return files


class _Lies:
    """Where tensors lie in a file that safetensors has found to be whole: 8 bytes say how long what is said of them
    is, and it is all after that."""

    def __init__(self, file: Path) -> None:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            self._said = parse_json(opened.read(length))
        self._ranges, self._begin = RangeReader(file), 8 + length

    def read(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Placed:
        return Placed(self._ranges, self._begin + self._said[key]["data_offsets"][0], dtype, shape)


def _value(opened: Any, lies: _Lies, file: Path, key: str) -> CheckpointTensor:
    about = opened.get_slice(key)
    shape, name = tuple(about.get_shape()), about.get_dtype()
    if name not in DTYPES:
        raise CheckpointError(f"{file} holds {key!r} in {name}, which is not known here.")
    dtype = DTYPES[name]
    whole = Box((0,) * len(shape), shape)
    return CheckpointTensor(key, torch.Size(shape), dtype, [(whole, partial(lies.read, key, dtype, shape))])


@dataclass(frozen=True)
class Part:
    """A file that is to be written.

    Attributes:
        name: of the file.
        keys: of its tensors, in their order.
    """

    name: str
    keys: tuple[str, ...]


def plan_files(sizes: Mapping[str, int], most: int) -> list[Part]:
    """Shares tensors out over files, in their order.

    Args:
        sizes: of each tensor, in bytes.
        most: bytes of tensors in a file; a larger tensor has a file of its own.
    """
    files = list(_filled(sizes.items(), most))
    if len(files) == 1:
        return [Part(SINGLE, files[0])]
    return [Part(f"model-{n:05}-of-{len(files):05}.safetensors", keys) for n, keys in enumerate(files, 1)]


def _filled(sizes: Iterable[tuple[str, int]], most: int) -> Iterator[tuple[str, ...]]:
    keys: list[str] = []
    held = 0
    for key, size in sizes:
        if keys and held + size > most:
            yield tuple(keys)
            keys, held = [], 0
        keys.append(key)
        held += size
    yield tuple(keys)


def parse_size(size: str | int) -> int:
    """Bytes of ``"5GB"``, ``"300MiB"`` or a number.

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]?I?B)\s*", str(size).upper()) if isinstance(size, str) else None
    value: Any = float(found[1]) * UNITS[found[2]] if found else size
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or a text such as '5GB' or '300MiB'.")
    return int(value)
