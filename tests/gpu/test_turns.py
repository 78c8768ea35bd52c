"""GPUs of one host read weights out of each other's memory, in turns: ranks need not read the same."""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from tests.helpers.options import config
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import whole_params
from tests.helpers.turns import CHOICES, Experts, Parts, batches
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)
BF16 = torch.bfloat16
ROUNDS = 3  # of CHOICES; replays begin after a few steps
autocast = partial(torch.autocast, "cuda", BF16, cache_enabled=False)


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train_plain(device: torch.device, world_size: int, same: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Parts().to(device)
    optimizer, losses = sgd(model), []
    for _ in range(ROUNDS):
        for batch, choices in zip(batches(world_size).to(device), CHOICES, strict=True):
            for rank in range(world_size):
                with autocast():
                    loss = model.loss(batch[rank], *choices[0 if same else rank])
                (loss / world_size).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "params": {n: p.detach().clone() for n, p in model.named_parameters()}}


def train(
    options: dict[str, Any], compile: dict[str, Any], same: bool, waits: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    device = here()
    torch.manual_seed(1)
    model = Parts()
    chosen = config(reduce_bucket_mb=0.001, reduce_dtype="bf16", compute_dtype=BF16, **compile, **options)
    engine = Engine(device, chosen)
    try:
        engine.shard(model)
        optimizer, losses = sgd(model), []
        for _ in range(ROUNDS):
            for batch, choices in zip(batches(engine.world_size).to(device), CHOICES, strict=True):
                mine = batch[engine.rank]
                if waits and engine.rank == 0:  # at the end of its backward, for its device
                    mine = mine.detach().requires_grad_()
                    mine.register_hook(lambda grad: torch.cuda.synchronize())
                with engine.train_step(), autocast():
                    loss = model.loss(mine, *choices[0 if same else engine.rank])
                loss.backward()
                with engine.optimizers.stepping(optimizer):
                    optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        got = {"losses": losses, "params": whole_params(engine, model)}
        expected = train_plain(device, engine.world_size, same)
        expected["losses"] = expected["losses"][engine.rank :: engine.world_size]
        return got, expected, engine.executor.counters()
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("same", [False, True], ids=["differ", "alike"])
@pytest.mark.parametrize("graphs", [False, "auto"], ids=["run", "replayed"])
def test_ranks_that_call_other_modules_train_as_if_they_had_no_gradients_there(
    ranks: Ranks, backend: str, same: bool, graphs: Any
) -> None:
    options = {"cuda_graph_model": graphs}
    for got, expected, counters in ranks.run(
        2, train, options, {"compile_backend": backend}, same, backend="nccl", deadline=240
    ):
        assert counters["copied_weights"] > 0
        assert_close_relative(got["losses"], expected["losses"], 2e-2, what="losses")
        assert_close_relative(got["params"], expected["params"], 1e-2, what="weights")


@pytest.mark.parametrize("reduce_transport", ["auto", "collective"])
def test_a_host_that_waits_for_its_device_in_backward_does_not_wait_for_ever(
    ranks: Ranks, reduce_transport: str
) -> None:
    """The device waits for gradients of the other rank, which has none, and reaches the agreement without this host."""
    options = {"cuda_graph_model": False, "reduce_transport": reduce_transport}
    for got, expected, _ in ranks.run(
        2, train, options, {"compile_backend": "aot_eager"}, False, True, backend="nccl", deadline=55
    ):
        assert_close_relative(got["params"], expected["params"], 1e-2, what="weights")


def late_readers(late: int) -> list[torch.Tensor]:
    """A late rank still reads the values of the time at which it was expected."""
    device = here()
    torch.manual_seed(1)
    model = Experts()
    engine = Engine(device, config(compile_backend="aot_eager", compute_dtype=BF16))
    seen = []
    try:
        engine.shard(model)
        x = torch.ones(4, 19, device=device)
        for _ in range(4):
            with torch.no_grad(), autocast():
                engine.eval_step()
                if dist.get_rank() == late:
                    time.sleep(0.3)
                seen.append(model(x, [0], 1).float())
                engine.cycle.after_eval()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
        return seen
    finally:
        engine.close()


def test_who_writes_waits_for_who_reads(ranks: Ranks) -> None:
    for late in (0, 1):
        one, other = ranks.run(2, late_readers, late, backend="nccl", deadline=120)
        assert_close_relative(one, other, 0)
        assert len({float(out.sum()) for out in one}) == 4
