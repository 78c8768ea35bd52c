"""Who else keeps the optimizer's state on the host, for `offload.py`: one class each, all with the same methods.

`FullyShard` is FSDP2, all of whose shards lie on the host: `fsdp2` in pinned memory, which torch hands out in powers of
two, so that it may take up to twice what lies in it, and `fsdp2_unpinned` in plain one. `DeepSpeed` is its ZeRO-3, in
two ways:

* `deepspeed` is `offload_optimizer` with pinned memory: gradients leave beside backward, masters and both moments lie
  on the host, DeepSpeed's own CPU Adam steps there, and the bfloat16 weights come back. Nothing is compiled, as is
  DeepSpeed's default.
* `deepcompile` is DeepCompile with its `offload_opt_states`, which takes the place of `offload_optimizer` (DeepSpeed
  refuses both together): AdamW steps on the GPU, and of masters and moments what DeepCompile finds no room for leaves
  in forward and is back by the end of backward. So `optimizer_ms` tells nothing of what that costs, and `step_ms` all.
  DeepSpeed made it for one micro-batch in a step.

DeepSpeed adds micro-batches up in bfloat16 unless told otherwise, as here; the others do in float32. It compiles its
CPU Adam when that is used first, for which it needs ninja and a C++ compiler, and can take minutes; DeepCompile's part
needs CUDA's and NCCL's headers, too. Who ends it while it compiles leaves a file `lock` behind, for which all later
ones wait.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compare.fast_init import quick_draws
from lightning_zero.cli.models import Decoder

ADAMW = {"lr": 1e-4, "weight_decay": 0.1}
MAX_NORM = 1.0
Dimensions = tuple[int, int, int, int]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)


class FullyShard:
    """FSDP2, all of whose shards lie on the host."""

    def __init__(self, dimensions: Dimensions, way: str, buffer_mb: float) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        policies: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=way != "fsdp2_unpinned"),
        }
        with torch.device("meta"):
            self.model = Decoder(*dimensions)
        for block in self.model.blocks:
            block.compile()
            fully_shard(block, **policies)
        fully_shard(self.model, **policies)
        self.model.to_empty(device="cpu")  # made whole by each rank, they alone would fill the host
        self.model.reset_parameters()
        with torch.no_grad(), quick_draws():
            for param in self.model.parameters():
                shard = param.to_local()
                shard.fill_(1.0) if param.dim() == 1 else shard.normal_(std=0.02)
        self.model.cos, self.model.sin = self.model.cos.cuda(), self.model.sin.cuda()
        self.optimizer = adamw(self.model)

    def backward(self, tokens: Tensor, share: float) -> None:
        self.model.set_is_last_backward(True)
        (self.model(tokens[:, :-1], tokens[:, 1:]) * share).backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def host_bytes(self) -> int:
        held = [*self.model.parameters(), *(v for s in self.optimizer.state.values() for v in s.values())]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in held if isinstance(t, Tensor)]
        return sum(t.nbytes for t in local if t.device.type == "cpu")  # of a DTensor, bytes are those of the whole

    def counters(self) -> dict[str, int]:
        return {}


def deepspeed_config(way: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # what a backward is given has its share already
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
    }
    if way == "deepcompile":
        compiled = {"deepcompile": True, "offload_opt_states": True}
        return config | {"compile": compiled, "zero_allow_untested_optimizer": True}
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return config | {"optimizer": {"type": "AdamW", "params": ADAMW}}


class DeepSpeed:
    """DeepSpeed's ZeRO-3 with the optimizer's state on the host, by itself or by DeepCompile."""

    def __init__(self, dimensions: Dimensions, way: str, buffer_mb: float) -> None:
        try:
            import deepspeed
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"The way {way} needs DeepSpeed (pip install deepspeed): {error}") from error

        os.environ.setdefault("LOCAL_RANK", "0")  # torchrun sets it; DeepSpeed asks for it beside one device, too
        config = deepspeed_config(way)
        with deepspeed.zero.Init(config_dict_or_path=config):  # each weight is drawn on the device, and cut at once
            self.model = Decoder(*dimensions)
        # All that was made in there is bfloat16, the tables of angles as well: those are float32 for the others.
        self.model.cos, self.model.sin = self.model.cos.float(), self.model.sin.float()
        self.model.reset_parameters()
        chosen = adamw(self.model) if way == "deepcompile" else None
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), optimizer=chosen, config=config
        )
        if way == "deepcompile":
            self.engine.compile()
        self.done = 0.0  # of a step's micro-batches

    def backward(self, tokens: Tensor, share: float) -> None:
        self.done += share
        self.engine.set_gradient_accumulation_boundary(self.done > 1 - share / 2)
        self.engine.backward(self.engine(tokens[:, :-1], tokens[:, 1:]) * share)

    def step(self) -> None:
        self.engine.step()
        self.done = 0.0

    def host_bytes(self) -> int:
        """Of this rank: masters, their gradients, moments, and gradients in the dtype that micro-batches add up in."""
        held = [*self.optimizer.fp32_partitioned_groups_flat, self.optimizer.grad_partitions_flat_buffer]
        held += [master.grad for master in self.optimizer.fp32_partitioned_groups_flat]
        held += [value for state in self.optimizer.optimizer.state.values() for value in state.values()]
        held += getattr(self.optimizer, "hp_params_pin_buffers", [])  # of DeepCompile's, for masters that left
        on_host = [t.untyped_storage() for t in held if isinstance(t, Tensor) and t.device.type == "cpu"]
        return sum({storage.data_ptr(): storage.nbytes() for storage in on_host}.values())

    def counters(self) -> dict[str, int]:
        return {}
