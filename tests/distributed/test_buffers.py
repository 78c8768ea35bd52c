"""Buffers that are sent, the time of sending, and the agreement of ranks on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.errors import RankMismatchError
from tests.helpers.sharded import EAGER, engine_for, sgd
from tests.ranks.pool import Ranks

STEPS = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(64, 64)
        self.register_buffer("constant", torch.full((3,), float(dist.get_rank())))
        self.other = nn.Module()
        self.other.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.other.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))
        self.other.register_buffer("flag", torch.zeros((), dtype=torch.bool))
        self.shared = nn.Module()
        self.shared.register_buffer("expanded", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Sent:
    """Bytes of each broadcast among the engine's ranks, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[int]] = []
        original = dist.broadcast

        def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.uint8 and self.steps and kwargs.get("group") is not None:
                self.steps[-1].append(tensor.numel())
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "broadcast", broadcast)


def train(engine: Engine, model: Model, sent: Sent, change: Callable[[Model, int], None], steps: int = STEPS) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        sent.steps.append([])
        with engine.train_step():
            model.step = step
            loss = model(torch.ones(2, 64)).square().mean()
            change(model, step)
        engine.cycle.before_backward()
        loss.backward()
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        optimizer.zero_grad()


def run(change: Callable[[Model, int], None], make: Callable[[], Model] = Model) -> dict[str, Any]:
    model = make()
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = Sent(monkeypatch)
        with engine_for(model, EAGER) as engine:
            train(engine, model, sent, change)
            sent.steps.append([])
            engine.eval_step()
            engine.eval_step()
            return {"sent": sent.steps, "buffers": {name: b.clone() for name, b in model.named_buffers()}}


def nothing(model: Model, step: int) -> None:
    pass


def half_from_the_third_step_on_rank_1(model: Model, step: int) -> None:
    if step >= 2 and dist.get_rank() == 1:
        model.other.low += 1


def flag_much_later(model: Model, step: int) -> None:
    if step >= 5:
        model.other.flag.fill_(dist.get_rank() == 0)


def without_a_trace(model: Model, step: int) -> None:
    model.other.wave.data.mul_(1 + dist.get_rank())


def registered_late(model: Model, step: int) -> None:
    if step == 4:
        model.net.register_buffer("late", torch.tensor([float(dist.get_rank())]))


def run_all(changes: list[Callable[[Model, int], None]]) -> list[dict[str, Any]]:
    return [run(change) for change in changes]


def test_only_what_changes_is_sent_and_ranks_agree_on_it(ranks: Ranks) -> None:
    changes = [nothing, half_from_the_third_step_on_rank_1, flag_much_later, without_a_trace, registered_late]
    for still, half, flag, wave, late in ranks.run(2, run_all, changes):
        # Everything once: three floats, then a module's buffers; in one tensor, each at a multiple of 16 bytes.
        everything, module = [16 + 16 + 16 + 16], [48]
        assert still["sent"] == [everything, *[[]] * STEPS]
        assert still["buffers"]["constant"].tolist() == [0.0] * 3
        assert half["sent"] == [everything, [], [], *[module] * (STEPS - 2)]
        assert half["buffers"]["other.low"].tolist() == [1.0] * 3
        assert flag["sent"] == [everything, *[[]] * 5, *[module] * 3]
        assert flag["buffers"]["other.flag"].item() is True
        assert wave["sent"] == [everything, *[module] * STEPS]
        assert wave["buffers"]["other.wave"].tolist() == [1.0] * 2
        assert late["sent"] == [everything, *[[]] * 4, *[[16]] * 4]
        assert late["buffers"]["net.late"].item() == 0.0


class Synchronised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)


def change_statistics(model: Model, step: int) -> None:
    model.norm.running_mean.add_(1.0)


def test_what_ranks_compute_together_is_sent_once(ranks: Ranks) -> None:
    for out in ranks.run(2, run, change_statistics, Synchronised):
        assert [bool(sizes) for sizes in out["sent"]] == [True, *[False] * STEPS]
        assert out["buffers"]["norm.running_mean"].tolist() == [float(STEPS)] * 4


class Different(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mine", torch.zeros(2 + dist.get_rank()))


def run_different() -> str:
    with pytest.raises(RankMismatchError) as error:
        run(nothing, Different)
    return str(error.value)


def test_ranks_with_other_buffers_are_an_error(ranks: Ranks) -> None:
    for message in ranks.run(2, run_different):
        assert "'mine (2,) torch.float32 cpu' against 'mine (3,) torch.float32 cpu'" in message
        assert "broadcast_buffers=False" in message
