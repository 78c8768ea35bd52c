"""Inside full_parameters() a module is the plain module it was.

Afterwards, and after unshard(), nothing is lost.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import UnsupportedError, full_parameters
from lightning_zero.engine import engine_of
from lightning_zero.sharding.shard_tensor import ShardParameter
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.oracle import assert_close_relative, shard_batch
from tests.helpers.sharded import (
    BACKENDS,
    EAGER,
    adamw,
    engine_for,
    train_plain,
    train_sharded,
    whole_grads,
    whole_params,
)
from tests.ranks.pool import Ranks

SAMPLES = 12


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(19, 19)
        self.norm = nn.LayerNorm(19)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Net(Case):
    """One weight is tied across the border of the submodule, one within."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 19)
        self.inner = nn.ModuleList([Inner(), Inner()])
        self.inner[1].linear.weight = self.inner[0].linear.weight
        self.last = nn.Linear(19, 19, bias=False)
        self.last.weight = self.inner[0].linear.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(96), requires_grad=False)  # a whole number of shards for 1, 2, 3 ranks

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), torch.randn(n, 19, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for inner in self.inner:
            x = x + inner(x)
        return self.last(x) * self.scale + self.frozen[:19]


def check_plain(model: nn.Module, plain: nn.Module) -> None:
    """By name, by attribute, by identity, and as a whole."""
    mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert_close_relative(mine, theirs, 0.0, what="parameter")
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                assert getattr(module, key) is param, f"{name}.{key}"
                assert param.is_leaf
    assert model.last.weight is model.inner[0].linear.weight is model.inner[1].linear.weight
    state = model.state_dict()
    assert_close_relative(state, plain.state_dict(), 0.0, what="state")


@torch.no_grad()
def edit(model: Any) -> None:
    model.first.weight.mul_(2)
    model.last.weight.add_(1)
    model.scale.fill_(3.0)
    model.frozen.data[90:].zero_()
    model.inner[1].norm.bias.copy_(torch.arange(19.0))


def whole_inside_and_kept_outside() -> None:
    model, plain = build(Net), build(Net)
    params = list(model.parameters())
    with engine_for(model, EAGER) as engine:
        train_sharded(engine, model, make_batches(Net, 2, SAMPLES), adamw(model))
        plain.load_state_dict(model.state_dict())
        with engine.full_parameters():
            assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))
            check_plain(model, plain)
            edit(model)
            edit(plain)
            check_plain(model, plain)
        assert_close_relative(whole_params(engine, model), dict(plain.named_parameters()), 0.0, what="written back")
        assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))
        # Reading gathers again.
        assert torch.equal(model.first.weight, plain.first.weight)
        before = {name: value.clone() for name, value in whole_params(engine, model).items()}
        with engine.full_parameters(writeback=False):
            edit(model)
            assert not torch.equal(model.first.weight, before["first.weight"])
        assert_close_relative(whole_params(engine, model), before, 0.0, what="not written back")


def test_parameters_are_whole_inside_and_edits_reach_the_shards(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, whole_inside_and_kept_outside)


def parts_and_nesting() -> None:
    model, plain = build(Net), build(Net)
    with engine_for(model, EAGER) as engine:
        for module, twin in ((model, plain), (model.inner[0], plain.inner[0]), (model.last, plain.last)):
            with engine.full_parameters(module):
                for name, param in module.named_parameters():
                    assert torch.equal(param, twin.get_parameter(name)), name
                # Outside of it, tied parameters are full, and the rest is sharded and read as usual.
                assert model.last.weight is model.inner[1].linear.weight
                assert torch.equal(model.first.weight, plain.first.weight)
                with torch.no_grad():
                    next(module.parameters()).add_(1)
                    next(twin.parameters()).add_(1)
            assert_close_relative(whole_params(engine, model), dict(plain.named_parameters()), 0.0, what="part")
        # An inner context must neither end the outer one nor write the values that the outer one keeps.
        with engine.full_parameters(model.inner):
            with engine.full_parameters():
                check_plain(model, plain)
                edit(model)
                edit(plain)
            assert model.inner[0].linear.weight.shape == (19, 19)
            assert model.inner[0].linear.weight is model.last.weight
            assert torch.equal(model.inner[0].linear.weight, plain.last.weight)
            assert torch.equal(model.first.weight, plain.first.weight)
            assert isinstance(model._parameters["scale"], ShardParameter)
        assert_close_relative(whole_params(engine, model), dict(plain.named_parameters()), 0.0, what="nested")
        before = {name: value.clone() for name, value in whole_params(engine, model).items()}
        with engine.full_parameters(writeback=False), engine.full_parameters(model.inner):
            edit(model)
        assert_close_relative(whole_params(engine, model), before, 0.0, what="nested in one that forgets")


