"""Nested state and the flat names of torch's distributed checkpoints: what comes back is what was saved."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero.checkpoint.sharded.contents import flattened, nested
from lightning_zero.checkpoint.sharded.saving import save_sharded
from lightning_zero.checkpoint.together import Alone
from lightning_zero.integrations.folders import read_whole
from tests.helpers.folders import sharded

EXTRA = OrderedDict({1: "one", 2.5: [3, None], (0, "a"): {True: torch.arange(3)}, "text": {4: 5}})


def state() -> dict[str, Any]:
    return {
        "state_dict": {"weight": sharded(torch.ones(7, 5)), "net._extra_state": EXTRA},
        "seen": {"by_epoch": {0: {"loss": 0.5}, 1: {"loss": 0.25}}, "last": (1, [2, {3: 4}])},
    }


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(_same(found[key], value) for key, value in wanted.items())
    return bool(found == wanted) and type(found) is type(wanted)


def test_keys_are_what_they_were(tmp_path: Path) -> None:
    save_sharded(tmp_path / "x.ckpt", state(), {}, Alone())
    found = read_whole(tmp_path / "x.ckpt", None)
    assert _same(found["state_dict"]["net._extra_state"], dict(EXTRA))
    assert _same(found["seen"], state()["seen"])
    assert torch.equal(found["state_dict"]["weight"].whole(), torch.ones(7, 5))


def test_torchs_readers_find_them_too(tmp_path: Path) -> None:
    save_sharded(tmp_path / "x.ckpt", state(), {}, Alone())
    dcp_to_torch_save(tmp_path / "x.ckpt", tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert _same(whole["state_dict"], {"weight": torch.ones(7, 5), "net._extra_state": dict(EXTRA)})
    assert _same(whole["seen"], state()["seen"])
    wanted = {"state_dict": {"weight": torch.zeros(7, 5), "net._extra_state": io.BytesIO()}}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "x.ckpt"), no_dist=True)
    assert torch.equal(wanted["state_dict"]["weight"], torch.ones(7, 5))
    assert _same(wanted["state_dict"]["net._extra_state"], dict(EXTRA))


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        (lambda part: {0: {"a": part}}, r"'mine\.there' is a dict with the key 0, of type int, and holds sharded"),
        (lambda part: (1, [part]), r"'mine\.there' is a tuple, and holds sharded values"),
    ],
)
def test_shards_that_cannot_be_named_are_refused(holder: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flattened({"mine": {"there": holder(sharded(torch.ones(3)))}})


def test_what_was_flattened_is_nested_again() -> None:
    given = {"a": {"b": [torch.ones(1), {"c": 2}], "empty": {}}, "d": [1, 2]}
    assert _same(nested(dict(flattened(given).values())), given)


def test_two_things_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the same name when it is flattened: 'a\.b'"):
        flattened({"a": {"b": 1}, "a.b": 2})
