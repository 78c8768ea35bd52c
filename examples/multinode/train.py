"""Trains a small GPT on several hosts, saves sharded checkpoints, and goes on from the last one when it is started
again: on as many hosts as before, or on fewer or more.

Started by torchrun.sh or by slurm.sh beside this file, which say how. All hosts must see the folder --out.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from gpt.data import StdlibBytes
from gpt.model import SHAPES, LitGPT
from lightning_zero import ZeroStrategy


class Windows(StdlibBytes):
    """After a resume it draws others than before: the step counts as part of the seed. A loader with ``state_dict()``
    and ``load_state_dict()`` would go on where it was, but only on as many processes."""

    def train_dataloader(self) -> DataLoader:
        step = self.trainer.global_step
        if step and self.trainer.is_global_zero:
            print(f"goes on after step {step}, on {self.trainer.world_size} processes", flush=True)
        self.seed += step
        return super().train_dataloader()


def nodes_and_devices() -> tuple[int, int]:
    """As torchrun or srun has started this process; one host with one device where nobody has."""
    environment = os.environ
    if "GROUP_WORLD_SIZE" in environment:  # torchrun's; another one after each restart with other hosts
        return int(environment["GROUP_WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    return int(environment.get("SLURM_NNODES", "1")), int(environment.get("SLURM_NTASKS_PER_NODE", "1"))


def newest(out: Path) -> str:
    """``ckpt_path`` of what was written last: by ModelCheckpoint, or at SLURM's signal, beside which Lightning's "last"
    does not look. Where there is neither, "last" begins anew."""
    found = [*out.glob("hpc_ckpt_*.ckpt"), *out.glob("checkpoints/last*.ckpt")]
    latest = max(found, key=lambda path: path.stat().st_mtime, default=out)
    return "hpc" if latest.name.startswith("hpc") else "last"


def main(arguments: list[str] | None = None) -> L.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="350m", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=2000, help="of the optimizer, in all")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=8, help="windows of a process")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a window")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--compile-backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--out", type=Path, default=Path("runs/multinode"), help="a folder that all hosts see")
    args = parser.parse_args(arguments)
    L.seed_everything(0)
    nodes, devices = nodes_and_devices()
    trainer = L.Trainer(
        # One writes each part; any number of processes goes on from it.
        strategy=ZeroStrategy(state_dict_type="sharded", compile_backend=args.compile_backend),
        accelerator=args.accelerator,
        num_nodes=nodes,
        devices=devices,
        precision=args.precision,
        max_steps=args.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=CSVLogger(args.out, name="", version=f"from_{os.environ.get('SLURM_RESTART_COUNT', '0')}"),
        default_root_dir=args.out,
        enable_progress_bar=False,
        callbacks=[
            # A SIGTERM, which is what preemption sends, ends all ranks before the same batch, and they save.
            ModelCheckpoint(
                args.out / "checkpoints", every_n_train_steps=args.every, save_last=True, save_on_exception=True
            )
        ],
    )
    module = LitGPT(args.size, lr=2e-3, warmup=20, steps=args.steps)
    trainer.fit(module, datamodule=Windows(args.length, args.batch, args.steps, seed=0), ckpt_path=newest(args.out))
    return trainer


if __name__ == "__main__":
    done = main()
    if done.is_global_zero:
        print(f"ended at step {done.global_step}, loss {float(done.callback_metrics['train_loss']):.3f}")
