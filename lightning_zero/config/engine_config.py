"""Derive the engine's and the compiler's configuration from the options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lightning_zero.config.options import Options, RecomputePolicy, Tuning
from lightning_zero.config.schema import OnChange, option_fields, options
from lightning_zero.errors import UnsupportedError

# Choices of ``offload`` that a memory plan may add. Master weights can be offloaded before training, when optimizers
# are known and activations are not; later plans only report where that would have helped.
OFFLOADABLE: tuple[str, ...] = ("optimizer", "activations", "parameters")
# Bytes per second in each direction between pinned host memory and a device while both directions copy, used where
# nothing is measured. Measured on an H200 with 16 lanes of PCIe 5.
HOST_BYTES_PER_S = 50e9
DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}


@dataclass(frozen=True)
class CompileConfig:
    """Options that compiled code depends on: equal configurations share code.

    :class:`Options` and :class:`Tuning` describe the fields; :meth:`from_options` reads them.
    """

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
    linear_dtype: str | None = None
    fp8_products: tuple[str, ...] = Tuning.fp8_products
    fp8_exclude: tuple[str, ...] = ()
    fp8_min_gain: float = Tuning.fp8_min_gain
    fp8_gradient_format: str = Tuning.fp8_gradient_format
    fp8_recipe: str = Tuning.fp8_recipe
    fp8_health: bool = False
    fp8_shards: bool = False

    @classmethod
    def from_options(cls, chosen: Options) -> CompileConfig:
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
            linear_dtype=chosen.linear_dtype,
            fp8_products=tuning.fp8_products,
            fp8_exclude=tuning.fp8_exclude,
            fp8_min_gain=tuning.fp8_min_gain,
            fp8_gradient_format=tuning.fp8_gradient_format,
            fp8_recipe=tuning.fp8_recipe,
            fp8_health=tuning.fp8_health_every is not None,
            fp8_shards=tuning.fp8_shards,
        )

    @property
    def unsharded_cache_bytes(self) -> float:
        """Return ``unsharded_cache_mb`` in bytes; 0 for ``"auto"``, which is measured later."""
        return 0.0 if isinstance(self.unsharded_cache_mb, str) else self.unsharded_cache_mb * 2**20


@options
class EngineConfig(Options):
    """Configuration of an :class:`~lightning_zero.engine.Engine`: options, and the precision's dtype.

    It takes all options of :class:`ZeroStrategy` by name, and one more.

    Args:
        compute_dtype: Dtype of autocast, None without it. Parameters that are used in it are gathered in it, from a
            compute shard that is written once per step.

    Raises:
        UnsupportedError: Options contradict each other.

    Examples:
        >>> import torch
        >>> from lightning_zero import EngineConfig
        >>> EngineConfig(stage=2, compute_dtype=torch.bfloat16).stage
        2
    """

    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "parameters" in self.offload and "optimizer" not in self.offload:
            raise UnsupportedError(
                f"offload={self.offload!r}: master weights are offloaded only together with optimizer state. Pass "
                "offload=('optimizer', 'parameters')."
            )
        if "parameters" in self.offload and not self.compile:
            raise UnsupportedError(
                f"offload={self.offload!r}: eager code reads master weights themselves, so with compile=False they "
                "stay on the device. Leave compile at True, or 'parameters' out."
            )
        if "activations" in self.offload and not self.compile:
            raise UnsupportedError(
                f"offload={self.offload!r}: only compiled code offloads activations, and compile=False leaves none. "
                "Leave compile at True, or 'activations' out; for eager code use "
                "torch.autograd.graph.save_on_cpu(pin_memory=True)."
            )
        if self.linear_dtype == "fp8" and not self.compile:
            raise UnsupportedError(
                "linear_dtype='fp8' and compile=False: only compiled code has fp8 products. Leave compile at True, or "
                "linear_dtype out."
            )
        if self.linear_dtype == "fp8" and self.tuning.fp8_recipe == "rowwise" and self.tuning.fp8_shards:
            raise UnsupportedError(
                "fp8_recipe='rowwise' and fp8_shards=True: fp8 shards have one factor for each weight, and rowwise "
                "products need one for each row, and others for each column. Leave fp8_shards out, or pass "
                "Tuning(fp8_recipe='tensorwise', fp8_shards=True)."
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
        """Return True if the options allow gradients to alias compute shards."""
        return not any(self._grad_aliasing_conflicts().values()) and self.compute_dtype is torch.bfloat16

    def _check_grad_aliasing(self) -> None:
        conflicts = self._grad_aliasing_conflicts()
        if any(conflicts.values()):
            raise UnsupportedError(
                "grad_aliasing=True: gradients use the memory of bfloat16 compute shards, which compiled code reads "
                "with stage=2 or 3 and master weights on the device, not with "
                f"{next(option for option, applies in conflicts.items() if applies)}. Leave one of them out."
            )

    def for_hosts(self, hosts: int, ranks_of_each: int) -> EngineConfig:
        """Return the configuration for this topology.

        On hosts of one rank, compute weights are unsharded on the host already, and compiled code reads them in place.
        """
        exchange = hosts > 1 and self.tuning.replicate_over is None
        unsharded = exchange and ranks_of_each == 1 and self.tuning.compute_shard_group == "host"
        if not (unsharded and self.compile and self.tuning.prefetch) or self.stage < 3:
            return self
        tuning = replace(self.tuning, unsharded_cache_mb=None, unsharded_cache_until="step")
        return replace(self, reshard_after_forward=False, tuning=tuning)

    @property
    def quantizes_state(self) -> bool:
        """Return True if optimizer state is stored in 8 bits."""
        return self.tuning.state_dtype == "8bit"

    @property
    def offload_buffer_bytes(self) -> int:
        return int(self.tuning.offload_buffer_mb * 2**20)

    def uses_grad_aliasing(self, hosts: int) -> bool:
        """Return True if gradients alias compute shards.

        Raises:
            UnsupportedError: The option is set, but there is no bfloat16 compute shard, or there are several hosts.
        """
        if self.tuning.grad_aliasing and (hosts > 1 or self.compute_dtype is not torch.bfloat16):
            where = f"has {hosts} hosts" if hosts > 1 else f"computes in {self.compute_dtype or 'float32'}"
            raise UnsupportedError(
                "grad_aliasing=True requires one host and precision='bf16-mixed', but this training "
                f"{where}. Leave the option out."
            )
        return bool(self.tuning.grad_aliasing)

    @cached_property
    def compiled(self) -> CompileConfig:
        """Return the options of compiled code. Cached: each training step reads them several times."""
        return CompileConfig.from_options(self)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Return the dtype of gradients in buckets and collectives; None for each parameter's own."""
        return None if self.reduce_dtype is None else DTYPES[self.reduce_dtype]


