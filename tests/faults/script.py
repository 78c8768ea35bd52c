"""The program of each rank: a training as a user would write it, with a fault.

``python -m tests.faults.script`` reads an environment variable; tests.faults.job starts it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeroStrategy
from lightning_zero.sharding import shared_memory
from tests.faults.injector import Injector, output_of
from tests.faults.model import VALIDATION_BATCHES, Trained, loaders
from tests.faults.points import POINTS
from tests.faults.spec import VARIABLE, Orders, Training
from tests.helpers.options import arguments
from tests.ranks.worker import dump_stacks_on_signal


class Emulated(ZeroStrategy):
    """Behaves as if compiled code were replayed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**arguments(**options, emulate_cuda_graph_model=True))


def strategy_of(training: Training) -> ZeroStrategy:
    options: dict[str, Any] = {
        "compile": training.strategy != "zero3",
        "compile_backend": "inductor" if training.strategy == "zero3_compile" else "aot_eager",
        "reduce_bucket_mb": 0.05,  # several buckets leave before a backward ends
    }
    if training.timeout_s is not None:
        options["timeout"] = timedelta(seconds=training.timeout_s)
    options |= dict(training.options)
    return Emulated(**options) if training.emulate else ZeroStrategy(**arguments(**options))


def trainer_of(orders: Orders) -> pl.Trainer:
    training = orders.training
    callbacks: list[pl.Callback] = [ModelCheckpoint(orders.home, save_last=True)] if training.save else []
    return pl.Trainer(
        accelerator="gpu" if training.device == "cuda" else "cpu",
        devices=orders.world,
        strategy=strategy_of(training),
        precision=training.precision,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        limit_val_batches=VALIDATION_BATCHES if training.validate else 0,
        num_sanity_val_steps=0,
        max_epochs=1,
        callbacks=callbacks,
        enable_checkpointing=training.save,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=1,
        default_root_dir=orders.home,
    )


def main() -> None:
    orders = Orders.loads(os.environ[VARIABLE])
    home, training = Path(orders.home), orders.training
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" not in os.environ:  # Lightning starts the others, and lets them write where rank 0 does
        for descriptor, stream in ((1, "out"), (2, "err")):
            file = os.open(output_of(home, rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
    dump_stacks_on_signal(open(output_of(home, rank, "stacks"), "a"))  # noqa: SIM115 - open as long as this rank lives
    faulthandler.disable()  # users have none
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the process that started the tests may ignore
    injector = Injector(orders, rank)
    injector.count_batches()
    for fault in filter(None, (orders.fault, orders.meanwhile)):
        if fault is injector.fault or (injector.fault is None and fault is orders.fault):
            point = POINTS[fault.point]
            point.install(point, injector)
    memory = Path(os.environ["TESTS_SHARED_MEMORY"])  # where only this job's files are
    if memory.is_dir():
        shared_memory.SHARED_MEMORY = memory

    hooked = orders.fault is not None and orders.fault.point == "gradient_hook"
    module = Trained(training.late, hooked, training.catches)
    trainer = trainer_of(orders)
    train, validation = loaders(training.steps, orders.world, training.workers, training.pause_s)
    trainer.fit(module, train, validation, ckpt_path=orders.checkpoint if training.resume else None)
    if training.then:
        getattr(trainer, training.then)(module, dataloaders=validation)
    injector.note("trained")
    print("trained", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
