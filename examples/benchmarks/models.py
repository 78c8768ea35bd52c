"""Time, memory and start of training models that others wrote, through the Lightning Trainer, for one strategy; prints
one JSON line.

    torchrun --nproc-per-node 2 examples/benchmarks/models.py llama --strategy zero3_compile

With torchrun all processes make their models at the same time, and what `start_s` counts from `fit` on is not another
process's Python.

`fsdp2` is Lightning's ModelParallelStrategy with `fully_shard` and `torch.compile` on each block; `fsdp2_graph` is the
same with forward and backward in one CUDA graph, captured after three steps, as torchtitan does it; `ddp` compiles the
whole model. All train from float32 master weights in bfloat16, with fused AdamW and norm clipping at 1.0; gradients are
averaged in bfloat16. Weights are drawn by `quick_draws`: what torch draws on one core takes as long as a start.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, Dataset

from compare import idle_gaps
from compare.baselines import clip_by_hand, zero_strategy
from compare.fast_init import quick_draws
from compare.step_graph import StepGraph
from compare.timing import Clock, Start, exit_without_cleanup, outer_deciles

PROFILED = 6  # steps


class Parts(L.LightningModule):
    """Three attributes, called one after another, as most people write it."""

    def __init__(self, width: int, layers: int, wrapped: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(32000, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32000)
        self.wrapped = wrapped
        if wrapped:
            self.whole = nn.Sequential(self.embedding, self.encoder, self.head)
            del self.embedding, self.encoder, self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.whole(tokens) if self.wrapped else self.head(self.encoder(self.embedding(tokens)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=ARGS.layers or 48,
            n_embd=1600,
            n_head=25,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=ARGS.cache,
        )
    )


def small_gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=12, n_embd=768, n_head=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=ARGS.layers or 24,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def llama_lora() -> nn.Module:
    """Llama's shape of 8 billion weights in bfloat16, frozen, with adapters in float32 on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=ARGS.layers or 32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=ARGS.layers or 8,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=8,
        vocab_size=32000,
        use_cache=False,
        **({"experts_implementation": ARGS.experts} if ARGS.experts else {}),
    )
    return MixtralForCausalLM(config)


def vit() -> nn.Module:
    import timm

    return timm.create_model("vit_huge_patch14_224", num_classes=1000)


def convnext() -> nn.Module:
    import timm

    return timm.create_model("convnext_large", num_classes=1000).to(memory_format=torch.channels_last)


@dataclass
class Row:
    make: Callable[[], nn.Module]
    batch: int
    length: int  # tokens, or pixels along a side
    blocks: tuple[str, ...] = ()  # classes that FSDP2 compiles and shards
    images: bool = False
    logits: bool = False  # the model gives logits of the next token instead of a loss


ROWS = {
    "gpt2": Row(gpt2, 4, 1024, ("GPT2Block",)),
    "small_gpt": Row(small_gpt, 4, 512, ("GPT2Block",)),
    "llama": Row(llama, 2, 2048, ("LlamaDecoderLayer",)),
    "llama_checkpointed": Row(llama_checkpointed, 4, 2048, ("LlamaDecoderLayer",)),
    "llama_lora": Row(llama_lora, 1, 4096, ("LlamaDecoderLayer",)),
    "mixtral": Row(mixtral, 4, 1024, ("MixtralDecoderLayer",)),
    "vit": Row(vit, 64, 224, ("Block",), images=True),
    "convnext": Row(convnext, 64, 224, ("ConvNeXtBlock",), images=True),
    "parts": Row(lambda: Parts(1024, 12), 4, 512, ("TransformerEncoderLayer",), logits=True),
    "wrapped_parts": Row(lambda: Parts(1024, 12, wrapped=True), 4, 512, ("TransformerEncoderLayer",), logits=True),
}


class Module(L.LightningModule):
    def __init__(self, row: Row, strategy: str, reshard: bool) -> None:
        super().__init__()
        self.row, self.strategy, self.reshard = row, strategy, reshard
        self.automatic_optimization = strategy != "fsdp2_graph"
        with quick_draws():
            model = row.make()
        if isinstance(model, Parts) and not model.wrapped:
            self.embedding, self.encoder, self.head = model.embedding, model.encoder, model.head
        else:
            self.net = model
        self.graph: StepGraph | None = None

    def configure_model(self) -> None:
        if self.strategy == "ddp" and not hasattr(self.net, "_compiled"):
            self.net.compile()
        if not self.strategy.startswith("fsdp2"):
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = self.device_mesh["data_parallel"]
        for block in [module for module in self.modules() if type(module).__name__ in self.row.blocks]:
            block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        for part in self.children():
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.row.images:
            return F.cross_entropy(self.net(x).float(), y)
        if not self.row.logits:
            return self.net(input_ids=x, labels=y).loss
        out = self.net(x) if hasattr(self, "net") else self.head(self.encoder(self.embedding(x)))
        return F.cross_entropy(out.float().flatten(0, 1), y.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        if self.row.images:
            x = x.contiguous(memory_format=torch.channels_last) if "conv" in ARGS.model else x
        if self.strategy != "fsdp2_graph":
            return self.loss(x, y)
        if self.graph is None:
            self.graph = StepGraph(lambda batch: self.loss(*batch))
        loss = self.graph((x, y))
        optimizer = self.optimizers()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any) -> None:
        if self.strategy != "ddp":
            self.clip_gradients(optimizer, gradient_clip_val, "norm")
        else:
            clip_by_hand(self, gradient_clip_val)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1, fused=True)


