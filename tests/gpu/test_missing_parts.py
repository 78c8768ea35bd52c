"""Two ranks as two hosts, of which one's device does not send its part of the weights.

The other's device waits in a kernel, or in a replayed graph, which no host sees, and both end within the time limit
with the name of the one that is late. See tests/distributed/test_missing_parts.py, where devices are emulated.
"""

import time
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import RankFailedError
from tests.helpers.sharded import engine_for, sgd
from tests.helpers.watched import verdict
from tests.ranks.pool import Ranks

# The watchdog ends a process 4 s after its message.
TIMEOUT_S, HELD_S, PATIENCE_S, LATE_AT = 6.0, 8.0, 20.0, 12


def hold(seconds: float) -> None:
    """Delay later work of the device.

    The unit is cycles, whose number in a second depends on the device and on its earlier work.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 4 * 10**8
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    torch.cuda._sleep(int(cycles * seconds / (begin.elapsed_time(end) / 1e3)))


def one_device_is_held(replayed: bool) -> tuple[str, float, dict[str, int]]:
    device = f"cuda:{torch.cuda.current_device()}"
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    options = {
        "ranks_per_host": 1,
        "gather_group_mb": 0.25,
        "cuda_graph_model": replayed,
        "timeout": timedelta(seconds=TIMEOUT_S),
        "report_stall_after_s": 2.0,
    }
    with engine_for(model, "aot_eager", device=device, **options) as engine:
        optimizer = sgd(model)

        def forward() -> Tensor:
            with engine.train_step():
                loss = model(torch.ones(4, 256, device=device)).square().mean()
            loss.item()
            return loss

        for _ in range(LATE_AT):
            forward().backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        begun = time.monotonic()
        if engine.rank == 1:
            hold(HELD_S)
        try:
            forward()
            # The rank whose device was held returns before it gets the other one's reason, and its queued work
            # would wait for collectives that no rank ends.
            said = verdict(engine.watchdog, PATIENCE_S)
        except RankFailedError as error:
            said = str(error)
        return said, time.monotonic() - begun, engine.executor.counters()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("replayed", [False, True], ids=["run", "replayed"])
def test_a_device_that_sends_no_part_is_named_within_the_time_limit(ranks: Ranks, replayed: bool) -> None:
    # Communicators whose collectives took too long can neither be used nor left.
    results = ranks.run(2, one_device_is_held, replayed, backend="nccl", deadline=120, last=True)
    for rank, (said, seconds, counters) in enumerate(results):
        assert ("replayed_graphs" in counters) == replayed
        # NCCL has the same time limit, and either may speak first.
        late = (
            f"A wait took longer than the timeout of {TIMEOUT_S:.0f} s",
            "a collective took longer than its timeout",
        )
        assert any(words in said for words in late), (rank, said)
        assert "its device waits in part 1 of" in said, (rank, said)
        named = ["Missing: rank 1 of host 1"] + ["Waiting for this rank: rank 0 of host 0"] * rank
        assert any(words in said for words in named), (rank, said)
        assert TIMEOUT_S < seconds < HELD_S + 8, (rank, seconds)
