"""Damaged checkpoints in all formats, each of which a reader must refuse by name.

They hold harmless data.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from lightning_zero.checkpoint.safetensors import open_safetensors
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.integrations.checkpoint_files import FileIO, load_file, read_folder
from tests.helpers.folders import write_folder

__all__ = ["FORMATS", "copied", "damages", "read", "values_in", "write"]

FORMATS = ("full", "sharded", "dcp", "safetensors")
INDEX = "model.safetensors.index.json"
HUGE = (1 << 62, 1 << 70, -1)

Damage = Callable[[Path], Any]


# -- whole ones


def _state() -> dict[str, Any]:
    weights = {"up.weight": torch.arange(32.0).view(8, 4), "up.bias": torch.arange(8.0), "scale": torch.tensor(2.0)}
    return {"state_dict": weights, "groups": [{"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.2)}]}


def write(kind: str, path: Path) -> Path:
    """Write a small checkpoint of that format, and return the path that a user gives."""
    torch.manual_seed(0)
    if kind == "full":
        torch.save({**_state(), "epoch": 1, "pytorch-lightning_version": "2.6.6"}, path)
    elif kind == "sharded":
        write_folder(path)
    elif kind == "dcp":
        dcp.save(_state(), checkpoint_id=path, no_dist=True)
        torch.save({"epoch": 1}, path / "meta.pt")
    else:
        path.mkdir()
        weights = _state()["state_dict"]
        save_file({"up.weight": weights.pop("up.weight")}, path / "one.safetensors")
        save_file(weights, path / "two.safetensors")
        where = {"up.weight": "one.safetensors"} | dict.fromkeys(weights, "two.safetensors")
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def read(kind: str, path: Path) -> Any:
    """Read it as users do, to its last tensor."""
    if kind == "full":
        return load_file(FileIO(), path, None)
    return open_safetensors(path) if kind == "safetensors" else read_folder(path, None)


def values_in(content: Any, name: str = "") -> dict[str, Tensor]:
    """Return all tensors by their names, in memory of their own."""
    if isinstance(content, Tensor):
        return {name: content.clone()}
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {key: value for at, inner in entries for key, value in values_in(inner, f"{name}.{at}").items()}


# -- damages


def damages(kind: str) -> Iterator[tuple[str, Damage]]:
    """Yield names, and functions that damage the files of :func:`write`."""
    if kind == "full":
        yield from _of_file()
    elif kind == "sharded":
        for name in ("manifest.json", ".metadata", "meta.pt", "__0_0.distcp"):
            yield from _bytes_of(name)
        yield "manifest nested deeply", lambda at: (at / "manifest.json").write_text("[" * 100_000)
        yield (
            "manifest with a key twice",
            lambda at: _text(at / "manifest.json", '"format": 1', '"format": 1, "format": 1'),
        )
        yield "manifest of a list", lambda at: (at / "manifest.json").write_text("[1, 2]")
        yield "manifest of long digits", lambda at: (at / "manifest.json").write_text("9" * 100_000)
    elif kind == "dcp":
        for name in (".metadata", "meta.pt", "__0_0.distcp"):
            yield from _bytes_of(name)
        yield from _of_metadata()
        yield from _of_pickles()
    else:
        for name in ("one.safetensors", INDEX):
            yield from _bytes_of(name, flips=())
        yield from _of_safetensors()


def _bytes_of(name: str, flips: tuple[float, ...] = (0.4, 0.6)) -> Iterator[tuple[str, Damage]]:
    for part in (0.0, 0.5, 0.98):
        yield f"{name} cut at {part}", lambda at, part=part: _cut(at / name, part)
    for part in flips if name != METADATA else ():
        yield f"{name} flipped at {part}", lambda at, part=part: _flip(at / name, part)
    yield f"{name} doubled", lambda at: (at / name).write_bytes((at / name).read_bytes() * 2)
    yield f"{name} missing", lambda at: (at / name).unlink()
    yield f"{name} a folder", lambda at: ((at / name).unlink(), (at / name).mkdir())


def _cut(file: Path, part: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])


def _flip(file: Path, part: float) -> None:
    """Damage the largest part of an archive, outside of torch's data between parts."""
    data = bytearray(file.read_bytes())
    at = int(len(data) * part)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entry = max(archive.infolist(), key=lambda entry: entry.file_size)
            at = data.index(archive.read(entry)) + int(entry.file_size * part)
    data[at] ^= 16
    file.write_bytes(data)


