"""All options, each defined once, here or in ``tuning.py``: the strategy's arguments, their checks, docstrings, the
README's tables and what the command line takes follow from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import ClassVar, Literal

from torch.distributed.constants import default_pg_timeout

from lightning_zero.config.option import (
    OnChange,
    check_options,
    check_memory,
    check_offload,
    option,
    option_fields,
    options,
    check_fraction,
)
from lightning_zero.config.text import document_options
from lightning_zero.config.tuning import GROUPS, RecomputePolicy, Transport, Tuning, CaptureMode

__all__ = ["GROUPS", "Options", "RecomputePolicy", "Transport", "Tuning"]


@document_options
@options
class Options:
    """What a user chooses besides a Trainer's arguments."""

    owner: ClassVar[str] = "ZeroStrategy"

    compile: bool = option(
        "compile the outermost modules that the training step calls; otherwise everything runs eagerly",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    compile_backend: Literal["inductor", "aot_eager"] = option(
        "``'aot_eager'`` has the same graphs and passes and generates no code, to debug",
        default="inductor",
        on_change=OnChange.RECOMPILE,
    )
    cuda_graphs: CaptureMode = option(
        "replay the optimizer's step, and forward and backward of compiled code, as CUDA graphs, so that the host is "
        "not what limits small batches: ``'auto'`` where that is possible; True, or raise where it is not; False "
        "never. Their memory serves nothing else; evaluation gives it back",
        default="auto",
        on_change=OnChange.APPLY,
    )
    stage: Literal[1, 2, 3] = option(
        "what is sharded besides optimizer state. 3: gradients and weights. 2: gradients; weights to compute with are "
        "whole on every rank, gathered once after each optimizer step. 1: neither: gradients of accumulated "
        "micro-batches are added up whole, in float32, and reduced in the last one's backward; until then "
        "``param.grad`` holds zeros. 1 and 2 are faster, for memory, and what is written to ``param.data`` between "
        "micro-batches counts from the next optimizer step on",
        default=3,
        on_change=OnChange.RECOMPILE,
    )
    reshard_after_forward: bool | Literal["auto"] = option(
        "as in ``fully_shard``: False: whole parameters stay from compiled forward to backward instead of being "
        "gathered twice: faster, for memory. ``'auto'``: none at first, and after a few steps as many as the device "
        "has room for; everything is then compiled once more",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    memory: float | Literal["auto"] | None = option(
        "limit of each device's memory in GiB, with other processes; ``'auto'``: 90 % of the device. Recomputation, "
        "kept weights and offload are planned within it, the fastest first. A plan may round gradients "
        "(``grad_aliasing``) if nothing else fits as fast. Options that are not at their defaults stay. The limit is "
        "held in the first step and from about the 20th on: CUDA graphs are measured once they are captured, and "
        "planned for then. A warning says so if it cannot be held",
        default=None,
        check=check_memory,
        on_change=OnChange.APPLY,
    )
    activation_memory_budget: float = option(
        "share, from 0 to 1, of the memory for activations that compiled code would like to save for backward; what "
        "does not fit is computed again, the cheapest first",
        default=1.0,
        check=check_fraction,
        on_change=OnChange.RECOMPILE,
    )
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = option(
        "what lies in the host's memory and comes to the device when it is needed. ``'optimizer'``: the state of "
        "optimizers that is as large as the weights (Adam's moments); the step, computed on the device as ever, takes "
        "as long as it takes to copy it there and back. ``'activations'``: what compiled forward saves for backward, "
        "large tensors, copied beside compute; what eager code saves stays. ``'parameters'``, with ``'optimizer'`` and "
        "mixed precision on one host: the float32 weights that compiled code reads in another dtype, which pass with "
        "the state; weights then travel by collectives, and what still reads the float32 ones does so over the link",
        default=(),
        check=check_offload,
        on_change=OnChange.APPLY,
    )
    reduce_dtype: Literal["bf16", "16", "32"] | None = option(
        "dtype of gradients on the wire; by default ``'bf16'`` for ``precision='bf16-mixed'`` and otherwise each "
        "parameter's own",
        default=None,
        on_change=OnChange.APPLY,
    )
    broadcast_buffers: bool = option(
        "as in ``DistributedDataParallel``: before the first forward after each optimizer step rank 0's buffers "
        "(running statistics, codebooks) are sent to all ranks: those of modules in which one changes",
        default=True,
        on_change=OnChange.APPLY,
    )
    state_dict_type: Literal["full", "sharded"] = option(
        "as in ``FSDPStrategy``: ``'full'`` saves one file with whole values, as a single process would; ``'sharded'`` "
        "a folder, into which all ranks write their parts at once. Either can be loaded, whatever is chosen here, on "
        "any number of ranks",
        default="full",
        on_change=OnChange.APPLY,
    )
    async_save: bool = option(
        "save checkpoints beside training: a copy in the host's memory is made beside the next forward and backward, "
        "and another process writes it. One at a time; errors show at the next save and at the end of ``fit``",
        default=False,
        on_change=OnChange.APPLY,
    )
    timeout: timedelta | None = option(
        "how long ranks wait for each other", default=default_pg_timeout, on_change=OnChange.REFUSE, default_text="30 minutes"
    )
    process_group_backend: str | None = option(
        "of ``torch.distributed``; by default ``'nccl'`` on CUDA and ``'gloo'`` on the CPU",
        default=None,
        on_change=OnChange.REFUSE,
    )
    tuning: Tuning = option(
        "a ``Tuning``, or a dict of its options; see there",
        default=Tuning(),
        on_change=OnChange.APPLY,
        default_text="`Tuning()`",
    )

    def __post_init__(self) -> None:
        if isinstance(self.tuning, Mapping):
            object.__setattr__(self, "tuning", Tuning(**self.tuning))
        if isinstance(self.offload, list):  # as command lines and YAML have it
            object.__setattr__(self, "offload", tuple(self.offload))
        check_options(self)
        tuning = self.tuning
        if not isinstance(tuning, Tuning):
            raise ValueError(f"tuning={tuning!r} must be a lightning_zero.Tuning, or a dict of its options.")
        self._check_resident(tuning)

    def _check_resident(self, tuning: Tuning) -> None:
        auto = self.reshard_after_forward == "auto"
        if self.stage < 3 and (auto or tuning.unsharded_cache_mb is not None):
            other = "reshard_after_forward='auto'" if auto else f"unsharded_cache_mb={tuning.unsharded_cache_mb!r}"
            raise ValueError(
                f"stage={self.stage} and {other} contradict each other: stages 1 and 2 keep all weights. Pass one of "
                "them."
            )
        if self.stage < 3 and not tuning.prefetch:
            raise ValueError(f"stage={self.stage} needs the passes that prefetch=False turns off. Leave prefetch on.")
        if tuning.unsharded_cache_mb is not None and self.reshard_after_forward is not True:
            raise ValueError(
                f"unsharded_cache_mb={tuning.unsharded_cache_mb!r} and reshard_after_forward={self.reshard_after_forward!r} "
                "contradict each other. Pass one of them."
            )
        if self.unsharded_cache_until == "step" and not (self.unsharded_cache_mb and tuning.prefetch):
            raise ValueError(
                "unsharded_cache_until='step' keeps nothing without a budget and the passes. Pass "
                "reshard_after_forward=False for all parameters or set unsharded_cache_mb, and leave prefetch on."
            )

    @classmethod
    def suggestions(cls) -> dict[str, str]:
        """Names that may have been meant, and how they are written."""
        inside = {name: f"tuning=Tuning({name}=...)" for name in option_fields(Tuning)}
        return inside | {f.name: f.name for f in fields(cls)}

    @property
    def unsharded_cache_mb(self) -> float | Literal["auto"]:
        """MiB of whole parameters that are not resharded after forward; ``"auto"``: to be measured."""
        if self.stage < 3:
            return float("inf")
        if self.reshard_after_forward == "auto":
            return "auto"
        return float("inf") if not self.reshard_after_forward else self.tuning.unsharded_cache_mb or 0.0

    @property
    def unsharded_cache_until(self) -> Literal["backward", "step"]:
        """How long they stay."""
        return "step" if self.stage < 3 else self.tuning.unsharded_cache_until

    @property
    def cuda_graph_step(self) -> CaptureMode:
        """Whether the optimizer's step is captured."""
        own = self.tuning.cuda_graph_step
        return self.cuda_graphs if own is None else own

    @property
    def cuda_graph_model(self) -> CaptureMode:
        """Whether forward and backward of compiled code are captured. What is not compiled cannot be, and is not
        asked for by ``cuda_graphs=True``."""
        own = self.tuning.cuda_graph_model
        if own is None:
            return self.cuda_graphs if self.compile else False
        return own

    def controlling_option(self, name: Literal["cuda_graph_step", "cuda_graph_model"]) -> str:
        """Which option the user has set to choose this: itself, or ``cuda_graphs``."""
        return "cuda_graphs" if getattr(self.tuning, name) is None else name
