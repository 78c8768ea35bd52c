"""One rank of one job: ``main()`` with the arguments JOB and FILE, and torchrun's variables.

JOB is a :class:`~compare.job.Job` as JSON. Rank 0 writes its measurements to FILE as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from compare.baselines import PEERS
from compare.job import Job, built_in
from compare.timing import Clock, Start, exit_without_cleanup, outer_deciles
from lightning_zero.cli.models import SIZES, model_class

__all__ = ["main", "train"]


def train(job: Job) -> dict[str, Any] | None:
    """Train, and return the measurements on rank 0; None on other ranks."""
    peer, gpus = PEERS[job.peer], torch.cuda.is_available()
    pl.seed_everything(0, verbose=False)
    base = built_in(job) if job.model in SIZES else model_class(job.model)
    module = peer.adapt(base, job)()
    clock, start = Clock(job.warm), Start(min(10, job.warm))
    trainer = pl.Trainer(
        strategy=peer.strategy(job),
        devices=1 if peer.alone else int(os.environ["WORLD_SIZE"]),
        accelerator="gpu" if gpus else "cpu",
        precision="32-true" if peer.own_precision else job.precision,  # type: ignore[arg-type]
        max_steps=job.steps,
        gradient_clip_val=None if peer.own_clipping else job.clip or None,
        callbacks=[clock, start],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start.begin = time.perf_counter()
    trainer.fit(module)
    steady = clock.milliseconds()
    if trainer.global_rank != 0:
        return None
    if len(steady) < 2:
        raise ValueError(f"Only {len(steady)} steps were measured: the model's data end before {job.steps} steps.")
    return {
        "ms": round(statistics.median(steady), 3),
        "ms_10_90": outer_deciles(steady, 3),
        "start_s": round(start.seconds, 1),
        "peak_gib": clock.peak,
        "reserved_gib": clock.reserved,
        "device_gib": clock.device,
        "last_loss": round(float(clock.loss), 4),
        "ranks": trainer.world_size,
        "counters": start.counters,
        "gib_by_role": start.roles,
    }


def main() -> None:
    job, file = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = train(Job.from_json(job))
    if found is not None:
        Path(file).write_text(json.dumps(found))
    exit_without_cleanup()