def _text(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def _archive(file: Path, change: Callable[[dict[str, bytes]], Any], compress: int = zipfile.ZIP_STORED) -> None:
    """Write an archive again, with checksums that fit."""
    with zipfile.ZipFile(file) as given:
        parts = {entry.filename: given.read(entry) for entry in given.infolist()}
    change(parts)
    with zipfile.ZipFile(file, "w", compress) as made:
        for name, data in parts.items():
            made.writestr(name, data)


def _of_file() -> Iterator[tuple[str, Damage]]:
    def pickled(old: bytes, new: bytes) -> Damage:
        def change(parts: dict[str, bytes]) -> None:
            [name] = [name for name in parts if name.endswith("/data.pkl")]
            assert old in parts[name]
            parts[name] = parts[name].replace(old, new)

        return lambda at: _archive(at, change)

    for part in (0.0, 0.01, 0.5, 0.98):
        yield f"cut at {part}", lambda at, part=part: _cut(at, part)
    for part in (0.1, 0.5, 0.9):
        yield f"flipped at {part}", lambda at, part=part: _flip(at, part)
    yield "doubled", lambda at: at.write_bytes(at.read_bytes() * 2)
    yield "a folder", lambda at: (at.unlink(), at.mkdir())
    yield "text", lambda at: at.write_bytes(b"no checkpoint" * 50)
    yield (
        "no pickle",
        lambda at: _archive(at, lambda parts: parts.pop(next(n for n in parts if n.endswith("data.pkl")))),
    )
    yield (
        "a part missing",
        lambda at: _archive(at, lambda parts: parts.pop(next(n for n in parts if n.endswith("/data/0")))),
    )
    yield (
        "a short part",
        lambda at: _archive(
            at,
            lambda parts: parts.update({name: data[:-4] for name, data in parts.items() if name.endswith("/data/0")}),
        ),
    )
    yield "compressed", lambda at: _archive(at, lambda parts: None, zipfile.ZIP_DEFLATED)
    yield "a larger storage", pickled(b"K\x20", b"K\x28")
    yield "a larger tensor", pickled(b"K\x08K\x04\x86", b"K\x7fK\x04\x86")
    yield "a part twice", lambda at: zipfile.ZipFile(at, "a").writestr(next(iter(zipfile.ZipFile(at).namelist())), b"x")


def _of_metadata() -> Iterator[tuple[str, Damage]]:
    key = "state_dict.up.weight"

    def edit(change: Callable[[Metadata], Any]) -> Damage:
        def damage(folder: Path) -> None:
            found = pickle.loads((folder / METADATA).read_bytes())
            change(found)
            (folder / METADATA).write_bytes(pickle.dumps(found))

        return damage

    def boxes(*given: tuple[tuple[int, ...], tuple[int, ...]]) -> Damage:
        def change(found: Metadata) -> None:
            entry, info = found.state_dict_metadata[key], _place(found, key)
            entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in given]
            for at, _ in given:
                found.storage_data[MetadataIndex(key, torch.Size(at))] = info

        return edit(change)

    yield "boxes overlap, volume right", boxes(((0, 0), (4, 4)), ((2, 0), (4, 4)))
    yield "boxes overlap in two dimensions", boxes(((0, 0), (4, 2)), ((4, 0), (4, 2)), ((0, 1), (8, 2)))
    yield "boxes leave a gap", boxes(((0, 0), (3, 4)), ((4, 0), (4, 4)))
    yield "boxes overlap", boxes(((0, 0), (8, 4)), ((4, 0), (4, 4)))
    yield "a box twice", boxes(((0, 0), (4, 4)), ((0, 0), (4, 4)))
    yield "a box outside", boxes(((1, 0), (8, 4)))
    yield "a negative box", boxes(((0, 0), (9, 4)), ((9, 0), (-1, 4)))
    yield "a box of other dimensions", boxes(((0,), (32,)))
    yield "no boxes", edit(lambda found: found.state_dict_metadata[key].chunks.clear())
    for size in (1 << 40, 1 << 62):

        def larger(found: Metadata, size: int = size) -> None:
            entry = found.state_dict_metadata[key]
            entry.size = entry.chunks[0].sizes = torch.Size((size, 4))

        yield f"a size of {size}", edit(larger)
    yield (
        "a thousand dimensions",
        edit(lambda found: setattr(found.state_dict_metadata[key], "size", torch.Size([1] * 999))),
    )
    yield "a size of words", edit(lambda found: setattr(found.state_dict_metadata[key], "size", ("8", "4")))
    yield (
        "another dtype",
        edit(lambda found: setattr(found.state_dict_metadata[key].properties, "dtype", torch.float64)),
    )
    yield (
        "a smaller dtype",
        edit(lambda found: setattr(found.state_dict_metadata[key].properties, "dtype", torch.int32)),
    )
    yield "no properties", edit(lambda found: setattr(found.state_dict_metadata[key], "properties", None))
    yield "an entry of nothing", edit(lambda found: found.state_dict_metadata.update({key: None}))
    yield "an entry lost", edit(lambda found: found.state_dict_metadata.pop(key))
    yield "an entry more", edit(lambda found: found.state_dict_metadata.update(x=BytesStorageMetadata()))
    yield (
        "shared boxes",
        edit(
            lambda found: setattr(
                found.state_dict_metadata["state_dict.up.bias"], "chunks", found.state_dict_metadata[key].chunks
            )
        ),
    )
    yield "a number as a key", edit(lambda found: found.state_dict_metadata.update({3: BytesStorageMetadata()}))
    yield (
        "a bytes entry for a tensor",
        edit(lambda found: found.state_dict_metadata.update({key: BytesStorageMetadata()})),
    )
    for name, value in (
        ("relative_path", "../x"),
        ("relative_path", ".."),
        ("relative_path", ""),
        ("relative_path", "a\0b"),
        ("relative_path", 3),
        ("relative_path", "n" * 5000),
        ("offset", -1),
        ("offset", 1 << 62),
        ("offset", 0.5),
        ("length", -1),
        ("length", 1 << 62),
        ("length", 0),
        ("length", "9"),
    ):
        yield f"{name} {value!r:.20}", edit(lambda found, n=name, v=value: setattr(_place(found, key), n, v))
    yield (
        "another's place",
        edit(lambda found: vars(_place(found, key)).update(vars(_place(found, "state_dict.up.bias")))),
    )
    for path in (
        ("groups", 1 << 40, "lr"),
        ("groups", -1, "lr"),
        ("groups", 2, "lr"),
        ("groups", "1", "lr"),
        ("groups", 1.0, "lr"),
        ("groups", 0, "lr"),
        ("groups", 0, "lr", "x"),
        ("groups", 0),
        ("groups",),
        ("state_dict", "scale"),
        ("state_dict", 0),
        (0, "lr"),
        ("x",) * 100_000,
        (),
        "groups",
        [("groups", 1)],
        None,
    ):
        yield f"path {path!r:.30}", edit(lambda found, path=path: found.planner_data.update({"groups.1.lr": path}))
    yield "a path lost", edit(lambda found: found.planner_data.pop(key))
    yield "paths in a list", edit(lambda found: setattr(found, "planner_data", [1]))
    yield "no places", edit(lambda found: setattr(found, "storage_data", None))
    yield "no entries", edit(lambda found: setattr(found, "state_dict_metadata", None))
    yield "a save id of nothing", edit(lambda found: setattr(found.storage_meta, "save_id", [1]))


