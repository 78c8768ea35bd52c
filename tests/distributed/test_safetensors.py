"""Hugging Face's files are loaded into shards and written from them.

Each rank reads and writes its part.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lightning_zero
from lightning_zero.checkpoint import safetensors
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations import hf_weights
from tests.helpers.sharded import EAGER, engine_for
from tests.ranks.pool import Ranks

WORLDS = [1, 2, 3]


class Net(nn.Module):
    """A tied weight, a convolution in channels_last, a scalar, a weight smaller than the world, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(67, 23)
        self.conv = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(23, 67, bias=False)
        self.head.weight = self.embed.weight


def _load(folder: str, inside: bool) -> tuple[dict[str, torch.Tensor], Any]:
    if inside:
        with engine_for(None, EAGER) as engine:
            with engine.construction():
                parent = nn.Module()
                parent.net = Net(seed=torch.distributed.get_rank() + 3)
                told = lightning_zero.load_safetensors(parent.net, folder)
            engine.shard(parent)
            return {k.removeprefix("net."): v for k, v in parent.state_dict().items()}, told
    model = Net(seed=5)
    with engine_for(model, EAGER):
        told = lightning_zero.load_safetensors(model, folder)
        return dict(model.state_dict()), told


@pytest.mark.parametrize("world_size", WORLDS)
def test_shards_hold_what_the_files_hold(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    state = {key: value.contiguous() for key, value in Net().state_dict().items() if key != "head.weight"}
    state["embed.weight"] = state["embed.weight"].bfloat16()  # is converted
    save_file({key: state[key] for key in list(state)[:3]}, tmp_path / "a.safetensors")
    save_file({key: state[key] for key in list(state)[3:]}, tmp_path / "b.safetensors")
    where = {key: "a.safetensors" if n < 3 else "b.safetensors" for n, key in enumerate(state)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for inside in (False, True):
        for found, told in ranks.run(world_size, _load, str(tmp_path), inside):
            assert told == ([], [])
            for key, value in state.items():
                assert torch.equal(found[key], value.to(found[key].dtype)), (inside, key)
            assert torch.equal(found["head.weight"], found["embed.weight"])


def _wrong(folder: str) -> list[str]:
    said = []
    model = Net(seed=5)
    with engine_for(model, EAGER):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        for name in ("lacking", "shapes", "damaged"):
            try:
                lightning_zero.load_safetensors(model, f"{folder}/{name}.safetensors")
            except (ValueError, CheckpointError) as error:
                said.append(str(error))
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        told = lightning_zero.load_safetensors(
            model, f"{folder}/other.safetensors", strict=False, rename=lambda key: key.replace("old", "scale")
        )
        said.append(f"{sorted(told.missing_keys)[:1]} {told.unexpected_keys} {float(model.state_dict()['scale'])}")
    return said


def test_what_does_not_fit_is_named_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    state = {key: value.contiguous() for key, value in Net().state_dict().items() if key != "head.weight"}
    save_file(
        {k: v for k, v in state.items() if k != "conv.bias"} | {"more": torch.ones(2)}, tmp_path / "lacking.safetensors"
    )
    save_file(state | {"embed.weight": torch.ones(66, 23)}, tmp_path / "shapes.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\x00" * 50)
    save_file({"old": torch.tensor(4.5), "more": torch.ones(2)}, tmp_path / "other.safetensors")
    for said in ranks.run(2, _wrong, str(tmp_path)):
        assert "The files lack: conv.bias. The module lacks: more." in said[0]
        assert "'embed.weight': (66, 23) in the files, (67, 23) in the module" in said[1]
        assert "damaged.safetensors cannot be read" in said[2]
        assert said[3] == "['conv.bias'] ['more'] 4.5"


def _export(folder: str, most: int, dtype: torch.dtype | None) -> tuple[list[str], dict[str, torch.Tensor]]:
    model = Net()
    with engine_for(model, EAGER):
        names = lightning_zero.export_safetensors(model, folder, most, dtype, {"made": "here"})
        return names, dict(model.state_dict())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.exhaustive_variants("3")
def test_what_is_written_is_read_by_others(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    for most, count in ((10**9, 1), (1500, 4)):
        for dtype in (None, torch.bfloat16):
            found = ranks.run(world_size, _export, str(tmp_path), most, dtype)
            names, state = found[0]
            assert (len(names) > 1) == (count > 1)
            whole = {k: v for name in names for k, v in load_file(tmp_path / name).items()}
            assert whole.keys() == state.keys() - {"head.weight"}  # tied, and written once
            for key, value in whole.items():
                wanted = state[key].to(dtype) if dtype and state[key].is_floating_point() else state[key]
                assert torch.equal(value, wanted), key
            left = {path.name for path in tmp_path.iterdir()} - {"config.json", "model.safetensors.index.json"}
            assert left == set(names)
            assert (tmp_path / "model.safetensors.index.json").exists() == (count > 1)
            plain = Net(seed=9)
            assert lightning_zero.load_safetensors(plain, tmp_path) == ([], [])


def _full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def _no_memory(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


CANNOT = {"write": ("_write_file", _full, "No space left"), "keep": ("to_cpu", _no_memory, "can't allocate memory")}


def _cannot(folder: str) -> dict[str, str]:
    model, said = Net(), {}
    with engine_for(model, EAGER):
        for what, (name, fail, _) in CANNOT.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                if torch.distributed.get_rank() == 1:
                    monkeypatch.setattr(safetensors if what == "write" else hf_weights, name, fail)
                try:
                    lightning_zero.export_safetensors(model, folder, 1500)
                except CheckpointError as error:
                    said[what] = str(error)
            torch.distributed.barrier()
            said[f"left by {what}"] = str(list(Path(folder).iterdir()))
            torch.distributed.barrier()
        lightning_zero.export_safetensors(model, folder, 1500)
    return said


def test_a_rank_that_cannot_do_its_part_is_named_on_all_and_the_next_time_goes_well(
    ranks: Ranks, tmp_path: Path
) -> None:
    for said in ranks.run(2, _cannot, str(tmp_path)):
        for what, (_, _, error) in CANNOT.items():
            assert f"export weights to {tmp_path}: rank 1: " in said[what]
            assert error in said[what]
            assert said[f"left by {what}"] == "[]"
    assert lightning_zero.load_safetensors(Net(seed=9), tmp_path) == ([], [])


def _transformers(home: str) -> bool:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    first = transformers.LlamaForCausalLM(config)
    if torch.distributed.get_rank() == 0:
        first.save_pretrained(f"{home}/first", max_shard_size="20KB")
    torch.distributed.barrier()
    torch.manual_seed(2)
    second = transformers.LlamaForCausalLM(config)
    with engine_for(second, EAGER):
        lightning_zero.load_safetensors(second, f"{home}/first")
        lightning_zero.export_safetensors(second, f"{home}/second", "20KB")
        with lightning_zero.full_parameters(second):
            if torch.distributed.get_rank() == 0:
                second.save_pretrained(f"{home}/third", max_shard_size="20KB")
    if torch.distributed.get_rank() == 0:
        config.save_pretrained(f"{home}/second")
    torch.distributed.barrier()
    wanted = first.state_dict()
    for name in ("second", "third"):
        again = transformers.AutoModelForCausalLM.from_pretrained(f"{home}/{name}").state_dict()
        assert again.keys() == wanted.keys()
        assert all(torch.equal(again[key], value) for key, value in wanted.items()), name
    return True


@pytest.mark.exhaustive
def test_transformers_reads_them_and_is_read(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert ranks.run(2, _transformers, str(tmp_path), deadline=120) == [True, True]
