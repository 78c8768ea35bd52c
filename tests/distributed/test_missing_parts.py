"""A part of what hosts exchange that does not come: within the time limit every rank ends, and says whose part it is,
of which weights, or that all have sent theirs and the network is to blame."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from lightning_zero.errors import RankFailedError
from tests.distributed.test_exchange import LAYER_MB, Layers
from tests.helpers.models import build, make_batches
from tests.helpers.options import config
from tests.helpers.sharded import sgd, train_sharded
from tests.ranks.pool import Ranks

TIMEOUT_S, PATIENCE_S = 4.0, 20.0
# What a device writes of the parts that hosts exchange, see csrc/runtime/device_words.h.
SENT, COME, WANTED, GOT = 5, 6, (7, 9), (8, 10)
WEIGHTS = ["'embed.weight'", "'layers.0.weight' to 'layers.3.weight', 4 weights"]


@contextmanager
def engine_of(timeout_s: float = TIMEOUT_S, **options: Any) -> Iterator[Engine]:
    chosen = config(timeout=timedelta(seconds=timeout_s), report_stall_after_s=1.0, ranks_per_host=2, **options)
    dist.barrier()  # by which all have ended what was before: the groups that come now wait no longer than that
    engine = Engine(torch.device("cpu"), chosen)
    try:
        yield engine
    finally:
        engine.close()


def verdict(engine: Engine, seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            engine.watchdog.check()
        except RankFailedError as error:
            return str(error)
        time.sleep(0.02)
    return ""


def devices(late: dict[int, dict[int, int]], come_after_s: float = PATIENCE_S) -> str:
    """As if devices waited for the second part of an exchange, whose numbers follow 7 others. Of four ranks, two on each
    host; a rank's words are as given, or say that it has sent and has got everything."""
    with engine_of(compile=False) as engine:
        words = torch.zeros(16, dtype=torch.int32)
        words[[SENT, COME]] = 9
        for at, number in late.get(engine.rank, {}).items():
            words[at] = number
        engine.watchdog.native.tell_parts(7, WEIGHTS)
        engine.watchdog.native.watch_device(words)
        engine.cycle.begin_stage()
        found = verdict(engine, come_after_s)
        words[[SENT, COME]] = 9
        words[list(GOT)] = words[list(WANTED)]
        return found or verdict(engine, 1.5)


# Rank 3, on the second host, sends nothing. So rank 1 gets nothing, and rank 0, which reads what rank 1 gets, waits too.
UNSENT = {
    0: {WANTED[0]: 9},
    1: {COME: 7, WANTED[0]: 9},
    2: {WANTED[1]: 9},
    3: {SENT: 7, COME: 7},
}
# All have sent, and it has not come to rank 1.
UNDER_WAY = {0: {WANTED[0]: 9}, 1: {COME: 8, WANTED[0]: 9}}


def emulated() -> tuple[str, str, str]:
    return devices(UNSENT), devices(UNDER_WAY), devices(UNSENT, come_after_s=1.0)


def test_devices_that_wait_for_a_part_end_and_name_the_rank_that_has_not_sent_it(ranks: Ranks) -> None:
    found = ranks.run(4, emulated, deadline=90)
    for rank, (unsent, under_way, in_time) in enumerate(found):
        assert in_time == "", f"rank {rank} was ended: {in_time}"
        assert f"A wait took longer than the timeout of {TIMEOUT_S:.0f} s" in unsent, (rank, unsent)
        assert "Missing: rank 3 of host 1" in unsent, (rank, unsent)
        assert f"part 2 of 2 of the weights that hosts exchange ({WEIGHTS[1]})" in unsent, (rank, unsent)
        assert "its device waits" in unsent
        assert "it has not come to rank 1 of host 0" in under_way, (rank, under_way)
        assert "NCCL_SOCKET_IFNAME" in under_way
        assert "Missing" not in under_way.partition(" The others:")[0], (rank, under_way)


def over_a_network_that_brings_nothing() -> tuple[str, float]:
    model = build(Layers)
    with engine_of(compile_backend="aot_eager", gather_group_mb=LAYER_MB) as engine:
        engine.shard(model)
        engine.cycle.begin_stage()
        begun = 0.0

        def slow_down(model: Any, index: int) -> None:
            nonlocal begun
            if index == 2:
                engine.executor.transport.limit_across(1e-9)
                begun = time.monotonic()

        try:
            train_sharded(engine, model, make_batches(Layers, 4, 12), sgd(model), before_batch=slow_down)
        except RankFailedError as error:
            return str(error), time.monotonic() - begun
        return "trained on", 0.0


def test_a_host_that_waits_for_a_part_ends_within_the_time_limit(ranks: Ranks) -> None:
    for text, seconds in ranks.run(4, over_a_network_that_brings_nothing, deadline=90):
        assert f"A wait took longer than the timeout of {TIMEOUT_S:.0f} s" in text
        assert "waits in part 1 of" in text
        assert "of the weights that hosts exchange ('layers.6.weight')" in text, "the first that is read"
        assert "Every rank has sent its part of that" in text
        assert TIMEOUT_S < seconds < TIMEOUT_S + 12
