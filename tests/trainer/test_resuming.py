"""Restore a checkpoint before hooks and optimizers look for its values."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    Regression,
    close,
    global_losses,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks

WIDTH = 64


def net(width: int = WIDTH, seed: int = 1) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, OUTPUTS))


class Notes(pl.Callback):
    """Its state may be anything, as those of old checkpoints are."""

    def __init__(self, state: Any = 7) -> None:
        self.state, self.loaded, self.seen = state, None, None

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["state"]

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen = self.loaded, module.last_weight()


class Resumed(Regression):
    """Records the order of hooks around a restored checkpoint."""

    def __init__(self, width: int = WIDTH, rate: float = 1e-2) -> None:
        super().__init__()
        self.width, self.rate = width, rate
        self.order: list[str] = []
        self.build()

    def build(self) -> None:
        self.net = net(self.width)

    def last_weight(self) -> torch.Tensor:
        return self.net[2].weight.detach().clone()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["width"] = self.width
        checkpoint["rate"] = 3 * self.rate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.order.append("on_load_checkpoint")
        self.rate = checkpoint["rate"]

    def on_fit_start(self) -> None:
        self.order.append("on_fit_start")

    def configure_optimizers(self) -> Any:
        self.order.append("configure_optimizers")
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-3)


class Rebuilt(Resumed):
    """Fits itself to the file."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if checkpoint["width"] != self.width:
            self.width = checkpoint["width"]
            self.net = net(self.width, seed=5 + self.global_rank)


class Late(Rebuilt):
    """Built in configure_model."""

    def build(self) -> None:
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = net(self.width)


class OnMeta(Resumed):
    def build(self) -> None:
        with torch.device("meta"):
            self.net = net(self.width)

    def configure_model(self) -> None:
        # for DDP, which cannot create values on the meta device
        if not self.ours and next(self.net.parameters()).is_meta:
            self.net = net(self.width)


class Half(Rebuilt):
    """One half is sharded while it is built, the other, later, is rebuilt."""

    def configure_model(self) -> None:
        if not hasattr(self, "more"):
            with seeded(2):
                self.more = nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.net(x))


MODULES: dict[str, Callable[..., Resumed]] = {cls.__name__: cls for cls in (Resumed, Rebuilt, Late, OnMeta, Half)}


def _resumed(kind: str, name: str, average: bool) -> dict[str, Any]:
    def make(**arguments: Any) -> Resumed:
        MODULES[name].ours = kind != "ddp"
        return MODULES[name](**arguments)

    def callbacks() -> list[pl.Callback]:
        return [Notes(), EMAWeightAveraging(decay=0.6)] if average else [Notes()]

    path = f"{kind}-{name}.ckpt"
    first = make()
    trainer = make_trainer(kind, callbacks=callbacks())
    trainer.fit(first, make_loader(kind))
    trainer.save_checkpoint(path)
    if name == "OnMeta":
        path = f"ddp-{name}.ckpt"  # layers on the meta device draw their values in another order
    rebuilt = isinstance(first, Rebuilt) and not average  # the average was copied before
    second = make(width=32) if rebuilt else make()
    trainer = make_trainer(kind, callbacks=callbacks(), max_epochs=2)
    trainer.fit(second, make_loader(kind), make_loader(kind, 2, seed=1), ckpt_path=path)
    out = {
        "order": second.order,
        "notes": trainer.callbacks[0].seen,
        "rate": second.rate,
        "groups": [len(group["params"]) for group in trainer.optimizers[0].param_groups],
        "losses": global_losses(kind, second),
        "state": whole_state(second),
        "file": torch.load(path, weights_only=True)["state_dict"],
    }
    close(first)
    if not rebuilt:
        third = make()
        (out["tested"],) = make_trainer(kind).test(third, make_loader(kind), ckpt_path=path, verbose=False)
        out["loaded"] = whole_state(third)
        close(third)
    close(second)
    return out


def _resumed_under(kinds: list[str], *args: Any) -> dict[str, Any]:
    return {kind: _resumed(kind, *args) for kind in kinds}


@pytest.mark.parametrize(
    ("name", "kind", "average"),
    [(name, "eager", False) for name in MODULES]
    + [("Resumed", "eager", True), ("Late", "eager", True), ("Rebuilt", "compiled", False)],
)
@pytest.mark.exhaustive_variants("Resumed-eager-True", "Late-eager-True", "OnMeta-eager-False")
def test_resuming_is_what_it_is_under_ddp(ranks: Ranks, name: str, kind: str, average: bool) -> None:
    for result in ranks.run(2, _resumed_under, ["ddp", kind], name, average):
        ours, ddp = result[kind], result["ddp"]
        assert ours.pop("order") == ddp.pop("order") == ["on_load_checkpoint", "configure_optimizers", "on_fit_start"]
        assert ddp["notes"][0] == 7
        assert_close_relative(ours, ddp, 3 * RTOL)
        assert ddp["state"]["net.0.weight"].shape == (WIDTH, INPUTS)
        assert not torch.equal(ddp["state"]["net.0.weight"], ddp["file"]["net.0.weight"]), "nothing was trained"


