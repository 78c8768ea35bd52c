"""What an engine and its compiler are given: the options, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lightning_zero.config.option import OnChange, option_fields, options
from lightning_zero.config.options import Options, RecomputePolicy, Tuning
from lightning_zero.errors import UnsupportedError

__all__ = ["OFFLOADABLE", "CompileConfig", "EngineConfig", "changed_options", "check_changes"]

# Of what ``offload`` has names for: plans choose of these, see MemoryPlanner. Master weights can leave before anything
# is trained, when optimizers are known and activations are not; later plans say where that would have helped.
OFFLOADABLE: tuple[str, ...] = ("optimizer", "activations", "parameters")
DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}


@dataclass(frozen=True)
class CompileConfig:
    """The options that compiled code depends on: where two are equal, so is the code. What they mean stands with
    :class:`Options` and :class:`Tuning`, from which :meth:`of` takes them."""

    enabled: bool = True
    backend: str = Options.compile_backend
    dynamic: bool | None = None
    prefetch: bool = True
    gather_group_mb: float = Tuning.gather_group_mb
    reduce_group_mb: float = Tuning.reduce_group_mb
    prefetch_mb: float | None = None
    unsharded_cache_mb: float | str = 0.0
    unsharded_cache_until: str = "backward"
    activation_memory_budget: float = 1.0
    recompute: RecomputePolicy | None = None
    whole_graphs: bool = False
    offload_activations: bool = False
    offload_activations_mb: float | None = None

    @classmethod
    def of(cls, chosen: Options) -> CompileConfig:
        tuning = chosen.tuning
        return cls(
            enabled=chosen.compile,
            backend=chosen.compile_backend,
            dynamic=tuning.compile_dynamic,
            prefetch=tuning.prefetch,
            gather_group_mb=tuning.gather_group_mb,
            reduce_group_mb=tuning.reduce_group_mb,
            prefetch_mb=tuning.prefetch_mb,
            unsharded_cache_mb=chosen.unsharded_cache_mb,
            unsharded_cache_until=chosen.unsharded_cache_until,
            activation_memory_budget=chosen.activation_memory_budget,
            recompute=tuning.recompute,
            whole_graphs=tuning.compile_whole_graphs,
            offload_activations="activations" in chosen.offload,
            offload_activations_mb=tuning.offload_activations_mb,
        )

    @property
    def unsharded_cache_bytes(self) -> float:
        """``unsharded_cache_mb`` in bytes; 0 for ``"auto"``, whose number is not chosen but measured."""
        return 0.0 if isinstance(self.unsharded_cache_mb, str) else self.unsharded_cache_mb * 2**20


@options
class EngineConfig(Options):
    """Everything an :class:`~lightning_zero.engine.Engine` is built from: the options, and what precision decides.

    Args:
        compute_dtype: what autocast computes in; shards have a compute copy in this dtype, written once per step,
            and parameters that are used in it are gathered in it. None without autocast.

    Raises:
        UnsupportedError: choices that do not go together.
    """

    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "parameters" in self.offload and "optimizer" not in self.offload:
            raise UnsupportedError(
                f"offload={self.offload!r}: master weights come and go together with the optimizer's state. Pass "
                "offload=('optimizer', 'parameters')."
            )
        if "parameters" in self.offload and not self.compile:
            raise UnsupportedError(
                f"offload={self.offload!r}: eager code reads master weights themselves, so with compile=False they "
                "stay on the device. Leave compile at True, or 'parameters' out."
            )
        if "activations" in self.offload and not self.compile:
            raise UnsupportedError(
                f"offload={self.offload!r}: activations leave for the host in compiled code alone, and compile=False "
                "leaves none. Leave compile at True, or 'activations' out; around eager code you can put "
                "torch.autograd.graph.save_on_cpu(pin_memory=True)."
            )
        if self.tuning.grad_aliasing:
            self._check_grad_aliasing()

    def _grad_aliasing_conflicts(self) -> dict[str, bool]:
        return {
            "compile=False": not self.compile,
            "stage=1": self.stage == 1,
            f"offload={self.offload!r}": "parameters" in self.offload,
        }

    @property
    def may_alias_gradients(self) -> bool:
        """Whether gradients could lie over compute copies, as far as options say."""
        return not any(self._grad_aliasing_conflicts().values()) and self.compute_dtype is torch.bfloat16

    def _check_grad_aliasing(self) -> None:
        against = self._grad_aliasing_conflicts()
        if any(against.values()):
            raise UnsupportedError(
                "grad_aliasing=True: gradients lie over the copies of weights in bfloat16 that compiled code "
                "reads with stage=2 or 3 and master weights on the device, not with "
                f"{next(option for option, is_so in against.items() if is_so)}. Leave one of them out."
            )

    def over(self, hosts: int, ranks_of_each: int) -> EngineConfig:
        """What the options come to there: where a host has one rank, the weights that lie on it are whole, and compiled
        code reads them where they lie."""
        exchange = hosts > 1 and self.tuning.replicate_over is None
        lie_whole = exchange and ranks_of_each == 1 and self.tuning.compute_shard_group == "host"
        if not (lie_whole and self.compile and self.tuning.prefetch) or self.stage < 3:
            return self
        tuning = replace(self.tuning, unsharded_cache_mb=None, unsharded_cache_until="step")
        return replace(self, reshard_after_forward=False, tuning=tuning)

    @property
    def offload_buffer_bytes(self) -> int:
        """Of the device, through which passes what lies on the host."""
        return int(self.tuning.offload_buffer_mb * 2**20)

    def over_copies(self, hosts: int) -> bool:
        """Whether gradients lie over compute copies.

        Raises:
            UnsupportedError: they should, and there are none in bfloat16, or several hosts.
        """
        if self.tuning.grad_aliasing and (hosts > 1 or self.compute_dtype is not torch.bfloat16):
            where = f"has {hosts} hosts" if hosts > 1 else f"computes in {self.compute_dtype or 'float32'}"
            raise UnsupportedError(
                "grad_aliasing=True is for one host and precision='bf16-mixed', where there are copies of "
                f"weights in bfloat16, and this training {where}. Leave the option out."
            )
        return bool(self.tuning.grad_aliasing)

    @cached_property
    def compiled(self) -> CompileConfig:
        """What compiled code depends on. Made once: each training step asks for it several times."""
        return CompileConfig.of(self)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Dtype of gradients on the wire and in buckets; None: each parameter's own."""
        return None if self.reduce_dtype is None else DTYPES[self.reduce_dtype]


