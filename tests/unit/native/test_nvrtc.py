"""Test that CUDA code is compiled without a toolkit and without a device."""

from pathlib import Path

import pytest
import torch

from lightning_zero.native import build as nvrtc
from lightning_zero.native.build import kernel_source

HOPPER = (9, 0)


def installed() -> bool:
    try:
        nvrtc._library()
    except RuntimeError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not installed(), reason="torch brings no NVRTC along")


@needs_nvrtc
@pytest.mark.parametrize(("rows", "capability"), [(1, HOPPER), (2, (8, 0)), (3, HOPPER), (8, (10, 0)), (72, HOPPER)])
def test_means_compile_for_any_number_of_ranks(rows: int, capability: tuple[int, int]) -> None:
    code = nvrtc.compile_cuda(kernel_source("kernels.cu"), capability, [f"-DROWS={rows}"])
    assert bytes(code[:4].tolist()) == b"\x7fELF"
    assert b"mean_of_bfloat16" in bytes(code.tolist())


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "kernels"),
    [
        ("signal_kernels.cu", ["rank_barrier", "begin_barrier_step"]),
        ("signal_kernels.cu", ["announce_epoch", "wait_for_epoch"]),
        ("signal_kernels.cu", ["announce_send", "announce_parts", "wait_for_parts"]),
    ],
)
@pytest.mark.parametrize("ranks", [2, 72])
def test_kernels_by_which_ranks_wait_compile_with_what_they_share(source: str, kernels: list[str], ranks: int) -> None:
    code = nvrtc.compile_cuda(kernel_source(source), HOPPER, [f"-DRANKS={ranks}"])
    for kernel in kernels:
        assert kernel.encode() in bytes(code.tolist())


@needs_nvrtc
def test_the_kernel_of_an_emulated_network_compiles() -> None:
    assert b"hold_stream" in bytes(nvrtc.compile_cuda(kernel_source("kernels.cu"), HOPPER).tolist())


@needs_nvrtc
def test_what_is_wrong_with_a_source_is_said(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("int declared() { return nothing; }")
    with pytest.raises(RuntimeError, match=r'(?s)wrong\.cu.*identifier "nothing" is undefined'):
        nvrtc.compile_cuda(source, HOPPER)


@pytest.mark.parametrize(("version", "said"), [(None, "built without CUDA"), ("77.1", r"libnvrtc\.so\.77 of NVRTC")])
def test_without_nvrtc_it_says_so(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(RuntimeError, match=said):
        nvrtc.compile_cuda(kernel_source("kernels.cu"), HOPPER)
