"""A file that is cut off after it was compared and mapped.

A read raises an error, without a signal, for files of any writer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from lightning_zero.checkpoint.full_checkpoint import write_local_file
from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.safetensors import open_safetensors
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.reader import open_checkpoint
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import FileIO, load_file
from lightning_zero.sharding.host_memory import as_mapped
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.folders import sharded

VALUES = {"a": torch.randn(300, 512), "b": torch.randn(1 << 17)}
Values = dict[str, Tensor]


def _file(path: Path) -> Callable[[], Values]:
    write_local_file({"state_dict": VALUES, "step": torch.tensor(7.0)}, path)

    def opened() -> Values:
        found = load_file(FileIO(), path, None)
        return found["state_dict"] | {"step": found["step"]}

    return opened


def _folder(path: Path) -> Callable[[], Values]:
    save_sharded(path, {"state_dict": {key: sharded(value) for key, value in VALUES.items()}}, {}, SingleProcess())
    return lambda: open_checkpoint(str(path)).content()["state_dict"]


def _others(path: Path) -> Callable[[], Values]:
    dcp.save({"state_dict": VALUES}, checkpoint_id=path, no_dist=True)
    torch.save({}, path / "meta.pt")
    return lambda: open_checkpoint(str(path)).content()["state_dict"]


def _safetensors(path: Path) -> Callable[[], Values]:
    path.mkdir()
    save_file(VALUES, path / "model.safetensors")
    return lambda: open_safetensors(path)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write", [_file, _folder, _others, _safetensors])
def test_reading_says_so(tmp_path: Path, write: Callable[[Path], Callable[[], Values]]) -> None:
    path = tmp_path / "x.ckpt"
    opened = write(path)
    for key, value in opened().items():
        if key in VALUES:
            assert torch.equal(_part(value), _part(VALUES[key])), key
    values = opened()
    _part(values["a"])  # all is mapped that will be
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file() and file.stat().st_size > 8192:
            os.truncate(file, 8192)
    for key, value in values.items():
        if key == "step":  # which was taken when the file was opened
            assert value == 7
            continue
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}.* was cut off|is damaged where"):
            _part(value)


def _part(value: Tensor) -> Tensor:
    return ShardLayout.from_shape(value.shape, value.dtype, 2).part(as_mapped(value), 1)
