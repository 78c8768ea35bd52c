"""State of optimizers, and activations, in pinned memory.

On one GPU, training is the same to the last bit, captured and not.
"""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.report.engine_report import memory_by_role
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.optimizer_steps import (
    OPTIMIZERS,
    Event,
    forget_one_state,
    load_own_state,
    nothing,
    train_sharded_steps,
    unfreeze_and_add,
)
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)

ON_HOST: dict[str, Any] = {"offload": ("optimizer",), "offload_buffer_mb": 0.0001}  # some stretches for each segment
CASES: list[tuple[str, Event]] = [
    *((name, nothing) for name in OPTIMIZERS if name != "Lion"),
    *(("AdamW", event) for event in (unfreeze_and_add, load_own_state, forget_one_state)),
]


def device() -> str:
    return f"cuda:{torch.cuda.current_device()}"


def train_both_ways(capture: bool) -> list[str]:
    """Return the differences of each case with state on the host."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    wrong = []
    for name, event in CASES:
        expected = train_sharded_steps(name, event, False, device(), capture)
        found = train_sharded_steps(name, event, False, device(), capture, **ON_HOST)
        try:
            torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
            assert found[2] == expected[2]
        except AssertionError as error:
            wrong.append(f"{name}, {event.__name__}: {error}")
    return wrong


@pytest.mark.parametrize("capture", [False, True], ids=["own", "captured"])
def test_training_is_the_same_to_the_last_bit(ranks: Ranks, capture: bool) -> None:
    (wrong,) = ranks.run(1, train_both_ways, capture, backend="nccl", deadline=400)
    assert wrong == []


def train_large(offload: bool, capture: bool, steps: int = 12) -> dict[str, Any]:
    """A layer with so much state that copies take milliseconds, and fill the ring several times."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    options: dict[str, Any] = {"offload": ("optimizer",), "offload_buffer_mb": 32.0} if offload else {}
    model = nn.Sequential(nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 512))
    with engine_for(model, "eager", device=device(), cuda_graph_step=capture, **options) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        before, norms = torch.cuda.memory_allocated(), []
        x = torch.randn(8, 4096, device=engine.device)
        for step in range(steps):
            with engine.train_step():
                loss = model(x + step).square().mean()
            engine.cycle.before_backward()  # during which state arrives
            loss.backward()
            engine.cycle.after_backward()
            if step == 7:  # too late for earlier arrivals
                torch.cuda.synchronize()
                next(iter(optimizer.state.values()))["exp_avg"].zero_()
            with engine.optimizers.stepping(optimizer, clip=1.0) as norm:
                optimizer.step()
            norms.append(norm.clone())
            optimizer.zero_grad()
            # Copies that do not wait would read or leave these values.
            del norm, loss
            junk = [torch.full((1 << 22,), float(step), device=engine.device) for _ in range(8)]
            del junk
        replays = engine.optimizers.stepper(optimizer).replays
        state = optimizer.state_dict()["state"]
        places = {value.is_pinned() for entries in state.values() for value in entries.values() if value.dim()}
        large = {(n, k): v.cpu().clone() for n, entries in state.items() for k, v in entries.items()}
        weights = [param.detach().cpu().clone() for param in model.parameters()]
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        runner = isinstance(engine.optimizers.stepper(optimizer).runner, CapturedRunner)
    return {
        "values": (weights, large, [float(norm) for norm in norms]),
        "pinned": places,
        "held": held,
        "captured": runner,
        "replays": replays,
    }


def train_large_all_ways() -> list[dict[str, Any]]:
    return [train_large(offload, capture) for capture in (False, True) for offload in (False, True)]


def test_much_state_passes_unharmed_and_leaves_the_device(ranks: Ranks) -> None:
    (found,) = ranks.run(1, train_large_all_ways, backend="nccl", deadline=300)
    elements = 4096 * 8192 + 8192 * 512 + 512
    for plain, away in (found[:2], found[2:]):
        torch.testing.assert_close(away["values"], plain["values"], rtol=0, atol=0)
        assert plain["pinned"] == {False}
        assert away["pinned"] == {True}
        assert plain["held"] - away["held"] > 8 * elements - (64 << 20)
        assert away["captured"] == plain["captured"]
        assert away["replays"] == plain["replays"]
    assert found[3]["replays"] > 5


