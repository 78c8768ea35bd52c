"""A sharded module is still the user's module: its class, its names, its identity.

Unsupported uses raise an error.
"""

import copy
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import guards

from lightning_zero import unshard
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.strategy_base import add_error_notes
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.ranks.pool import Ranks


class Block(nn.Module):
    """Return a subclass of ours with features that classes may have."""

    slots = 3

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_parameter("nothing", None)
        self.plain = "kept"

    @property
    def doubled(self) -> Tensor:
        return 2 * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.doubled


@contextmanager
def sharded(*modules: nn.Module) -> Iterator[list[Engine]]:
    engines = []
    try:
        for module in modules:
            engine = Engine(torch.device("cpu"), EngineConfig(compile=False))
            engine.shard(module)
            engines.append(engine)
        yield engines
    finally:
        for engine in engines:
            engine.close()


def raises_all(kind: type[Exception], words: str, *calls: Callable[[], Any]) -> None:
    for number, call in enumerate(calls):
        with pytest.raises(kind, match=words):
            call()
            raise AssertionError(f"call {number} did not raise")


# -- unchanged behavior


def looks_the_same() -> None:
    model = nn.Sequential(Block(), nn.Linear(6, 3), nn.LayerNorm(3))
    printed, names = repr(model), list(model.state_dict())
    params = dict(model.named_parameters())
    with sharded(model):
        assert repr(model) == printed
        assert list(model.state_dict()) == names
        assert all(dict(model.named_parameters())[name] is param for name, param in params.items())
        block, linear = model[0], model[1]
        assert isinstance(block, Block)
        assert isinstance(linear, nn.Linear)
        assert not isinstance(linear, Block)
        assert type(linear).__name__ == "Linear"
        assert type(linear).__qualname__ == "Linear"
        assert type(linear).__module__ == nn.Linear.__module__
        assert type(linear).__doc__ == nn.Linear.__doc__
        assert type(block).__mro__[1] is Block
        assert (block.slots, block.plain, block.nothing) == (3, "kept", None)
        assert block.doubled.shape == (6,)
        assert hasattr(block, "scale")
        assert not hasattr(block, "scales")
        assert linear.weight.shape == (3, 6)  # reading gives the whole parameter
        assert type(linear.weight) is not nn.Parameter
        assert "scale" in block._parameters


def test_class_names_and_identity_of_a_sharded_module_stay(ranks: Ranks) -> None:
    ranks.run(1, looks_the_same)


def shares_classes() -> None:
    class Other(nn.Linear):
        pass

    model = nn.ModuleList(
        [nn.Linear(3, 3), nn.Linear(5, 2), nn.Linear(3, 3, bias=False), Other(3, 3), Block(), Block(4)]
    )
    with sharded(model):
        kinds = [type(module) for module in model]
        assert kinds[0] is kinds[1]  # other sizes, one class: else every layer would compile anew
        assert kinds[4] is kinds[5]
        assert kinds[4].__name__ == "Block"
        assert type(model[4].inner) is kinds[0]
        # `bias` is None, not a parameter: another set of names
        assert kinds[2] is not kinds[0]
        assert kinds[2].__mro__[1] is nn.Linear
        assert kinds[3].__mro__[1] is Other
        assert type(model) is nn.ModuleList, "a module without parameters of its own needs no properties"
        second = nn.Linear(3, 3)
        with sharded(second):
            assert type(second) is not kinds[0], "another engine's modules must find their own engine"


def test_modules_of_one_class_and_set_of_names_share_one_subclass(ranks: Ranks) -> None:
    ranks.run(1, shares_classes)


def gives_back() -> None:
    model = nn.Sequential(Block(), nn.Linear(6, 3))
    values = copy.deepcopy(model.state_dict())
    params = list(model.parameters())
    with sharded(model):
        unshard(model)
        assert type(model[0]) is Block
        assert type(model[1]) is nn.Linear
        assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))
        assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
        assert engine_of(model) is None
        assert torch.equal(copy.deepcopy(model)[1].weight, model[1].weight)
        pickle.loads(pickle.dumps(model[1]))
        model(torch.randn(2, 6)).sum().backward()
        assert model[1].weight.grad is not None


def test_unshard_gives_the_plain_module_back(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, gives_back)


def reads_recurrent() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 7, 4)
    plain = copy.deepcopy(model)
    expected, _ = plain(x)
    expected.sum().backward()
    with sharded(model) as (engine,):
        with engine.train_step():
            result, _ = model(x)
        result.sum().backward()
        torch.testing.assert_close(result, expected)
        for name, param in plain.named_parameters():
            record = engine.sharder.find(dict(model.named_parameters())[name])
            assert record is not None
            begin, end = record.layout.shard_range(engine.rank)
            assert param.grad is not None
            assert record.param.grad is not None, name
            with no_shard_dispatch():
                own = record.param.grad.reshape(-1)[: end - begin]
            torch.testing.assert_close(own, param.grad.reshape(-1)[begin:end])
        model.flatten_parameters()
        # Recurrent modules keep a list of their weights, which would hold all of them whole from one step to the next.
        # A transfer's own thread may let go of its memory a little later.
        deadline = time.monotonic() + 30
        while engine.executor.counters()["watched_weights"] and time.monotonic() < deadline:
            time.sleep(0.05)
            engine.executor.weights.sync_user_writes()
        assert engine.executor.counters()["watched_weights"] == 0


