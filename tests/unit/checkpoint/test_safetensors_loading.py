"""Files of safetensors: their content, and their distribution."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_zero.checkpoint.safetensors import (
    INDEX,
    ExportFile,
    load_safetensors_into,
    open_safetensors,
    parse_size,
    plan_files,
)
from lightning_zero.checkpoint.sharded.checkpoint_tensors import RangeReader
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import ShardLayout

WEIGHTS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b": torch.tensor(3.0),
    "c": torch.ones(0, 2),
    "d": torch.ones(5) * 1j,
}


def _two_files(folder: Path) -> None:
    first, second = {"a.weight": WEIGHTS["a.weight"]}, {key: WEIGHTS[key] for key in "bcd"}
    save_file(first, folder / "one.safetensors")
    save_file(second, folder / "two.safetensors")
    where = dict.fromkeys(first, "one.safetensors") | dict.fromkeys(second, "two.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def test_a_file_a_folder_or_an_index_will_do(tmp_path: Path) -> None:
    _two_files(tmp_path)
    save_file(WEIGHTS, tmp_path / "all.safetensors")
    for path in (tmp_path, tmp_path / INDEX, tmp_path / "all.safetensors"):
        found = open_safetensors(path)
        assert found.keys() == WEIGHTS.keys()
        for key, value in WEIGHTS.items():
            assert torch.equal(found[key].full_tensor(), value), key


@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_read_their_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    whole = torch.arange(2048 * 2048).view(2048, 2048).to(torch.bfloat16)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    read: list[int] = []

    def counted(self: RangeReader, begin: int, into: memoryview, real: Any = RangeReader.read) -> None:
        read.append(len(into))
        real(self, begin, into)

    monkeypatch.setattr(RangeReader, "read", counted)
    value = open_safetensors(tmp_path)["w"]
    layout = ShardLayout.from_shape(value.shape, value.dtype, world_size)
    for rank in range(world_size):
        assert torch.equal(layout.part(value, rank), layout.part(whole, rank))
    assert sum(read) == whole.nbytes


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda home: (home / "two.safetensors").unlink(), "two.safetensors cannot be read"),
        (lambda home: (home / "one.safetensors").write_bytes(b"x" * 40), "one.safetensors cannot be read"),
        (lambda home: (home / INDEX).write_text("{"), "is not an index"),
        (lambda home: (home / INDEX).write_text('{"weight_map": {"z": "one.safetensors"}}'), "lacks 'z'"),
        (lambda home: (home / INDEX).write_text('{"weight_map": {"z": "../one"}}'), "not a file of its folder"),
        (lambda home: (home / INDEX).unlink(), "holds neither"),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, damage: object, words: str) -> None:
    _two_files(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=words):
        open_safetensors(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read.*Download it again"):
        open_safetensors(tmp_path)


def test_tensors_are_shared_out_in_their_order() -> None:
    sizes = {"a": 5, "b": 5, "c": 11, "d": 1}
    assert plan_files(sizes, 100) == [ExportFile("model.safetensors", ("a", "b", "c", "d"))]
    assert [part.keys for part in plan_files(sizes, 10)] == [("a", "b"), ("c",), ("d",)]
    assert plan_files(sizes, 10)[1].name == "model-00002-of-00003.safetensors"


def test_sizes() -> None:
    assert [parse_size(size) for size in ("5GB", "1.5 MiB", "10b", 7)] == [5 * 10**9, 3 * 2**19, 10, 7]
    for wrong in ("5", "GB", 0, -1, None, True, "0B"):
        with pytest.raises(ValueError, match="max_shard_size="):
            parse_size(wrong)  # type: ignore[arg-type]


def test_a_plain_module_is_loaded_whole(tmp_path: Path) -> None:
    module, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    assert load_safetensors_into(other, tmp_path) == ([], [])
    assert torch.equal(other.weight, module.weight)
    with pytest.raises(ValueError, match=r"The files lack: nothing\. The module lacks: bias"):
        load_safetensors_into(torch.nn.Linear(4, 3, bias=False), tmp_path)
    with pytest.raises(ValueError, match=r"'weight': \(3, 4\) in the files, \(2, 4\) in the module"):
        load_safetensors_into(torch.nn.Linear(4, 2), tmp_path)
    with pytest.raises(ValueError, match="meta device"):
        load_safetensors_into(torch.nn.Linear(4, 3, device="meta"), tmp_path)
