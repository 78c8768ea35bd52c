"""Test the choice of transports, their memory, their fallbacks, and the signal pads."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor

from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.symm_mem import transports as module
from lightning_zero.sharding.symm_mem.transports import (
    GradientTransport,
    PeerTransports,
    SignalPads,
    WeightTransport,
    chooses_copies,
)

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("choice", "device", "cuda", "usable", "expected"),
    [
        ("auto", GPU, "13.0", True, True),
        ("auto", GPU, "12.8", True, False),
        ("auto", GPU, None, True, False),
        ("auto", GPU, "13.0", False, False),
        ("auto", CPU, None, False, True),
        ("copy", CPU, None, False, True),  # raises later, with the reason
        ("collective", GPU, "13.0", True, False),
        ("auto", torch.device("xpu"), "13.0", True, False),
    ],
)
def test_copies_are_chosen_where_one_call_makes_many(
    monkeypatch: pytest.MonkeyPatch, choice: str, device: torch.device, cuda: str | None, usable: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert chooses_copies(choice, device, usable, on_cpu=True) is expected


def test_between_cpus_auto_does_what_is_asked_for() -> None:
    assert not chooses_copies("auto", CPU, usable=True, on_cpu=False)


class ChoiceMemory:
    """Allocate without limit."""

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

    return way.try_allocate(allocate)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_memory_runs_out_nothing_is_kept_and_one_rank_says_so(
    caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    way = way_of(EngineConfig(), rank=rank)
    way.set_memory(ChoiceMemory(), "")
    assert way.try_allocate(lambda: None)
    assert not take_too_much(way)
    assert way.memory.kept == 0
    assert ("move all weights from now on, which is slower (reason=there is no more)" in caplog.text) == (rank == 0)


def test_copies_that_were_asked_for_are_refused_by_name() -> None:
    way = way_of(EngineConfig(tuning=Tuning(gather_transport="copy")))
    with pytest.raises(
        UnsupportedError, match="gather_transport='copy' is impossible here: there is one rank. Use gather_transport"
    ):
        way.set_memory(None, "there is one rank")
    way.set_memory(ChoiceMemory(), "")
    with pytest.raises(UnsupportedError, match="gather_transport='copy' is impossible here: there is no more"):
        take_too_much(way)


def test_a_sharded_model_keeps_its_way_and_an_option_that_means_the_same_may_change() -> None:
    before = EngineConfig(tuning=Tuning(gather_transport="auto"))
    way = way_of(before)  # between CPUs, "auto" copies weights
    way.set_memory(ChoiceMemory(), "")
    copy, collective = (replace(before, tuning=Tuning(gather_transport=name)) for name in ("copy", "collective"))
    way.check(copy)
    way.configure(copy)
    with pytest.raises(UnsupportedError, match="sharded with gather_transport='copy', and cannot change to"):
        way.check(collective)


def test_a_model_whose_memory_ran_out_may_be_trained_on_with_the_same_option() -> None:
    config = EngineConfig(tuning=Tuning(gather_transport="auto"))
    way = way_of(config)
    way.set_memory(None, "there is no more")
    assert way.wants_copies(config)
    way.check(config)
    with pytest.raises(UnsupportedError, match="sharded with gather_transport='auto', and cannot change to"):
        way.check(replace(config, tuning=Tuning(gather_transport="copy")))


@pytest.mark.parametrize(
    "other", [{}, {"compute_dtype": None}, {"tuning": Tuning(prefetch=False)}], ids=["mixed", "one dtype", "late"]
)
def test_on_an_accelerator_compiled_code_copies_weights_in_every_precision(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = replace(EngineConfig(compute_dtype=torch.bfloat16), **other)
    assert way_of(config, GPU).wants_copies(config)
    eager = replace(config, compile=False)
    assert not way_of(eager, GPU).wants_copies(eager)
    assert GradientTransport(eager, MagicMock(device=GPU)).wants_copies(eager)


MIXED_WEIGHTS = EngineConfig(compute_dtype=torch.bfloat16)
SIZES = {torch.float32: 64, torch.bfloat16: 32}


class WeightMemory:
    """Emulate the memory of two ranks, with stale values."""

    all_or_nothing = staticmethod(nullcontext)

    def __init__(self, enough: bool = True) -> None:
        self.enough = enough

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        if not self.enough:
            raise UnsupportedError("there is no more")
        mine = torch.full((numel,), 7, dtype=dtype)
        return mine, [mine, mine.clone()]


def way_with(memory: WeightMemory | None, choice: Any = "auto") -> WeightTransport:
    config = replace(MIXED_WEIGHTS, tuning=Tuning(gather_transport=choice))
    way = WeightTransport(
        config,
        MagicMock(world_size=2, rank=0, device=torch.device("cpu"), inter_host=None, inter_host_shard_group=None),
    )
    way.set_memory(memory, "")  # type: ignore[arg-type]
    return way


def executor(uses_epoch_lock: bool) -> Any:
    found = MagicMock()
    found.weights.uses_epoch_lock.return_value = uses_epoch_lock
    return found


def test_shards_lie_where_peers_see_them_and_begin_as_zeros() -> None:
    memory, turns = WeightMemory(), MagicMock()
    own = executor(uses_epoch_lock=False)
    found = way_with(memory).allocate_shards(own, SIZES, turns)
    assert {dtype: mine.numel() for dtype, (mine, _) in found.items()} == SIZES
    for dtype, (mine, everywhere) in found.items():
        assert not mine.any()
        assert everywhere[0] is mine
        assert everywhere[1].dtype is dtype
    turns.assert_called_once_with(own, memory)


def test_ranks_that_take_turns_already_go_on_with_that() -> None:
    turns = MagicMock()
    assert way_with(WeightMemory()).allocate_shards(executor(uses_epoch_lock=True), SIZES, turns)
    turns.assert_not_called()


def test_without_memory_of_peers_shards_have_memory_of_their_own() -> None:
    turns = MagicMock()
    assert way_with(None).allocate_shards(executor(False), SIZES, turns) == {}
    turns.assert_not_called()


@pytest.mark.parametrize("turns", [None, UnsupportedError("no kernels")])
def test_where_there_is_not_enough_for_shards_collectives_take_over(turns: Any) -> None:
    way = way_with(WeightMemory(enough=turns is not None))
    assert way.allocate_shards(executor(False), SIZES, MagicMock(side_effect=turns)) == {}
    assert way.memory is None
    with pytest.raises(UnsupportedError, match=r"gather_transport='copy' is impossible here: there is no more"):
        way_with(WeightMemory(enough=False), "copy").allocate_shards(executor(False), SIZES, MagicMock())


def test_compute_copies_lie_with_peers_where_there_is_room() -> None:
    memory, given = WeightMemory(), []
    way = way_with(memory)
    way.allocate_compute_shards(executor(False), given.append)
    assert given == [memory]
    assert way.memory is memory  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("uses_epoch_lock", [False, True])
def test_without_room_copies_are_gathered_unless_shards_can_be_read(uses_epoch_lock: bool) -> None:
    given, way = [], way_with(WeightMemory())

    def allocate(peers: Any) -> None:
        given.append(peers)
        if peers is not None:
            raise UnsupportedError("there is no more")

    memory = way.memory
    way.allocate_compute_shards(executor(uses_epoch_lock), allocate)
    assert given == ([memory] if uses_epoch_lock else [memory, None])
    assert way.memory is (memory if uses_epoch_lock else None)


def test_where_collectives_move_weights_copies_have_memory_of_their_own() -> None:
    given: list[Any] = []
    way_with(None).allocate_compute_shards(executor(False), given.append)
    assert given == [None]


class BucketMemory:
    all_or_nothing = staticmethod(nullcontext)

    def empty(self, size: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        mine = torch.empty(size, dtype=dtype)
        return mine, [mine, mine]


def way_on(device: torch.device) -> tuple[GradientTransport, Any]:
    way = GradientTransport(EngineConfig(), MagicMock(world_size=2, rank=0, device=device))
    way.set_memory(BucketMemory(), "")  # type: ignore[arg-type]
    executor = MagicMock(world_size=2, rank=0, device=device)
    executor.transport.staging_unit = 2048
    return way, executor


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_what_adds_up_gradients_on_a_gpu_is_torch_where_no_kernel_can_be_compiled(
    caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    way, executor = way_on(device)
    executor.transport.compile_means.side_effect = RuntimeError("no NVRTC")
    for _ in range(2):
        way.stage(executor, 1.0)
    executor.transport.set_staging.assert_called_once()
    assert executor.transport.compile_means.call_count == (device is GPU)
    assert ("torch kernels add gradients (reason=no NVRTC)" in caplog.text) == (device is GPU)


@pytest.mark.parametrize(("bucket_mb", "nbytes"), [(1.0, 2**21), (0.0001, 2048), (0.0015, 4096)])
def test_two_buckets_fit_in_whole_units_of_each_rank(bucket_mb: float, nbytes: int) -> None:
    way, executor = way_on(CPU)
    way.stage(executor, bucket_mb)
    (staging, group, timeout_s), _ = executor.transport.set_staging.call_args
    assert [memory.numel() for memory in staging] == [nbytes, nbytes]
    assert (group, timeout_s) == (way.mesh.intra_host.gather_group, way.mesh.timeout_s)


def rows_of_three() -> SignalPads:
    return SignalPads(MagicMock(intra_host=MagicMock(rank=1, size=3)))


class PadMemory:
    """Emulate the memory of three ranks; this rank's own pad is mapped twice, as in symmetric memory."""

    def __init__(self, theirs: str | None = None) -> None:
        self.given: list[tuple[int, torch.dtype]] = []
        self.errors: list[str | None] = []
        self.mine = torch.empty(0)
        self._theirs = theirs

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        self.given.append((numel, dtype))
        self.mine = torch.full((numel,), 7, dtype=dtype)
        return self.mine, [torch.full((numel,), rank, dtype=dtype) for rank in range(3)]

    def first_rank_error(self, error: str | None) -> str | None:
        self.errors.append(error)
        return error or self._theirs


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the devices that were synchronized."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def executor_on(device: torch.device, **failing: Any) -> Any:
    executor = MagicMock(device=device)
    executor.transport.configure_mock(**failing)
    return executor


