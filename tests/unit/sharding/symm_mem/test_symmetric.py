"""What weights and gradients share of peers' memory."""

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.symm_mem import symmetric as module
from lightning_zero.sharding.symm_mem.symmetric import PeerTransports

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MIXED = EngineConfig(compute_dtype=torch.bfloat16)
COPY = replace(MIXED, tuning=Tuning(gather_transport="copy", reduce_transport="copy"))
WEIGHTS_ONLY = replace(MIXED, tuning=Tuning(gather_transport="copy", reduce_transport="collective"))
GRADIENTS_ONLY = replace(MIXED, tuning=Tuning(gather_transport="collective", reduce_transport="copy"))
NOTHING = replace(MIXED, tuning=Tuning(gather_transport="collective", reduce_transport="collective"))


def made(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, reason: str = "", device: torch.device = CPU, rank: int = 0
) -> tuple[PeerTransports, Any]:
    """With memory, or with a reason why there is none; and what asks for the memory."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    ask = MagicMock(return_value=(None if reason else MagicMock(nbytes=100), reason))
    monkeypatch.setattr(module.SymmetricMemory, "of", ask)
    return PeerTransports.of(config, MagicMock(world_size=2, rank=rank, device=device, inter_host=None, inter_host_shard_group=None)), ask


def test_ranks_ask_for_memory_once_for_all_that_is_to_be_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    peers, ask = made(monkeypatch, COPY)
    assert caplog.text == ""
    ask.assert_called_once()
    assert peers.weight_memory is peers.gradient_memory is ask.return_value[0]
    assert peers.collectives_used == ""
    assert peers.nbytes == 100, "one memory is counted once"


def test_what_travels_by_collectives_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, _ = made(monkeypatch, WEIGHTS_ONLY)
    assert peers.weight_memory is not None
    assert peers.gradient_memory is None
    assert peers.collectives_used == "gradients travel by collectives"
    peers, ask = made(monkeypatch, NOTHING)
    ask.assert_not_called()
    assert peers.collectives_used == "weights and gradients travel by collectives"
    assert peers.nbytes == 0


def test_gradients_leave_from_where_they_lie_unless_something_adds_up_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, GRADIENTS_ONLY)[0].zero_copy_gradients
    assert made(monkeypatch, NOTHING, device=GPU)[0].zero_copy_gradients
    assert not made(monkeypatch, NOTHING)[0].zero_copy_gradients, "gloo does"
    for ranks, exchanging, borrows in ((1, MagicMock(), True), (1, None, False), (2, None, True)):
        mesh = MagicMock(intra_host=MagicMock(size=ranks), inter_host_shard_group=exchanging, device=GPU)  # of several hosts
        assert PeerTransports(NOTHING, mesh).zero_copy_gradients is borrows


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    caplog.set_level("INFO")
    peers, _ = made(monkeypatch, MIXED, "there are two hosts", rank=rank)
    assert peers.collectives_used == "weights and gradients travel by collectives"
    assert ("move all weights and gradients: there are two hosts." in caplog.text) == (rank == 0)
    with pytest.raises(UnsupportedError, match="gather_transport='copy' is impossible here: there are two hosts"):
        made(monkeypatch, COPY, "there are two hosts")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_copied_on_gpus_in_every_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    chosen = replace(WEIGHTS_ONLY, compute_dtype=dtype)
    assert made(monkeypatch, chosen, device=GPU)[0].weight_memory is not None
    assert made(monkeypatch, chosen)[0].weight_memory is not None


def test_options_are_checked_of_both_before_either_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, _ = made(monkeypatch, WEIGHTS_ONLY)
    other = replace(MIXED, tuning=Tuning(gather_transport="auto", reduce_transport="copy"))
    with pytest.raises(UnsupportedError, match="sharded with reduce_transport='collective'"):
        peers.check(other)
    same = replace(MIXED, tuning=Tuning(gather_transport="auto", reduce_transport="auto"))
    peers.check(same)
    peers.configure(same)
    with pytest.raises(UnsupportedError, match="sharded with reduce_transport='auto'"):
        peers.check(other)
    with pytest.raises(UnsupportedError, match="sharded with gather_transport='auto'"):
        peers.check(NOTHING)


class Recorded:
    """The ways of ``peers``, in whose order things are allocated."""

    def __init__(self, peers: PeerTransports) -> None:
        self.order = MagicMock()
        own: Any = peers
        own._rows, own._gradients.stage = self.order.rows, self.order.stage
        own._weights.allocate_compute_shards = self.order.copies
        self.executor, self.memory = MagicMock(), MagicMock()
        self.memory.executor = self.executor


@pytest.mark.parametrize("config", [WEIGHTS_ONLY, GRADIENTS_ONLY], ids=["weights", "gradients"])
def test_ranks_meet_in_whatever_memory_there_is(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    peers, ask = made(monkeypatch, config)
    recorded = Recorded(peers)
    own: Any = peers
    own._weights.allocate_shards = lambda executor, sizes, take_turns: take_turns(executor, "memory")
    peers.allocate(recorded.memory)
    peers.allocate_shards(recorded.executor, {})
    meet = call(recorded.executor, ask.return_value[0])
    assert recorded.order.rows.set_barrier.mock_calls == [meet, meet]


def test_ranks_can_meet_before_anything_is_copied_and_copies_are_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, ask = made(monkeypatch, COPY)
    recorded = Recorded(peers)
    assert not peers.allocate(recorded.memory)
    assert not peers.allocate(recorded.memory)
    memory, executor, order = ask.return_value[0], recorded.executor, recorded.order
    names = [name for name, *_ in order.mock_calls]
    assert names == ["rows.set_barrier", "stage", "copies", "rows.set_barrier", "stage"]
    assert order.mock_calls[:2] == [call.rows.set_barrier(executor, memory), call.stage(executor, 64.0)]
    allocate = order.copies.call_args.args[1]
    allocate(None)
    recorded.memory.allocate_compute_shards.assert_called_once_with(torch.bfloat16, None)


@pytest.mark.parametrize("config", [replace(COPY, compute_dtype=None), replace(COPY, compile=False)])
def test_without_another_dtype_or_compiled_code_there_are_no_copies(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    peers, _ = made(monkeypatch, config)
    recorded = Recorded(peers)
    peers.allocate(recorded.memory)
    recorded.order.copies.assert_not_called()


def test_where_memory_runs_out_that_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, _ = made(monkeypatch, COPY)
    own: Any = peers
    recorded = Recorded(peers)
    recorded.order.stage.side_effect = lambda *args: setattr(own._gradients, "memory", None)
    assert [peers.allocate(recorded.memory) for _ in range(2)] == [True, False]
    assert peers.collectives_used == "gradients travel by collectives"
    assert peers.nbytes == 100


def test_shards_take_turns_once_ranks_can_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, ask = made(monkeypatch, COPY)
    recorded = Recorded(peers)
    own: Any = peers
    own._weights.allocate_shards = lambda executor, sizes, take_turns: take_turns(executor, "memory") or sizes
    assert peers.allocate_shards(recorded.executor, {torch.float32: 64}) == {torch.float32: 64}
    meet = call.rows.set_barrier(recorded.executor, ask.return_value[0])
    assert recorded.order.mock_calls == [meet, call.rows.set_epoch_lock(recorded.executor, "memory")]


@pytest.mark.parametrize(
    ("config", "several_hosts", "meet"),
    [
        (COPY, False, []),
        (WEIGHTS_ONLY, False, ["inside"]),
        (COPY, True, ["across"]),
        (NOTHING, True, ["across", "inside"]),
    ],
    ids=["copies", "collectives", "copies inside hosts", "collectives everywhere"],
)
def test_groups_connect_once_where_gradients_are_reduced_in_them(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, several_hosts: bool, meet: list[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module.SymmetricMemory, "of", MagicMock(return_value=(MagicMock(), "")))
    monkeypatch.setattr(module, "SignalPads", MagicMock())
    monkeypatch.setattr(module.GradientTransport, "stage", MagicMock())
    monkeypatch.setattr(module.WeightTransport, "allocate_compute_shards", MagicMock())
    started = MagicMock()
    monkeypatch.setattr(module, "_meet", started)
    sides = {"inside": MagicMock(), "across": MagicMock() if several_hosts else None}
    peers = PeerTransports.of(config, MagicMock(world_size=2, rank=0, device=GPU, inter_host_shard_group=None, **sides))
    memory = MagicMock(**{"executor.device": GPU})
    memory.executor.collective.side_effect = lambda what, lane, start: start(True)
    for _ in range(2):
        peers.allocate(memory)
    assert started.mock_calls == [call(sides[name], GPU, True) for name in meet]
