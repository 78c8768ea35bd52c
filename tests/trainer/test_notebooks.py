"""Type cells into a running interpreter: one device trains, several raise an error with the remedy."""

from pathlib import Path

from tests.helpers.command import run

NAMES = """
import importlib
import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry

options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
for name in ("zero3", "zero3_compile", "zero2_compile", "zero1_compile"):
    try:
        pl.Trainer(strategy=name, **options)
    except ValueError as error:
        assert "invalid strategy name" in str(error), error
    else:
        raise AssertionError(f"{name} is known before the import")

import lightning_zero
names = [("zero3", False, 3), ("zero3_compile", True, 3), ("ZeRO3_Compile", True, 3)]
for name, compiles, stage in [*names, ("zero2_compile", True, 2), ("zero1_compile", True, 1)]:
    strategy = pl.Trainer(strategy=name, **options).strategy
    assert type(strategy) is lightning_zero.ZeroStrategy
    assert (strategy._options.compile, strategy._options.stage) == (compiles, stage)
    assert StrategyRegistry[name.lower()]["description"]

before = StrategyRegistry.available_strategies()
importlib.reload(lightning_zero)
assert StrategyRegistry.available_strategies() == before
assert pl.Trainer(strategy="zero3_compile", **options).strategy._options.compile
print("NAMES ARE KNOWN")
"""
CELLS = """
import torch, lightning.pytorch as pl, lightning_zero
from lightning.fabric import Fabric

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)

try:
    pl.Trainer(strategy="zero3_compile", devices=2, **options)
except Exception as error:
    print("TRAINER", error)

try:
    Fabric(strategy="zero3_compile", accelerator="cpu", devices=2)
except Exception as error:
    print("FABRIC", error)

for cell in range(2):
    trainer = pl.Trainer(strategy=lightning_zero.ZeroStrategy(compile_backend="aot_eager"), devices=1, **options)
    trainer.fit(model := Model(), data)
    print("TRAINED", trainer.global_step, trainer.strategy.plan().graphs != (), model.net.weight.shape)

fabric = Fabric(strategy="zero3", accelerator="cpu", devices=1)
fabric.launch()
net = torch.nn.Linear(4, 2)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters()))
fabric.backward(net(torch.ones(1, 4)).sum())
optimizer.step()
print("FABRIC TRAINED")
"""


def test_names_are_registered_by_importing_and_one_device_trains_where_there_is_no_script(
    native_library: None, tmp_path: Path
) -> None:
    # As a notebook does: source that is no file's, run in __main__ of an interpreter that calls itself interactive.
    cells = tmp_path / "cells.txt"
    cells.write_text(NAMES + CELLS)
    runs = "import sys; sys.ps1 = 'In : '; exec(compile(open('cells.txt').read(), '<cell>', 'exec'), globals())"
    done = run("-c", runs, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "NAMES ARE KNOWN" in done.stdout
    assert "Trainer(devices=2) cannot start its other processes from a notebook or a Python shell" in done.stdout
    assert "Fabric(devices=2) cannot start its other processes from a notebook or a Python shell" in done.stdout
    assert "Use Trainer(devices=1) here" in done.stdout
    assert "torchrun --nproc-per-node 2 train.py" in done.stdout
    assert done.stdout.count("TRAINED 4 True torch.Size([2, 4])") == 2, done.stdout
    assert "FABRIC TRAINED" in done.stdout
