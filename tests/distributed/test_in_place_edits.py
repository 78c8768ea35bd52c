"""A write to a weight that was read reaches the shards, and does not undo later writes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative
from tests.helpers.sharded import BACKENDS, adamw, engine_for, sgd, train_plain, train_sharded, whole_params
from tests.ranks.pool import Ranks

SAMPLES = 12


class Net(Case):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(23, 25)
        self.norm = nn.LayerNorm(25)
        self.second = nn.Linear(25, 19, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied = nn.Linear(23, 25, bias=False)
        self.tied.weight = self.first.weight

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), torch.randn(n, 19, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(x)) + self.tied(x))) * self.scale


def initialise(model: Net) -> None:
    nn.init.xavier_uniform_(model.first.weight)
    nn.init.constant_(model.norm.weight, 0.7)
    nn.init.normal_(model.second.weight, std=0.02)


def write_to_data(model: Net) -> None:
    model.first.weight.data.normal_()
    model.first.bias.data[2:5] = 3.0
    model.scale.data.fill_(0.5)


@torch.no_grad()
def change_without_grad(model: Net) -> None:
    model.first.weight.copy_(torch.arange(575.0).view(25, 23) / 575)
    model.second.weight.clamp_(-0.1, 0.1)
    model.second.weight.t()[3].zero_()
    model.norm.bias.add_(0.25)
    torch.add(model.first.bias, 1.0, out=model.first.bias)
    model.scale.mul_(-1)


@torch.no_grad()
def change_what_is_held(model: Net) -> None:
    weight, rows = model.second.weight, model.first.weight[:3]
    model(torch.zeros(2, 23))  # reads everything again
    weight.mul_(2)
    rows.fill_(0.125)
    model.second.weight.add_(1)
    weight.sub_(0.5)  # both are one memory, as in a plain module


@torch.no_grad()
def change_through_a_tie(model: Net) -> None:
    model.tied.weight.mul_(3)
    model.first.weight.add_(1)


@torch.no_grad()
def swap_with_a_copy(model: Net) -> None:
    # as averaging callbacks do around validation
    kept = [param.detach().clone() for param in (model.first.weight, model.second.weight)]
    for param in (model.first.weight, model.second.weight):
        param.copy_(torch.ones_like(param))
    model(torch.zeros(2, 23))
    for param, value in zip((model.first.weight, model.second.weight), kept, strict=True):
        param.copy_(value + 1)


@torch.no_grad()
def change_in_inference_mode(model: Net) -> None:
    with torch.inference_mode():
        model(torch.ones(2, 23))
        model.second.weight.mul_(2)


EDITS: list[Callable[[Any], None]] = [
    initialise,
    write_to_data,
    change_without_grad,
    change_what_is_held,
    change_through_a_tie,
    swap_with_a_copy,
    change_in_inference_mode,
]


def edit_then_read(edit: Callable[[Any], None], by: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = build(Net)
    with engine_for(model, "eager") as engine:
        edit(model)
        if by == "step":
            engine.cycle.before_step()
        elif by == "state":
            return engine.model_state()
        elif by == "full":
            with engine.full_parameters(writeback=False):
                return {name: param.detach().clone() for name, param in model.named_parameters()}
        elif by == "forward":
            model(torch.zeros(2, 23))
        return whole_params(engine, model)


@pytest.mark.parametrize("by", ["step", "state", "full", "forward"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_reaches_the_shards_before_anybody_looks(ranks: Ranks, edit: Callable[[Any], None], by: str) -> None:
    torch.manual_seed(3)
    plain = build(Net)
    before = copy.deepcopy(plain.state_dict())
    edit(plain)
    expected = plain.state_dict()
    assert any(not torch.equal(expected[name], before[name]) for name in before)
    out = ranks.run(3, edit_then_read, edit, by)[0]
    assert_close_relative(out, {name: expected[name] for name in out}, 0.0, what="parameter")
    assert len(out) >= len(list(plain.parameters()))


def edited_training(model: Net, engine: Engine | None, batches: list[Batch], world: int) -> Reference:
    """Edit weights between forward passes, between steps, and long after a read."""
    optimizer = adamw(model)
    held: list[Tensor] = []

    @torch.no_grad()
    def before_batch(model: Any, index: int) -> None:
        if index in (1, 4):
            model.first.weight.clamp_(-0.2, 0.2)
            write_to_data(model) if index == 4 else None
        if index == 2:
            held.extend([model.second.weight, model.first.bias])  # and kept over all steps that follow
        if index == 3:
            model.norm.weight.mul_(0.5)
            model(torch.zeros(2, 23))

    torch.manual_seed(5)
    if engine is None:
        return train_plain(model, batches, optimizer, world=world, before_batch=before_batch)
    return train_sharded(engine, model, batches, optimizer, before_batch=before_batch)


def train_with_edits(backend: str) -> Reference:
    model = build(Net)
    with engine_for(model, backend) as engine:
        return edited_training(model, engine, make_batches(Net, 6, SAMPLES), engine.world_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.exhaustive_variants("W=3-aot_eager")
def test_training_goes_on_from_what_was_edited(ranks: Ranks, world_size: int, backend: str) -> None:
    out = ranks.run(world_size, train_with_edits, backend)[0]
    expected = edited_training(build(Net), None, make_batches(Net, 6, SAMPLES), world_size)
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.params, expected.params, 1e-6, atol=2e-8, what="params")


def step_over_a_held_weight(announced: bool, fused: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, plain = build(Net), build(Net)
    batch = make_batches(Net, 1, SAMPLES)[0]
    with engine_for(model, "eager") as engine:
        held = [model.first.weight, model.second.weight, model.scale]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        with engine.train_step():
            model.loss(batch).backward()
        if announced:
            engine.cycle.before_step()
        optimizer.step()
        held.append(model.first.weight)
        model(torch.zeros(2, 23))
        out = whole_params(engine, model)
        del held
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=fused)
    plain.loss(batch).backward()
    optimizer.step()
    return out, {name: param.detach() for name, param in plain.named_parameters()}


# A fused step leaves no trace in a parameter's version, so it must be announced.
@pytest.mark.parametrize(("announced", "fused"), [(True, True), (True, False), (False, False)])
def test_an_optimizer_step_is_not_undone_by_weights_that_are_held(ranks: Ranks, announced: bool, fused: bool) -> None:
    out, expected = ranks.run(2, step_over_a_held_weight, announced, fused)[0]
    assert_close_relative(out, expected, 1e-6, what="parameter")


def edit_what_was_held_over_a_step() -> str:
    model = build(Net)
    with engine_for(model, "eager") as engine:
        optimizer = sgd(model)
        held = model.second.weight
        train_sharded(engine, model, make_batches(Net, 1, SAMPLES), optimizer)
        before = whole_params(engine, model)["second.weight"].clone()
        try:
            with torch.no_grad():
                held.fill_(7.0)
            model(torch.zeros(2, 23))
            engine.cycle.before_step()
        except Exception as error:
            return f"raised {error}"
        after = whole_params(engine, model)["second.weight"]
        if torch.equal(after, torch.full_like(after, 7.0)):
            return "arrived"
        return "vanished" if torch.equal(after, before) else "something else"


def test_an_edit_of_a_weight_held_over_a_step_arrives_or_raises(ranks: Ranks) -> None:
    out = ranks.run(2, edit_what_was_held_over_a_step)[0]
    assert out == "arrived" or out.startswith("raised")


class EditsItself(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.mul_(0.9)
        return super().forward(x)


def train_what_edits_itself(backend: str) -> Reference | str:
    model = build(EditsItself)
    with engine_for(model, backend) as engine:
        try:
            return train_sharded(engine, model, make_batches(Net, 4, SAMPLES), sgd(model))
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_an_edit_in_forward_arrives_or_raises(ranks: Ranks, backend: str) -> None:
    out = ranks.run(1, train_what_edits_itself, backend)[0]
    if isinstance(out, str):
        assert "second.weight" in out
        return
    model = build(EditsItself)
    expected = train_plain(model, make_batches(Net, 4, SAMPLES), sgd(model))
    assert_close_relative(out.params, expected.params, 1e-6, what="params")


class OverwritesWhatItNeeds(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out = self.second(self.norm(torch.tanh(hidden)))
        return out + torch.sigmoid(hidden.square()).mean() * hidden.mul_(2).mean()


def overwritten(sharded: bool) -> str:
    model, batch = build(OverwritesWhatItNeeds), Net.make_batch(0, SAMPLES)
    if not sharded:
        with pytest.raises(RuntimeError) as error:
            model.loss(batch).backward()
        return str(error.value)
    with engine_for(model, "eager") as engine:
        with engine.train_step():
            loss = model.loss(batch)
        with pytest.raises(RuntimeError) as error:
            loss.backward()
    return str(error.value)


def both_overwritten() -> list[str]:
    return [overwritten(sharded) for sharded in (False, True)]


@pytest.mark.parametrize("world_size", [1])
def test_activations_that_were_changed_before_backward_are_an_error_as_without_sharding(
    ranks: Ranks, world_size: int
) -> None:
    [messages] = ranks.run(world_size, both_overwritten)
    for message in messages:
        assert "has been modified by an inplace operation" in message


def use_registered_parameters() -> list[float]:
    """Edit a gathered weight, then read and write the registered parameter, whose values are a shard."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    found = []
    with engine_for(model, "aot_eager"):
        param = dict(model.named_parameters())["0.weight"]

        def edited() -> Tensor:
            weight = model[0].weight
            with torch.no_grad():
                weight.fill_(3.0)
            return weight

        held = edited()
        found += [param.norm().item(), param.detach().clone().sum().item()]
        del held
        edited()
        with torch.no_grad():
            param.mul_(2)
        found.append(model[0].weight.sum().item())
        edited()
        param.data = param.data * 2
        found.append(model[0].weight.sum().item())
    return found


def test_registered_parameters_have_the_values_of_edited_weights(ranks: Ranks, world_size: int) -> None:
    for found in ranks.run(world_size, use_registered_parameters):
        assert found == pytest.approx([3 * 42**0.5, 3 * 42, 6 * 42, 6 * 42])
