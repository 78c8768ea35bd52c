"""Every damaged input, in every format, ends in a CheckpointError that names it, soon, and changes nothing."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from lightning_zero.cli.main import main
from lightning_zero.errors import CheckpointError
from tests.helpers.damaged_inputs import FORMATS, copied, damages, read, values_in, write

HARMLESS = ("__0_0.distcp doubled",)  # of others' files, whose metadata say where each piece is
SOON_S = 20.0  # on a busy machine; each takes some 10 ms
EVERY = 5  # of the damages, in the quick version


def _process() -> dict[str, Any]:
    """Return the state that a file might have changed: attributes of the classes and functions that metadata name."""
    known = [*vars(metadata).values(), *vars(filesystem).values(), torch.serialization._get_layout, torch.Size]
    known += list(metadata._MEM_FORMAT_ENCODING)
    return {
        f"{one!r}": dict(vars(one)) for one in known if hasattr(one, "__dict__") and callable(one) or one in known[-3:]
    }


def _outcome(kind: str, path: Path, wanted: dict[str, Tensor]) -> str:
    """How a read ends: a few words, or the error."""
    try:
        found = values_in(read(kind, path))
    except CheckpointError as error:
        return "named" if path.name in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    same = found.keys() == wanted.keys() and all(torch.equal(found[key], value) for key, value in wanted.items())
    return "read as it was" if same else f"read: {len(found)} tensors"


def _tried(kind: str, home: Path, every: int) -> dict[str, str]:
    good = write(kind, home / "good.ckpt")
    wanted = values_in(read(kind, good))
    before, modules = _process(), set(sys.modules)
    found = {}
    for number, (name, damage) in enumerate(damages(kind)):
        if number % every:
            continue
        path = copied(good, home / "x.ckpt")
        damage(path)
        begin = time.monotonic()
        found[name] = _outcome(kind, path, wanted)
        if (took := time.monotonic() - begin) > SOON_S:
            found[name] = f"slow: {took:.1f} s"
        assert _process() == before, name
        assert modules <= set(sys.modules), name
        assert kind != "dcp" or modules == set(sys.modules), name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _check(kind: str, home: Path, every: int) -> None:
    found = _tried(kind, home, every)
    assert {name: end for name, end in found.items() if end not in ("named", "read as it was")} == {}
    assert [name for name, end in found.items() if end == "read as it was"] == [
        name for name in found if kind == "dcp" and name in HARMLESS
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_some_of_every_format_are_named(tmp_path: Path, kind: str) -> None:
    _check(kind, tmp_path, EVERY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FORMATS)
def test_every_damage_is_named(tmp_path: Path, kind: str) -> None:
    _check(kind, tmp_path, 1)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "safetensors"])
def test_verify_finds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    good = write(kind, tmp_path / "good.ckpt")
    assert main(["checkpoint", "verify", str(good), "--json"]) == 0
    capsys.readouterr()
    for name, damage in list(damages(kind))[::13] + list(damages(kind))[16:19]:
        path = copied(good, tmp_path / "x.ckpt")
        damage(path)
        harmless = kind == "dcp" and name in HARMLESS
        assert main(["checkpoint", "verify", str(path), "--json"]) == (0 if harmless else 1), name
        [row] = json.loads(capsys.readouterr().out)
        assert harmless or "x.ckpt" in row["why"], name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
