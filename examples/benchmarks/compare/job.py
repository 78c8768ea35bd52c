"""The settings of one training, which ranks get as JSON on their command line, and the model that it names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import lightning.pytorch as pl

from compare.fast_init import quick_draws
from lightning_zero.cli.models import DecoderModule

__all__ = ["Job", "built_in"]


@dataclass(frozen=True)
class Job:
    """A training under one strategy.

    Attributes:
        peer: the strategy's name in :data:`compare.baselines.PEERS`.
        model: a size of the built-in decoder, or ``script.py:Module``: a LightningModule that takes no arguments and
            has its own ``train_dataloader``.
        batch: samples per rank and step of the built-in decoder.
        length: tokens per sample of the built-in decoder.
        steps: optimizer steps.
        warm: number of first steps that are not measured.
        precision: the Trainer's, such as ``"bf16-mixed"``.
        backend: of ``torch.compile``.
        clip: largest norm of gradients; 0 disables clipping.
        options: of ZeroStrategy, as ``NAME=VALUE``.
    """

    peer: str
    model: str
    batch: int
    length: int
    steps: int
    warm: int
    precision: str
    backend: str
    clip: float
    options: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**fields | {"options": tuple(fields["options"])})


def built_in(job: Job) -> type[pl.LightningModule]:
    """Return the built-in decoder of a job as a class that takes no arguments, like a user's own."""

    class BuiltIn(DecoderModule):
        def __init__(self) -> None:
            with quick_draws():
                super().__init__(job.model, job.batch, job.length)

    return BuiltIn