def _compared() -> list[str]:
    """Return the objects that compiled code compares by identity in each step, for a model of several layers."""
    parts: list[str] = []
    real = guards.build_guard_function
    model = nn.Sequential(*(Block() for _ in range(4)))

    def build(code: list[str], *rest: Any) -> Any:
        parts.extend(code)
        return real(code, *rest)

    with sharded(model), patch.object(guards, "build_guard_function", build):
        torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(torch.ones(2, 6))
    return parts


def test_what_layers_share_is_not_compared_for_each_two_weights(ranks: Ranks) -> None:
    """As torch 2.11 did with objects that all modules of a class share: in Python, in each step."""
    [parts] = ranks.run(1, _compared)
    assert not [part for part in parts if "_zero_" in part]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_recurrent_module_reads_its_weights_like_any_other(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, reads_recurrent)


# -- edits


def edits_arrive() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 33))
    plain = copy.deepcopy(model)

    def edit(first: nn.Linear, second: nn.Linear) -> None:
        with torch.no_grad():
            first.weight.mul_(2)
            first.weight[1].fill_(3.0)
            held, again = second.weight, second.weight  # reading twice must not undo writes through one
            held.clamp_(min=0)
            again[0] += 1
            del held, again
            second.bias.copy_(torch.arange(33.0))
        nn.init.constant_(first.bias, 0.5)
        second.bias.data[3:5].zero_()

    edit(*plain)
    with sharded(model) as (engine,):
        edit(*model)
        engine.cycle.before_step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        for record in engine.sharder.live:
            begin, end = record.layout.shard_range(engine.rank)
            assert not record.shard[end - begin :].any()


def test_in_place_edits_of_weights_reach_the_shards(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, edits_arrive)


def shares_memory() -> None:
    table = torch.full((60, 25), float(dist.get_rank() + 1))
    model = nn.Linear(25, 19)
    model.weight = nn.Parameter(table[20:39])
    with sharded(model):
        assert torch.equal(model.weight, torch.ones(19, 25)), "rank 0's values are everybody's"
        with torch.no_grad():
            model.weight.zero_()
        assert not model.weight.any()
        with pytest.raises(UnsupportedError, match="taken of the memory of 'weight' before the model was sharded"):
            table[0].zero_()  # which may be the weight's
    with no_shard_dispatch():
        assert (table.as_subclass(Tensor) == dist.get_rank() + 1).all(), "a tensor that is no parameter was written to"


def test_tensors_that_share_memory_with_a_parameter_stay_as_they_were(ranks: Ranks) -> None:
    ranks.run(3, shares_memory)


# -- unsupported uses


def copies_values() -> None:
    # Return the instruction of the message.
    model = nn.Sequential(Block(), nn.Linear(6, 3))
    with sharded(model):
        twin = nn.Sequential(Block(), nn.Linear(6, 3))
        twin.load_state_dict(model.state_dict())
        x = torch.randn(2, 6)
        assert torch.equal(twin(x), model(x))
        with torch.no_grad():
            twin[1].weight.zero_()
        assert model[1].weight.any(), "the copy shares memory with the shards"


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_of_a_sharded_module_can_be_copied(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, copies_values)


def refuses_replaced() -> None:
    words = r"no shard of a live engine.*assigning module\.weight.*full_parameters\(module\)"
    x = torch.randn(2, 6)

    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    with sharded(model) as (engine,):
        with pytest.raises(ValueError, match=r"'0\.weight' was given another tensor.*lightning_zero\.unshard"):
            model.half()  # at once
        model[0].weight = nn.Parameter(torch.zeros(4, 6))
        with pytest.raises(ValueError, match=words) as caught:
            model(x)
        for _ in range(2):
            add_error_notes(caught.value, engine)
        assert caught.value.__notes__ == ["lightning_zero: replaced since the model was sharded: '0.weight'."]
        with pytest.raises(ValueError, match=words), engine.train_step():
            model(x)


def test_a_parameter_that_was_replaced_is_an_error_when_it_is_read(ranks: Ranks) -> None:
    ranks.run(1, refuses_replaced)


def assigns_what_was_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with sharded(model) as (engine,):
        with pytest.raises(TypeError) as caught:
            model[1].weight = model[0].weight
        add_error_notes(caught.value, engine)
        assert re.search(
            r"module\.weight of a sharded module is a plain tensor.* Tie weights before .*__init__",
            caught.value.__notes__[0],
        )
        with pytest.raises(RuntimeError) as frozen, engine.train_step():
            model[1].weight.requires_grad = False
        add_error_notes(frozen.value, engine)
        assert "by module.requires_grad_(False) or on what module.parameters() returns" in frozen.value.__notes__[0]
        other = TypeError("something else")
        add_error_notes(other, engine)
        assert not hasattr(other, "__notes__")


def test_a_weight_that_is_read_and_assigned_or_frozen_says_what_to_do_instead(ranks: Ranks) -> None:
    ranks.run(1, assigns_what_was_read)


def changes_flags() -> None:
    model = nn.Linear(6, 4)
    with sharded(model):
        before = [param._version for param in model.parameters()]
        assert model.requires_grad_(False) is model
        assert [param.requires_grad for param in model.parameters()] == [False, False]
        assert next(model.parameters()).requires_grad_() is next(model.parameters())
        assert [param._version for param in model.parameters()] == before


def test_requires_grad_is_no_edit(ranks: Ranks) -> None:
    ranks.run(1, changes_flags)


def removes_bias() -> None:
    model = nn.Linear(6, 4)
    with sharded(model):
        model.bias = None
        x = torch.randn(2, 6)
        torch.testing.assert_close(model(x), F.linear(x, model.weight))


def test_a_parameter_can_be_taken_away(ranks: Ranks) -> None:
    ranks.run(1, removes_bias)
