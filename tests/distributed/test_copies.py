"""Copies of sharded modules are plain ones with full parameters; the originals continue as before."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.sharding.module_patching import is_sharded
from tests.helpers.sharded import EAGER, engine_for
from tests.ranks.pool import Ranks

WIDTH = 64


class Tied(nn.Module):
    """A tied weight, a scalar, a frozen parameter, buffers, a recurrent layer.

    The root owns a parameter, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.net[2].weight = self.net[0].weight
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.fixed = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.net(x)[:, None])[0].squeeze(1) * self.scale


class Own(nn.Sequential):
    """Define its own copy, and own no parameters."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["told"] = "by the module"
        return state


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.own = Tied(), Own(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.tied(x))


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "save": saved}


def check_plain(made: nn.Module, model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for a, b in zip(made.modules(), plain.modules(), strict=True):
        assert type(a) is type(b)
        assert not is_sharded(a)
        assert not [key for key in a.__dict__ if key.startswith("_zero") or key in ("__deepcopy__", "__reduce_ex__")]
        assert a._compiled_call_impl is None
        assert not a._state_dict_hooks
        assert not a._load_state_dict_pre_hooks
    ours, expected = (dict(m.named_parameters(remove_duplicate=False)) for m in (made, plain))
    assert list(ours) == list(expected)
    assert len(list(made.parameters())) == len(list(plain.parameters())), "a tie was lost"
    assert not {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}
    for name, param in ours.items():
        assert torch.equal(param, expected[name]), name
        assert type(param) is nn.Parameter
        assert param.requires_grad == expected[name].requires_grad
        assert param.numel() == param.untyped_storage().nbytes() // 4, "padding"
    assert torch.equal(made(x), plain(x))
    made(x).sum().backward()
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=1.0)
    optimizer.step()  # trains by itself


def copies(backend: str) -> None:
    torch.manual_seed(3)
    plain = Root()
    model = copy.deepcopy(plain)
    x = torch.randn(4, WIDTH)
    with engine_for(model, backend) as engine:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            for way in COPIES.values():
                check_plain(way(model), model, copy.deepcopy(plain), x)
                check_plain(way(model.tied), model.tied, copy.deepcopy(plain.tied), x)
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())
        assert copy.deepcopy(model).own.told == "by the module"
        model.tied._parameters["fixed"].note = "mine"
        assert pickled(model).tied.fixed.note == "mine"


@pytest.mark.parametrize(("world_size", "backend"), [(1, EAGER), (2, EAGER), (2, "aot_eager"), (3, EAGER)])
@pytest.mark.exhaustive_variants("3-eager")
def test_a_copy_is_a_plain_module(ranks: Ranks, world_size: int, backend: str) -> None:
    ranks.run(world_size, copies, backend)


def leaves_no_trace() -> None:
    model = Root()
    with engine_for(model, EAGER) as engine:
        before = {name: dict(module.__dict__) for name, module in model.named_modules()}
        classes = [type(module) for module in model.modules()]
        for way in COPIES.values():
            way(model)
        shallow = copy.copy(model.own[0])
        assert type(shallow) is nn.Linear
        assert shallow.weight.shape == (WIDTH, WIDTH)
        assert [type(module) for module in model.modules()] == classes
        for name, module in model.named_modules():
            assert module.__dict__.keys() == before[name].keys()
            assert all(module.__dict__[key] is value for key, value in before[name].items())

        del shallow
        assert copy.deepcopy(engine) is None
        gc.collect()
        assert not any(ref() for ref in engine._copies._pickled.values()), "a pickled value lives on"


def test_copying_leaves_the_module_as_it_was(ranks: Ranks) -> None:
    ranks.run(2, leaves_no_trace)


class Unwilling(nn.Linear):
    def __getstate__(self) -> Any:
        raise ValueError("not this one")


def fails() -> None:
    model = nn.Sequential(Unwilling(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2, WIDTH)
    with engine_for(model, EAGER):
        expected = model(x)
        for way in COPIES.values():
            with pytest.raises(ValueError, match="not this one"):
                way(model)
        assert is_sharded(model[0])
        assert torch.equal(model(x), expected)


def test_a_copy_that_fails_leaves_the_module_as_it_was(ranks: Ranks) -> None:
    ranks.run(2, fails)


def of_whole_parameters() -> None:
    model = Root()
    with engine_for(model, EAGER) as engine:
        with engine.full_parameters():
            with torch.no_grad():
                model.tied.scale.fill_(3.0)
                model.own[0].weight.fill_(2.0)
            made = copy.deepcopy(model)
            model.own[0].weight.data.fill_(1.0)
        assert made.tied.scale.item() == 3.0
        assert made.own[0].weight.eq(2.0).all()
        assert model.own[0].weight.eq(1.0).all()
        model.own[0].weight.data.fill_(5.0)  # an edit of a gathered weight that no step has followed yet
        assert copy.deepcopy(model).own[0].weight.eq(5.0).all()
        engine.unshard()
        assert not [key for module in model.modules() for key in module.__dict__ if key.startswith("__")]
        assert copy.deepcopy(model).own[0].weight.eq(5.0).all()


def test_copies_see_edits(ranks: Ranks) -> None:
    ranks.run(2, of_whole_parameters)
