"""Export weights as safetensors: every dtype, errors with their key, and files that other users may read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.safetensors import ExportWeight, export_weights
from lightning_zero.errors import CheckpointError

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu),
)


def _export(tensors: dict[str, torch.Tensor], folder: Path) -> list[int]:
    written: list[int] = []
    weights = {
        key: ExportWeight(value.nbytes, lambda value=value: value, torch.clone) for key, value in tensors.items()
    }
    export_weights(weights, folder, 10**9, SingleProcess(), {"made": "here"}, written.append)
    return written


def test_every_dtype_is_written_and_each_byte_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"{dtype}".replace("torch.", "ä."): torch.rand(5, 3).mul(9).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.empty(0, 4), "scalar": torch.tensor(2.5), 'a "b"\\': torch.rand(2)}
    written = _export(tensors, tmp_path)
    file = tmp_path / "model.safetensors"
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
    assert sum(written) == file.stat().st_size
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "other"}


def test_an_unknown_dtype_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold 'z', of torch.complex128. Make it torch.complex64"):
        _export({"a": torch.zeros(2), "z": torch.zeros(1, dtype=torch.complex128)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_library_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    from lightning_zero.checkpoint import safetensors as exporting

    def fail(*args: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(exporting, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"No space left on device .*model.safetensors"):
        _export({"a": torch.zeros(2)}, tmp_path)
    assert list(tmp_path.iterdir()) == []