def test_contexts_can_be_nested_and_hold_for_a_part(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, parts_and_nesting)


def exception_inside() -> None:
    model, plain = build(Net), build(Net)
    with engine_for(model, EAGER) as engine:
        with pytest.raises(RuntimeError, match="inside"), engine.full_parameters():
            edit(model)
            raise RuntimeError("inside")
        edit(plain)
        assert all(isinstance(record.param, ShardParameter) for record in engine.sharder.live)
        assert all(record.param.data_ptr() == record.shard.data_ptr() for record in engine.sharder.live)
        # On a plain module the edits would have stayed, too.
        assert_close_relative(whole_params(engine, model), dict(plain.named_parameters()), 0.0, what="parameter")
        train_sharded(engine, model, make_batches(Net, 1, SAMPLES), adamw(model))


def test_an_exception_inside_leaves_shards_behind(ranks: Ranks) -> None:
    ranks.run(2, exception_inside)


def other_kinds_inside() -> None:
    with engine_for(backend=EAGER) as engine:
        model = nn.Sequential(nn.Linear(19, 5), nn.Linear(5, 3))
        engine.shard(model)
        before = whole_params(engine, model)
        changes: list[Callable[[], Any]] = [
            lambda: setattr(model[0].weight, "data", torch.ones(5, 19, dtype=torch.float64)),
            lambda: setattr(model[0].weight, "data", torch.ones(19)),
            lambda: model[0].half(),
        ]
        for number, change in enumerate(changes):
            words = (
                r"another shape or dtype than before full_parameters\(\): '0\.weight'.*x\.to\(module\.weight\.dtype\)"
            )
            with pytest.raises(UnsupportedError, match=words), full_parameters(model), torch.no_grad():
                change()
                model[1].bias.fill_(number)
            after = whole_params(engine, model)
            assert after["1.bias"].eq(number).all()
            assert_close_relative({**after, "1.bias": before["1.bias"]}, before, 0.0, what="parameter")
            with full_parameters(model, writeback=False):
                change()
        with full_parameters(model):
            model[0].weight.data = torch.ones(5, 19)
        assert model[0].weight.eq(1).all()


def test_another_shape_or_dtype_on_exit_is_refused(ranks: Ranks) -> None:
    ranks.run(2, other_kinds_inside)


def gradients_stay() -> None:
    model = build(Net)
    with engine_for(model, EAGER) as engine:
        batches = make_batches(Net, 2, SAMPLES)
        for batch in batches:
            with engine.train_step():
                loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
            loss.backward()
            del loss  # with its graph, which knows the parameters' shapes
            grads = {name: param.grad for name, param in model.named_parameters()}
            before = whole_grads(engine, model)
            with engine.full_parameters(model.inner):
                assert model.inner[0].linear.weight.grad is None  # a shard's gradient does not fit a whole parameter
                # Gradients of full parameters belong to no parameter.
                model.inner[0](torch.ones(2, 19)).sum().backward()
            assert all(param.grad is grads[name] for name, param in model.named_parameters())
            assert_close_relative(whole_grads(engine, model), before, 0.0, what="gradient")
        # The second pass added to the first.
        plain = build(Net)
        for batch in batches:
            plain.loss(batch).backward()
        expected = {name: param.grad for name, param in plain.named_parameters() if param.requires_grad}
        assert_close_relative(whole_grads(engine, model), expected, 1e-5, what="gradient")