def _place(found: Metadata, key: str) -> Any:
    return next(info for index, info in found.storage_data.items() if index.fqn == key)


def _of_pickles() -> Iterator[tuple[str, Damage]]:
    """Instructions that no saving writes. All values are harmless."""
    meta = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    memory_format = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    for name, data in {
        "state for a class": meta + b"N}X\x01\x00\x00\x00xK\x01s\x86b.",
        "a dict for a class": meta + b"}X\x01\x00\x00\x00xK\x01sb.",
        "state for a function": b"ctorch.serialization\n_get_layout\n}X\x01\x00\x00\x00xK\x01sb.",
        "state for a constant": memory_format + b"K\x00\x85R}X\x01\x00\x00\x00xK\x01sb.",
        "state for a dtype": b"ctorch\nfloat32\n}X\x01\x00\x00\x00xK\x01sb.",
        "state for a list": b"]}X\x01\x00\x00\x00xK\x01sb.",
        "state twice": meta + b")\x81}b}b.",
        "slots": meta + b")\x81N}X\x01\x00\x00\x00xK\x01s\x86b.",
        "another field": meta + b")\x81}X\x09\x00\x00\x00__class__K\x01sb.",
        "arguments for a class": meta + b"K\x01\x85\x81.",
        "a class called": meta + b")R.",
        "a name of another module": b"cbuiltins\nlist\n)R.",
        "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x0cfloat32.type\x93.",
        "a list as a key": b"}]K\x01s.",
        "a blank index as a key": b"}" + index + b")\x81K\x01s.",
        "a key twice": b"}X\x01\x00\x00\x00xK\x01sX\x01\x00\x00\x00xK\x02s.",
        "a size of words": b"ctorch\nSize\nX\x01\x00\x00\x00x\x85\x85R.",
        "a negative size": b"ctorch\nSize\nJ\xff\xff\xff\xff\x85\x85R.",
        "a long text": b"X\xff\xff\xff\x7fx.",
        "a longer text": b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        "a long number": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
        "a memo of nothing": b"j\xff\xff\xff\xff.",
        "a far memo": b"Nr\xff\xff\xff\xff.",
        "nested deeply": b"]" * 100_000 + b"a" * 99_999 + b".",
        "in itself": b"]q\x00h\x00a.",
        "marks alone": b"(" * 100_000,
        "nothing on the stack": b"a.",
        "a persistent thing": b"K\x01Q.",
        "a later protocol": b"\x80\x09N.",
        "no end": meta,
        "text that is none": b"X\x02\x00\x00\x00\xff\xff.",
    }.items():
        yield f"pickle: {name}", lambda at, data=data: (at / METADATA).write_bytes(data)