def changed_options(before: Options, now: Options) -> Iterator[tuple[str, OnChange, Any, Any]]:
    """The options that differ: name, what is to happen, both values."""
    for old, new, cls in ((before, now, Options), (before.tuning, now.tuning, Tuning)):
        for name, (_, known) in option_fields(cls).items():
            values = getattr(old, name), getattr(new, name)
            if name != "tuning" and values[0] != values[1]:
                yield name, known.on_change, *values


def check_changes(before: Options, now: Options) -> None:
    """Raises ``UnsupportedError`` where an option differs that nobody could apply any more."""
    for name, on_change, old, new in changed_options(before, now):
        if name == "grad_aliasing" and bool(old) == bool(new):
            continue  # whether nobody or the user says no, nothing of it was settled: only plans go by that
        if on_change is OnChange.REFUSE or (name == "offload" and ("parameters" in old) != ("parameters" in new)):
            raise cannot_change_error(name, old, new)


def cannot_change_error(name: str, old: Any, new: Any) -> UnsupportedError:
    """The error for an option whose effect lasts as long as the model stays sharded."""
    return UnsupportedError(
        f"The model was sharded with {name}={old!r}, which was settled then: {name}={new!r} would change nothing. Pass "
        f"{name}={old!r}, or call lightning_zero.unshard(model) first."
    )