def changed_options(before: Options, now: Options) -> Iterator[tuple[str, OnChange, Any, Any]]:
    """Yield the name, the effect and both values of each option that differs."""
    for old, new, cls in ((before, now, Options), (before.tuning, now.tuning, Tuning)):
        for name, (_, spec) in option_fields(cls).items():
            values = getattr(old, name), getattr(new, name)
            if name != "tuning" and values[0] != values[1]:
                yield name, spec.on_change, *values


def check_changes(before: Options, now: Options) -> None:
    """Raise ``UnsupportedError`` if an option differs that cannot change while the model is sharded."""
    for name, on_change, old, new in changed_options(before, now):
        if name == "grad_aliasing" and bool(old) == bool(new):
            continue  # None and False shard alike; only plans distinguish them
        moves_masters = name == "offload" and ("parameters" in old) != ("parameters" in new)
        needs_blocks = name == "state_dtype" and new == "8bit"  # shards may end inside a block
        if on_change is OnChange.REFUSE or moves_masters or needs_blocks:
            raise cannot_change_error(name, old, new)


def cannot_change_error(name: str, old: Any, new: Any) -> UnsupportedError:
    """Return the error for an option that is fixed while the model stays sharded."""
    return UnsupportedError(
        f"The model was sharded with {name}={old!r}, and cannot change to {name}={new!r} while it is sharded. "
        f"Pass {name}={old!r}, or call lightning_zero.unshard(model) first."
    )