def skip_steps(offload: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Every third step by a captured graph is skipped by a value on the device."""
    torch.manual_seed(0)
    options: dict[str, Any] = ON_HOST if offload else {}
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    with engine_for(model, "eager", device=device(), cuda_graph_step=True, **options) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.optimizers.check(optimizer)
        x = torch.randn(8, 64, device=engine.device)
        for step in range(12):
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward()
            flag = torch.tensor(float(step % 3 == 2), device=engine.device) if step else None
            with engine.optimizers.stepping(optimizer, skip=flag):
                optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        counts = [float(entries["step"]) for entries in state.values()]
        kept = [v.cpu().clone() for entries in state.values() for v in entries.values()]
        return [*kept, *(param.detach().cpu().clone() for param in model.parameters())], counts


def skip_both_ways() -> list[Any]:
    return [skip_steps(offload) for offload in (False, True)]


def test_a_step_that_the_device_skips_changes_nothing_on_the_host(ranks: Ranks) -> None:
    ((plain, away),) = ranks.run(1, skip_both_ways, backend="nccl", deadline=200)
    torch.testing.assert_close(away, plain, rtol=0, atol=0)
    assert set(away[1]) == {8.0}


class Wide(nn.Module):
    """Layers of which each saves 32 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def train_wide(capture: bool | str, backend: str, sizes: tuple[int, ...] = (4096,), **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()  # or memory of an earlier training would count as this one's
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = Wide()
    more = {"cuda_graph_model": capture, "cuda_graph_step": False, "compile_dynamic": False}
    with engine_for(model, backend, device=device(), **more, **options) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses: list[float] = []
        peak = between = earlier = 0
        for step in range(12 * len(sizes)):
            torch.cuda.reset_peak_memory_stats()
            for part in range(2):  # accumulated
                x = torch.randn(sizes[step % len(sizes)], 2048, device=engine.device) + part
                earlier = engine.executor.counters().get("offload_bytes", 0)
                with engine.train_step():
                    loss = model(x)
                between = torch.cuda.memory_allocated()
                # Copies that do not wait would read or leave these values.
                junk = [torch.full((1 << 22,), float(step), device=engine.device) for _ in range(4)]
                del junk
                loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            peak = torch.cuda.max_memory_allocated()
        counted = engine.executor.counters()
        return {
            "values": (losses, [param.detach().cpu().clone() for param in model.parameters()]),
            "peak": peak - before,
            "between": between - before,
            "host": memory_by_role(engine)["activations_on_host"],
            "left": counted.get("offload_bytes", 0),
            "left last": counted.get("offload_bytes", 0) - earlier,
            "counted last": engine.executor.activations.quota.sent,
            "replays": counted.get("replayed_graphs", 0),
        }


ACTIVATIONS: dict[str, Any] = {"offload": ("activations",), "offload_activations_mb": float("inf")}


def train_wide_both_ways(capture: bool, backend: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [train_wide(capture, backend, sizes, **away) for away in ({}, ACTIVATIONS)]


@pytest.mark.parametrize("capture", [False, True], ids=["run", "replayed"])
@pytest.mark.parametrize(
    ("backend", "sizes"), [("aot_eager", (4096,)), ("inductor", (4096,)), ("aot_eager", (4096, 2048))]
)
def test_activations_leave_and_training_is_the_same(
    ranks: Ranks, capture: bool, backend: str, sizes: tuple[int, ...]
) -> None:
    ((plain, away),) = ranks.run(1, train_wide_both_ways, capture, backend, sizes, backend="nccl", deadline=300)
    torch.testing.assert_close(away["values"], plain["values"], rtol=0, atol=0)
    assert away["left"] > 0
    assert away["counted last"] == away["left last"] > 0, "of a pass, replayed or not"
    assert plain["host"] == 0
    assert away["host"] > 100 << 20
    assert away["replays"] == plain["replays"]
    assert (away["replays"] > 10) == capture
    if not capture:  # captured graphs hold the memory of their pool
        assert plain["between"] - away["between"] > 100 << 20
        assert plain["peak"] - away["peak"] > 50 << 20


def waits_are_few() -> tuple[float, float, int]:
    """Return milliseconds of a step with nothing, and with hidden copies, on the host; and its bytes."""
    found = []
    for options in ({}, {"offload": ("activations",)}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(12)))
        with engine_for(model, "aot_eager", device=device(), compute_dtype=torch.bfloat16, **options) as engine:
            x = torch.randn(16384, 8192, device=engine.device)
            marks = []
            for _ in range(10):
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                with engine.train_step(), torch.autocast("cuda", torch.bfloat16):
                    loss = model(x).float().square().mean()
                loss.backward()
                for param in model.parameters():
                    param.grad = None
            torch.cuda.synchronize()
            times = sorted(a.elapsed_time(b) for a, b in zip(marks[6:], marks[7:], strict=False))
            found.append((times[len(times) // 2], engine.executor.counters().get("offload_bytes", 0)))
    return found[0][0], found[1][0], found[1][1]


def test_what_leaves_without_a_number_hides(ranks: Ranks) -> None:
    ((plain, away, left),) = ranks.run(1, waits_are_few, backend="nccl", deadline=200)
    assert left > 256 << 20
    assert away < 1.1 * plain, f"{plain:.1f} and {away:.1f} ms"
