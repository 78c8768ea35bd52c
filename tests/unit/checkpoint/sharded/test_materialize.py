"""Values of a checkpoint that a hook has put into a module, or that a module takes as its extra state."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.checkpoint_tensors import (
    CheckpointTensor,
    materialize_extra_state,
    materialize_values,
)
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.reader import CheckpointReader
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.trainer.checkpoint_lookup import _read_folders

WHOLE = torch.arange(35.0).view(7, 5)


def _saved() -> CheckpointTensor:
    return CheckpointTensor("w", WHOLE.shape, WHOLE.dtype, [(Box((0, 0), (7, 5)), WHOLE.clone)])


def test_parameters_and_buffers_have_memory_and_what_is_tied_stays_so() -> None:
    module = nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(5, 7), "frozen": nn.Linear(5, 7)})
    module["up"].weight = module["down"].weight = nn.Parameter(_saved())
    module["frozen"].weight = nn.Parameter(_saved(), requires_grad=False)
    module["frozen"].register_buffer("table", _saved())
    bias = module["up"].bias
    materialize_values(module)
    assert module["up"].weight is module["down"].weight
    assert module["up"].bias is bias
    for name, grad in (("up", True), ("frozen", False)):
        assert type(module[name].weight) is nn.Parameter
        assert module[name].weight.requires_grad is grad
        assert torch.equal(module[name].weight, WHOLE)
    assert type(module["frozen"].table) is torch.Tensor
    assert torch.equal(module["frozen"].table, WHOLE)
    assert len(module.state_dict()) == 7
    module["up"](torch.ones(2, 5)).sum().backward()


def test_a_parameter_that_lost_its_memory_is_named() -> None:
    """Return a file whose reader is ended by a signal."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(0, 3))
    module[0].weight.data = _saved()
    with pytest.raises(ValueError, match=r"'0\.weight' has no memory.*value\.clone\(\)"):
        materialize_values(module)


def test_extra_state_has_memory_however_deep_it_lies(tmp_path: Path) -> None:
    extra = {"scale": torch.arange(3.0), "list": [torch.ones(2), ("x", 1)]}
    state = {"0._extra_state": extra, "_extra_state": torch.ones(4), "0.weight": WHOLE}
    path = tmp_path / "x.ckpt"
    save_sharded(path, {"state_dict": state}, {}, SingleProcess())
    found = materialize_extra_state(CheckpointReader(str(path)).content()["state_dict"])
    assert type(found["0.weight"]) is CheckpointTensor
    alone = _read_folders(torch.load)(path)["state_dict"]  # as load_from_checkpoint does
    assert torch.equal(alone["0.weight"], WHOLE)
    for given in (found, alone):
        mine = given["0._extra_state"]
        assert [type(value) for value in (given["_extra_state"], mine["scale"], mine["list"][0])] == 3 * [torch.Tensor]
        assert torch.equal(mine["scale"], extra["scale"])
        assert torch.equal(mine["list"][0], torch.ones(2))
        assert mine["list"][1] == ("x", 1)


def test_extra_state_of_any_class_is_read_where_the_file_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_sharded(path, {"state_dict": {"0._extra_state": io.BytesIO(b"abc")}}, {}, SingleProcess())
    with pytest.raises(CheckpointError, match=r"(?s)holds 'state_dict\.0\._extra_state', of a class.*BytesIO"):
        CheckpointReader(str(path)).content()
    assert CheckpointReader(str(path)).content(weights_only=False)["state_dict"]["0._extra_state"].read() == b"abc"
