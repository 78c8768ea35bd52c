"""Buffers that forward edits: backward uses the values that forward read."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

WIDTH = 8


class Queue(nn.Module):
    """Keep the keys that were seen last, as contrastive losses compare with them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(x @ self.keys.clone().t(), -1)
        x = x + scores @ self.keys.clone()
        self.keys.copy_(torch.cat([x[:2].detach(), self.keys[:-2]]))
        return x


class Mean(nn.Module):
    """Read the buffer before and after an edit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x * before.cos() + x.square() * self.mean.clone().sin()


class Count(nn.Module):
    """Count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls.float().sin()


class Normalised(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(WIDTH)


# In this order, no gradient of a net with one of each is only rounding noise.
KINDS: tuple[type[nn.Module], ...] = (Normalised, Count, Queue, Mean)
EDITS = {kind.__name__: (kind,) * 3 for kind in KINDS}
ALL = "one of each"


class Net(nn.Module):
    def __init__(self, edits: str, checkpointed: bool) -> None:
        super().__init__()
        kinds = (EDITS | {ALL: KINDS})[edits]
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), kind()) for kind in kinds]
        self.layers = nn.ModuleList(layers)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return F.mse_loss(x, torch.linspace(-3, 3, x.numel()).sin().view_as(x))


def differences(backend: str, edits: str, checkpointed: bool) -> dict[str, float]:
    """Return differences of gradients and buffers from eager code without checkpoints, which would edit buffers twice."""
    torch.manual_seed(3)
    model = Net(edits, checkpointed)
    plain = copy.deepcopy(model)
    plain.checkpointed = False
    found: dict[str, float] = {}
    with engine_for(model, backend) as engine:
        for step in range(4):
            torch.manual_seed(step)
            x = torch.randn(6, WIDTH)
            with engine.train_step():
                loss = model(x)
            loss.backward()
            if step == 0:  # the eager one
                for mine, its in zip(model.buffers(), plain.buffers(), strict=True):
                    mine.copy_(its)
            else:
                plain.zero_grad()
                plain(x).backward()
                for (name, param), its in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert its.grad is not None
                    assert param.grad is not None
                    with no_shard_dispatch():  # a shard of one rank is all of it
                        grad = param.grad.reshape(-1)[: its.numel()].view_as(its)
                    found[name] = max(found.get(name, 0.0), float((grad - its.grad).abs().max() / its.grad.abs().max()))
                for (name, buffer), its in zip(model.named_buffers(), plain.buffers(), strict=True):
                    found[name] = max(found.get(name, 0.0), float((buffer - its).abs().max()))
            for param in model.parameters():
                param.grad = None
    return found


@pytest.mark.parametrize(
    ("backend", "edits", "checkpointed"),
    [
        *(("aot_eager", edits, checkpointed) for edits in EDITS for checkpointed in (False, True)),
        # The buffers of backward are chosen before code is generated, which then takes seconds for each graph.
        pytest.param("inductor", ALL, True, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants("aot_eager-Queue-False")
def test_backward_reads_buffers_as_forward_has_read_them(
    ranks: Ranks, backend: str, edits: str, checkpointed: bool
) -> None:
    """torch's partitioner saves the buffer itself, and computes again with its new value."""
    (found,) = ranks.run(1, differences, backend, edits, checkpointed, deadline=200)
    assert found
    assert max(found.values()) < 1e-4, found
