"""How tensors travel: what options come to, and what is said where they cannot be followed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.symm_mem.gradients import GradientTransport
from lightning_zero.sharding.symm_mem.transport_choice import wanted
from lightning_zero.sharding.symm_mem.weights import WeightTransport

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("choice", "device", "cuda", "usable", "expected"),
    [
        ("auto", GPU, "13.0", True, True),
        ("auto", GPU, "12.8", True, False),
        ("auto", GPU, None, True, False),
        ("auto", GPU, "13.0", False, False),
        ("auto", CPU, None, False, True),
        ("copy", CPU, None, False, True),  # what is impossible is refused later, with its reason
        ("collective", GPU, "13.0", True, False),
        ("auto", torch.device("xpu"), "13.0", True, False),
    ],
)
def test_copies_are_chosen_where_one_call_makes_many(
    monkeypatch: pytest.MonkeyPatch, choice: str, device: torch.device, cuda: str | None, usable: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert wanted(choice, device, usable, on_cpu=True) is expected


def test_between_cpus_auto_does_what_is_asked_for() -> None:
    assert not wanted("auto", CPU, usable=True, on_cpu=False)


class Memory:
    """As much as there is."""

    def __init__(self) -> None:
        self.kept = 0

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        before = self.kept
        try:
            yield
        except UnsupportedError:
            self.kept = before
            raise


def way_of(config: EngineConfig, device: torch.device = CPU, rank: int = 0) -> Any:
    return WeightTransport(config, MagicMock(world_size=2, rank=rank, device=device))


def take_too_much(way: Any) -> bool:
    def allocate() -> None:
        way.memory.kept += 1
        raise UnsupportedError("there is no more")

    return way.attempt(allocate)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_memory_runs_out_nothing_is_kept_and_one_rank_says_so(
    caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    way = way_of(EngineConfig(), rank=rank)
    way.use(Memory(), "")
    assert way.attempt(lambda: None)
    assert not take_too_much(way)
    assert way.memory.kept == 0
    assert ("move all weights from now on, which is slower: there is no more" in caplog.text) == (rank == 0)


def test_copies_that_were_asked_for_are_refused_by_name() -> None:
    way = way_of(EngineConfig(tuning=Tuning(gather_transport="copy")))
    with pytest.raises(
        UnsupportedError, match="gather_transport='copy' is impossible here: there is one rank. Use gather_transport"
    ):
        way.use(None, "there is one rank")
    way.use(Memory(), "")
    with pytest.raises(UnsupportedError, match="gather_transport='copy' is impossible here: there is no more"):
        take_too_much(way)


def test_a_sharded_model_keeps_its_way_and_an_option_that_means_the_same_may_change() -> None:
    before = EngineConfig(tuning=Tuning(gather_transport="auto"))
    way = way_of(before)  # between CPUs, "auto" copies weights
    way.use(Memory(), "")
    copy, collective = (replace(before, tuning=Tuning(gather_transport=name)) for name in ("copy", "collective"))
    way.check(copy)
    way.configure(copy)
    with pytest.raises(UnsupportedError, match="sharded with gather_transport='copy', which is fixed from then on"):
        way.check(collective)


def test_a_model_whose_memory_ran_out_may_be_trained_on_with_the_same_option() -> None:
    config = EngineConfig(tuning=Tuning(gather_transport="auto"))
    way = way_of(config)
    way.use(None, "there is no more")
    assert way.copies(config)
    way.check(config)
    with pytest.raises(UnsupportedError, match="sharded with gather_transport='auto', which is fixed from then on"):
        way.check(replace(config, tuning=Tuning(gather_transport="copy")))


@pytest.mark.parametrize(
    "other", [{}, {"compute_dtype": None}, {"tuning": Tuning(prefetch=False)}], ids=["mixed", "one dtype", "late"]
)
def test_on_an_accelerator_compiled_code_copies_weights_in_every_precision(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = replace(EngineConfig(compute_dtype=torch.bfloat16), **other)
    assert way_of(config, GPU).copies(config)
    eager = replace(config, compile=False)
    assert not way_of(eager, GPU).copies(eager)
    assert GradientTransport(eager, MagicMock(device=GPU)).copies(eager)