def test_gradients_stay_what_and_where_they_were(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, gradients_stay)


def forward_and_load_inside(backend: str) -> None:
    model, plain = build(Net), build(Net)
    x = torch.ones(3, 19)
    other = copy.deepcopy(plain)
    edit(other)
    with engine_for(model, backend) as engine:
        optimizer, plain_optimizer = adamw(model), adamw(plain)
        batches = make_batches(Net, 4, SAMPLES)
        train_sharded(engine, model, batches[:2], optimizer)
        train_plain(plain, batches[:2], plain_optimizer, world=engine.world_size)
        with torch.no_grad():
            with engine.full_parameters():
                assert_close_relative(model(x), plain(x), 1e-6, what="output inside")
                model.load_state_dict(other.state_dict())
                assert_close_relative(model(x), other(x), 1e-6, what="output after loading")
            assert_close_relative(model(x), other(x), 1e-6, what="output outside")
        plain.load_state_dict(other.state_dict())
        out = train_sharded(engine, model, batches[2:], optimizer)
        expected = train_plain(plain, batches[2:], plain_optimizer, world=engine.world_size)
        assert_close_relative(out.losses, expected.losses, 1e-5, what="losses")
        assert_close_relative(out.params, expected.params, 1e-5, atol=1e-7, what="params")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_module_can_run_and_load_inside(ranks: Ranks, backend: str) -> None:
    ranks.run(2, forward_and_load_inside, backend)


def low_precision_copies_follow() -> None:
    model, plain = build(Net), build(Net)
    with engine_for(model, "aot_eager", compute_dtype=torch.bfloat16) as engine:
        autocast = torch.autocast("cpu", torch.bfloat16)
        train_sharded(engine, model, make_batches(Net, 2, SAMPLES), adamw(model), context=lambda: autocast)
        with engine.full_parameters():
            for param, value in zip(model.parameters(), plain.parameters(), strict=True):
                param.data.copy_(value)  # unknown to autograd: no version counts it
        engine.eval_step()
        with torch.no_grad(), autocast:
            assert_close_relative(model(torch.ones(3, 19)), plain(torch.ones(3, 19)), 1e-6, what="output")


def test_what_is_written_inside_is_used_in_low_precision_afterwards(ranks: Ranks) -> None:
    ranks.run(2, low_precision_copies_follow)


def unshard_and_train_on(backend: str) -> None:
    model, plain = build(Net), build(Net)
    params, kinds = dict(model.named_parameters()), [type(module) for module in model.modules()]
    batches = make_batches(Net, 6, SAMPLES)
    with engine_for(model, backend) as engine:
        world = engine.world_size
        train_sharded(engine, model, batches[:3], adamw(model))
        train_plain(plain, batches[:3], adamw(plain), world=world)
        engine.unshard()
        assert engine_of(model) is None
        assert [type(module) for module in model.modules()] == kinds
        assert all(param is params[name] for name, param in model.named_parameters())
        assert_close_relative(dict(model.named_parameters()), dict(plain.named_parameters()), 1e-6, what="parameter")
        assert all(param.grad is None for param in model.parameters())
        plain.load_state_dict(copy.deepcopy(model).state_dict())
        # From here on it is a plain module, and may be sharded again.
        both = [train_plain(m, batches[3:4], adamw(m), world=world) for m in (model, plain)]
        assert_close_relative(both[0].params, both[1].params, 0.0, what="plain step")
    with engine_for(model, backend) as engine:
        out = train_sharded(engine, model, batches[4:], adamw(model))
        expected = train_plain(plain, batches[4:], adamw(plain), world=world)
        assert_close_relative(out.params, expected.params, 1e-6, atol=2e-8, what="sharded again")


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, EAGER), pytest.param(2, "aot_eager", marks=pytest.mark.slow)],
    ids=["W=3-eager", "W=2-aot_eager"],
)
@pytest.mark.exhaustive_variants("W=2-aot_eager")
def test_an_unsharded_module_trains_on_like_any_other(ranks: Ranks, world_size: int, backend: str) -> None:
    ranks.run(world_size, unshard_and_train_on, backend)
