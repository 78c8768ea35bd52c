"""Nested state and the flat names of torch's distributed checkpoints: loaded values equal saved ones."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero.checkpoint.progress_reporter import ProgressReporter
from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.planner import flatten_state, nest_state
from lightning_zero.integrations.checkpoint_files import FileIO, read_folder
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
    save_sharded(tmp_path / "x.ckpt", state(), {}, SingleProcess())
    found = read_folder(tmp_path / "x.ckpt", None)
    assert _same(found["state_dict"]["net._extra_state"], dict(EXTRA))
    assert _same(found["seen"], state()["seen"])
    assert torch.equal(found["state_dict"]["weight"].full_tensor(), torch.ones(7, 5))


def test_torchs_readers_find_them_too(tmp_path: Path) -> None:
    save_sharded(tmp_path / "x.ckpt", state(), {}, SingleProcess())
    dcp_to_torch_save(tmp_path / "x.ckpt", tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert _same(whole["state_dict"], {"weight": torch.ones(7, 5), "net._extra_state": dict(EXTRA)})
    assert _same(whole["seen"], state()["seen"])
    wanted = {"state_dict": {"weight": torch.zeros(7, 5), "net._extra_state": io.BytesIO()}}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "x.ckpt"), no_dist=True)
    assert torch.equal(wanted["state_dict"]["weight"], torch.ones(7, 5))
    assert _same(wanted["state_dict"]["net._extra_state"], dict(EXTRA))


def _buffers() -> dict[str, torch.Tensor]:
    return {
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.arange(4.0)),
        "imaginary": torch.randn(5, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "sparse rows": torch.eye(3).to_sparse_csr(),
        "expanded": torch.tensor(3.0).expand(2, 3),
        "transposed": torch.randn(3, 4).t(),
        "stepped": torch.arange(100)[::7],
        "a truth": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "unsigned": torch.arange(5).to(torch.uint16),
    }


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value.to_dense() if value.layout is not torch.strided else value.clone().resolve_conj().resolve_neg()


def test_buffers_of_all_kinds_are_what_torch_would_load(tmp_path: Path) -> None:
    buffers = _buffers()
    save_sharded(tmp_path / "x.ckpt", {"state_dict": buffers}, {}, SingleProcess())
    dcp_to_torch_save(tmp_path / "x.ckpt", tmp_path / "one.pt")
    torch.save(buffers, tmp_path / "plain.pt")
    wanted = torch.load(tmp_path / "plain.pt")
    for found in (read_folder(tmp_path / "x.ckpt", None), torch.load(tmp_path / "one.pt")):
        for name, value in wanted.items():
            mine = found["state_dict"][name]
            assert (mine.layout, mine.dtype, mine.shape) == (value.layout, value.dtype, value.shape), name
            assert torch.equal(_dense(mine), _dense(value)), name


def test_a_bar_is_shown_over_buffers_that_have_no_bytes_of_their_own(tmp_path: Path) -> None:
    shown: list[int] = []
    io = FileIO()
    io.progress = lambda what, done, total: shown.append(total) or ProgressReporter(what, done, None)  # type: ignore[func-returns-value]
    io.save_checkpoint({"state_dict": {"graph": torch.eye(3).to_sparse(), "w": torch.ones(5)}}, tmp_path / "x.ckpt")
    assert shown == [20]
    assert torch.equal(torch.load(tmp_path / "x.ckpt")["state_dict"]["graph"].to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        (lambda part: {0: {"a": part}}, r"'mine\.there' is a dict with the key 0, of type int, and holds sharded"),
        (lambda part: (1, [part]), r"'mine\.there' is a tuple, and holds sharded values"),
    ],
)
def test_shards_that_cannot_be_named_are_refused(holder: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flatten_state({"mine": {"there": holder(sharded(torch.ones(3)))}})


def test_what_was_flattened_is_nested_again() -> None:
    given = {"a": {"b": [torch.ones(1), {"c": 2}], "empty": {}}, "d": [1, 2]}
    assert _same(nest_state(dict(flatten_state(given).values())), given)


def test_two_things_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the same name when it is flattened: 'a\.b'"):
        flatten_state({"a": {"b": 1}, "a.b": 2})
