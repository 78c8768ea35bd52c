"""Bars for saves and loads that take long, where the Trainer shows one for its batches: on rank 0's terminal."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

from lightning_zero.checkpoint.telling import Bar, Show

__all__ = ["progress_bar_for"]

BAR_DELAY_S = 3.0


def progress_bar_for(trainer: pl.Trainer) -> Show | None:
    """None where nobody looks, or Lightning shows none. Beside Rich's, which draws all of the screen anew, a line now
    and then is what there is."""
    bar = trainer.progress_bar_callback
    shown = isinstance(bar, TQDMProgressBar) and bar.is_enabled and trainer.is_global_zero
    return _show if shown and sys.stdout.isatty() else None


def _show(what: str, total: int) -> Bar:
    units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return tqdm(desc=what, total=total, delay=BAR_DELAY_S, leave=False, file=sys.stdout, dynamic_ncols=True, **units)