def test_ranks_meet_on_gpus_by_rows_that_are_zero_before_anybody_comes(waited: list[Any]) -> None:
    memory, executor = PadMemory(), executor_on(GPU)

    def use(rows: list[Tensor]) -> None:
        assert waited == [GPU], "zeros are on the device before another rank writes"
        assert rows[1] is memory.mine
        assert not rows[1].any()
        assert [int(rows[rank][0]) for rank in (0, 2)] == [0, 2]

    executor.transport.set_barrier.side_effect = use
    rows = rows_of_three()
    rows.set_barrier(executor, memory)  # type: ignore[arg-type]
    rows.set_barrier(executor, memory)  # type: ignore[arg-type]
    assert memory.given == [(2 * 3, torch.int32)], "a row for each lane, once"
    executor.transport.set_barrier.assert_called_once()


@pytest.mark.parametrize(("device", "memory"), [(CPU, PadMemory()), (GPU, None)])
def test_ranks_meet_otherwise_on_cpus_and_without_memory(waited: list[Any], device: Any, memory: Any) -> None:
    executor = executor_on(device)
    rows_of_three().set_barrier(executor, memory)
    executor.transport.set_barrier.assert_not_called()
    assert waited == []


def test_memory_that_comes_later_is_still_used(waited: list[Any]) -> None:
    rows, executor = rows_of_three(), executor_on(GPU)
    rows.set_barrier(executor, None)
    rows.set_barrier(executor, PadMemory())  # type: ignore[arg-type]
    executor.transport.set_barrier.assert_called_once()