class Data(Dataset):
    """Whole batches."""

    def __init__(self, row: Row, lengths: list[int]) -> None:
        self.row, self.lengths = row, lengths

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator, batch = torch.Generator().manual_seed(index), ARGS.batch or self.row.batch
        if self.row.images:
            image = torch.randn(batch, 3, self.row.length, self.row.length, generator=generator)
            return image, torch.randint(1000, (batch,), generator=generator)
        tokens = torch.randint(32000, (batch, self.lengths[index % len(self.lengths)]), generator=generator)
        return tokens, tokens


def keep_masks_as_compiled() -> None:
    """transformers asks the device in each step whether sequences are packed, and where a stream is captured it makes a
    whole mask instead, so blocks would be compiled once more amid the capture, which fails."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    import_utils.is_cuda_stream_capturing = lambda: False
    masking_utils.find_packed_sequence_indices = lambda position_ids: None


def strategy_of(name: str) -> Any:
    if name.startswith("fsdp2"):
        return ModelParallelStrategy(data_parallel_size=ARGS.devices, tensor_parallel_size=1)
    if name == "ddp":
        return DDPStrategy(ddp_comm_hook=bf16_compress_hook)
    return zero_strategy(name, ARGS.option)


def profiler(trainer: L.Trainer) -> Any:
    """Prints where the device stands idle in the steps after the last one that is timed."""

    def show(profile: Any) -> None:
        if trainer.global_rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                trace = Path(directory, "trace.json")
                profile.export_chrome_trace(str(trace))
                lines = idle_gaps.describe(trace)
            print("\n".join([f"{ARGS.model}:", *lines]), flush=True)

    schedule = torch.profiler.schedule(wait=ARGS.steps + 1, warmup=3, active=PROFILED, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=show)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("lightning_zero").setLevel(logging.INFO)  # where the seconds of the start went
    L.seed_everything(0, verbose=False)
    row = ROWS[ARGS.model]
    # torchrun gives each process one thread, by which making GPT-2 XL's weights takes as long as the start.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // ARGS.devices, 1))
    start, clock = Start(), Clock(ARGS.warm)
    lengths = [int(length) for length in ARGS.lengths.split(",")] if ARGS.lengths else [ARGS.length or row.length]
    module = Module(row, ARGS.strategy, not ARGS.no_reshard)
    trainer = L.Trainer(
        strategy=strategy_of(ARGS.strategy),
        devices=ARGS.devices,
        accelerator="gpu",
        precision="32-true" if ARGS.strategy.startswith("fsdp2") else ARGS.precision,
        max_steps=ARGS.steps + (PROFILED + 6 if ARGS.profile else 0),
        gradient_clip_val=None if ARGS.strategy == "fsdp2_graph" else 1.0,
        callbacks=[clock, start],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    if ARGS.strategy == "fsdp2_graph":
        keep_masks_as_compiled()
    if ARGS.profile:
        clock.profiler = profiler(trainer)
        clock.profiler.start()
    start.begin = time.perf_counter()
    trainer.fit(module, DataLoader(Data(row, lengths), batch_size=None, num_workers=4))
    steady, leads = (values[: ARGS.steps - ARGS.warm - 1] for values in (clock.milliseconds(), clock.leads()))
    result = {
        "model": ARGS.model,
        "strategy": ARGS.strategy + "_no_reshard" * ARGS.no_reshard,
        "options": ARGS.option + [f"precision={ARGS.precision}"] * (ARGS.precision != "bf16-mixed"),
        "ms": round(statistics.median(steady), 2),
        "ms_10_90": outer_deciles(steady, 2),
        "host_ahead_ms": round(statistics.median(leads), 2),
        "start_s": round(start.seconds, 1),
        "peak_gib": clock.peak,
        "reserved_gib": clock.reserved,
        "device_gib": clock.device,
        "gib_by_role": start.roles,
        "last_loss": round(float(clock.loss), 4),
        "torch": torch.__version__,
    } | start.counters
    if trainer.global_rank == 0:
        print(json.dumps(result), flush=True)
    exit_without_cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=ROWS)
    parser.add_argument("--strategy", default="zero3_compile")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--cache", action="store_true", help="gpt2: keys and values are kept, transformers' default")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--experts", help="mixtral: eager, batched_mm or grouped_mm; transformers' default without it")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--lengths", help="tokens of batches, in turn, with commas")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="say where the device stands idle, too")
    parser.add_argument("--no-reshard", action="store_true", help="FSDP2: keep weights gathered after forward")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy, or tuning.NAME=VALUE"
    )
    ARGS = parser.parse_args()
    main()
