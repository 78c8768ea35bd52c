"""Trainings through the Trainer in which replays of compiled code are possible, or stop: users' code around them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.lightning_modules import (
    GAN,
    Accumulating,
    Averaged,
    EditsWeights,
    Finetuned,
    Overflows,
    SeveralForwards,
    Teacher,
    backbone_later,
)
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    WIDTH,
    Regression,
    close,
    make_loader,
    make_trainer,
    mean_over_ranks,
    seeded,
    whole_state,
)

STEPS = 12  # an epoch's


class Smooth(Regression):
    """AdamW whose steps do not follow rounding noise; as those of all the following."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class KeepsItsLosses(Smooth):
    """With their graphs, as a user's list of outputs may."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss)
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        assert [loss.item() for loss in self.kept] == self.losses, "a loss that the user holds was overwritten"


class LooksAtGradients(Smooth):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [float(norm) for norm in grad_norm(self, 2).values()]


class ScalesItsGradients(Smooth):
    """By hooks that run in Python, in each backward."""

    def on_fit_start(self) -> None:
        for param in self.net.parameters():
            param.register_hook(lambda grad: grad * 0.5)


class ByHand(Smooth):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SkipsBatches(ByHand):
    """After their forward, as users do where a loss is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if batch_idx not in (1, 7):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class RetainsItsGraph(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


class Checkpointed(Smooth):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net[:3], x, use_reentrant=False)
        return self.net[3:](hidden)


class CheckpointedReentrantly(Smooth):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=True)
        return self.net[3:](hidden)


class PredictsInBetween(Smooth):
    def on_train_batch_end(self, *args: Any) -> None:
        self.eval()
        with torch.no_grad():
            self(torch.ones(1, INPUTS, device=self.device))
        self.train()


class FreezesLater(Smooth):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch != 1)


class ReturnsMore(Smooth):
    """Outputs that are not differentiated, and two that are."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.net[:2](x)
        out = self.net[2:](hidden)
        return out, {"hidden": hidden, "big": hidden.detach().abs() > 0.5, "count": x.shape[0]}

    def loss(self, batch: Any) -> Tensor:
        out, more = self(batch[0])
        return F.mse_loss(out.float(), batch[1]) + 0.1 * more["hidden"].float()[more["big"]].square().sum()


class InputsWithGradients(Smooth):
    """An encoder that is not compiled with the rest gets gradients back through it."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.encoder = nn.Linear(INPUTS, INPUTS)

    def loss(self, batch: Any) -> Tensor:
        x = self.encoder(batch[0])
        return F.mse_loss(self.net(x).float(), batch[1]) + 0.1 * x.float().square().mean()


class Normalised(Smooth):
    def __init__(self) -> None:
        super().__init__()
        with seeded(4):
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, OUTPUTS))