@pytest.mark.usefixtures("waited")
@pytest.mark.parametrize(
    ("own", "theirs", "said"), [("no NVRTC", None, "no NVRTC"), (None, "rank 2: old", "rank 2: old")]
)
def test_a_kernel_that_a_rank_cannot_compile_is_told_on_every_rank(own: Any, theirs: Any, said: str) -> None:
    memory: Any = PadMemory(theirs)
    failing = {"side_effect": RuntimeError(own) if own else None}
    executor = executor_on(GPU, set_barrier=MagicMock(**failing), set_epoch_lock=MagicMock(**failing))
    with pytest.raises(
        UnsupportedError,
        match=rf"barriers between devices cannot be compiled \({said}\).*gather_transport='collective' and reduce",
    ):
        rows_of_three().set_barrier(executor, memory)
    with pytest.raises(UnsupportedError, match=rf"the kernels by which ranks take turns cannot be compiled \({said}\)"):
        rows_of_three().set_epoch_lock(executor, memory)
    assert memory.errors == [own, own]


def test_gpus_take_turns_by_a_number_of_each_rank(waited: list[Any]) -> None:
    memory, executor = PadMemory(), executor_on(GPU)
    rows_of_three().set_epoch_lock(executor, memory)  # type: ignore[arg-type]
    assert memory.given == [(3, torch.int32)]
    ((rows,), _) = executor.transport.set_epoch_lock.call_args
    assert rows[1] is memory.mine
    assert waited == [GPU]


