"""A callback and a logger that record a training, one that saves, and a schedule for ``PassSchedule``."""

from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only


class Lines(Logger):
    """Keep the arguments, on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    name, version = "lines", 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


# Without these passes no graph runs.
MINIMAL = ["split_gathers", "enqueue_gradients", "publish_plan"]


class SavesAfter(Callback):
    """Save after that step, during training, which may continue during the save."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Count(Callback):
    """Gathers in groups, and gathers, of each batch."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.before = (0, 0)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        counters = trainer.strategy._engine.executor.counters()
        now = (counters.get("gather_groups", 0), counters["gathers"])
        self.batches.append((now[0] - self.before[0], now[1] - self.before[1]))
        self.before = now
