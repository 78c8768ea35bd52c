"""Train bfloat16 weights with stochastic rounding: equal on any number of ranks, resumed across them and dtypes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.errors import UnsupportedError
from tests.helpers.rounded_training import BF16, FP32, STAGE, STEPS, Sums, make_optimizer, same, train
from tests.helpers.sharded import engine_for, train_step
from tests.ranks.pool import Ranks

LARGE, SMALL = (61 * 70, 65 * 64, 4608), (70, 81, 9, 70 * 70, 70)
SIZES = {  # elements of the parameters, and the unit of their shards
    None: [(numel, 64) for numel in LARGE + SMALL],
    "8bit": [(numel, 256 if numel >= 4096 else 64) for numel in LARGE + SMALL],
}


def train_in_turn(home: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for job in jobs:
        job = {"dtype": BF16} | job
        found.append(train(home, **{"bf16_stochastic_round": job["dtype"] is BF16} | job))
    return found


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_ranks_stages_forms_and_resumes_give_the_same_bits(
    ranks: Ranks, tmp_path: Path, state_dtype: str | None
) -> None:
    home = str(tmp_path)
    base: dict[str, Any] = {"state_dtype": state_dtype}
    half = base | {"steps": STEPS // 2, "save": True}
    jobs = [base, half | {"name": "from1"}, base | {"bf16_stochastic_round": False}]
    ((alone, _, nearest),) = ranks.run(1, train_in_turn, home, jobs, deadline=120)
    assert any(not torch.equal(nearest["weights"][key], value) for key, value in alone["weights"].items())
    assert {value.dtype for value in alone["weights"].values()} == {BF16}
    assert alone["dtypes"]["step"] is FP32
    kinds = {torch.int8, torch.uint8} if state_dtype else {BF16}
    assert {dtype for key, dtype in alone["dtypes"].items() if key != "step" and "scales" not in key} == kinds
    assert alone["roles"]["master_shard"] == 2 * sum(-(-numel // unit) * unit for numel, unit in SIZES[state_dtype])
    resumed = [base | {"name": "from1"}, base | {"name": "from1.pt", "sharded": False}]
    for world_size in (2, 3):
        jobs = [base | {"stage": STAGE[world_size]}]
        jobs += [base | {"emulate_cuda_graph_step": True, "offload": ("optimizer",)}, *resumed]
        jobs += [half | {"name": f"from{world_size}"}]
        for found in ranks.run(world_size, train_in_turn, home, jobs, deadline=150):
            for one in found[:4]:
                same(one, alone)
    jobs = [base | {"name": name} for name in ("from2", "from3")]
    ((from_two, from_three),) = ranks.run(1, train_in_turn, home, jobs, deadline=60)
    same(from_two, alone)
    same(from_three, alone)


@pytest.mark.parametrize("kind", ["SGD", "Muon"])
def test_rules_without_state_and_of_matrices_give_the_same_bits(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    home = str(tmp_path)
    jobs: list[dict[str, Any]] = [{"kind": kind}, {"kind": kind, "steps": STEPS // 2, "save": True, "name": "half"}]
    ((alone, _),) = ranks.run(1, train_in_turn, home, jobs, deadline=60)
    jobs = [{"kind": kind}, {"kind": kind, "name": "half"}]
    for found in ranks.run(2, train_in_turn, home, jobs, deadline=90):
        for one in found:
            if kind == "SGD":
                same(one, alone)
                continue
            for key, value in alone["weights"].items():  # products of matrices are of another order
                torch.testing.assert_close(one["weights"][key], value, rtol=2.0**-7, atol=2e-3)
    if kind == "SGD":
        assert {int(entries["roundings"]) for entries in alone["state"].values()} == {STEPS}


def test_files_are_read_as_float32_and_back(ranks: Ranks, tmp_path: Path) -> None:
    home = str(tmp_path)
    half: dict[str, Any] = {"steps": STEPS // 2, "save": True}
    jobs = [half | {"name": "narrow"}, half | {"name": "wide", "dtype": FP32}]
    for name in ("narrow", "narrow.pt"):  # read only
        jobs += [{"name": name, "dtype": FP32, "steps": 0, "sharded": "pt" not in name}]
    for name in ("wide", "wide.pt"):
        jobs += [{"name": name, "steps": 0, "sharded": "pt" not in name}]
    jobs += [{"name": "narrow", "dtype": FP32}, {"name": "wide"}]
    for found in ranks.run(2, train_in_turn, home, jobs, deadline=150):
        narrow, wide, *others = found
        for one in others[:2]:
            for key, value in narrow["weights"].items():
                assert torch.equal(one["weights"][key], value.float())
        for one in others[2:4]:
            for key, value in wide["weights"].items():
                assert torch.equal(one["weights"][key], value.to(BF16))
        for one, expected in zip(others[4:], (FP32, BF16), strict=True):  # and train on
            assert {value.dtype for value in one["weights"].values()} == {expected}
            assert one["dtypes"]["exp_avg"] is expected
    content = torch.load(f"{home}/narrow.pt")
    model = Sums()
    model.load_state_dict(content["model"])
    optimizer = make_optimizer(model, "AdamW")
    optimizer.load_state_dict(content["optimizer"])
    assert {value.dtype for value in model.state_dict().values()} == {FP32}
    for number, entries in enumerate(optimizer.state.values()):
        assert torch.equal(entries["exp_avg"], content["optimizer"]["state"][number]["exp_avg"].float())


def count_runs(state_dtype: str | None) -> int:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(BF16)
    with engine_for(model, "eager", bf16_stochastic_round=True, state_dtype=state_dtype) as engine:
        optimizer = torch.optim.AdamW(model.parameters())
        engine.optimizers.arrange([optimizer])
        with engine.train_step():
            loss = model(torch.ones(1, 64, dtype=BF16)).sum()
        loss.backward()
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        layout = engine.optimizers.stepper(optimizer).layout
        assert layout is not None
        return len(layout.runs)


def test_biases_between_matrices_do_not_divide_the_runs(ranks: Ranks) -> None:
    """A kernel of each run would be too many to compile."""
    assert ranks.run(1, count_runs, None) == [1]
    assert ranks.run(1, count_runs, "8bit") == [2]


def change() -> tuple[int, str]:
    """Turn the option on and off while the model is sharded; return the number of bfloat16 states, and a refusal."""
    model = Sums().to(BF16)
    with engine_for(model, "eager") as engine:
        with engine.registered_parameters():
            optimizer = make_optimizer(model, "AdamW")
        for step in range(4):
            tuning = replace(engine.config.tuning, bf16_stochastic_round=step % 2 == 1)
            engine.configure(replace(engine.config, tuning=tuning))
            engine.optimizers.check(optimizer)
            train_step(engine, optimizer, partial(model, step))
        counts = {int(entries["step"]) for entries in optimizer.state.values()}
    with engine_for(Sums(), "eager", bf16_stochastic_round=True) as engine:
        assert engine.module is not None
        with pytest.raises(UnsupportedError) as caught:
            engine.optimizers.check(torch.optim.AdamW(engine.module.parameters()))
    [steps] = counts
    return steps, str(caught.value)


def test_the_option_may_change_and_needs_bfloat16_weights(ranks: Ranks) -> None:
    ((steps, text),) = ranks.run(1, change)
    assert steps == 4
    assert "float32. Pass precision='bf16-true'" in text
