"""The memory left on a device is read from it, and decides which weights are cached."""

import pytest
import torch

from lightning_zero.engine import Engine
from lightning_zero.profiling.device_gauges import MARGIN, MemoryGauge, memory_limit
from tests.helpers.options import config
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)
MIB = 2**20


def gauge_a_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gauge = MemoryGauge(device)
    gauge.start(anew=True)
    before = gauge.read()
    big = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
    del big
    after = gauge.read()
    assert after.allocated - before.allocated >= 256 * MIB
    assert after.reserved - before.reserved >= 256 * MIB
    assert after.allocated_now == before.allocated_now
    assert abs(after.others - before.others) < 64 * MIB
    assert after.cached >= 256 * MIB
    assert memory_limit(None, after.total) == pytest.approx(after.total * (1 - MARGIN))
    gauge.start(anew=True)
    assert gauge.read().reserved < after.reserved
    assert gauge.read().cached < after.cached


@pytest.mark.gpu(2, apart=True)
def test_peaks_and_what_is_left(ranks: Ranks) -> None:
    ranks.run(2, gauge_a_device, backend="nccl")


def train(cached: float | str, until: str) -> tuple[list[float], list[int], list[str]]:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    said: list[str] = []
    budget = {"reshard_after_forward": "auto"} if cached == "auto" else {"unsharded_cache_mb": cached}
    chosen = config(compile_backend="aot_eager", unsharded_cache_until=until, **budget)
    engine = Engine(device, chosen, report=said.append)
    try:
        engine.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, gathered = [], []
        for step in range(8):
            with engine.train_step():
                loss = model(torch.full((8, 1024), 0.1 * step, device=device)).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            gathered.append(engine.executor.counters().get("gather_bytes", 0))
    finally:
        engine.close()
    return losses, [b - a for a, b in zip(gathered, gathered[1:], strict=False)], [s for s in said if "auto" in s]


@pytest.mark.parametrize("until", ["backward", "step"])
def test_a_device_with_room_keeps_everything_after_some_steps(ranks: Ranks, until: str) -> None:
    plain = ranks.run(2, train, 0.0, "backward", backend="nccl", deadline=100)
    auto = ranks.run(2, train, "auto", until, backend="nccl", deadline=100)
    for (expected, before, _), (losses, gathered, said) in zip(plain, auto, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert gathered[:4] == before[:4]
        assert gathered[-1] < before[-1]
        assert len(said) == 1
        assert "compiling once more" in said[0]
