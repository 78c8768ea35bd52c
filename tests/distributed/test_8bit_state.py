"""Train with `state_dtype="8bit"` in an engine: equal on any number of ranks, and resumed across them and forms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks

STEPS, STAGE = 6, {1: 3, 2: 2, 3: 1}


class Sums(nn.Module):
    """Its gradients are small multiples of 6, which means over 2 and 3 ranks leave exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large, self.small, self.other = nn.Linear(61, 70), nn.Linear(9, 9), nn.Linear(65, 64, bias=False)
        self.conv = nn.Conv2d(16, 32, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Linear(70, 70)
        self.frozen.requires_grad_(False)

    def forward(self, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        layers: tuple[nn.Linear, ...] = (self.large, self.small, self.other)
        batches = [torch.randint(-4, 5, (2, layer.in_features), generator=rng).float() for layer in layers]
        image = torch.randint(-4, 5, (1, 16, 4, 4), generator=rng).float()
        return 6 * self.conv(image).sum() + 6 * sum(
            (layer(x).sum() for layer, x in zip(layers, batches, strict=True)), torch.zeros(())
        )


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": [model.large.weight, model.small.weight]}, {"params": [model.large.bias, model.small.bias]}]
    return torch.optim.AdamW([*groups, {"params": [model.other.weight, model.conv.weight], "lr": 0.01}], lr=0.02)


def train(
    home: str, name: str | None = None, save: bool = False, sharded: bool = True, steps: int = STEPS, **options: Any
) -> dict[str, Any]:
    """Train, from the state of file ``name`` if it exists; return weights, full state and the memory of each role."""
    model: Any = Sums()
    options = {"state_dtype": "8bit", "offload_buffer_mb": 0.02} | options
    with engine_for(model, "eager", **options) as engine:
        with engine.registered_parameters():
            optimizer = make_optimizer(model)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        first = 0
        if name is not None and not save:
            path = f"{home}/{name}"
            loaded: Any = engine.checkpoints.open(path).state() if sharded else torch.load(path, mmap=True)
            with engine.full_parameters(model):
                model.load_state_dict({key: value.clone() for key, value in loaded["model"].items()})
            engine.load_optimizer_state(optimizer, loaded["optimizer"])
            first = STEPS // 2
        for step in range(first, steps):
            with engine.train_step():
                loss = model(step) / 2
            loss.backward()
            with engine.train_step():
                loss = model(step + 100) / 2
            loss.backward()
            with engine.optimizers.stepping(optimizer, clip=1e9):
                optimizer.step()
            optimizer.zero_grad()
        weights = whole_params(engine, model)
        state = engine.optimizer_state(optimizer)
        if save:
            engine.checkpoints.save(
                f"{home}/{name}",
                {
                    "model": engine.checkpoints.model_state(True),
                    "optimizer": engine.checkpoints.optimizer_state(optimizer, True),
                },
            )
            if engine.rank == 0:
                torch.save({"model": weights, "optimizer": state}, f"{home}/{name}.pt")
        codes = {key: value.dtype for key, value in optimizer.state[model.large.weight].items()}
        roles = memory_by_role(engine, [optimizer])
        return {"weights": weights, "state": state.get("state", {}), "codes": codes, "roles": roles}


def train_in_turn(home: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(home, **job) for job in jobs]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
    if found["state"]:  # on rank 0
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


def test_ranks_stages_forms_and_resumes_give_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    home = str(tmp_path)
    half: dict[str, Any] = {"steps": STEPS // 2, "save": True}
    ((alone, _, wide),) = ranks.run(
        1, train_in_turn, home, [{}, half | {"name": "from1"}, {"state_dtype": None}], deadline=120
    )
    assert alone["codes"]["exp_avg_8bit_codes"] is torch.int8
    assert alone["codes"]["exp_avg_sq_8bit_codes"] is torch.uint8
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
            assert set(found[4]["codes"].values()) == {torch.float32}
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
