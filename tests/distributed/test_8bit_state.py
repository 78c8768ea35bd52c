"""Train with `state_dtype="8bit"` in an engine: equal on any number of ranks, and resumed across them and forms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero import Tuning
from lightning_zero.errors import UnsupportedError
from tests.helpers.rounded_training import STAGE, STEPS, Sums, make_optimizer, same, train
from tests.helpers.sharded import engine_for
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
