"""A part of the exchange between hosts does not arrive.

Every rank ends within the time limit, and names the rank and the weights, or the network if all have sent their parts.
"""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.errors import RankFailedError
from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import Watchdog
from tests.helpers.models import Case, build, make_batches
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.helpers.watched import verdict
from tests.ranks.pool import Ranks

WIDTH = 24
LAYER_MB = 4 * WIDTH * WIDTH / 2**20  # a part for each layer
TIMEOUT_S, DEVICES_S, PATIENCE_S = 4.0, 2.0, 20.0
# Numbers that a device writes about exchanged parts, see csrc/sync/signal_pads.h.
SENT, COME, WANTED, GOT = 5, 6, (7, 9), (8, 10)
WEIGHTS = ["'embed.weight'", "'layers.0.weight' to 'layers.3.weight', 4 weights"]


class Layers(Case):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    @staticmethod
    def make_batch(seed: int, n: int) -> Any:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, WIDTH, generator=rng), torch.randn(n, WIDTH, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# Rank 3, on the second host, sends nothing. So rank 1 gets nothing, and rank 0, which reads from rank 1, waits too.
UNSENT = {
    0: {WANTED[0]: 9},
    1: {COME: 7, WANTED[0]: 9},
    2: {WANTED[1]: 9},
    3: {SENT: 7, COME: 7},
}


def devices(come_after_s: float, rest_s: float) -> str:
    """Let devices wait for the second part of an exchange, whose numbers follow 7 others.

    There are four ranks, two on each host. Return the errors of this rank before the part arrives, and after.
    """
    mesh = Mesh.from_world(torch.device("cpu"), ranks_per_host=2)
    watchdog = Watchdog(replace(mesh, timeout_s=DEVICES_S), report_s=1.0)
    try:
        words = torch.zeros(16, dtype=torch.int32)
        words[[SENT, COME]] = 9
        for at, number in UNSENT[mesh.rank].items():
            words[at] = number
        watchdog.native.set_exchange_parts(7, WEIGHTS)
        watchdog.native.watch_device(words)
        watchdog.begin()
        found = verdict(watchdog, come_after_s)
        words[[SENT, COME]] = 9
        words[list(GOT)] = words[list(WANTED)]
        return found or verdict(watchdog, rest_s)
    finally:
        watchdog.close()


def emulated() -> tuple[str, str]:
    return devices(PATIENCE_S, 0.0), devices(0.5, DEVICES_S)


def test_devices_that_wait_for_a_part_end_and_name_the_rank_that_has_not_sent_it(ranks: Ranks) -> None:
    for rank, (unsent, in_time) in enumerate(ranks.run(4, emulated, deadline=90)):
        assert in_time == "", f"rank {rank} was ended: {in_time}"
        assert f"A wait took longer than the timeout of {DEVICES_S:.0f} s" in unsent, (rank, unsent)
        assert "Missing: rank 3 of host 1" in unsent, (rank, unsent)
        assert f"part 2 of 2 of the weights exchanged between hosts ({WEIGHTS[1]})" in unsent, (rank, unsent)
        assert "its device waits" in unsent


def over_a_network_that_brings_nothing() -> tuple[str, float]:
    model = build(Layers)
    dist.barrier()  # by then all have ended earlier work: later groups wait no longer than the timeout
    timeout = timedelta(seconds=TIMEOUT_S)
    with engine_for(model, ranks_per_host=2, gather_group_mb=LAYER_MB, timeout=timeout) as engine:
        engine.cycle.begin_stage()
        begun = 0.0

        def slow_down(model: Any, index: int) -> None:
            nonlocal begun
            if index == 2:
                engine.executor.transport.limit_cross_host_bandwidth(1e-9)
                begun = time.monotonic()

        try:
            train_sharded(engine, model, make_batches(Layers, 4, 12), sgd(model), before_batch=slow_down)
        except RankFailedError as error:
            return str(error), time.monotonic() - begun
        return "trained on", 0.0


@pytest.mark.exhaustive  # the other test waits on devices
def test_a_host_that_waits_for_a_part_ends_within_the_time_limit(ranks: Ranks) -> None:
    for text, seconds in ranks.run(4, over_a_network_that_brings_nothing, deadline=90):
        assert f"A wait took longer than the timeout of {TIMEOUT_S:.0f} s" in text
        assert "waits in part 1 of" in text
        assert "of the weights exchanged between hosts ('layers.0.weight')" in text
        assert "Every rank has sent its part" in text
        assert TIMEOUT_S < seconds < TIMEOUT_S + 12
