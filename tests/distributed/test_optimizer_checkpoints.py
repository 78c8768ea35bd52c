"""The state of optimizers for scalars, single elements and empty parameters is saved and loaded."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import Rule, register_rule
from tests.helpers import wrapping
from tests.helpers.lion import Lion
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import EAGER, engine_for, train_plain, train_sharded
from tests.ranks.pool import Ranks

WORLDS = (1, 2, 3)
STEPS = 6
RTOL = 1e-5


class ScalarsOnly(Case):
    empty_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(-0.5))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
        return x, 0.3 * x + 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope + self.offset


class Mixed(ScalarsOnly):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 7), nn.Linear(7, 1, bias=False)
        self.gain = nn.Parameter(torch.ones(1))  # one element, and a dimension

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x[:, None]))
        return super().forward(self.second(hidden)[:, 0] * self.gain)


class Counting(Lion):
    """Without a rule of its own, with a counter of its own."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    seen = self.state[param].setdefault("seen", torch.zeros(()))
                    seen += 1
                    param.grad *= 1 + 1 / seen
        return super().step(closure)


class Tabled(torch.optim.Optimizer):
    """Keep a table of 32 numbers, the size of a small shard, for parameters of at most one dimension, and read them
    all.

    Each parameter is a group: tables of several are no table of them together.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__([{"params": [param]} for param in params], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                average = state.setdefault("exp_avg", torch.zeros_like(param))
                average.lerp_(param.grad, 0.5)
                size = group["lr"]
                if param.dim() < 2:
                    table = state.setdefault("table", torch.zeros(32))
                    table[7 + int(table.count_nonzero())] = 0.5
                    size *= 1 + table.sum().item()
                param.sub_(average, alpha=size)
        return loss


@functools.cache
def tabled() -> Rule:
    def refuse(*args: Any) -> Any:
        raise AssertionError("its steps are not captured here")

    return Rule(("lr",), ("exp_avg",), refuse, refuse)


def make_tabled(group: Any) -> Rule:
    return tabled()


register_rule(Tabled, make_tabled)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.02, eps=1e-3),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.05, lambd=0.1, t0=1),
    "Counting": functools.partial(Counting, lr=0.02),
    "Tabled": Tabled,
    "Wrapping": functools.partial(wrapping.Wrapping, lr=0.02),
    "Renaming": functools.partial(wrapping.Renaming, lr=0.02),
    "Counting once": functools.partial(wrapping.Counting, lr=0.02),
}
WITHOUT_RULES = ("Counting", "Wrapping", "Renaming", "Counting once")
KINDS = [
    (model, name)
    for model in (ScalarsOnly, Mixed)
    for name in OPTIMIZERS
    if not (model is ScalarsOnly and name in WITHOUT_RULES)
]  # the state for parameters with dimensions shows that an entry of an unknown optimizer is a counter


def batches(model: type[Case]) -> list[Batch]:
    return make_batches(model, STEPS, 12)


def path_of(home: str, model: type[Case], name: str, world: int) -> str:
    return f"{home}/{model.__name__}-{name}-{world}.pt"


def write(home: str) -> None:
    for kind, name in KINDS:
        model = build(kind)
        with engine_for(model, EAGER) as engine:
            optimizer = OPTIMIZERS[name](model.parameters())
            train_sharded(engine, model, batches(kind)[:3], optimizer)
            state = {"model": engine.model_state(), "optimizer": engine.optimizer_state(optimizer)}
            if engine.rank == 0:
                torch.save(state, path_of(home, kind, name, engine.world_size))


def resume(home: str, written_by: int) -> dict[tuple[str, str], Any]:
    found = {}
    for kind, name in KINDS:
        model = build(kind, seed=7)
        state = torch.load(path_of(home, kind, name, written_by))
        with engine_for(model, EAGER) as engine:
            model.load_state_dict(state["model"])
            optimizer = OPTIMIZERS[name](model.parameters())
            engine.load_optimizer_state(optimizer, state["optimizer"])
            train_sharded(engine, model, batches(kind)[3:], optimizer)
            found[kind.__name__, name] = engine.model_state(), engine.optimizer_state(optimizer).get("state")
    return found


def uninterrupted(kind: type[Case], name: str, steps: int = STEPS) -> tuple[dict[str, Tensor], dict[int, Any]]:
    model = build(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    train_plain(model, batches(kind)[:steps], optimizer)
    return model.state_dict(), optimizer.state_dict()["state"]


@pytest.fixture(scope="module")
def home(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    home = str(tmp_path_factory.mktemp("checkpoints"))
    for world in WORLDS:
        ranks.run(world, write, home)
    return home


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "name"), KINDS, ids=lambda value: getattr(value, "__name__", value))
def test_a_file_holds_what_a_single_process_would_have(home: str, kind: type[Case], name: str, world: int) -> None:
    written = torch.load(path_of(home, kind, name, world))
    weights, state = uninterrupted(kind, name, 3)
    assert_close_relative(written["model"], weights, RTOL, atol=1e-6)
    assert_close_relative(_tensors(written["optimizer"]["state"]), _tensors(state), RTOL, atol=1e-6)


# All write the same, as the test above shows; each reads the file of another one.
@pytest.mark.parametrize(("world", "written_by"), [(1, 2), (2, 3), (3, 1)])
@pytest.mark.exhaustive_variants("3-1")
def test_training_that_goes_on_equals_one_that_was_not_interrupted(
    ranks: Ranks, home: str, world: int, written_by: int
) -> None:
    first, *_ = ranks.run(world, resume, home, written_by)
    for kind, name in KINDS:
        weights, state = first[kind.__name__, name]
        expected, expected_state = uninterrupted(kind, name)
        what = f"{kind.__name__}, {name}"
        assert_close_relative(weights, expected, RTOL, atol=1e-6, what=what)
        assert_close_relative(_tensors(state), _tensors(expected_state), RTOL, atol=1e-6, what=what)


def _tensors(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the tensors of nested dicts."""
    return {
        key: _tensors(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if isinstance(value, dict | Tensor)
    }
