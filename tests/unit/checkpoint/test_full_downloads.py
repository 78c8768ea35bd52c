"""Full checkpoints at URLs: each host downloads one once, and reads the values of ``torch.load``."""

from __future__ import annotations

import enum
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch

from lightning_zero.checkpoint.remote_files import ScratchFolder
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import FileIO, load_file
from lightning_zero.sharding.layout import ShardLayout, memory_order
from tests.helpers.elsewhere import Counted, counting
from tests.helpers.threaded import on_ranks

URL = "counted://run/x.ckpt"


@pytest.fixture(autouse=True)
def _store() -> Iterator[None]:
    with counting():
        yield


def _put(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with fsspec.open(URL, "wb") as file:
        file.write(buffer.getvalue())
    Counted.read.clear()
    return buffer.getvalue()


def _values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tied, conv = torch.randn(300, 100), torch.randn(64, 33, 3, 3)
    return {
        "up": tied,
        "small": torch.randn(7),
        "conv": conv.to(memory_format=torch.channels_last),
        "transposed": torch.randn(200, 300).t(),
        "part": torch.randn(400, 200)[100:300, 50:],
        "expanded": torch.randn(1, 20000).expand(3, 20000),
        "half": torch.randn(70000).bfloat16(),
        "down": tied,
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(20000)),
        "number": torch.tensor(3.0),
    }


def test_each_host_downloads_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {str(number): torch.randn(1000 + number, 256) for number in range(12)} | {"bias": torch.randn(100)}
    _put({"state_dict": values, "step": 3})
    folders: list[Path] = []

    def download(self: ScratchFolder, *args: Any, real: Any = ScratchFolder.download) -> Path:
        folders.append(self.path)
        return real(self, *args)

    monkeypatch.setattr(ScratchFolder, "download", download)

    def attempt(rank_tasks: Any) -> None:
        found = load_file(FileIO(), URL, None, rank_tasks)
        assert found["step"] == 3
        for key, value in values.items():
            layout = ShardLayout.from_shape(value.shape, value.dtype, rank_tasks.world_size)
            part = layout.part(found["state_dict"][key], rank_tasks.rank)
            assert torch.equal(part, layout.part(value, rank_tasks.rank))

    for world_size in (1, 3):
        folders.clear()
        assert on_ranks(world_size, attempt) == [None] * world_size
        [folder] = folders
        assert not folder.exists()


def test_too_little_room_for_a_download_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _put({"state_dict": _values()})
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    for end in on_ranks(2, lambda rank_tasks: load_file(FileIO(), URL, None, rank_tasks)):
        assert isinstance(end, CheckpointError)
        assert "Set TMPDIR to a folder with more space" in str(end)


@pytest.mark.parametrize("rank", [0, 2])
def test_every_value_is_what_torch_loads(rank: int) -> None:
    saved = _put({"state_dict": OrderedDict(_values()), "list": [(torch.ones(30000), {"a": {1, 2}})]})
    wanted = torch.load(io.BytesIO(saved))
    found = load_file(FileIO(), URL, None)
    assert type(found["state_dict"]) is OrderedDict
    assert list(found["state_dict"]) == list(wanted["state_dict"])
    assert found["list"][0][1] == {"a": {1, 2}}
    assert torch.equal(found["list"][0][0] + 0, wanted["list"][0][0])
    assert found["state_dict"]["up"] is found["state_dict"]["down"]
    for key, value in wanted["state_dict"].items():
        given = found["state_dict"][key]
        assert (given.shape, given.dtype) == (value.shape, value.dtype)
        layout = ShardLayout.from_shape(value.shape, value.dtype, 3, memory_order(value.detach()))
        assert torch.equal(layout.part(given, rank), layout.part(value, rank)), key
        assert torch.equal(given * 1, value * 1), key


class Kind(enum.Enum):
    ONE = 1


class Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _marked(value: torch.Tensor) -> torch.Tensor:
    value.held = torch.ones(50000)  # type: ignore[attr-defined]
    return value


HIDDEN: dict[str, Callable[[], Any]] = {
    "in an object": lambda: Holder(torch.ones(50000)),
    "in an attribute": lambda: _marked(torch.zeros(50000)),
    "conjugated": lambda: torch.randn(30000, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(90000), 0.5, 0, torch.qint8),
    "sparse": lambda: torch.ones(50000).to_sparse(),
}


