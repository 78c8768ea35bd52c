"""Files are those of the library, byte for byte."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_zero.checkpoint.disk import AT_ONCE
from lightning_zero.checkpoint.weights.writing import NAMES, write_tensors


def test_they_are_what_the_library_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"{dtype}".replace("torch.", "ä."): torch.rand(5, 3).mul(9).to(dtype) for dtype in NAMES}
    tensors |= {"none": torch.empty(0, 4), "scalar": torch.tensor(2.5), 'a "b"\\': torch.rand(2), "Z": torch.rand(3)}
    tensors["large"] = torch.rand(AT_ONCE // 4 + 77)
    told: list[int] = []
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(tmp_path / "ours", tensors, {"format": "pt"}, told.append)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sum(told) == (tmp_path / "ours").stat().st_size
    assert max(told) == AT_ONCE


def test_what_the_format_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot hold 'z', of torch.complex128. Make it torch.complex64"):
        write_tensors(tmp_path / "x", {"z": torch.zeros(1, dtype=torch.complex128)}, {})
