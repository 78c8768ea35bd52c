"""What one job of a benchmark is given, as JSON on its command line, and the model that it names."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.bench.decoder import SIZES, Decoder, Tokens
from lightning_zero.bench.draws import quick_draws

__all__ = ["MODELS", "Job", "Language", "built_in", "model_class"]

MODELS = ("tiny", "350m", "700m", "1b")


@dataclass(frozen=True)
class Job:
    """A training under one strategy.

    Attributes:
        peer: by its name, see :mod:`lightning_zero.bench.peers`.
        model: of ``MODELS``, or ``script.py:Module``: a LightningModule that takes no arguments and has its own
            ``train_dataloader``.
        batch: samples of a rank and step, of built-in models.
        length: tokens of a sample, likewise.
        steps: of the optimizer.
        warm: of these, so many are not measured.
        precision: the Trainer's, such as ``"bf16-mixed"``.
        backend: of ``torch.compile``.
        clip: largest norm of gradients; 0: they are not clipped.
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


class Language(pl.LightningModule):
    """A built-in model. Its initial weights follow from the seed alone."""

    def __init__(self, size: str, batch: int, length: int) -> None:
        super().__init__()
        self.batch, self.length = batch, length
        with quick_draws():
            self.net = Decoder(*SIZES[size])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch[:, :-1], batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, fused=self.device.type == "cuda")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(self.length), self.batch)


def built_in(job: Job) -> type[pl.LightningModule]:
    """The model that a job names, as a class that takes no arguments, like users' own."""

    class BuiltIn(Language):
        def __init__(self) -> None:
            super().__init__(job.model, job.batch, job.length)

    return BuiltIn


def model_class(name: str) -> type[pl.LightningModule]:
    """The class that ``script.py:Module`` names.

    Raises:
        ValueError: there is no such file or class, or it is no LightningModule.
    """
    path, _, wanted = name.rpartition(":")
    file = Path(path)
    if not path or not file.is_file():
        raise ValueError(f"{name!r} is none of {', '.join(MODELS)}, nor a file and a class, as in model.py:Module.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, wanted, None)
    if not (isinstance(found, type) and issubclass(found, pl.LightningModule)):
        raise ValueError(f"{file} has no LightningModule called {wanted!r}.")
    return found
