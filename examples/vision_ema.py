"""A convolutional net in channels_last with batch norm, whose weights are averaged over the steps (EMA); validation and
checkpoints get the averages.

    python examples/vision_ema.py --accelerator cpu --devices 2 --epochs 2
    python examples/vision_ema.py --model timm/convnext_tiny --precision bf16-mixed --devices 4

The pictures are made up, each with a bright square in one of nine places, so that nothing has to be downloaded: put
your own DataModule in their place.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401 - registers the strategies' names


def block(inputs: int, outputs: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def make(name: str, classes: int) -> nn.Module:
    if name.startswith("timm/"):
        import timm

        return timm.create_model(name.removeprefix("timm/"), num_classes=classes)
    blocks = [block(3, 32, 1), block(32, 64, 2), block(64, 128, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(128 * 9, classes))


class Classifier(L.LightningModule):
    def __init__(self, model: str, classes: int = 9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = make(model, classes).to(memory_format=torch.channels_last)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0].contiguous(memory_format=torch.channels_last)), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        guesses = self.net(batch[0].contiguous(memory_format=torch.channels_last)).argmax(-1)
        self.log("accuracy", (guesses == batch[1]).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Squares(L.LightningDataModule):
    def __init__(self, count: int, side: int = 24) -> None:
        super().__init__()
        places = torch.randint(9, (count,))
        pictures = torch.randn(count, 3, side, side)
        for picture, place in zip(pictures, places.tolist(), strict=True):
            top, left = (part * side // 3 for part in divmod(place, 3))
            picture[:, top : top + side // 3, left : left + side // 3] += 0.5
        self.data = TensorDataset(pictures, places)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=32)


def main(arguments: list[str] | None = None) -> L.Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=2048)
    parser.add_argument("--model", default="small")
    parser.add_argument("--out", default="runs/vision")
    args = parser.parse_args(arguments)
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="zero3_compile",
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.epochs,
        callbacks=[EMAWeightAveraging(decay=0.9), ModelCheckpoint(args.out, monitor="accuracy", mode="max")],
        logger=False,
        default_root_dir=args.out,
    )
    trainer.fit(Classifier(args.model), Squares(args.pictures))
    best = trainer.checkpoint_callback.best_model_path
    print(f"accuracy of the averaged weights {trainer.callback_metrics['accuracy']:.3f}, saved in {best}")
    return trainer


if __name__ == "__main__":
    main()
