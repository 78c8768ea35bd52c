"""Master weights in pinned memory.

On one GPU, and on two ranks, training is the same to the last bit, captured and not, and the device has so much more
memory.
"""

import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.offload.pinned_memory import HostMemory
from tests.helpers.masters import BF16, check, train_both_ways
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)

ELEMENTS = 4096 * 8192 + 8192 * 512  # of the large model


def device() -> str:
    return f"cuda:{torch.cuda.current_device()}"


def both_ways(name: str, **options: Any) -> list[Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_both_ways(name, "aot_eager", device(), **options)


@pytest.mark.parametrize("capture", [False, True], ids=["own", "captured"])
def test_training_is_the_same_to_the_last_bit(ranks: Ranks, capture: bool) -> None:
    options: dict[str, Any] = {"cuda_graph_step": capture, "cuda_graph_model": capture}
    ((here, away),) = ranks.run(1, both_ways, "AdamW", backend="cpu:gloo,cuda:nccl", deadline=300, **options)
    check(here, away)
    assert away["captured"] == here["captured"] == capture
    assert (away["replays"] > 5) == (here["replays"] > 5) == capture


@pytest.mark.gpu(2)
def test_two_ranks_train_the_same(ranks: Ranks) -> None:
    options: dict[str, Any] = {"reduce_transport": "collective"}
    for here, away in ranks.run(2, both_ways, "AdamW", backend="cpu:gloo,cuda:nccl", deadline=300, **options):
        check(here, away)


def see_both_ways() -> dict[str, Any]:
    """Writes through one view are visible through the other."""
    here = torch.device(device())
    seen, host = HostMemory(here).mapped(1 << 20, torch.float32)
    found: dict[str, Any] = {"device": str(seen.device), "pinned": host.is_pinned(), "zero": not seen.any().item()}
    values = torch.randn(1 << 20)
    for name, write in {
        "from the host": lambda: seen.copy_(values),
        "from the device": lambda: seen.copy_(values.to(here)),
        "by a kernel": lambda: torch.add(values.to(here), 0, out=seen),
    }.items():
        seen.zero_()
        write()
        torch.cuda.synchronize()
        found[name] = torch.equal(host, values) and torch.equal(seen.cpu(), values)
    param = nn.Parameter(seen.view(1, -1))
    (param * 2).sum().backward()
    assert param.grad is not None
    found["its gradient is the device's"] = torch.empty_like(seen).data_ptr() != seen.data_ptr()
    return found


def test_a_device_and_the_host_see_the_same_memory(ranks: Ranks) -> None:
    (found,) = ranks.run(1, see_both_ways, backend="cpu:gloo,cuda:nccl")
    assert found.pop("device").startswith("cuda")
    assert all(found.values()), found


def train_large(
    offload: tuple[str, ...], capture: bool, steps: int = 10, memory: float | None = None
) -> dict[str, Any]:
    """A layer with so many masters that copies take milliseconds, and fill the ring several times."""
    torch._dynamo.reset()
    gc.collect()  # or memory of an earlier training would count as this one's
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    options: dict[str, Any] = {"offload": offload, "offload_buffer_mb": 32.0, "compute_dtype": BF16, "memory": memory}
    model = nn.Sequential(nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 512, bias=False))
    autocast = partial(torch.autocast, "cuda", BF16, cache_enabled=False)
    more = {"cuda_graph_step": capture, "cuda_graph_model": False, "gather_transport": "collective"}
    with engine_for(model, "aot_eager", device=device(), **options, **more) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        plan, states = engine.memory.plan, engine.session.planner.known.states
        x, losses = torch.randn(8, 4096, device=engine.device), []
        for step in range(steps):
            with engine.train_step(), autocast():
                loss = model(x + step).float().square().mean()
            engine.cycle.before_backward()  # during which state and masters arrive
            loss.backward()
            engine.cycle.after_backward()
            if step == 7:  # too late for earlier arrivals
                model._modules["0"]._parameters["weight"].data.mul_(1.01)
            with engine.optimizers.stepping(optimizer, clip=1.0):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            # Copies that do not wait would read or leave these values.
            junk = [torch.full((1 << 22,), float(step), device=engine.device) for _ in range(8)]
            del junk
        weights = [param.detach().cpu().clone() for param in model.parameters()]
        moments = [v.cpu().clone() for entries in optimizer.state.values() for v in entries.values() if v.dim()]
        torch.cuda.synchronize()
        return {
            "values": (losses, weights, moments),
            "held": torch.cuda.memory_allocated() - before,
            "offload": engine.optimizers.config.offload,
            "away": sum(record.shard.nbytes for record in engine.sharder.live if record.is_on_host),
            "without state": 0 if plan is None else plan.peak - states,
        }


def train_large_all_ways(capture: bool) -> list[dict[str, Any]]:
    return [train_large(offload, capture) for offload in (("optimizer",), ("optimizer", "parameters"))]


@pytest.mark.parametrize("capture", [False, True], ids=["own", "captured"])
def test_much_passes_unharmed_and_leaves_the_device(ranks: Ranks, capture: bool) -> None:
    (found,) = ranks.run(1, train_large_all_ways, capture, backend="cpu:gloo,cuda:nccl", deadline=300)
    here, away = found
    torch.testing.assert_close(away["values"], here["values"], rtol=0, atol=0)
    assert here["held"] - away["held"] > 4 * ELEMENTS - (16 << 20)


def planned_and_by_hand() -> tuple[dict[str, Any], dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a limit cannot be held by tensors that exist in a first step for a moment
        plenty = train_large((), False, steps=1, memory=1000.0)
        limit = (plenty["without state"] - 2 * ELEMENTS) / 2**30  # half of the master weights are too much
        return train_large((), False, memory=limit), train_large(("optimizer", "parameters"), False)


def test_a_plan_moves_them_before_the_first_step(ranks: Ranks) -> None:
    ((planned, by_hand),) = ranks.run(1, planned_and_by_hand, backend="cpu:gloo,cuda:nccl", deadline=300)
    assert {"optimizer", "parameters"} <= {*planned["offload"]}
    assert planned["away"] == by_hand["away"] == 4 * ELEMENTS
    torch.testing.assert_close(planned["values"], by_hand["values"], rtol=0, atol=0)
    assert abs(planned["held"] - by_hand["held"]) < 16 << 20, "nothing of them is left on the device"
