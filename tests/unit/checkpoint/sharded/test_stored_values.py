"""Values of our own files are read in place."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.reader import CheckpointReader
from tests.helpers.folders import sharded, write_folder

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def test_tensors_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = write_folder(tmp_path / "x.ckpt")
    found = CheckpointReader(str(tmp_path / "x.ckpt")).state()["state_dict"]

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a tensor was unpickled")

    monkeypatch.setattr(torch, "load", refused)
    for key, value in wanted.items():
        assert torch.equal(found[key].full_tensor(), value), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (3,), (7, 5), (2, 3, 4), (0, 3), (200, 70)]
    values = {str(number): torch.randn(shape).mul(9).to(dtype) for number, shape in enumerate(shapes)}
    state = {"whole": values, "parts": {key: sharded(value) for key, value in values.items()}}
    save_sharded(tmp_path / "x", state, None, SingleProcess())
    found = CheckpointReader(str(tmp_path / "x")).state()
    for key, value in values.items():
        for part in ("whole", "parts"):
            assert torch.equal(found[part][key].full_tensor(), value), (part, key)
            assert found[part][key].dtype == dtype


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    write_folder(tmp_path / "x.ckpt")
    file = tmp_path / "x.ckpt" / "__0_0.distcp"
    before = file.read_bytes()
    value = CheckpointReader(str(tmp_path / "x.ckpt")).state()["state_dict"]["a.weight"].full_tensor()
    value.zero_()
    assert file.read_bytes() == before
    assert CheckpointReader(str(tmp_path / "x.ckpt")).state()["state_dict"]["a.weight"].full_tensor().any()
