"""One rank of one job: ``python -m lightning_zero.bench.rank JOB FILE``, with torchrun's variables. JOB is a
:class:`~lightning_zero.bench.job.Job` as JSON; rank 0 writes what it measured into FILE."""

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

from lightning_zero.bench.clock import Clock, Start
from lightning_zero.bench.job import MODELS, Job, built_in, model_class
from lightning_zero.bench.leave import leave
from lightning_zero.bench.peers import PEERS

__all__ = ["train"]


def train(job: Job) -> dict[str, Any] | None:
    """What rank 0 measured; None on the others."""
    peer, gpus = PEERS[job.peer], torch.cuda.is_available()
    pl.seed_everything(0, verbose=False)
    base = built_in(job) if job.model in MODELS else model_class(job.model)
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
    deciles = statistics.quantiles(steady, n=10)
    return {
        "ms": round(statistics.median(steady), 3),
        "ms_10_90": [round(deciles[0], 3), round(deciles[-1], 3)],
        "start_s": round(start.seconds, 1),
        "peak_gib": clock.peak,
        "reserved_gib": clock.reserved,
        "device_gib": clock.device,
        "last_loss": round(float(clock.loss), 4),
        "ranks": trainer.world_size,
        "counters": start.counters,
        "gib_by_role": start.roles,
    }


def main(job: str, file: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = train(Job.from_json(job))
    if found is not None:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
