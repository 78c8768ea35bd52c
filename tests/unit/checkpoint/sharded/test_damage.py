"""Damage is found before anything is believed, and named, on every rank."""

from __future__ import annotations

import pickle
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointTensor
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.folder import MANIFEST
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import FileIO, load_file, read_folder, read_on_all_ranks
from tests.helpers.damage import RanCode, of_file, of_folder
from tests.helpers.threaded import checkpoints_of, on_ranks, sharded_state, values_of

WORLD = 2


def save(path: Path, seed: float) -> Path:
    def attempt(together: Any) -> None:
        save_sharded(path, sharded_state(together.rank, WORLD, seed), {"seed": seed}, together)

    assert on_ranks(WORLD, attempt) == [None] * WORLD
    return path


def refusals(path: Path, full: bool = False, name: str = "") -> list[str]:
    """Return the message of each reading rank, and that of a single process."""

    def attempt(together: Any) -> None:
        if full and path.is_file():
            load_file(FileIO(), path, None, together)
        else:
            read_on_all_ranks(checkpoints_of(together), path, None)

    errors = on_ranks(WORLD, attempt)
    try:
        load_file(FileIO(), path, None) if full and path.is_file() else read_folder(path, None)
    except Exception as error:
        errors.append(error)
    else:
        errors.append("was read by one")
    for error in errors:
        assert type(error) is CheckpointError, f"{name}: {error!r}"
    return [str(error) for error in errors]


def test_every_damage_of_a_folder_is_named_on_every_rank(tmp_path: Path) -> None:
    folder, other = save(tmp_path / "good.ckpt", 1.0), save(tmp_path / "other.ckpt", 2.0)
    for name, damage, said in of_folder(folder, other):
        copy = tmp_path / "x.ckpt"
        shutil.copytree(folder, copy)
        damage(copy)
        for text in refusals(copy, False, name):
            assert "x.ckpt" in text, name
            assert re.search(said, text, re.DOTALL), f"{name}: {text}"
        shutil.rmtree(copy)


def test_extra_files_do_no_harm(tmp_path: Path) -> None:
    folder = save(tmp_path / "x.ckpt", 1.0)
    (folder / "__7_0.distcp").write_bytes(b"of another world size")
    (folder / "notes").mkdir()
    assert on_ranks(WORLD, lambda together: read_on_all_ranks(checkpoints_of(together), folder, None)["seed"]) == [
        1.0,
        1.0,
    ]


def test_every_damage_of_a_file_is_named_on_every_rank(tmp_path: Path) -> None:
    file, ran = tmp_path / "good.ckpt", tmp_path / "ran"
    torch.save({"seed": 1.0, "state_dict": values_of(1.0)}, file)
    for name, damage, said in of_file(file, ran):
        copy = tmp_path / "x.ckpt"
        shutil.copy(file, copy)
        damage(copy)
        for text in refusals(copy, True, name):
            assert re.search(said, text, re.DOTALL), f"{name}: {text}"
        assert not ran.exists(), name
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


@pytest.mark.parametrize("at", range(0, 100, 4))
def test_a_bit_anywhere_in_a_file_is_noticed_or_changes_nothing(tmp_path: Path, at: int) -> None:
    file = tmp_path / "x.ckpt"
    values = values_of(1.0)
    torch.save({"seed": 1.0, "state_dict": values}, file)
    data = file.read_bytes()
    for position in range(at * len(data) // 100, (at + 4) * len(data) // 100, 61):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        with suppress(CheckpointError):
            found = load_file(FileIO(), file, None)
            assert all(torch.equal(value, values[key]) for key, value in found["state_dict"].items()), position
            del found


# -- files of other programs have no checksums


def foreign(path: Path) -> Path:
    dcp.save({"state_dict": values_of(1.0)}, checkpoint_id=path, no_dist=True)
    torch.save({"seed": 1.0}, path / "meta.pt")
    return path


def rewritten(change: Any) -> Any:
    def damage(folder: Path) -> None:
        found = pickle.loads((folder / METADATA).read_bytes())
        change(found)
        (folder / METADATA).write_bytes(pickle.dumps(found))

    return damage


def _move(found: Any) -> None:
    chunk = found.state_dict_metadata["state_dict.up.weight"].chunks[0]
    chunk.offsets = torch.Size((1, 0))


def _shorten(found: Any) -> None:
    entry = found.state_dict_metadata["state_dict.up.weight"]
    entry.chunks[0].sizes = torch.Size((32, 17))


def _escape(found: Any) -> None:
    for info in found.storage_data.values():
        info.relative_path = "../" + info.relative_path


def _elsewhere(found: Any) -> None:
    found.storage_data.pop(MetadataIndex("state_dict.scale", torch.Size(()), 0), None)


FOREIGN = {
    "cut": (lambda at: (at / "__0_0.distcp").write_bytes((at / "__0_0.distcp").read_bytes()[:-50]), "__0_0.distcp"),
    "missing": (lambda at: (at / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a part outside": (rewritten(_move), r"\.metadata is damaged: a part of 'state_dict.up.weight' is not within it"),
    "a part missing": (rewritten(_shorten), r"\.metadata is damaged: the parts of 'state_dict.up.weight' do not make"),
    "outside": (rewritten(_escape), r"__0_0\.distcp|\.metadata"),
    "nowhere": (rewritten(_elsewhere), r"\.metadata does not say in which file 'state_dict.scale' lies"),
    "no types": (rewritten(lambda found: found.storage_data.update(x=3)), r"\.metadata is damaged"),
    "paths": (
        rewritten(lambda found: found.planner_data.update(x=3)),
        r"\.metadata is damaged: an entry has no path of keys",
    ),
    "no metadata": (lambda at: (at / METADATA).write_bytes(pickle.dumps([1])), r"\.metadata is not the metadata"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_damage_of_what_others_have_written(tmp_path: Path, name: str) -> None:
    folder = foreign(tmp_path / "x.ckpt")
    damage, said = FOREIGN[name]
    damage(folder)
    for text in refusals(folder):
        assert re.search(said, text), text


def test_what_others_have_written_is_read(tmp_path: Path) -> None:
    found = read_folder(foreign(tmp_path / "x.ckpt"), None)
    for key, value in values_of(1.0).items():
        assert isinstance(found["state_dict"][key], CheckpointTensor)
        assert torch.equal(found["state_dict"][key].full_tensor(), value)


# -- code


@pytest.mark.parametrize("file", ["meta.pt", METADATA, "__0_0.distcp"])
@pytest.mark.parametrize("whose", ["ours", "others'"])
def test_nothing_is_executed(tmp_path: Path, file: str, whose: str) -> None:
    ran, at = tmp_path / "ran", tmp_path / "x.ckpt"
    if whose == "ours":
        save(at, 1.0)
        (at / MANIFEST).unlink()  # a forger of one file forges that, too; and without it, it is not complete
        (at / METADATA).write_bytes((at / METADATA).read_bytes().replace(b"lightning_zero-", b"somebody-else--"))
    else:
        foreign(at)
    if file == METADATA:
        (at / file).write_bytes(pickle.dumps(RanCode(ran)))
    else:
        with open(at / file, "r+b") as out:
            torch.save({"code": RanCode(ran)}, out)
            if file == "meta.pt":
                out.truncate()
    for text in refusals(at):
        assert re.search(re.escape(file), text), text
    assert not ran.exists()
    if file == "meta.pt":
        assert read_folder(at, False)["code"] is not None
        assert ran.exists(), "who trusts the file gets what it says"
