"""Weights that bitsandbytes 0.50 and torchao 0.18 have saved are read as these packages dequantize them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_zero.checkpoint import quantized_weights
from lightning_zero.checkpoint.safetensors import INDEX, open_safetensors
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.weight_format import WeightFormat

SAMPLES = Path(__file__).parent / "samples" / "quantized"
FILES = ("bitsandbytes", "torchao")
STATE = "nf4_nested_64.weight.quant_state.bitsandbytes__nf4"


def expected(name: str) -> dict[str, Tensor]:
    found = load_file(SAMPLES / "dequantized.safetensors")
    theirs = {key.removeprefix("torchao."): value for key, value in found.items() if key.startswith("torchao.")}
    return theirs if name == "torchao" else {key: found[key] for key in found if not key.startswith("torchao.")}


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("name", FILES)
def test_values_and_dtypes_are_those_of_the_package(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weights, "_DECODED_AT_ONCE", at_once)
    found, values = open_safetensors(SAMPLES / f"{name}.safetensors"), expected(name)
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key].full_tensor(), value), key


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", FILES)
def test_each_rank_reads_its_elements(name: str, world_size: int) -> None:
    found = open_safetensors(SAMPLES / f"{name}.safetensors")
    for key, value in expected(name).items():
        layout = ShardLayout.from_shape(value.shape, value.dtype, world_size)
        for rank in range(world_size):
            assert torch.equal(layout.part(found[key], rank), layout.part(value, rank)), key


def test_frozen_weights_keep_the_codes_of_bitsandbytes() -> None:
    value = expected("bitsandbytes")["nf4_nested_64.weight"]
    packing = WeightFormat("nf4", value.shape, value.dtype)
    packed = packing.encode(value)
    words = packed[: value.numel() // 8]
    own = torch.stack([words >> 4 * field & 15 for field in range(8)], 1).view(-1)
    pairs = load_file(SAMPLES / "bitsandbytes.safetensors")["nf4_nested_64.weight"].view(torch.uint8).view(-1)
    assert torch.equal(own, torch.stack([pairs >> 4, pairs & 15], 1).view(-1).int())
    assert (packing.decode(packed) - value).norm() < 0.01 * value.norm()


def test_parts_of_a_weight_may_be_in_several_files(tmp_path: Path) -> None:
    content = load_file(SAMPLES / "bitsandbytes.safetensors")
    where = {key: f"{number % 3}.safetensors" for number, key in enumerate(content)}
    for file in set(where.values()):
        save_file({key: content[key] for key in content if where[key] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    found = open_safetensors(tmp_path)
    for key, value in expected("bitsandbytes").items():
        assert torch.equal(found[key].full_tensor(), value), key


def test_each_file_of_torchao_describes_its_tensors(tmp_path: Path) -> None:
    content = load_file(SAMPLES / "torchao.safetensors")
    with safe_open(SAMPLES / "torchao.safetensors", "pt") as file:
        metadata = file.metadata()
    names = json.loads(metadata.pop("tensor_names"))
    for layer in ("rows", "groups"):
        own = [name for name in names if name.startswith(layer)]
        described = {name: metadata[name] for name in own} | {"tensor_names": json.dumps(own)}
        part = {key: content[key] for key in content if key.startswith(layer)}
        save_file(part, tmp_path / f"{layer}.safetensors", described)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {key: f"{key.split('.')[0]}.safetensors" for key in content}})
    )
    found, values = open_safetensors(tmp_path), expected("torchao")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[key].full_tensor(), value) for key, value in values.items())


@pytest.mark.parametrize("names", ["w,b", "", "3", "null", '["w"]', '["w", 1, []]', '{"w": 1}', "[" * 9999])
def test_names_that_another_package_wrote_are_ignored(tmp_path: Path, names: str) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "x.safetensors", {"tensor_names": names, "w": "of no JSON"})
    assert torch.equal(open_safetensors(tmp_path / "x.safetensors")["w"].full_tensor(), torch.ones(2, 3))


def test_blocks_may_cross_rows(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    codes, table = torch.randint(16, (5 * 90,), generator=rng), torch.linspace(-1, 1, 16)
    maxima = torch.rand(8, generator=rng)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [5, 90]}
    content = {
        "w": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).view(-1, 1),
        "w.absmax": maxima,
        "w.quant_map": table,
        "w.quant_state.bitsandbytes__nf4": as_bytes(state),
    }
    save_file(content, tmp_path / "x.safetensors")
    values = torch.tensor([float(table[code] * maxima[at // 64]) for at, code in enumerate(codes)]).view(5, 90)
    found = open_safetensors(tmp_path / "x.safetensors")["w"]
    assert torch.equal(found.full_tensor(), values)
    layout = ShardLayout.from_shape(values.shape, values.dtype, 3)
    assert all(torch.equal(layout.part(found, rank), layout.part(values, rank)) for rank in range(3))


def as_bytes(state: Any) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def changed(**values: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(content: dict[str, Tensor]) -> None:
        content[STATE] = as_bytes(json.loads(bytes(content[STATE].tolist())) | values)

    return change


def without(content: dict[str, Tensor], key: str) -> None:
    state = json.loads(bytes(content[STATE].tolist()))
    del state[key]
    content[STATE] = as_bytes(state)


DAMAGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "lacks 'nf4_flat_64.weight.absmax'": lambda content: content.pop("nf4_flat_64.weight.absmax"),
    "lacks 'nf4_nested_64.weight.nested_quant_map'": lambda content: content.pop(
        "nf4_nested_64.weight.nested_quant_map"
    ),
    "'nf4_nested_64.weight' do not fit": changed(shape=[6, 130]),
    "'fp4_nested_128.weight' do not fit": lambda c: c.update({"fp4_nested_128.weight.absmax": torch.zeros(5).byte()}),
    "'nf4_nested_64.weight' do not": lambda content: without(content, "nested_blocksize"),
    "KeyError.*nested_offset": lambda content: without(content, "nested_offset"),
    "TypeError": changed(dtype="save"),
    "KeyError": lambda content: content.update({STATE: as_bytes({})}),
    "JSONDecodeError": lambda content: content.update({STATE: torch.ones(3).byte()}),
    "'int8.weight' do not fit": lambda content: content.update({"int8.SCB": torch.ones(5)}),
    "'int8.weight' was saved by bitsandbytes in the layout": lambda c: c.update(
        {"int8.weight_format": torch.tensor(2).byte()}
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_files_of_bitsandbytes_that_cannot_be_read_are_named(tmp_path: Path, words: str) -> None:
    content = load_file(SAMPLES / "bitsandbytes.safetensors")
    DAMAGES[words](content)
    save_file(content, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=words):
        open_safetensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_type": "Int4Tensor"}, "is a Int4Tensor of torchao"),
        ({"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, "Int8Tensor of torchao with act_pre_scale"),
        ({"_tensor_data_names": None}, "TypeError"),
        ({"_data": {"dtype": {"_data": "Tensor"}}}, "TypeError"),
    ],
)
def test_other_tensors_of_torchao_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with safe_open(SAMPLES / "torchao.safetensors", "pt") as file:
        metadata = file.metadata()
    metadata["rows.weight"] = json.dumps(json.loads(metadata["rows.weight"]) | change)
    save_file(load_file(SAMPLES / "torchao.safetensors"), tmp_path / "x.safetensors", metadata)
    with pytest.raises(CheckpointError, match=words):
        open_safetensors(tmp_path / "x.safetensors")
