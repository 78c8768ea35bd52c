"""A checkpoint whose place is taken by another one while it is being read.

It is read to its end, or an error says so; never some of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.checkpoint.sharded.reader import CheckpointReader
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations import checkpoint_files
from lightning_zero.integrations.checkpoint_files import FileIO, load_file
from tests.helpers.saves import save, save_file
from tests.helpers.threaded import on_ranks, values_of

WORLD = 2


@pytest.mark.parametrize("mapped", [False, True], ids=["nothing was read", "some was read"])
def test_a_folder(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1.0)
    folder = CheckpointReader(str(path))
    folder.check(folder.sizes())
    state = folder.content()["state_dict"]
    if mapped:  # of one file
        state["up.bias"].chunks[0][1]()
    save(path, 2.0)
    wanted = values_of(1.0)
    gone = []
    for key, value in state.items():
        try:
            found = value.full_tensor()
        except CheckpointError as error:
            gone.append(str(error))
        else:
            assert torch.equal(found, wanted[key]), key
    assert gone
    assert all("x.ckpt/__" in said and "is missing" in said for said in gone)
    assert CheckpointReader(str(path)).content()["seed"] == 2.0


@pytest.mark.parametrize("when", ["after it was compared", "before rank 1 looked"])
def test_a_file(tmp_path: Path, when: str) -> None:
    path = tmp_path / "x.ckpt"
    save_file(path, 1.0)
    real, calls = checkpoint_files.verify_archive, []

    def check(*args: Any) -> None:
        real(*args)
        calls.append(args)
        if len(calls) == (WORLD if when == "after it was compared" else 1):
            save_file(path, 2.0)

    def attempt(together: Any) -> float:
        if when != "after it was compared" and together.rank == 1:
            while not calls:
                pass
        return load_file(FileIO(), path, None, together)["seed"]

    with patch.object(checkpoint_files, "verify_archive", check):
        ends = on_ranks(WORLD, attempt)
    for end in ends:
        assert isinstance(end, CheckpointError)
        assert "x.ckpt was replaced by another one while it was being loaded" in str(end)
    assert load_file(FileIO(), path, None)["seed"] == 2.0
