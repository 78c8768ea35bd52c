"""Fine-tunes a causal language model of transformers, its weights or LoRA's, and exports it in transformers' format.

    python examples/finetune_transformers.py --model Qwen/Qwen3-8B --lora --precision bf16-true --devices 2
    python examples/finetune_transformers.py --accelerator cpu --devices 2 --steps 20        # a small one, from scratch
    python examples/finetune_transformers.py --config examples/llama_8b.json --length 4096 --batch 1 [--estimate]

The text is this file, over and over: put your own dataset in its place. `--config` trains a model of this shape from
random weights, which ranks build layer by layer, each its own shards; with `--estimate` nothing is trained, and what a
step would take of each GPU is printed, on a machine without any. `--export` gathers the whole model on every rank, and
rank 0 writes it; with --lora the adapters are merged first.
"""

import argparse
import json
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lightning_zero


class FineTuned(L.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.net = args, None
        if args.config is None:
            self.net = self.prepared(pretrained(args.model))

    def configure_model(self) -> None:
        if self.net is None:  # here each layer is sharded as soon as it is built
            self.net = self.prepared(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.args.config)))

    def prepared(self, net: PreTrainedModel) -> torch.nn.Module:
        if self.args.checkpointing:
            net.gradient_checkpointing_enable()
        if self.args.lora:
            from peft import LoraConfig, get_peft_model

            net = get_peft_model(net, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        return net.train()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.net(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=self.args.rate, fused=True)


def pretrained(name: str | None) -> PreTrainedModel:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))


def windows(name: str | None, length: int) -> TensorDataset:
    text = Path(__file__).read_text() * 8
    tokens = list(text.encode()) if name is None else AutoTokenizer.from_pretrained(name)(text)["input_ids"]
    whole = len(tokens) // length * length
    return TensorDataset(torch.tensor(tokens[:whole]).view(-1, length))


def export(module: FineTuned, folder: str, lora: bool, rank: int) -> None:
    lightning_zero.unshard(module)  # on every rank
    if rank == 0:
        (module.net.merge_and_unload() if lora else module.net).save_pretrained(folder)


def estimate(args: argparse.Namespace) -> None:
    """What a step takes of each of --devices H200s: estimated, and nothing of it measured."""
    with torch.device("meta"):
        module = FineTuned(args)
    batch = [torch.zeros(args.batch, args.length, dtype=torch.long, device="meta")]
    found = lightning_zero.plan(module, batch, world_size=args.devices, device="H200", precision=args.precision)
    print(json.dumps(found.as_dict(), indent=2))


def main(arguments: list[str] | None = None) -> L.Trainer | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="of the hub, or a folder; without it a small Llama over bytes, from scratch")
    parser.add_argument("--config", metavar="FILE", help="of transformers; a model of this shape, from scratch")
    parser.add_argument("--estimate", action="store_true", help="what it would take, and no training")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--length", type=int, default=128, help="tokens per window")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--export", metavar="FOLDER")
    args = parser.parse_args(arguments)
    if args.model and args.config:
        parser.error("--config is for models from scratch: leave out --model.")
    if args.estimate:
        estimate(args)
        return None
    L.seed_everything(0)
    module = FineTuned(args)
    trainer = L.Trainer(
        strategy="zero3_compile",
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(windows(args.model, args.length), batch_size=args.batch, shuffle=True))
    print(f"loss {trainer.callback_metrics['train_loss']:.3f}")
    if args.export:
        export(module, args.export, args.lora, trainer.global_rank)
    return trainer


if __name__ == "__main__":
    main()
