"""Run stages in any order on one Trainer and several; each finds the module as the last left it."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_zero
from lightning_zero.engine import engine_of
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    RTOL,
    WIDTH,
    Regression,
    close,
    global_losses,
    is_ours,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks


def _predictions(kind: str, parts: Any) -> torch.Tensor:
    """Return the predictions of all ranks, in the order of the samples."""
    mine = torch.cat(parts)
    if kind == "single":
        return mine
    world = torch.distributed.get_world_size()
    everyone = [torch.empty_like(mine) for _ in range(world)]
    torch.distributed.all_gather(everyone, mine)
    return torch.stack(everyone, 1).flatten(0, 1)


class Story:
    """Run stages one after the other, and record the result of each."""

    def __init__(self, kind: str, module: Regression | None = None) -> None:
        self.kind = kind
        self.module = module or Regression()
        self.trainer = make_trainer(kind)
        self.notes: list[tuple[str, Any]] = []
        self.epochs = 0

    def new_trainer(self) -> None:
        self.trainer, self.epochs = make_trainer(self.kind), 0

    def fit(self, **arguments: Any) -> None:
        self.epochs += 1
        self.trainer.fit_loop.max_epochs = self.epochs
        self.module.losses.clear()
        self.trainer.fit(self.module, make_loader(self.kind), make_loader(self.kind, 2, seed=1), **arguments)
        self.note("fit", (global_losses(self.kind, self.module), self.trainer.callback_metrics["val_loss"].item()))
        assert len(self.module.losses) == 4
        self.check_optimizer()

    def check_optimizer(self) -> None:
        (optimizer,) = self.trainer.optimizers
        held = [id(param) for group in optimizer.param_groups for param in group["params"]]
        assert held == [id(param) for param in self.module.parameters()], "a stale optimizer"
        assert len(optimizer.state) == len(held)

    def validate(self, **arguments: Any) -> None:
        results = self.trainer.validate(self.module, make_loader(self.kind, 2, seed=1), verbose=False, **arguments)
        self.note("validate", results)

    def test(self, **arguments: Any) -> None:
        results = self.trainer.test(self.module, make_loader(self.kind, 2, seed=2), verbose=False, **arguments)
        self.note("test", results)

    def predict(self, **arguments: Any) -> None:
        parts = self.trainer.predict(self.module, make_loader(self.kind, 2, seed=3), **arguments)
        self.note("predict", _predictions(self.kind, parts))

    def save(self, name: str) -> None:
        self.trainer.save_checkpoint(f"{self.kind}-{name}.ckpt")
        file = torch.load(f"{self.kind}-{name}.ckpt", weights_only=False)
        self.note("save", (file["state_dict"], file["global_step"], file["epoch"]))

    def note(self, what: str, value: Any) -> None:
        self.notes.append((what, value))
        if is_ours(self.kind):
            engine = engine_of(self.module)
            assert engine is not None
            assert engine is self.trainer.strategy._engine
            layer = self.module.net[0]
            depth = [cls for cls in type(layer).__mro__ if "_zero_original_class" in vars(cls)]
            assert len(depth) == 1, "wrapped again"
            assert layer.weight.shape == (WIDTH, INPUTS)
            assert not any(param.is_inference() for param in self.module.parameters())
            assert engine.executor.counters()["bucket_bytes"] == 0, "memory that is of no use between stages"

    def end(self) -> list[tuple[str, Any]]:
        self.notes.append(("state", whole_state(self.module)))
        close(self.module)
        return self.notes


def _one_trainer(kind: str) -> list[tuple[str, Any]]:
    story = Story(kind)
    story.validate()
    story.fit()
    story.test()
    story.predict()
    story.save("after-predict")
    story.fit()
    story.validate()
    story.save("after-fit")
    return story.end()


def _several_trainers(kind: str) -> list[tuple[str, Any]]:
    story = Story(kind)
    story.fit()
    story.new_trainer()
    story.test()
    story.fit()
    story.save("second")
    story.new_trainer()
    story.predict()
    return story.end()


def _evaluation_only(kind: str) -> list[tuple[str, Any]]:
    """Use untrained weights, from a file or from the constructor."""
    story = Story(kind)
    story.predict()
    with torch.inference_mode():
        story.test()
    story.fit()
    story.save("trained")
    close(story.module)

    fresh = Story(kind)
    fresh.notes = story.notes
    fresh.test(ckpt_path=f"{kind}-trained.ckpt")
    fresh.new_trainer()
    fresh.predict(ckpt_path=f"{kind}-trained.ckpt")
    fresh.validate(ckpt_path=f"{kind}-trained.ckpt")
    fresh.trainer.fit_loop.max_epochs = fresh.epochs = 1
    fresh.fit(ckpt_path=f"{kind}-trained.ckpt")
    return fresh.end()


def _tell(story: Any, *kinds: str) -> dict[str, list[tuple[str, Any]]]:
    return {kind: story(kind) for kind in kinds}


STORIES = [_one_trainer, _several_trainers, _evaluation_only]


@pytest.mark.parametrize(
    ("story", "world_size", "kind"),
    [
        pytest.param(
            story,
            *place,
            id=f"{story.__name__.strip('_')}-{place[0]}-{place[1]}",
            marks=[pytest.mark.exhaustive] * ((story, place) == (_evaluation_only, (2, "compiled"))),
        )
        for story in STORIES
        for place in ((1, "eager"), (2, "compiled"), (3, "eager"))
    ],
)
@pytest.mark.exhaustive_variants("one_trainer-3-eager", "several_trainers-3-eager")
def test_stages_in_any_order_equal_a_single_devices(ranks: Ranks, world_size: int, kind: str, story: Any) -> None:
    for rank, result in enumerate(ranks.run(world_size, _tell, story, "single", kind, deadline=90)):
        ours, single = result[kind], result["single"]
        assert [what for what, _ in ours] == [what for what, _ in single]
        for index, ((what, value), (_, expected)) in enumerate(zip(ours, single, strict=True)):
            assert_close_relative(value, expected, 2 * RTOL, what=f"stage {index}, {what}, on rank {rank}")


class Eval(pl.Callback):
    """Modes that evaluation must leave as it found them."""

    def __init__(self) -> None:
        self.seen: set[tuple[bool, bool]] = set()

    def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.seen.add((module.training, torch.is_grad_enabled()))


def _sanity_check_first() -> tuple[list[float], list[float], set[tuple[bool, bool]]]:
    losses = []
    for kind in ("single", "compiled"):
        module, modes = Regression(), Eval()
        module.net[1] = torch.nn.Dropout(0.0)
        trainer = make_trainer(kind, num_sanity_val_steps=2, max_epochs=2, callbacks=[modes])
        trainer.fit(module, make_loader(kind), make_loader(kind, 2, seed=1))
        losses.append(global_losses(kind, module))
        assert module.training
        close(module)
    return losses[0], losses[1], modes.seen


def test_evaluation_before_and_within_training(ranks: Ranks) -> None:
    for single, ours, modes in ranks.run(2, _sanity_check_first):
        assert_close_relative(ours, single, 2 * RTOL)
        assert modes == {(False, False)}


class Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(WIDTH))


class Grown(Regression):
    def configure_model(self) -> None:
        self.more = torch.nn.Linear(WIDTH, WIDTH)


LATER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other dtype": (Regression, {"precision": "bf16-true"}, "in torch.float32, and cannot be converted .*'bf16-true'"),
    "synchronised": (Normalised, {"sync_batchnorm": True}, "without sync_batchnorm=True"),
    "grown": (Grown, {}, "2 parameters were added after the model was sharded, the first is 'more.weight'"),
}


def _second_trainers() -> dict[str, list[str]]:
    messages: dict[str, list[str]] = {}
    for what, (make, arguments, _) in LATER.items():
        module = make()
        make_trainer("eager").validate(module, make_loader("eager", 1), verbose=False)
        messages[what] = []
        for _ in range(2):
            try:
                make_trainer("eager", **arguments).validate(module, make_loader("eager", 1), verbose=False)
                messages[what].append("works")
            except MisconfigurationException as error:
                messages[what].append(str(error))
                if what != "grown":
                    lightning_zero.unshard(module)
        close(module)
    return messages


def test_a_later_trainer_that_wants_another_module_says_what_to_do(ranks: Ranks) -> None:
    for messages in ranks.run(2, _second_trainers):
        for what, (_, _, expected) in LATER.items():
            assert re.search(expected, messages[what][0]), messages[what][0]
        assert all(
            "Call lightning_zero.unshard(model)" in messages[what][0] for what in ("other dtype", "synchronised")
        )
        assert messages["other dtype"][1] == messages["synchronised"][1] == "works"
