"""A model that is sharded while it is built equals the one that is built whole, and is never whole on any rank."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import UnsupportedError
from tests.helpers.memory import allocations
from tests.helpers.models import Batch, NextToken
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import EAGER, engine_for, train_plain, train_sharded, whole_params
from tests.ranks.pool import Ranks

SAMPLES = 12


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim + 3), nn.Tanh(), nn.Linear(dim + 3, dim))
        self.scale = nn.Parameter(torch.randn(dim))
        self.mlp[2].weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * self.scale


class Model(NextToken):
    """Initialised in all the ways that are usual."""

    def __init__(self, blocks: int = 3, dim: int = 19) -> None:
        super().__init__()
        self.tokens = nn.Embedding(29, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.batch_norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(dim, 29)
        self.head.weight = self.tokens.weight
        self.other = nn.Linear(dim, 29, bias=False)
        self.other.weight = self.head.weight
        self.temperature = nn.Parameter(torch.rand(()))
        self.apply(self.initialise)
        self.head.bias.data = torch.arange(29.0) / 29
        with torch.no_grad():
            self.blocks[0].norm.weight.copy_(torch.rand(dim))
            self.tokens.weight[0] = torch.linspace(-1, 1, dim)
        self.blocks[-1].mlp[0].requires_grad_(False)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)
            nn.init.zeros_(module.bias) if module.bias is not None else None
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.3)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        drawn = torch.randint(29, (n, 6), generator=torch.Generator().manual_seed(seed))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) + self.other(x)) * self.temperature


class Lists(nn.Module):
    """Modules that reach their parents late, early, or through containers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 5), nn.Linear(5, 6)]
        nn.init.ones_(layers[0].weight)
        self.layers = nn.Sequential(*layers)
        nn.init.uniform_(layers[1].weight)  # by another name than its parent's
        self.by_name = nn.ModuleDict({"a": nn.Conv1d(3, 5, 2), "b": nn.GRU(3, 4)})
        self.params = nn.ParameterList([nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(5))])
        self.add_module("added", nn.Bilinear(2, 3, 4))
        self.layers.append(nn.Linear(6, 2))
        self.shared = self.layers[0]
        self.register_parameter("late", nn.Parameter(torch.randn(2, 2)))
        del self.by_name["a"]


class Casts(Model):
    """Weights that change their dtype after they were sharded, by each usual way."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.tokens.weight[3] = 2.0  # still only in the gathered weight when that is cast
        self.tokens.to(torch.float64)
        with torch.no_grad():
            self.blocks[0].norm.weight[2] = 2.0
        self.blocks.bfloat16()
        self.head.half()  # a tied weight, and a bias of its own
        self.blocks[0].mlp[0].double()
        with torch.no_grad():
            self.blocks[0].mlp[0].weight[1] = 3.0
        layer = self.blocks[1].mlp[0]
        for name, param in list(layer.named_parameters()):  # as PEFT casts adapters
            setattr(layer, name, nn.Parameter(param.data.to(torch.float32), requires_grad=name == "bias"))
        layer.weight.data.mul_(2)
        self.blocks.append(copy.deepcopy(self.blocks[1]))
        self.blocks[3].half()
        mlp = self.blocks[2].mlp
        mlp[0].weight.data = torch.randn(mlp[0].weight.shape, dtype=torch.float64)
        mlp[2].weight.data = mlp[0].weight.data.t() * 2
        held = mlp[0].bias
        held.data = self.blocks[3].mlp[0].bias.data  # of another dtype, again
        held.data.mul_(3)
        self.norm = nn.LayerNorm(22)
        self.norm.bias = held


class Plain(nn.Module):
    """Own one parameter, which is sharded at the end only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9))


def tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return list(names.values())


