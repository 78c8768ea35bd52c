"""Values of a checkpoint that a hook has put into a module."""

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.owned import own_values
from lightning_zero.checkpoint.sharded.values import SavedValue

WHOLE = torch.arange(35.0).view(7, 5)


def _saved() -> SavedValue:
    return SavedValue("w", WHOLE.shape, WHOLE.dtype, [(Box((0, 0), (7, 5)), WHOLE.clone)])


def test_parameters_and_buffers_have_memory_and_what_is_tied_stays_so() -> None:
    module = nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(5, 7), "frozen": nn.Linear(5, 7)})
    module["up"].weight = module["down"].weight = nn.Parameter(_saved())
    module["frozen"].weight = nn.Parameter(_saved(), requires_grad=False)
    module["frozen"].register_buffer("table", _saved())
    bias = module["up"].bias
    own_values(module)
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
    """Whoever reads it is ended by a signal."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(0, 3))
    module[0].weight.data = _saved()
    with pytest.raises(ValueError, match=r"'0\.weight' has no memory.*value\.clone\(\)"):
        own_values(module)