class InNoOptimizer(Smooth):
    """The gradients of one layer are not dropped, and grow, while others are new at each step."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.beside = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.beside(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-3)


class DropsLayers(Smooth):
    """Each rank leaves out others of its layers, and others in each batch: layer drop, experts without tokens."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(6):
            self.net = nn.Linear(INPUTS, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x)
        for number, layer in enumerate(self.layers):
            if not self.training or (self.global_step * (2 + self.global_rank) + number) % 3:
                hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class StepsSeldom(ByHand):
    """After three batches, or two at the end."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.losses.append(loss.item())
        if batch_idx % 3 == 2 or batch_idx == 10:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad()


@dataclass(frozen=True)
class Way:
    make: Callable[[], Any] = Smooth
    arguments: Callable[[], dict[str, Any]] = dict  # of the Trainer; anew for each, since callbacks keep things
    epochs: int = 2
    replays: int | None = STEPS + 1  # at least; 0: none; None: as many as there are, where several graphs make a step
    emulated: bool = True  # otherwise only a capture shows the result
    # True if DDP is the oracle. It reduces no gradients of parameters frozen at first, and gives all ranks the
    # buffers of the first one. Otherwise the same steps without compiled code are the oracle.
    ddp: bool = True
    validated: bool = True
    twice: bool = False  # replays send gradients one by one, which would be added up, and rounded, together in a run
    strategy: dict[str, Any] = field(default_factory=dict)


def by_callback(*callbacks: Callable[[], pl.Callback]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make() for make in callbacks]}


def saved() -> dict[str, Any]:
    often = ModelCheckpoint("saved", every_n_train_steps=4, save_top_k=-1)
    return {"callbacks": [often], "enable_checkpointing": True, "val_check_interval": 5}


WAYS = {
    "plain": Way(),
    "losses kept": Way(KeepsItsLosses),
    "batches skipped": Way(SkipsBatches),
    "accumulated and clipped": Way(KeepsItsLosses, lambda: {"accumulate_grad_batches": 5, "gradient_clip_val": 0.2}),
    "accumulated more later": Way(arguments=by_callback(lambda: GradientAccumulationScheduler({0: 1, 1: 3}))),
    "kept until the step": Way(
        arguments=lambda: {"accumulate_grad_batches": 4},
        strategy={"unsharded_cache_mb": float("inf"), "unsharded_cache_until": "step"},
    ),
    "weights averaged": Way(Averaged, by_callback(lambda: EMAWeightAveraging(decay=0.6))),
    "unfrozen later": Way(Finetuned, by_callback(backbone_later), ddp=False),
    "frozen later": Way(FreezesLater, epochs=3),
    "saved and validated": Way(arguments=saved),
    "anomalies looked for": Way(arguments=lambda: {"detect_anomaly": True}),
    "losses scaled": Way(Overflows, lambda: {"precision": "16-mixed", "gradient_clip_val": 0.2}, emulated=False),
    "gradients read": Way(LooksAtGradients),
    "gradients hooked": Way(ScalesItsGradients, replays=0),
    "graph retained": Way(RetainsItsGraph, replays=0, emulated=False),
    "activations checkpointed": Way(Checkpointed),
    "checkpointed by the reentrant way": Way(CheckpointedReentrantly, ddp=False),  # DDP refuses it
    "predictions in between": Way(PredictsInBetween),
    "more outputs": Way(ReturnsMore),
    "inputs with gradients": Way(InputsWithGradients, replays=None, emulated=False),
    "batch norm": Way(Normalised, ddp=False),
    "steps by hand": Way(StepsSeldom),
    "layers dropped": Way(DropsLayers, replays=None, emulated=False),
    "in no optimizer": Way(InNoOptimizer, emulated=False),
    "a closure": Way(Accumulating, replays=None, emulated=False),
    "two optimizers": Way(GAN, replays=None, emulated=False),
    "a teacher": Way(Teacher, validated=False, replays=None, emulated=False),
    "views of two sides": Way(SeveralForwards, replays=None, emulated=False, twice=True),
    "weights edited": Way(EditsWeights, validated=False, replays=None, emulated=False),
}


PARTS = ("losses", "weights", "logged", "seen", "steps")  # in which two trainings of one kind are alike


def fit(name: str, strategy: Any = None, validated: bool = True, **arguments: Any) -> dict[str, Any]:
    """Return the results of a training under this strategy, by default DDP.

    validated: after each epoch, where the way is
    arguments: of the Trainer; the way's own win
    """
    way = WAYS[name]
    with seeded():
        module = way.make()
    options = {"max_epochs": way.epochs} | arguments | way.arguments()
    if strategy is not None:
        options["strategy"] = strategy
    trainer: pl.Trainer = make_trainer("ddp", **options)
    validates = validated and way.validated
    trainer.fit(module, make_loader("ddp", STEPS), make_loader("ddp", 2, seed=1) if validates else None)
    out = {
        "losses": mean_over_ranks(module.losses),
        "weights": {key: value.cpu() for key, value in whole_state(module).items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "seen": mean_over_ranks(getattr(module, "seen", [])),
        "steps": trainer.global_step,
        "replays": strategy.counters().get("replayed_graphs", 0) if strategy is not None else 0,
    }
    close(module)
    torch._dynamo.reset()
    return out
