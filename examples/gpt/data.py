"""The text of the Python standard library that runs this program, as windows of bytes.

Sample number i is the same window whatever the strategy, and a global batch holds the same windows however many
processes share it. So the curves of two runs may be laid over each other.
"""

import sysconfig
import zlib
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_WINDOWS = 128


def read_stdlib() -> tuple[np.ndarray, np.ndarray]:
    """The bytes for training and for validation: whole files on either side, so that neither has seen the other."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, validation = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts):
            # By a checksum of the name, so that one more file moves no other. The zero byte marks a file's end.
            part = validation if zlib.crc32(name.as_posix().encode()) % 20 == 0 else train
            part += path.read_bytes() + b"\0"
    if len(train) < 1_000_000 or len(validation) < 50_000:
        raise FileNotFoundError(
            f"Too little Python source under {root}: is the standard library installed as *.py files?"
        )
    return np.frombuffer(train, dtype=np.uint8), np.frombuffer(validation, dtype=np.uint8)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """For each start a window of `length` bytes, and the same one byte later as the targets."""

    def __init__(self, text: np.ndarray, starts: np.ndarray, length: int) -> None:
        self.text, self.starts, self.length = text, starts, length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        window = torch.from_numpy(self.text[start : start + self.length + 1].astype(np.int64))
        return window[:-1], window[1:]


class StdlibBytes(L.LightningDataModule):
    """Needs `Trainer(use_distributed_sampler=False)`: it brings its own sampler, because Lightning's would shuffle.

    `batch_size` is per process; `micro_batches` is how many batches each process takes in the whole run, which is one
    epoch.
    """

    def __init__(self, block_size: int, batch_size: int, micro_batches: int, seed: int) -> None:
        super().__init__()
        self.block_size, self.batch_size, self.micro_batches, self.seed = block_size, batch_size, micro_batches, seed
        self.train_text, self.validation_text = read_stdlib()

    def train_dataloader(self) -> DataLoader:
        count = self.micro_batches * self.batch_size * self.trainer.world_size
        last = len(self.train_text) - self.block_size - 1
        return self._loader(self.train_text, np.random.default_rng(self.seed).integers(0, last, size=count))

    def val_dataloader(self) -> DataLoader:
        starts = np.arange(0, len(self.validation_text) - self.block_size - 1, self.block_size)
        # Spread over the whole text, and whole global batches only: a padded one would count some windows twice.
        spread = np.linspace(0, len(starts) - 1, min(VALIDATION_WINDOWS, len(starts))).astype(np.int64)
        share = self.batch_size * self.trainer.world_size
        return self._loader(self.validation_text, starts[spread][: max(len(spread) // share, 1) * share])

    def _loader(self, text: np.ndarray, starts: np.ndarray) -> DataLoader:
        windows = ByteWindows(text, starts, self.block_size)
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        # Rank r takes samples r, r + ranks, ...: together the ranks take the next consecutive run of samples.
        sampler = DistributedSampler(windows, num_replicas=ranks, rank=rank, shuffle=False, drop_last=True)
        return DataLoader(windows, self.batch_size, sampler=sampler, pin_memory=torch.cuda.is_available())
