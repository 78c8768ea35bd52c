"""A manifest lists the content of a folder, and detects changes of itself."""

import json

import pytest

from lightning_zero.checkpoint.integrity import FileChecksum, digest_of
from lightning_zero.checkpoint.sharded.folder import FORMAT, Manifest, _canonical
from lightning_zero.errors import CheckpointError

WHERE = "run/x.ckpt/manifest.json"
MANIFEST = Manifest(
    "lightning_zero-1", 2, {"__0_0.distcp": FileChecksum(3, digest_of(b"abc")), "meta.pt": FileChecksum(0, "x")}
)


def test_it_comes_back() -> None:
    data = MANIFEST.to_bytes()
    assert Manifest.from_bytes(data, WHERE) == MANIFEST
    assert json.loads(data)["files"]["__0_0.distcp"]["bytes"] == 3


@pytest.mark.parametrize("at", [5, 60, 200, -40])
def test_a_flipped_bit_is_noticed(at: int) -> None:
    data = bytearray(MANIFEST.to_bytes())
    data[at] ^= 1
    with pytest.raises(CheckpointError, match=r"run/x\.ckpt/manifest\.json is damaged"):
        Manifest.from_bytes(bytes(data), WHERE)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", MANIFEST.to_bytes()[:-3], MANIFEST.to_bytes() * 2])
def test_what_is_no_manifest_is_damaged(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_bytes(data, WHERE)


def _changed(**entries: object) -> bytes:
    body = json.loads(MANIFEST.to_bytes()) | entries
    del body["xxh3_128"]
    return json.dumps(body | {"xxh3_128": digest_of(_canonical(body))}).encode()


def test_a_later_format_is_named() -> None:
    with pytest.raises(CheckpointError, match=f"says format {FORMAT + 1}, written by lightning_zero .* Update"):
        Manifest.from_bytes(_changed(format=FORMAT + 1), WHERE)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", "..", "a\\b"])
def test_files_of_other_folders_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a file of its folder"):
        Manifest.from_bytes(_changed(files={name: {"bytes": 1, "xxh3_128": "x"}}), WHERE)