def build_inside(make: Callable[[], nn.Module], seed_by_rank: bool) -> dict[str, Any]:
    with engine_for(backend=EAGER) as engine:
        torch.manual_seed(11 + (engine.rank if seed_by_rank else 0))
        with engine.construction():
            model = make()
        drawn = torch.rand(())
        engine.shard(model)
        whole = whole_params(engine, model)
        assert engine.executor.counters()["watched_weights"] == 0
        return {
            "params": whole,
            "state": dict(model.state_dict()),
            "tied": tied(model),
            "grad": [param.requires_grad for param in model.parameters()],
            "kinds": [type(module).__name__ for module in model.modules()],
            "drawn": drawn,
        }


@pytest.mark.parametrize("make", [Model, Lists, Casts, Plain])
def test_a_model_built_in_shards_equals_one_built_whole_to_the_bit(
    ranks: Ranks, world_size: int, make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(11)
    plain = make()
    drawn = torch.rand(())
    for out in ranks.run(world_size, build_inside, make, False):
        assert_close_relative(out["params"], dict(plain.named_parameters()), 0.0, what="parameter")
        assert_close_relative(out["state"], plain.state_dict(), 0.0, what="state")
        assert list(out["state"]) == list(plain.state_dict())
        assert [value.dtype for value in out["state"].values()] == [
            value.dtype for value in plain.state_dict().values()
        ]
        assert out["tied"] == tied(plain)
        assert out["grad"] == [param.requires_grad for param in plain.parameters()]
        assert out["kinds"] == [type(module).__name__ for module in plain.modules()]
        assert torch.equal(out["drawn"], drawn)  # as many random numbers were drawn


def test_all_ranks_draw_what_rank_0_draws(ranks: Ranks) -> None:
    torch.manual_seed(11)
    plain = Model()
    outs = ranks.run(3, build_inside, Model, True)
    for out in outs:
        assert_close_relative(out["params"], dict(plain.named_parameters()), 0.0, what="parameter")
    # Afterwards each rank draws its own again.
    assert len({out["drawn"].item() for out in outs}) == 3


def train_what_was_built(inside: bool) -> Any:
    with engine_for(backend="aot_eager" if inside else EAGER) as engine:
        torch.manual_seed(11)
        with engine.construction() if inside else nullcontext():
            model = Model(blocks=2)
        engine.shard(model)
        return train_sharded(engine, model, Model_batches(), slow(model))


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


def Model_batches() -> list[Batch]:
    return [Model.make_batch(seed, SAMPLES) for seed in range(4)]


def test_a_model_built_in_shards_trains_as_in_one_process(ranks: Ranks) -> None:
    out, built_whole = (ranks.run(2, train_what_was_built, inside)[0] for inside in (True, False))
    assert_close_relative(out.losses, built_whole.losses, 0.0, what="losses")
    assert_close_relative(out.params, built_whole.params, 0.0, what="params")
    torch.manual_seed(11)
    model = Model(blocks=2)
    expected = train_plain(model, Model_batches(), slow(model), world=2)
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.params, expected.params, 1e-6, atol=2e-8, what="params")


