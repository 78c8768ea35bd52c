"""Count the bytes of a first step: its optimizer step takes no more than later ones, and nothing of it stays."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

STEPS, WIDTH, LAYERS = 4, 128, 16
CHUNK = 1 << 13  # elements, so that a chunk is small compared with the model
BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.float().square().mean()


@contextmanager
def phases() -> Iterator[dict[str, tuple[int, int]]]:
    """Yield the bytes of each ``record_function`` when the context has ended: at most, and at the end."""
    found: dict[str, tuple[int, int]] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    path = Path(f"phases-{torch.distributed.get_rank()}.json")
    profiler.export_chrome_trace(str(path))
    events = sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    live: dict[int, int] = {}
    totals = [(0.0, 0)]
    for event in (e for e in events if e.get("name") == "[memory]"):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size < 0:
            live.pop(address, None)
        else:
            # Memory that gloo's threads freed is seen at its next use only.
            for other in [at for at, held in live.items() if at < address + size and address < at + held]:
                del live[other]
            live[address] = size
        totals.append((event["ts"], sum(live.values())))
    for name, (begin, end) in spans.items():
        before = [total for at, total in totals if at < begin][-1]
        within = [total for at, total in totals if begin <= at <= end]
        found[name] = max([before, *within]), ([before, *within])[-1]


def train(dtype: torch.dtype = torch.float32, make: Any = None, **options: Any) -> dict[str, Any]:
    """Return the most bytes of each optimizer step, and the bytes after each."""
    model = Net().to(dtype)
    mixed = dtype is torch.float32
    options = {"compute_dtype": BF16 if mixed else None, "emulate_cuda_graph_step": True} | options
    x = torch.ones(4, WIDTH, dtype=dtype)
    chunks = [
        patch(f"lightning_zero.{name}.MAX_CHUNK_NUMEL", CHUNK) for name in ("optim.step_kernel", "step.chunked_step")
    ]
    with chunks[0], chunks[1], phases() as found, engine_for(model, "aot_eager", **options) as engine:
        optimizer = (make or torch.optim.AdamW)(model.parameters(), lr=1e-3)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        for step in range(STEPS):
            with engine.train_step(), torch.autocast("cpu", BF16, enabled=mixed, cache_enabled=False):
                loss = model(x)
            engine.cycle.before_backward()
            loss.backward()
            engine.cycle.after_backward()
            del loss
            with record_function(f"step {step}"), engine.optimizers.stepping(optimizer, clip=1.0):
                optimizer.step()
            with record_function(f"after {step}"):
                optimizer.zero_grad()
                torch.empty(1)  # an event of the allocator
    most = [found[f"step {step}"][0] for step in range(STEPS)]
    after = [found[f"after {step}"][1] for step in range(STEPS)]
    return {"most": most, "after": after}


def dampened(params: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that makes the first step itself."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5)


EIGHT: dict[str, Any] = {"state_dtype": "8bit"}
ALIASED: dict[str, Any] = {"grad_aliasing": True}
WEIGHTS: dict[str, Any] = {"dtype": BF16, "bf16_stochastic_round": True}
WAYS: dict[str, dict[str, Any]] = {
    "float32 state": {},
    "aliased gradients": ALIASED,
    "8-bit state, aliased gradients": EIGHT | ALIASED,
    "bf16 weights": WEIGHTS,
    "bf16 weights, 8-bit state": WEIGHTS | EIGHT,
    "Muon": {"make": torch.optim.Muon} | ALIASED,
    "its own first step": {"make": dampened} | EIGHT | ALIASED,
}


def train_all() -> dict[str, dict[str, Any]]:
    return {way: train(**options) for way, options in WAYS.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_first_step_takes_and_keeps_no_more_than_later_ones(ranks: Ranks, world_size: int) -> None:
    elements = LAYERS * WIDTH * WIDTH // world_size
    slack = 4 * 4 * WIDTH * WIDTH  # full gradients that gloo threads hold, which free them unseen
    for found in ranks.run(world_size, train_all, deadline=120):
        for way, bytes_of in found.items():
            most, after = bytes_of["most"], bytes_of["after"]
            own = 4 * elements * (way == "its own first step")  # for gradients, which it needs in float32
            assert most[0] <= max(most[1:]) + own + slack, (way, most)
            assert after[0] - after[-1] <= slack, (way, after)
        # Weights, gradients and moments: 2 + 2 + 4 bytes with bfloat16 weights instead of 4 + 2 + 4 + 8.
        kept = {way: bytes_of["after"][-1] / elements for way, bytes_of in found.items()}
        if world_size == 1:  # no float32 gradient exists, and no temporary tensors of all elements
            for way in WAYS.keys() - {"its own first step", "Muon"}:
                assert found[way]["most"][0] - found[way]["after"][0] < 3 * elements, way
        if world_size == 1:  # memory that several ranks share is no allocator's
            assert kept["float32 state"] - kept["aliased gradients"] == pytest.approx(4, abs=0.3)
            assert kept["aliased gradients"] - kept["8-bit state, aliased gradients"] == pytest.approx(5.97, abs=0.3)
            assert kept["8-bit state, aliased gradients"] - kept["its own first step"] == pytest.approx(1.02, abs=0.3)
            assert kept["bf16 weights"] - kept["bf16 weights, 8-bit state"] == pytest.approx(1.97, abs=0.3)
            assert kept["float32 state"] - kept["bf16 weights"] > 10