@pytest.mark.parametrize("name", list(HIDDEN))
def test_tensors_anywhere_are_read(name: str) -> None:
    _put({"state_dict": {"w": torch.arange(50000.0)}, "other": HIDDEN[name]()})
    with torch.serialization.safe_globals([Holder, Kind]):
        found = load_file(FileIO(), URL, None)
    assert type(found["state_dict"]["w"]) is torch.Tensor
    other = found["other"]
    if name == "in an object":
        assert other.value.sum() == 50000
    elif name == "in an attribute":
        assert other.held.sum() == 50000
    elif name == "sparse":
        assert other.to_dense().sum() == 50000
    elif name == "quantized":
        assert other.dequantize().sum() == 90000
    else:
        assert other.is_conj()
        assert other.abs().min() > 0


def test_only_what_is_trusted_is_unpickled() -> None:
    _put({"state_dict": {"w": torch.ones(50000)}, "kind": Kind.ONE})
    with pytest.raises(CheckpointError, match=r"(?s)x\.ckpt cannot be read: UnpicklingError.*Kind"):
        load_file(FileIO(), URL, None)
    assert load_file(FileIO(), URL, False)["kind"] is Kind.ONE


def test_an_older_format_is_read_whole() -> None:
    with fsspec.open(URL, "wb") as file:
        torch.save({"state_dict": {"w": torch.ones(50000)}}, file, _use_new_zipfile_serialization=False)
    assert torch.equal(load_file(FileIO(), URL, None)["state_dict"]["w"], torch.ones(50000))


@pytest.mark.parametrize("damage", ["flipped", "cut off", "empty"])
def test_what_is_damaged_is_named_on_every_rank(damage: str) -> None:
    data = bytearray(_put({"state_dict": _values()}))
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    left = {"flipped": len(data), "cut off": len(data) // 2, "empty": 0}[damage]
    with fsspec.open(URL, "wb") as file:
        file.write(data[:left])
    for end in on_ranks(2, lambda together: load_file(FileIO(), URL, None, together)):
        assert isinstance(end, CheckpointError)
        assert f"Could not load the checkpoint {URL}" in str(end)
        assert "is damaged" in str(end) or "is empty" in str(end)


def test_one_that_is_replaced_is_not_read_as_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    _put({"state_dict": {"w": torch.zeros(50000)}})
    found = load_file(FileIO(), URL, None)
    _put({"state_dict": {"w": torch.ones(50000)}})
    assert torch.equal(found["state_dict"]["w"], torch.zeros(50000))

    def download(self: ScratchFolder, *args: Any, real: Any = ScratchFolder.download) -> Path:
        path = real(self, *args)
        _put({"state_dict": {"w": torch.zeros(50000)}})
        return path

    monkeypatch.setattr(ScratchFolder, "download", download)
    with pytest.raises(CheckpointError, match=r"x\.ckpt was replaced by another one"):
        load_file(FileIO(), URL, None)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(50000))


def _of_plain(value: float) -> dict[str, Any]:
    return {"pytorch-lightning_version": "2", "state_dict": {"w": torch.full((50000,), value)}}


def test_a_module_is_loaded_out_of_one_that_was_compared() -> None:
    data = bytearray(_put(_of_plain(3.0)))
    assert torch.equal(Plain.load_from_checkpoint(URL).w, torch.full((50000,), 3.0))
    data[len(data) // 2] ^= 1
    with fsspec.open(URL, "wb") as file:
        file.write(data)
    with pytest.raises(CheckpointError, match=r"counted://run/x\.ckpt is damaged"):
        Plain.load_from_checkpoint(URL)


def test_that_nothing_is_there_is_said_as_torch_says_it() -> None:
    with pytest.raises(FileNotFoundError):
        load_file(FileIO(), "counted://run/none.ckpt", None)
    with pytest.raises(FileNotFoundError):
        Plain.load_from_checkpoint("counted://run/none.ckpt")


def test_one_rank_of_a_host_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            asked.append(self.path)

    torch.save({"state_dict": {"w": torch.arange(50000.0)}}, tmp_path / "x.ckpt")
    (tmp_path / "another").mkdir()
    torch.save({"state_dict": {"w": torch.ones(50000)}}, tmp_path / "another" / "x.ckpt")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/x.ckpt?version=2"
    try:
        ends = on_ranks(3, lambda together: load_file(FileIO(), url, True, together)["state_dict"]["w"])
        missing = on_ranks(2, lambda together: load_file(FileIO(), url.replace("x.ckpt", "y.ckpt"), True, together))
        another = load_file(FileIO(), url.replace("x.ckpt", "another/x.ckpt"), True)
    finally:
        server.shutdown()
        server.server_close()
    assert all(torch.equal(end, torch.arange(50000.0)) for end in ends)
    assert torch.equal(another["state_dict"]["w"], torch.ones(50000)), "another one of the same name"
    assert [path for path in asked if "x.ckpt" in path] == ["/x.ckpt?version=2", "/another/x.ckpt?version=2"]
    assert all(isinstance(end, CheckpointError) and "y.ckpt" in str(end) for end in missing)