class Opaque:
    """No plain data."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)


def _of_any_kind(kind: str) -> dict[str, Any]:
    path = f"{kind}-opaque.ckpt"
    module = Resumed()
    trainer = make_trainer(kind, callbacks=[Notes(Opaque())])
    trainer.fit(module, make_loader(kind))
    trainer.save_checkpoint(path)
    close(module)
    out: dict[str, Any] = {}
    for weights_only in (False, None):
        module, notes = Resumed(), Notes()
        try:
            make_trainer(kind, callbacks=[notes], max_epochs=2).fit(
                module, make_loader(kind), ckpt_path=path, weights_only=weights_only
            )
            out[str(weights_only)] = notes.loaded == Opaque()
        except Exception as error:
            out[str(weights_only)] = str(error)
        close(module)
    return out


def test_weights_only_is_passed_on(ranks: Ranks) -> None:
    for found in ranks.run(2, _of_any_kind, "eager"):
        assert found["False"] is True
        assert "weights_only" in found["None"]


class WithoutOptimizer(Resumed):
    def configure_optimizers(self) -> Any:
        return None


def _without_optimizer(kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    module, trainer = WithoutOptimizer(), make_trainer(kind)
    trainer.fit(module, make_loader(kind))
    trainer.save_checkpoint(f"{kind}-none.ckpt")
    file = torch.load(f"{kind}-none.ckpt", weights_only=True)
    out["file"] = file["state_dict"], file["optimizer_states"]
    close(module)
    module, trainer = WithoutOptimizer(), make_trainer(kind, max_epochs=2)
    trainer.fit(module, make_loader(kind), ckpt_path=f"{kind}-none.ckpt")
    out["resumed"] = global_losses(kind, module), whole_state(module)
    close(module)
    # a file of no optimizers at all
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({**file, "optimizer_states": []}, f"{kind}-empty.ckpt")
        torch.save({**file, "optimizer_states": []}, f"{kind}-old.ckpt", _use_new_zipfile_serialization=False)
    dist.barrier()
    for name in ("empty", "old"):
        module, trainer = Resumed(), make_trainer(kind, max_epochs=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, make_loader(kind), ckpt_path=f"{kind}-{name}.ckpt")
        out[name] = global_losses(kind, module), whole_state(module), trainer.global_step
        out[f"{name} warned"] = [str(w.message) for w in caught if "no optimizer state" in str(w.message)]
        close(module)
    if kind != "ddp":
        module = Resumed()
        with pytest.raises(
            ValueError, match="written where configure_optimizers.. returned nothing.*AdamW.*only the w"
        ):
            make_trainer(kind, max_epochs=2).fit(module, make_loader(kind), ckpt_path=f"{kind}-none.ckpt")
        close(module)
    return out


def _without_optimizer_under(*kinds: str) -> dict[str, Any]:
    return {kind: _without_optimizer(kind) for kind in kinds}


def test_files_without_optimizers(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(2, _without_optimizer_under, "ddp", "eager")):
        ours, ddp = result["eager"], result["ddp"]
        assert ddp["file"][1] == [{}]
        for name in ("empty", "old"):
            assert len(ours.pop(f"{name} warned")) == (1 if rank == 0 else 0)
            ddp.pop(f"{name} warned")
        assert_close_relative(ours, ddp, 3 * RTOL)


class Nothing(pl.LightningModule):
    """No parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.log("loss", batch[0].mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0] * 2


def _nothing(*kinds: str) -> list[Any]:
    out = []
    for kind in kinds:
        module, trainer = Nothing(), make_trainer(kind)
        (found,) = trainer.validate(module, make_loader(kind), verbose=False)
        out.append((found, trainer.predict(module, make_loader(kind)), whole_state(module)))
        trainer.save_checkpoint(f"{kind}-nothing.ckpt", weights_only=True)
        trainer.validate(module, make_loader(kind), ckpt_path=f"{kind}-nothing.ckpt", verbose=False)
        close(module)
    return out


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_a_module_without_parameters_is_evaluated(ranks: Ranks, kind: str) -> None:
    for ddp, ours in ranks.run(2, _nothing, "ddp", kind):
        assert_close_relative(ours, ddp, 0.0)


def _rebuilt_later() -> str:
    module, trainer = Rebuilt(), make_trainer("eager")
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint("later.ckpt")
    other = Rebuilt(width=32)
    tester = make_trainer("eager")
    tester.validate(other, make_loader("eager"), verbose=False)
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as refusal:
        tester.test(other, make_loader("eager"), ckpt_path="later.ckpt", verbose=False)
    close(module, other)
    return str(refusal.value)


def test_a_module_that_is_sharded_already_is_not_rebuilt_by_a_checkpoint(ranks: Ranks) -> None:
    for message in ranks.run(2, _rebuilt_later):
        assert "4 parameters were added after the model was sharded, the first is 'net.0.weight'" in message
        assert "on_load_checkpoint() built it again, call lightning_zero.unshard(model)" in message
