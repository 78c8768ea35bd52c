"""Train with `state_dtype="8bit"` in an engine: equal on any number of ranks, and resumed across them and forms."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import Tuning, full_parameters
from lightning_zero.errors import UnsupportedError
from tests.helpers.oracle import assert_close_relative
from tests.helpers.rounded_training import STAGE, STEPS, Sums, make_optimizer, same, train
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks


def train_in_turn(home: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(home, **{"state_dtype": "8bit", "image": 4} | job) for job in jobs]


def test_ranks_stages_forms_and_resumes_give_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    home = str(tmp_path)
    half: dict[str, Any] = {"steps": STEPS // 2, "save": True}
    ((alone, _, wide),) = ranks.run(
        1, train_in_turn, home, [{}, half | {"name": "from1"}, {"state_dtype": None}], deadline=120
    )
    assert alone["dtypes"]["exp_avg_8bit_codes"] is torch.int8
    assert alone["dtypes"]["exp_avg_sq_8bit_codes"] is torch.uint8
    assert {value.dtype for value in alone["state"][0].values()} == {torch.float32}
    padded = sum(-(-numel // 256) * 256 for numel in (61 * 70, 65 * 64, 4608))
    exact = sum(-(-numel // 32) * 32 for numel in (61 * 70, 65 * 64, 4608))
    saved = wide["roles"]["optimizer_state"] - alone["roles"]["optimizer_state"]
    assert saved == 2 * (4 * exact - padded - 4 * padded // 256)
    resumed = [{"name": "from1"}, {"name": "from1.pt", "sharded": False}, {"name": "from1", "state_dtype": None}]
    for world_size in (2, 3):
        jobs = [{"stage": STAGE[world_size]}, {"emulate_cuda_graph_step": True, "offload": ("optimizer",)}, *resumed]
        jobs += [half | {"name": f"from{world_size}"}]
        for found in ranks.run(world_size, train_in_turn, home, jobs, deadline=150):
            for one in found[:4]:
                same(one, alone)
            assert set(found[4]["dtypes"].values()) == {torch.float32}
            for key, value in found[4]["weights"].items():
                torch.testing.assert_close(value, alone["weights"][key], rtol=0, atol=0.1 * STEPS * 0.02)
    jobs = [{"name": name} for name in ("from2", "from3")]
    ((from_two, from_three),) = ranks.run(1, train_in_turn, home, jobs, deadline=60)
    same(from_two, alone)
    same(from_three, alone)
    read_by_torch(torch.load(f"{home}/from3.pt"))


def read_by_torch(content: Any) -> None:
    """Load a full checkpoint by plain torch, and its next step's state again in 8 bits."""
    model = Sums()
    model.load_state_dict(content["model"])
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(content["optimizer"])
    for number, entries in enumerate(optimizer.state.values()):
        assert torch.equal(entries["exp_avg"], content["optimizer"]["state"][number]["exp_avg"])


def refuse() -> str:
    with engine_for(Sums(), "eager") as engine, pytest.raises(UnsupportedError) as caught:
        engine.configure(replace(engine.config, tuning=Tuning(state_dtype="8bit")))
    return str(caught.value)


def test_a_sharded_model_does_not_change_to_8_bits(ranks: Ranks) -> None:
    (text,) = ranks.run(1, refuse)
    assert "cannot change to state_dtype='8bit' while it is sharded" in text


def write_weights(model: nn.Module, full: dict[str, Tensor]) -> None:
    for name, value in full.items():
        owner, _, key = name.rpartition(".")
        getattr(model.get_submodule(owner), key).copy_(value)


def assign_data(model: nn.Module, full: dict[str, Tensor]) -> None:
    for name, value in full.items():
        owner, _, key = name.rpartition(".")
        getattr(model.get_submodule(owner), key).data = value.clone()


def write_full_parameters(model: nn.Module, full: dict[str, Tensor]) -> None:
    with full_parameters(model):
        for name, param in model.named_parameters():
            param.copy_(full[name])


WAYS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "weights": write_weights,
    "data": assign_data,
    "full parameters": write_full_parameters,
    "load": lambda model, full: model.load_state_dict(full),
}


def restore_after_nan(way: str | None) -> dict[str, Tensor]:
    """Train, restore weights and state (by ``way`` after two steps with NaN), and train on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 61), nn.Tanh(), nn.Linear(61, 70))  # 4270 elements end inside a block
    with engine_for(model, "eager", state_dtype="8bit") as engine:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)  # state depends on weights

        def step(number: int, nan: bool = False) -> None:
            with engine.train_step():
                loss = model(torch.full((2, 70), number / 8)).square().mean()
            loss.backward()
            for param in model.parameters():
                param.grad.mul_(torch.nan if nan else 1.0)
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()

        for number in range(3):
            step(number)
        kept: list[Any] = [engine.model_state(), engine.optimizer_state(optimizer)]
        dist.broadcast_object_list(kept, src=0)
        if way is not None:
            step(0, nan=True)
            step(0, nan=True)  # reads state of blocks that are NaN, padding too
            with torch.no_grad():
                WAYS[way](model, kept[0])
            engine.load_optimizer_state(optimizer, kept[1])
        for number in range(3):
            step(number)
        return whole_params(engine, model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_and_state_that_are_restored_after_nan_train_as_before(ranks: Ranks, world_size: int) -> None:
    expected = ranks.run(world_size, restore_after_nan, None)[0]
    for way in WAYS:
        for found in ranks.run(world_size, restore_after_nan, way):
            assert_close_relative(found, expected, 0.0, what=way)
