"""Keep logging in steps out of compiled code, with the values that DDP logs."""

import contextlib
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torchmetrics import MeanAbsoluteError, MeanMetric

from tests.helpers.callbacks import Lines
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, make_loader, make_trainer
from tests.ranks.pool import Ranks


class Bookkeeper(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.mae = MeanAbsoluteError()
        self.val_mean = MeanMetric()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.log("early", float(self.global_step))
        prediction = self(batch[0])
        loss = F.mse_loss(prediction, batch[1])
        self.mae(prediction, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("worst", loss.detach(), on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log_dict({"mean": prediction.mean(), "epoch": float(self.current_epoch)}, on_epoch=True, sync_dist=True)
        self.log("mae", self.mae, on_step=True, on_epoch=True)
        self.print(f"epoch {self.current_epoch} step {self.global_step} batch {batch_idx} call {self.calls}")
        # numbers that change all the time must reach the computation, without another graph each
        return loss * (1 + 0.5 * self.current_epoch + 0.25 * self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.val_mean.update(loss)
        self.log("val_mean", self.val_mean)
        self.log("val_loss", loss, sync_dist=True)


class Watch(pl.Callback):
    """The number of compiled graphs after each batch, and the metrics that callbacks see."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, int]] = []
        self.metrics: list[dict[str, float]] = []

    def _note(self, what: str) -> None:
        self.graphs.append((what, counters["stats"]["unique_graphs"]))

    def on_train_batch_end(self, *args: Any) -> None:
        self._note("train")

    def on_validation_batch_end(self, *args: Any) -> None:
        self._note("val")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.metrics.append({key: value.item() for key, value in trainer.callback_metrics.items()})


def _logged(kind: str) -> dict[str, Any]:
    counters.clear()
    lines, watch, module = Lines(), Watch(), Bookkeeper()
    trainer = make_trainer(kind, max_epochs=2, logger=lines, callbacks=[watch], log_every_n_steps=1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module, make_loader(kind, 5), make_loader(kind, 2, seed=1))
    close(module)
    return {
        "lines": lines.lines,
        "metrics": watch.metrics,
        "printed": [line for line in printed.getvalue().splitlines() if line.startswith("epoch ")],
        "graphs": watch.graphs,
    }


def _log_under(*kinds: str) -> dict[str, dict[str, Any]]:
    return {kind: _logged(kind) for kind in kinds}


@pytest.fixture(scope="module")
def compiled(ranks: Ranks) -> list[dict[str, dict[str, Any]]]:
    return ranks.run(2, _log_under, "ddp", "compiled")


@pytest.mark.parametrize("world_size", [1, 3])
def test_logged_values_equal_ddps(ranks: Ranks, world_size: int) -> None:
    _compare(ranks.run(world_size, _log_under, "ddp", "eager"), "eager")


def test_logged_values_of_compiled_modules_equal_ddps(compiled: list[Any]) -> None:
    _compare(compiled, "compiled")


def _compare(results: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for rank, result in enumerate(results):
        ours, ddp = result[kind], result["ddp"]
        assert_close_relative(ours["metrics"], ddp["metrics"], RTOL, what=f"callback_metrics on rank {rank}")
        assert ours["printed"] == ddp["printed"]
        assert len(ddp["metrics"]) == 2
        assert {"loss_epoch", "mae_epoch", "worst_epoch", "val_mean", "val_loss"} <= set(ddp["metrics"][0])
    ours, ddp = results[0][kind]["lines"], results[0]["ddp"]["lines"]
    assert [(step, sorted(line)) for step, line in ours] == [(step, sorted(line)) for step, line in ddp]
    # the mean of the predictions is near zero
    assert_close_relative([line for _, line in ours], [line for _, line in ddp], RTOL, 5e-8, what="logged")
    assert len(results[0]["ddp"]["printed"]) == 10
    assert all(not result["ddp"]["printed"] for result in results[1:])


def test_no_graph_is_compiled_after_the_first_epoch_nor_within_it_after_the_second_batch(compiled: list[Any]) -> None:
    for result in compiled:
        graphs = result["compiled"]["graphs"]
        assert [what for what, _ in graphs] == (["train"] * 5 + ["val"] * 2) * 2
        seen = [count for _, count in graphs]
        assert seen[0] == 0, "the first step shows what is called, and runs eagerly"
        assert seen[1] == 1, "the step after it compiles one graph: bookkeeping breaks none"
        assert set(seen[1:5]) == {seen[1]}
        assert set(seen[5:]) == {seen[5]}, "later epochs and evaluations compile nothing"
