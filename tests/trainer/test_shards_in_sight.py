"""Compare users' code on shards with DDP.

SAM, trust ratios, norms of layers, noise, initialisation, BYOL, MoCo; values that swap places, optimizer state, state
dicts that are written to, and parameters that are looked up.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, RTOL, Regression, seeded, train
from tests.ranks.pool import Ranks


class Wide(Regression):
    """Every rank holds a good part of every matrix; the last bias is padding on all ranks but the first."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Sequential(
                nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 70), nn.Tanh(), nn.Linear(70, OUTPUTS)
            )
        self.seen: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def note(self, value: Tensor) -> None:
        self.losses.append(float(value))


class Sam(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            norm = torch.stack([(p.abs() * p.grad).norm(p=2) for p in self.parameters()]).norm(p=2)
            self.note(norm)
            steps = {}
            for p in self.parameters():
                steps[p] = p.pow(2) * p.grad * (0.05 / (norm + 1e-12))
                p.add_(steps[p])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p in self.parameters():
                p.sub_(steps[p])
        optimizer.step()


class TrustRatios(Wide):
    """LARS and LAMB by hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                update = p.grad + 0.01 * p.data
                ratio = torch.where(p.data.norm() > 0, 0.1 * p.data.norm() / (update.norm() + 1e-6), 1.0)
                self.note(ratio)
                p.grad = update.mul(ratio)


class LayerNorms(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            self.losses.extend(float(p.norm()) for p in self.parameters())
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for _, p in self.named_parameters():
            self.note(p.grad.norm(2))
            self.note(p.grad.abs().max())
            assert p.grad.isfinite().all()
        self.note(nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class Noise(Wide):
    """Add equal noise on every rank, as DDP needs."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with seeded(self.global_step):
            for p in self.parameters():
                p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
                p.grad += torch.empty_like(p.grad).uniform_(-0.1, 0.1)
                self.note(p.grad.norm())


class Byol(Wide):
    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.net.parameters():
            p.data = p.data * 0.9


class Moco(Wide):
    """A second net follows the first one's weights, within the forward that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
            slow.data.mul_(0.9).add_(fast.detach(), alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        with torch.no_grad():
            target = self.slow(x)
        return self.net(x) + target


class LateInit(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.late: Any = None

    def configure_model(self) -> None:
        if self.late is None:
            with seeded(5):
                self.late = nn.Sequential(nn.Linear(INPUTS, 64), nn.Linear(64, OUTPUTS))
                for p in self.late.parameters():
                    nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.normal_(p)

    def on_fit_start(self) -> None:
        with seeded(6):
            for p in self.net.parameters():
                nn.init.kaiming_normal_(p) if p.dim() > 1 else nn.init.constant_(p, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.late(x)


class LateLoad(LateInit):
    def configure_model(self) -> None:
        if self.late is None:
            with seeded(8):
                pretrained = nn.Sequential(nn.Linear(INPUTS, 64), nn.Linear(64, OUTPUTS)).state_dict()
                self.late = nn.Sequential(nn.Linear(INPUTS, 64), nn.Linear(64, OUTPUTS))
                self.late.load_state_dict(pretrained)


class LateEncoder(LateInit):
    """``nn.TransformerEncoder`` deep-copies its layer; here with weights that are tied inside of it."""

    def configure_model(self) -> None:
        if self.late is None:
            with seeded(9):
                layer = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)
                layer.linear2.weight = layer.linear1.weight
                self.late = nn.Sequential(
                    nn.Linear(INPUTS, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, OUTPUTS)
                )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.late(x[:, None])[:, 0]


class Swaps(Wide):
    """Averages take the weights' places for a while, and values change places, all by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.one, self.other = nn.Linear(OUTPUTS, OUTPUTS), nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(self.net(x))))

    def on_train_start(self) -> None:
        self.averages = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept = [p.data if batch_idx % 2 else p.detach().view_as(p) for p in self.parameters()]
        for average, p in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(p.data, 0.3)
        for average, p in zip(self.averages, self.parameters(), strict=True):
            p.data = average.clone()
        with torch.no_grad():
            self.note(self.loss(batch))
        for value, p in zip(kept, self.parameters(), strict=True):
            p.data = value
        one, other = self.one, self.other
        if batch_idx == 0:
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                p.data, q.data = q.data, p.data
        elif batch_idx == 1:
            one.weight.data, other.weight.data = other.weight.data, one.weight.data


class States(Wide):
    """An optimizer's state, read and written by its shape."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        state, packed = optimizer.optimizer.state, optimizer.optimizer.state_dict()["state"]
        for number, p in enumerate(self.parameters()):
            mean = state[p]["exp_avg"]
            assert mean.shape == p.shape, (mean.shape, p.shape)
            self.note(mean.norm() + packed[number]["exp_avg_sq"].sum())
            mean.mul_(torch.linspace(0.5, 1, p.numel()).view(p.shape))
            if batch_idx == 1:
                state[p]["exp_avg_sq"] = torch.linspace(0.1, 1, p.numel()).view(p.shape)
        if batch_idx == 0:
            kept = io.BytesIO()
            torch.save(optimizer.optimizer.state_dict(), kept)
            kept.seek(0)
            loaded = torch.load(kept, weights_only=True)
            assert loaded["state"][0]["exp_avg"].shape == (64, INPUTS)
            optimizer.optimizer.load_state_dict(loaded)


class StateDicts(Wide):
    """Write to the result of state_dict(), as loops over ``own_state[name].copy_()`` do."""

    def on_train_start(self) -> None:
        own = self.state_dict()
        for name, value in own.items():
            own[name].copy_(torch.linspace(-0.3, 0.3, value.numel()).view(value.shape))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for value in self.state_dict(keep_vars=True).values():
            value.data.mul_(0.9)
        state = self.net.state_dict()
        state["0.weight"][3:5].zero_()
        state["2.weight"] += 0.01
        state["2.bias"].view(-1)[0] = 0.5
        kept = copy.deepcopy(state)
        state["4.weight"].data = torch.full_like(state["4.weight"], 0.1) if batch_idx else kept["4.weight"] * 2
        kept["0.weight"].zero_()
        assert type(kept["0.weight"]) is Tensor is type(state["0.weight"] * 2)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        for name, value in torch.load(file, weights_only=True).items():
            self.note((value * self.net.state_dict()[name]).abs().sum())


class Identities(Wide):
    """Find parameters by values that are read from modules."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def on_train_start(self) -> None:
        for layer in self.net:
            if isinstance(layer, nn.Linear) and isinstance(layer.weight, nn.Parameter) and layer.weight.is_leaf:
                layer.weight.data.mul_(0.5)
        self.get_parameter("net.0.bias").data.fill_(0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        scales, smaller = {self.net[0].weight: 0.1}, {self.net[2].weight, self.net[2].weight, self.net[4].bias}
        assert len(smaller) == 2
        for p in self.parameters():
            p.grad.mul_(scales.get(p, 1.0))
            if p in smaller:
                p.grad.mul_(0.2)
        state = optimizer.state
        if self.net[0].weight in state:
            state[self.net[0].weight]["exp_avg"].zero_()


class OwnGradients(Wide):
    """Full gradients, also of a parameter that has one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            self.note(p.grad.norm())
            p.grad = torch.linspace(-0.1, 0.1, p.numel()).view(p.shape) if p.numel() > 1 else torch.ones(1)


class EditsAfterSteps(Wide):
    """Edits a weight that it reads in a hook of the optimizer, after the step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.shrink())
        return optimizer

    @torch.no_grad()
    def shrink(self) -> None:
        self.net[2].weight.mul_(0.9)


CASES: list[Any] = [Sam, TrustRatios, LayerNorms, Noise, Byol, Moco, LateInit, LateLoad, LateEncoder]
CASES += [Swaps, States, StateDicts, Identities, OwnGradients, EditsAfterSteps]


def _train_under(kinds: list[str], make: Any) -> dict[str, Any]:
    return {kind: train(kind, make, steps=3) for kind in kinds}


# Compiled code is the same on two ranks and on three, and shards do the same in eager code: these are
# exhaustive when they are compiled.
EXHAUSTIVE = (TrustRatios, Noise, LateLoad, LateEncoder, States, StateDicts, Identities, OwnGradients)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        pytest.param(
            make,
            kinds,
            id=f"{make.__name__}-{kinds}",
            marks=[pytest.mark.exhaustive] * (make in EXHAUSTIVE and "compiled" in kinds),
        )
        for make in CASES
        for kinds in ((3, "eager"), (2, "compiled"))
    ],
)
def test_as_under_ddp(ranks: Ranks, make: Any, kinds: tuple[int, str]) -> None:
    world_size, kind = kinds
    for result in ranks.run(world_size, _train_under, ["ddp", kind], make, deadline=400):
        (losses, state), (expected, whole) = result[kind], result["ddp"]
        assert len(expected) >= 3
        assert_close_relative(losses, expected, 5 * RTOL, what="losses and norms")
        assert_close_relative(state, whole, 5 * RTOL, what="values")