def test_cpus_take_turns_by_one_wide_number_each(waited: list[Any]) -> None:
    memory, executor = PadMemory(), executor_on(CPU)
    rows_of_three().set_epoch_lock(executor, memory)  # type: ignore[arg-type]
    assert memory.given == [(1, torch.int64)]
    ((numbers,), _) = executor.transport.set_epoch_lock.call_args
    assert len(numbers) == 3
    assert waited == []


MIXED = EngineConfig(compute_dtype=torch.bfloat16)
COPY = replace(MIXED, tuning=Tuning(gather_transport="copy", reduce_transport="copy"))
WEIGHTS_ONLY = replace(MIXED, tuning=Tuning(gather_transport="copy", reduce_transport="collective"))
GRADIENTS_ONLY = replace(MIXED, tuning=Tuning(gather_transport="collective", reduce_transport="copy"))
NOTHING = replace(MIXED, tuning=Tuning(gather_transport="collective", reduce_transport="collective"))


def made(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, reason: str = "", device: torch.device = CPU, rank: int = 0
) -> tuple[PeerTransports, Any]:
    """Return transports with memory, or with a reason why there is none, and the mock that allocates it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    ask = MagicMock(return_value=(None if reason else MagicMock(nbytes=100), reason))
    monkeypatch.setattr(module.SymmetricMemory, "of", ask)
    return PeerTransports.of(
        config, MagicMock(world_size=2, rank=rank, device=device, inter_host=None, inter_host_shard_group=None)
    ), ask


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
    assert peers.collectives_used == "gradients use collectives"
    peers, ask = made(monkeypatch, NOTHING)
    ask.assert_not_called()
    assert peers.collectives_used == "weights and gradients use collectives"
    assert peers.nbytes == 0


def test_gradients_leave_from_where_they_lie_unless_something_adds_up_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, GRADIENTS_ONLY)[0].zero_copy_gradients
    assert made(monkeypatch, NOTHING, device=GPU)[0].zero_copy_gradients
    assert not made(monkeypatch, NOTHING)[0].zero_copy_gradients, "gloo does"
    for ranks, exchanging, borrows in ((1, MagicMock(), True), (1, None, False), (2, None, True)):
        mesh = MagicMock(
            intra_host=MagicMock(size=ranks), inter_host_shard_group=exchanging, device=GPU
        )  # of several hosts
        assert PeerTransports(NOTHING, mesh).zero_copy_gradients is borrows


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    caplog.set_level("DEBUG")
    peers, _ = made(monkeypatch, MIXED, "there are two hosts", rank=rank)
    assert peers.collectives_used == "weights and gradients use collectives"
    assert ("collectives for all weights and gradients (reason=there are two hosts)" in caplog.text) == (rank == 0)
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


def _allocate(peers: PeerTransports, memory: Any) -> bool:
    return peers.allocate(memory.executor, memory.allocate_compute_shards, memory.allocate_host_shards)


class Recorded:
    """Record the order of allocations of ``peers``."""

    def __init__(self, peers: PeerTransports) -> None:
        self.order = MagicMock()
        own: Any = peers
        own._signal_pads, own._gradients.stage = self.order.rows, self.order.stage
        own._weights.allocate_compute_shards = self.order.copies
        self.executor, self.memory = MagicMock(), MagicMock()
        self.memory.executor = self.executor


@pytest.mark.parametrize("config", [WEIGHTS_ONLY, GRADIENTS_ONLY], ids=["weights", "gradients"])
def test_ranks_meet_in_whatever_memory_there_is(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    peers, ask = made(monkeypatch, config)
    recorded = Recorded(peers)
    own: Any = peers
    own._weights.allocate_shards = lambda executor, sizes, lock: lock(executor, "memory")
    _allocate(peers, recorded.memory)
    peers.allocate_shards(recorded.executor, {})
    meet = call(recorded.executor, ask.return_value[0])
    assert recorded.order.rows.set_barrier.mock_calls == [meet, meet]


def test_ranks_can_meet_before_anything_is_copied_and_copies_are_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, ask = made(monkeypatch, COPY)
    recorded = Recorded(peers)
    assert not _allocate(peers, recorded.memory)
    assert not _allocate(peers, recorded.memory)
    memory, executor, order = ask.return_value[0], recorded.executor, recorded.order
    names = [name for name, *_ in order.mock_calls]
    assert names == ["rows.set_barrier", "stage", "copies", "rows.set_barrier", "stage"]
    assert order.mock_calls[:2] == [call.rows.set_barrier(executor, memory), call.stage(executor, 64.0)]
    order.copies.call_args.args[1](None)
    recorded.memory.allocate_compute_shards.assert_called_once_with(torch.bfloat16, None)


@pytest.mark.parametrize("config", [replace(COPY, compute_dtype=None), replace(COPY, compile=False)])
def test_without_another_dtype_or_compiled_code_there_are_no_copies(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    peers, _ = made(monkeypatch, config)
    recorded = Recorded(peers)
    _allocate(peers, recorded.memory)
    recorded.order.copies.assert_not_called()


def test_where_memory_runs_out_that_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, _ = made(monkeypatch, COPY)
    own: Any = peers
    recorded = Recorded(peers)
    recorded.order.stage.side_effect = lambda *args: setattr(own._gradients, "memory", None)
    assert [_allocate(peers, recorded.memory) for _ in range(2)] == [True, False]
    assert peers.collectives_used == "gradients use collectives"
    assert peers.nbytes == 100


def test_shards_take_turns_once_ranks_can_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, ask = made(monkeypatch, COPY)
    recorded = Recorded(peers)
    own: Any = peers
    own._weights.allocate_shards = lambda executor, sizes, lock: lock(executor, "memory") or sizes
    assert peers.allocate_shards(recorded.executor, {torch.float32: 64}) == {torch.float32: 64}
    meet = call.rows.set_barrier(recorded.executor, ask.return_value[0])
    assert recorded.order.mock_calls == [meet, call.rows.set_epoch_lock(recorded.executor, "memory")]


@pytest.mark.parametrize(
    ("config", "several_hosts", "meet"),
    [
        (COPY, False, []),
        (WEIGHTS_ONLY, False, ["intra_host"]),
        (COPY, True, ["inter_host"]),
        (NOTHING, True, ["inter_host", "intra_host"]),
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
    monkeypatch.setattr(module, "_connect_side", started)
    sides = {"intra_host": MagicMock(), "inter_host": MagicMock() if several_hosts else None}
    peers = PeerTransports.of(config, MagicMock(world_size=2, rank=0, device=GPU, inter_host_shard_group=None, **sides))
    memory = MagicMock(**{"executor.device": GPU})
    memory.executor.collective.side_effect = lambda what, lane, start: start(True)
    for _ in range(2):
        _allocate(peers, memory)
    assert started.mock_calls == [call(sides[name], GPU, True) for name in meet]