def _of_safetensors() -> Iterator[tuple[str, Damage]]:
    one = "one.safetensors"

    def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
        def damage(folder: Path) -> None:
            data = (folder / one).read_bytes()
            length = int.from_bytes(data[:8], "little")
            told = json.loads(data[8 : 8 + length])
            change(told)
            said = json.dumps(told).encode()
            (folder / one).write_bytes(len(said).to_bytes(8, "little") + said + data[8 + length :])

        return damage

    def index(text: str) -> Damage:
        return lambda at: (at / INDEX).write_text(text)

    for begin, end in ((4, 132), (0, 64), (0, 1 << 40), (-4, 124), (128, 0)):
        yield f"offsets {begin}, {end}", header(lambda told, x=[begin, end]: told["up.weight"].update(data_offsets=x))
    for shape in ([8, 5], [1 << 40, 4], [1 << 70, 4], [-8, -4], "8", [8.0, 4]):
        yield f"shape {shape}", header(lambda told, shape=shape: told["up.weight"].update(shape=shape))
    yield "dtype of none", header(lambda told: told["up.weight"].update(dtype="F31"))
    yield "no dtype", header(lambda told: told["up.weight"].pop("dtype"))
    yield "a key of another name", header(lambda told: told.update({"other": told.pop("up.weight")}))
    yield "a header too long", lambda at: (at / one).write_bytes(b"\xff" * 8 + (at / one).read_bytes()[8:])
    yield "a header nested deeply", lambda at: (at / one).write_bytes((50_000).to_bytes(8, "little") + b"[" * 50_000)
    yield "index nested deeply", index('{"weight_map": ' + "[" * 100_000)
    yield "index with a key twice", index('{"weight_map": {"scale": "two.safetensors", "scale": "one.safetensors"}}')
    for told in (
        "[]",
        "{}",
        "3",
        '{"weight_map": []}',
        '{"weight_map": {"scale": 3}}',
        '{"weight_map": {"scale": ""}}',
    ):
        yield f"index {told}", index(told)
    for name in ("..", "../one.safetensors", "/etc/one.safetensors", "three.safetensors", "a\\u0000b"):
        yield f"index to {name}", index(f'{{"weight_map": {{"scale": "{name}"}}}}')
    yield "index to another file", index('{"weight_map": {"scale": "one.safetensors"}}')
    yield "index of bytes", lambda at: (at / INDEX).write_bytes(b"\xff\xfe\xff")


def copied(good: Path, to: Path) -> Path:
    """Copy a checkpoint of any format."""
    return Path((shutil.copytree if good.is_dir() else shutil.copy)(good, to))