class Meta(nn.Module):
    """Built on the meta device: each module gets its values from reset_parameters() when it is sharded."""

    def __init__(self, layers: int = 3, dim: int = 7) -> None:
        super().__init__()
        with torch.device("meta"):
            self.tokens = nn.Embedding(29, dim)
            self.layers = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, 29, bias=False)
        self.head.weight = self.tokens.weight
        self.layers[1].weight.requires_grad_(False)
        self.real = nn.Linear(dim, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.real(self.norm(self.layers(self.tokens(ids)))) @ self.head.weight[:2]


def build_meta(inside: bool) -> dict[str, Any]:
    with engine_for(backend=EAGER) as engine:
        torch.manual_seed(engine.rank)
        if inside:
            with engine.construction():
                model = Meta()
        else:
            model = Meta()
        engine.shard(model)
        assert not any(param.is_meta for param in model.parameters())
        with engine.train_step():
            model(torch.arange(5)).square().sum().backward()
        return {
            "params": whole_params(engine, model),
            "tied": tied(model),
            "grad": [param.requires_grad for param in model.parameters()],
            "has gradient": [param.grad is not None for param in model.parameters()],
        }


@pytest.mark.parametrize("inside", [True, False], ids=["construction", "plain"])
def test_meta_modules_get_their_values_when_they_are_sharded(ranks: Ranks, world_size: int, inside: bool) -> None:
    plain = Meta()
    outs = ranks.run(world_size, build_meta, inside)
    for out in outs:
        assert_close_relative(out["params"], outs[0]["params"], 0.0, what="parameter")
        assert out["tied"] == tied(plain)
        assert out["grad"] == [param.requires_grad for param in plain.parameters()]
        assert out["has gradient"] == out["grad"]
    # The spread of reset_parameters(), not its values, which depend on the order of modules.
    params = outs[0]["params"]
    assert params["tokens.weight"].std() == pytest.approx(1.0, abs=0.3)
    assert_close_relative([params["norm.weight"], params["norm.bias"]], [torch.ones(7), torch.zeros(7)], 0.0)
    for name in ("layers.0.weight", "layers.1.weight", "layers.2.bias"):
        assert 0.02 < params[name].abs().mean() < 7**-0.5
        assert params[name].abs().max() <= 7**-0.5


WIDTH = 150


class Wide(nn.Module):
    def __init__(self, layers: int, meta: bool) -> None:
        super().__init__()
        with torch.device("meta" if meta else "cpu"):
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        if not meta:
            for layer in self.layers:
                nn.init.normal_(layer.weight)
                layer.weight.data.mul_(0.5)
            self.layers[0].weight = self.layers[1].weight


def most_whole_weights(layers: int, meta: bool, construction: bool) -> float:
    """Whole weights that were alive at once while the model was built and sharded."""
    found = []
    for _ in range(3):
        with engine_for(backend=EAGER) as engine:
            with allocations() as seen:
                if construction:
                    with engine.construction():
                        model = Wide(layers, meta)
                else:
                    model = Wide(layers, meta)
                engine.shard(model)
            padded = engine.world_size * engine.sharder.live[0].layout.shard_numel
            found.append(seen.totals(4 * WIDTH * WIDTH, 4 * padded)[0] / (4 * WIDTH * WIDTH))
    return min(found)


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_no_rank_holds_more_than_one_layer_whole(ranks: Ranks, meta: bool) -> None:
    # One layer of the 32, with the copies that drawing, sending and cutting it need, and
    # memory that gloo's threads held and freed unseen; it grows with the logarithm of the layers (8: 4, 128: 8)
    assert max(ranks.run(3, most_whole_weights, 32, meta, True)) <= 12


def test_without_construction_all_layers_are_whole_at_once(ranks: Ranks) -> None:
    """The test above can fail."""
    assert min(ranks.run(3, most_whole_weights, 32, False, False)) >= 31


def other_shape_while_building() -> None:
    with engine_for(backend=EAGER) as engine, engine.construction():
        model = nn.Sequential(nn.Linear(3, 5))
        for value in (torch.ones(3), torch.ones(3, 5)):  # torch.Tensor.copy_ would take the first
            with pytest.raises(UnsupportedError, match=r"'0\.weight' was given.*shape \(3.*\(5, 3\).*Build the module"):
                model[0].weight.data = value


def test_data_of_another_shape_is_refused_while_building(ranks: Ranks) -> None:
    ranks.run(2, other_shape_while_building)


def exception_while_building() -> None:
    class Broken(Model):
        def __init__(self) -> None:
            super().__init__()
            raise RuntimeError("while building")

    with engine_for(backend=EAGER) as engine:
        with pytest.raises(RuntimeError, match="while building"), engine.construction():
            Broken()
        # No hook remains: modules that are built now stay unsharded.
        plain = nn.Sequential(nn.Linear(3, 4))
        assert plain[0].weight.shape == (4, 3)
        assert isinstance(plain[0].weight, nn.Parameter)
        torch.manual_seed(11)
        with engine.construction():
            model = Model()
        engine.shard(model)
        torch.manual_seed(11)
        assert_close_relative(whole_params(engine, model), dict(Model().named_parameters()), 0.0, what="parameter")


def test_an_exception_while_building_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(2, exception_while_building)
