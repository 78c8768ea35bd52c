"""A convolution's weight that was channels_last is so again when it has been gathered, and trains as under DDP."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import BACKENDS, adamw, engine_for
from tests.ranks.pool import Ranks

STEPS = 4


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(16, 64, 3, padding=1)
        self.point = nn.Conv2d(64, 64, 1, bias=False)
        self.depth = nn.Conv2d(64, 64, 3, groups=64)
        self.head = nn.Linear(64, 4)
        self.to(memory_format=torch.channels_last)
        self.volume = nn.Conv3d(1, 8, 2).to(memory_format=torch.channels_last_3d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depth(torch.relu(self.point(torch.relu(self.first(x)))))
        return self.head(x.mean((2, 3))) + self.volume(x[:, None]).mean()


def share(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(2, 16, 6, 6, generator=rng).to(memory_format=torch.channels_last)
    return x, torch.randn(2, 4, generator=rng)


def train(backend: str) -> dict[str, Any]:
    model = Convolutions()
    plain = copy.deepcopy(model)
    replica = DistributedDataParallel(plain)
    optimizer = adamw(plain)
    for step in range(STEPS):
        x, y = share(step)
        F.mse_loss(replica(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    with engine_for(model, backend) as engine:
        read = {name: model.get_submodule(name).weight.stride() for name in ("first", "point", "depth", "volume")}
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        engine.executor.reset_counters()
        optimizer = adamw(model)
        for step in range(STEPS):
            x, y = share(step)
            with engine.train_step():
                loss = F.mse_loss(model(x), y)
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        compiled_reads = engine.executor.counters()["eager_gathers"] - len(engine.sharder.live)
        state = copy.deepcopy(model.state_dict())
        moments = engine.optimizer_state(optimizer)
        with engine.full_parameters():
            whole = model.first.weight.stride(), torch.equal(model.first.weight, state["first.weight"])
        # A write to a weight reaches the shards at the same places.
        ramp = torch.arange(64.0 * 16 * 9).view(64, 16, 3, 3)
        model.first.weight.data = ramp
        assigned = torch.equal(model.state_dict()["first.weight"], ramp)
        with torch.no_grad():
            model.first.weight[3, 5, 1, 2] = -1.0
        edited = model.state_dict()["first.weight"]
        model.load_state_dict(before)
        loaded = torch.equal(model.first.weight, before["first.weight"])
        strides = {name: plain.get_submodule(name).weight.stride() for name in read}
        engine.unshard()
        unsharded = model.first.weight.stride()
    return {
        "read": (read, strides),
        "state": (state, plain.state_dict()),
        "moments": moments,
        "whole": whole,
        "same": same,
        "compiled reads": compiled_reads,
        "edits": (assigned, int((edited != ramp).sum()), edited[3, 5, 1, 2].item(), loaded),
        "unsharded": unsharded,
    }


@pytest.mark.parametrize("world_size", [2], ids="W={}".format)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_keep_their_memory_format(ranks: Ranks, world_size: int, backend: str) -> None:
    outs = ranks.run(world_size, train, backend)
    for out in outs:
        found, expected = out["read"]
        assert found == expected
        assert found["first"] == (144, 1, 48, 16)
        assert out["same"]
        assert_close_relative(*out["state"], 1e-6, atol=1e-8, what="state")
        assert out["whole"] == ((144, 1, 48, 16), True)
        assert out["edits"] == (True, 1, -1.0, True)
        assert out["unsharded"] == (144, 1, 48, 16)
        assert backend == "eager" or out["compiled reads"] == 0
    assert outs[0]["moments"]["state"][0]["exp_avg"].shape == (64, 16, 3, 3)
