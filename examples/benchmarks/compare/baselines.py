"""The strategies that are compared. Each is set up as its own documentation says.

All have float32 master weights, and with mixed precision bfloat16 on the wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from compare.job import Job
from compare.step_graph import StepGraph
from lightning_zero.cli.plan_command import parsed_options
from lightning_zero.integrations.trainer.strategy import ZeroStrategy

__all__ = ["FLOOR", "OURS", "PEERS", "Peer", "clip_by_hand", "repeated", "zero_strategy"]

Module = type[pl.LightningModule]


@dataclass(frozen=True)
class Peer:
    """A strategy to compare.

    Attributes:
        title: name in tables and charts.
        strategy: makes the Trainer's ``strategy`` for a job, on every rank.
        adapt: makes a subclass of the model's class that the strategy can train.
        needs_gpus: it does not run on the CPU.
        package: a package that must be installed.
        alone: it runs on one rank, even if there are more devices.
        own_precision: ``adapt`` sets the precision, and the Trainer does not.
        own_clipping: ``adapt`` clips gradients, and the Trainer does not.
    """

    title: str
    strategy: Callable[[Job], Any]
    adapt: Callable[[Module, Job], Module] = lambda module, job: module
    needs_gpus: bool = False
    package: str = ""
    alone: bool = False
    own_precision: bool = False
    own_clipping: bool = False

    def missing_requirement(self, gpus: bool) -> str:
        """Return why it cannot run on this machine; empty if it can."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return "needs GPUs" if self.needs_gpus and not gpus else ""


def zero_strategy(name: str, options: Sequence[str], backend: str = "inductor") -> Any:
    """Return the Trainer's ``strategy``; `options`: see :func:`~lightning_zero.cli.plan_command.parsed_options`."""
    if not options and backend == "inductor":
        return name
    chosen: dict[str, Any] = {"compile": name == "zero3_compile", "compile_backend": backend}
    return ZeroStrategy(**chosen | parsed_options(options))


# -- changes of models


def repeated(model: nn.Module) -> list[nn.Module]:
    """Return the outermost items of lists of modules, a decoder's layers, which FSDP2 compiles and shards each."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
                found.extend(item for item in child if any(True for _ in item.parameters()))
            else:
                walk(child)

    walk(model)
    return found


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules that a training step calls: children, and the items of lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from outermost(child)
        elif any(True for _ in child.parameters()):
            yield child


def clip_by_hand(module: nn.Module, limit: float | None) -> None:
    """Clip gradients by their total norm, if there is a limit.

    With a fused optimizer in mixed precision Lightning refuses to clip, because of a scaler that bfloat16 does not use.
    """
    if limit:
        nn.utils.clip_grad_norm_(module.parameters(), limit)


def compiled(base: Module, job: Job) -> Module:
    """Return a class whose children are compiled as a whole before they are wrapped."""

    class Compiled(base):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            super().configure_model()
            if not getattr(self, "bench_compiled", False):
                self.bench_compiled = True
                for child in outermost(self):
                    child.compile(backend=job.backend)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any
        ) -> None:
            clip_by_hand(self, gradient_clip_val)

    return Compiled


def fully_sharded(base: Module, job: Job) -> Module:
    """Return a class that compiles each repeated block and shards it and all other children by ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    class FullySharded(base):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            super().configure_model()
            if any(isinstance(module, FSDPModule) for module in self.modules()):
                return
            mixed = torch.bfloat16 if job.precision == "bf16-mixed" else None
            policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=mixed)
            mesh = self.device_mesh["data_parallel"]
            for block in repeated(self):
                block.compile(backend=job.backend)
                fully_shard(block, mesh=mesh, mp_policy=policy)
            own = [name for name, _ in self.named_parameters(recurse=False)]
            if own:
                raise ValueError(f"FSDP2 shards what is called; the LightningModule itself holds {', '.join(own)}.")
            for child in outermost(self):
                if not isinstance(child, FSDPModule):
                    fully_shard(child, mesh=mesh, mp_policy=policy)

    return FullySharded


def graphed(base: Module, job: Job) -> Module:
    """Return the class of :func:`fully_sharded` with forward and backward in one CUDA graph."""

    class Graphed(fully_sharded(base, job)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self._step: StepGraph | None = None

        def training_step(self, batch: Any, index: int) -> Tensor:
            run = super().training_step
            if self._step is None:
                self._step = StepGraph(lambda batch: run(batch, index))
            loss = self._step(batch)
            optimizer = self.optimizers()
            if job.clip:
                nn.utils.clip_grad_norm_(self.parameters(), job.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss

    return Graphed


# -- strategies

STAGE_3 = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}


def _fsdp(job: Job) -> Any:
    def blocks(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or getattr(module, "bench_block", False)

    return FSDPStrategy(auto_wrap_policy=blocks)


def _marked(base: Module, job: Job) -> Module:
    """Return a class that marks repeated blocks for FSDP's policy, which sees single modules."""

    class Marked(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            for block in repeated(self):
                block.bench_block = True  # type: ignore[assignment]

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any
        ) -> None:
            if gradient_clip_val:  # only the wrapper knows the norm over all shards
                self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)

    return Marked


def _ddp(job: Job) -> Any:
    # By default it sends float32 gradients of float32 weights, twice the bytes that the others send.
    return DDPStrategy(ddp_comm_hook=bf16_compress_hook if job.precision == "bf16-mixed" else None)


def _deepspeed(job: Job) -> Any:
    return DeepSpeedStrategy(config=STAGE_3)


class _DeepCompile(DeepSpeedStrategy):
    """Compile DeepSpeed's engine after its setup."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.model.compile()  # type: ignore[union-attr, operator]


def _deepcompile(job: Job) -> Any:
    return _DeepCompile(config=STAGE_3 | {"compile": {"deepcompile": True}})


def _fsdp2(job: Job) -> Any:
    return ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)


def _alone(job: Job) -> Any:
    return SingleDeviceStrategy("cuda:0" if torch.cuda.is_available() else "cpu")


OURS, FLOOR = "zero3_compile", "floor"
PEERS = {
    FLOOR: Peer("one device, no communication", _alone, compiled, alone=True),
    OURS: Peer("zero3_compile", lambda job: zero_strategy(OURS, job.options, job.backend)),
    "ddp": Peer("DDP, compiled", _ddp, compiled),
    "fsdp": Peer("FSDPStrategy", _fsdp, _marked, needs_gpus=True),
    "fsdp2": Peer("FSDP2, blocks compiled", _fsdp2, fully_sharded, own_precision=True),
    "fsdp2_graph": Peer(
        "FSDP2 in CUDA graphs", _fsdp2, graphed, needs_gpus=True, own_precision=True, own_clipping=True
    ),
    "deepspeed": Peer("DeepSpeed ZeRO-3", _deepspeed, needs_gpus=True, package="deepspeed"),
    "deepcompile": Peer("DeepCompile ZeRO-3", _deepcompile, needs_gpus=True, package="deepspeed"),
}
