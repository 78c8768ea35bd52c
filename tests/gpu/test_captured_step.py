"""The optimizer's step as a CUDA graph has the weights and state of the plain optimizer."""

import pytest
import torch
from torch import nn

from tests.helpers.optimizer_steps import (
    SELDOM,
    Event,
    compare,
    forget_one_state,
    load_own_state,
    nothing,
    other_settings,
    replace_gradients,
    train_sharded_steps,
    unfreeze_and_add,
)
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)


def train_on_gpu(name: str, event: Event, capture: bool):
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted: bool | str = "auto" if capture and name == "Lion" else capture  # True would say that it cannot be
    return train_sharded_steps(name, event, False, f"cuda:{torch.cuda.current_device()}", wanted)


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("AdamW", nothing),
        ("SGD", nothing),
        ("Lion", nothing),
        ("AdamW", unfreeze_and_add),
        ("AdamW", other_settings),
        ("AdamW", load_own_state),
        ("AdamW", forget_one_state),
        ("AdamW", replace_gradients),
    ],
)
def test_steps_equal_the_plain_optimizers(ranks: Ranks, name: str, event: Event, capture: bool) -> None:
    options = {"backend": "nccl", "deadline": 200}
    for *_, replays in compare(ranks, 2, name, event, capture, train_on_gpu, 1e-4, **options):
        if event is not forget_one_state:  # after which there are too few steps
            assert (replays > 0) == (capture and name != "Lion")


def ask_for_capturable(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Only on a GPU, where alone torch lets one ask."""
    for group in optimizer.param_groups:
        if "capturable" in group and group["params"][0].is_cuda:
            group["capturable"] = True


@pytest.mark.parametrize("event", [nothing, ask_for_capturable], ids=["as made", "capturable"])
@pytest.mark.parametrize("name", ["RMSprop", *SELDOM])
def test_captured_steps_of_less_common_optimizers_equal_the_plain_ones(ranks: Ranks, name: str, event: Event) -> None:
    for *_, replays in compare(ranks, 2, name, event, True, train_on_gpu, 1e-4, backend="nccl", deadline=200):
        assert replays > 0


def profile_steps():
    """Count copies to the host in replayed steps, and the functions that launched them."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    with engine_for(model, "eager", device=f"cuda:{torch.cuda.current_device()}") as engine:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine.optimizers.check(optimizer)
        x = torch.randn(4, 64, device=engine.device)
        for step in range(55):
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward()
            if step == 5:
                torch.cuda.synchronize()
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profiler.__enter__()
            with engine.optimizers.stepping(optimizer, clip=1.0):
                optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.99
            optimizer.zero_grad()
        torch.cuda.synchronize()
        profiler.__exit__(None, None, None)
        names = [event.name for event in profiler.events()]
        return sum("DtoH" in name for name in names), len(names)


def test_nothing_is_copied_to_the_host(ranks: Ranks) -> None:
    for copies, events in ranks.run(2, profile_steps, backend="nccl", deadline=120):
        assert copies == 0
        assert events > 500
