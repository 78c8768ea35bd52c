"""LAMB, LARS, Adafactor and NorMuon on shards: the weights and state of a single process, and checkpoints at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.errors import RankMismatchError
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.muon import Net, batch
from tests.helpers.reference_optimizers import LARS, Lamb, NorMuon
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks

STEPS = 6
Make = Callable[[Any], torch.optim.Optimizer]


def normuon(params: Any) -> torch.optim.Optimizer:
    """Return NorMuon for the matrices, one of which is fused from three parts."""
    matrices = [param for param in params if param.ndim > 1]
    groups = [{"params": matrices[1:2], "split_sizes": (40, 20, 10)}, {"params": [matrices[0], *matrices[2:]]}]
    return NorMuon(groups, lr=0.02, weight_decay=0.1)


ADAFACTOR: Make = partial(torch.optim.Adafactor, lr=0.02, weight_decay=0.1, d=1.1)
# name: (optimizer, options of the strategy, clip)
WAYS: dict[str, tuple[Make, dict[str, Any], float | None]] = {
    "Adafactor": (ADAFACTOR, {}, None),
    "Adafactor, captured and clipped": (ADAFACTOR, {"emulate_cuda_graph_step": True}, 0.5),
    "Adafactor, hosts": (ADAFACTOR, {"ranks_per_host": 1, "replicate_over": "hosts"}, None),
    "NorMuon": (normuon, {"matrix_bucket_mb": 0.01, "emulate_cuda_graph_step": True}, 0.5),
    "LAMB": (partial(Lamb, weight_decay=0.1), {"stage": 2}, None),
    "LAMB without ratio": (partial(Lamb, adam=True), {}, 0.5),
    "LARS": (LARS, {"stage": 1}, None),
    "LARS, nesterov": (partial(LARS, nesterov=True), {}, None),
    "LARS without momentum": (partial(LARS, momentum=0.0), {}, None),
}


def small_net() -> nn.Module:
    """Return matrices of several shapes, a convolution, a batch of experts and vectors, in one order of memory."""
    model = Net()
    model.conv.to(memory_format=torch.contiguous_format)
    return model


def plain(make: Make, steps: range, clip: float | None = None, saved: Mapping[str, Any] | None = None) -> Any:
    model = small_net()
    optimizer = make(model.parameters())
    if saved is not None:
        model.load_state_dict(saved["weights"])
        optimizer.load_state_dict(saved["state"])
    for step in steps:
        x, y = batch(step)
        ((model(x) - y) ** 2).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@contextmanager
def sharded(make: Make, backend: str = "eager", **options: Any) -> Iterator[tuple[Engine, nn.Module, Any]]:
    model = small_net()
    with engine_for(model, backend, **options) as engine:
        optimizer = make(model.parameters())
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        yield engine, model, optimizer


def take_steps(
    engine: Engine, model: Any, optimizer: Any, steps: range, clip: float | None = None, **begin: Any
) -> None:
    for step in steps:
        x, y = batch(step, engine.rank, engine.world_size)
        with engine.train_step():
            loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        with engine.optimizers.stepping(optimizer, clip=clip, **begin):
            optimizer.step()
        optimizer.zero_grad()


def train_all(names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        make, options, clip = WAYS[name]
        if "replicate_over" in options and dist.get_world_size() == 1:
            continue
        with sharded(make, **options) as (engine, model, optimizer):
            take_steps(engine, model, optimizer, range(STEPS), clip)
            found[name] = whole_params(engine, model), engine.optimizer_state(optimizer).get("state", {})
    return found


@cache
def expected_of(name: str) -> Any:
    make, _, clip = WAYS[name]
    return plain(make, range(STEPS), clip)


def close(found: Tensor, expected: Tensor, *what: Any) -> None:
    # NorMuon divides rows by their size, and so makes more of the rounding of small ones. Weights change by about 0.1.
    atol = 2e-4 if "NorMuon" in what else 1e-5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol, msg=lambda text: f"{what}: {text}")


def check_params(found: Mapping[str, Tensor], model: nn.Module, *what: Any) -> None:
    for key, value in model.named_parameters():
        close(found[key], value.detach(), *what, key)


THREE = (
    "Adafactor, captured and clipped",
    "Adafactor, hosts",
    "LARS",
    "NorMuon",
)  # ways that depend on the number of ranks


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(1, (*WAYS,)), (2, (*WAYS,)), (3, THREE), (3, (*WAYS,))],
    ids=["one rank", "two ranks", "three ranks, some ways", "three ranks"],
)
@pytest.mark.exhaustive_variants("one rank", "three ranks")
def test_weights_and_state_are_those_of_one_process(ranks: Ranks, world_size: int, names: tuple[str, ...]) -> None:
    everything = ranks.run(world_size, train_all, names, deadline=90)
    for found in everything:
        assert len(found) >= len(names) - 1
        for name, (params, _) in found.items():
            check_params(params, expected_of(name)[0], name)
    for name, (_, state) in everything[0].items():
        expected = expected_of(name)[1].state_dict()["state"]
        assert state.keys() == expected.keys(), name
        for number, entries in expected.items():
            assert {key for key, value in entries.items() if isinstance(value, Tensor)} <= state[number].keys(), name
            for key, value in state[number].items():
                assert value.shape == entries[key].shape, (name, key)
                close(value, entries[key], name, number, key)


# -- events


SKIPPED: dict[str, Make] = {"Adafactor": ADAFACTOR, "LAMB": Lamb, "NorMuon": normuon}


def _skips() -> dict[str, Any]:
    found = {}
    for name, make in SKIPPED.items():
        with sharded(make, emulate_cuda_graph_step=True) as (engine, model, optimizer):
            take_steps(engine, model, optimizer, range(2), skip=torch.zeros(()))
            take_steps(engine, model, optimizer, range(2, 4), skip=torch.ones(()))  # as a loss scaler skips
            take_steps(engine, model, optimizer, range(4, 6), skip=torch.zeros(()))
            model.last.requires_grad_(False)
            take_steps(engine, model, optimizer, range(6, 8))
            found[name] = whole_params(engine, model)
    return found


def _narrow() -> dict[str, Any]:
    with sharded(Lamb, state_dtype="bf16") as (engine, model, optimizer):
        take_steps(engine, model, optimizer, range(STEPS))
        kinds = {value.dtype for entries in optimizer.state.values() for value in entries.values()}
        return {"params": whole_params(engine, model), "kinds": kinds}


def _memory() -> tuple[int, int]:
    """Return bytes of the state of Adafactor, and of AdamW."""
    with sharded(ADAFACTOR) as (engine, model, optimizer):
        take_steps(engine, model, optimizer, range(1))
        state = memory_by_role(engine, [optimizer])["optimizer_state"]
    with sharded(torch.optim.AdamW) as (engine, model, optimizer):
        take_steps(engine, model, optimizer, range(1))
        return state, memory_by_role(engine, [optimizer])["optimizer_state"]


def _missing() -> str:
    with sharded(Lamb) as (engine, model, optimizer):
        x, y = batch(0, engine.rank, engine.world_size)
        with engine.train_step():
            loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        if engine.rank == 1:
            dict(model.named_parameters())["last.weight"].grad = None
        with pytest.raises(RankMismatchError) as raised, engine.optimizers.stepping(optimizer):
            optimizer.step()
        return str(raised.value)


def _events(path: str) -> dict[str, Any]:
    found = {"skips": _skips(), "narrow": _narrow(), "memory": _memory(), "missing": _missing()}
    for name, make in SAVED.items():
        with sharded(make) as (engine, model, optimizer):
            take_steps(engine, model, optimizer, range(3))
            weights, state = engine.model_state(), engine.optimizer_state(optimizer)
            if engine.rank == 0:
                torch.save({"weights": weights, "state": state}, path + name)
    return found


SAVED: dict[str, Make] = {"Adafactor": ADAFACTOR, "LARS": LARS, "NorMuon": normuon}


def _resumes(path: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, make in SAVED.items():
        saved = torch.load(path + name)
        with sharded(make) as (engine, model, optimizer):
            with engine.full_parameters():
                model.load_state_dict(saved["weights"])
            engine.load_optimizer_state(optimizer, saved["state"])
            take_steps(engine, model, optimizer, range(3, 6))
            found[name] = whole_params(engine, model)
    return found


def test_skips_checkpoints_and_missing_gradients(ranks: Ranks, tmp_path: Any) -> None:
    path = str(tmp_path / "state ")
    expected = {}
    for name, make in SKIPPED.items():
        model = small_net()
        optimizer = make(model.parameters())
        for step in (0, 1, 4, 5, 6, 7):
            x, y = batch(step)
            ((model(x) - y) ** 2).mean().backward()
            if step >= 6:
                model.last.weight.grad = model.last.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
        expected[name] = model
    narrow, _ = plain(Lamb, range(STEPS))
    for rank, found in enumerate(ranks.run(2, _events, path, deadline=90)):
        for name, params in found["skips"].items():
            check_params(params, expected[name], name)
        assert torch.bfloat16 in found["narrow"]["kinds"]
        for key, value in narrow.named_parameters():
            assert (found["narrow"]["params"][key] - value).abs().max() < 0.02, key
        adafactor, adamw = found["memory"]
        assert adafactor < adamw / 4  # AdamW's is sharded over two ranks; the rest is of small parameters
        assert "None on some ranks only: 'last.weight' (" + ["present", "None"][rank] in found["missing"]
    whole = {name: plain(make, range(6))[0] for name, make in SAVED.items()}
    for found in ranks.run(3, _resumes, path):
        for name, params in found.items():
            check_params(params, whole[name], name)
    for name, make in SAVED.items():  # and plain torch resumes it
        model, _ = plain(make, range(3, 6), saved=torch.load(path + name))
        check_params(dict(model.named_parameters()), whole[name], name)
