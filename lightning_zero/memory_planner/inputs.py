"""Numbers that a memory plan is made from, and their relation to the user's options.

:class:`PlannerInputs` is what a plan needs; :class:`EngineMemoryFacts` is the part that the compiler does not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.config.options import Tuning
from lightning_zero.config.schema import OFFLOAD_CHOICES

MIB, GIB = 2**20, 2**30
DEFAULT_BUFFER_MB = Tuning().offload_buffer_mb
MASTERS = "parameters"  # name of the fp32 master weights in the option ``offload``

# Fragmentation of a CUDA graph's memory pool, as a share of its tensors. Measured on two H200s.
CAPTURE_GAP_SHARE = 0.04


@dataclass(frozen=True)
class MemoryConfig:
    """One way to spend the device's memory. The field names are keys in plan files.

    Attributes:
        weights: bytes of unsharded weights that are kept instead of gathered again.
        reduce_once: accumulate full gradients and reduce them in the last micro-batch, as with stage 1.
        ring: bytes of the staging buffers for offloaded state; 0 uses the options' size.
        grad_aliasing: gradients alias the bfloat16 compute copies of the weights.
    """

    activation_memory_budget: float = 1.0
    offload: tuple[str, ...] = ()
    weights: float = 0.0
    until: Literal["backward", "step"] = "backward"
    reduce_once: bool = False
    ring: int = 0
    grad_aliasing: bool = False


@dataclass(frozen=True)
class Constraints:
    """Fields of :class:`MemoryConfig` that a plan may choose. The user or the training fixes the others.

    Attributes:
        activations: choose the share of activations that is saved.
        weights: choose the bytes of weights that are kept.
        offload: names that may move to the host in addition to those already there; None if the user has chosen.
        gradients: choose whether micro-batches reduce their gradients once.
        ring: choose the size of the staging buffers.
        below: exclusive upper bound of the share of activations; None without one.
    """

    activations: bool = True
    weights: bool = True
    offload: tuple[str, ...] | None = ()
    gradients: bool = True
    ring: bool = False
    grad_aliasing: bool = False
    below: float | None = None


@dataclass(frozen=True)
class GradientBytes:
    """Sizes of a rank's gradients.

    Attributes:
        full: bytes of all unsharded gradients if micro-batches can defer their reduction, else 0.
        reduced: bytes of the gradients that one pass reduces.
        aliasable: bytes saved if gradients alias compute copies; 0 if they cannot.
    """

    full: float = 0.0
    reduced: float = 0.0
    aliasable: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Durations that weigh the choices.

    Attributes:
        pass_s: seconds of one forward and backward. A guess still puts choices in order.
        forward_s: compute seconds of a compiled forward by its cost estimates; 0 if unknown. Measured steps may be
            longer because their launches are not captured yet.
        passes: forward and backward passes in one optimizer step.
        gather_s: seconds to gather one byte of weights, or to reduce one byte of gradients, without overlap.
        host_bytes_per_s: bandwidth to the host and from it, each direction at the same time.
    """

    pass_s: float = 0.1
    forward_s: float = 0.0
    passes: float = 1.0
    gather_s: float = 0.0
    host_bytes_per_s: float = HOST_BYTES_PER_S
    pass_known: str = "guessed"
    host_known: str = "nominal"

    @property
    def guessed(self) -> bool:
        """Return True if ``pass_s`` was not measured."""
        return self.pass_known.startswith("guessed")

    def __str__(self) -> str:
        link = f"{self.host_known} ({self.host_bytes_per_s / 1e9:.0f} GB/s each way)"
        return f"of a pass {self.pass_known} ({self.pass_s * 1e3:.0f} ms), of copies to and from the host {link}"


@dataclass(frozen=True)
class PlannerInputs:
    """Bytes and seconds that a plan is made from: on every rank those of the tightest rank.

    Attributes:
        source: origin of the numbers, for the user.
        limit: bytes that the device's peak must not exceed.
        peak: bytes of the device at its peak under ``current``, everything on it included.
        activations: bytes saved for backward if nothing is recomputed.
        weights: bytes of unsharded weights, in their compute dtype, that a pass gathers twice.
        states: bytes of optimizer state that is sharded like parameters, on device or host.
        masters: bytes of the shards that the optimizer steps.
        ring: bytes of the staging buffers for offloaded state that the options give.
        prefetches_state: the staging buffers are filled and drained during forward and backward, as with the captured
            step of a single optimizer.
        host_free: bytes free on the host, for this rank.
    """

    source: str
    limit: float
    peak: float
    current: MemoryConfig = field(default_factory=MemoryConfig)
    activations: float = 0.0
    weights: float = 0.0
    states: float = 0.0
    masters: float = 0.0
    gradients: GradientBytes = field(default_factory=GradientBytes)
    ring: float = 0.25 * GIB
    prefetches_state: bool = True
    host_free: float = float("inf")
    times: StepTimes = field(default_factory=StepTimes)


@dataclass(frozen=True)
class EngineMemoryFacts:
    """Facts about an engine's memory that do not depend on compiled code.

    Attributes:
        fixed: bytes that persist between steps without optimizer state, plus communication buffers.
        states: bytes of optimizer state that is sharded like parameters.
        unallocated_states: bytes of ``states`` that the optimizer has not made yet.
        matrix_updates: bytes of full updates of matrices, which exist from the first step of their optimizer on.
        masters: bytes of master weights that can move to the host.
        full_weights: bytes of all unsharded weights in their compute dtype; 0 on one rank.
        ring: bytes of the staging buffers that the options give.
        host_free: bytes free on the host, for this rank; None if unknown.
        offloadable: names of the option ``offload`` that this training can still move to the host.
        before_sharding: names that could have moved only before the model was sharded.
        on_host: names that are on the host and stay there.
        gather_s: seconds to gather one byte.
        host_bytes_per_s: measured bandwidth of each direction; None if it was not measured.
    """

    fixed: int = 0
    states: int = 0
    unallocated_states: int = 0
    matrix_updates: int = 0
    masters: int = 0
    gradients: GradientBytes = field(default_factory=GradientBytes)
    full_weights: int = 0
    ring: int = 0
    prefetches_state: bool = True
    host_free: float | None = None
    offloadable: tuple[str, ...] = ()
    before_sharding: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ()
    gather_s: float = 0.0
    host_bytes_per_s: float | None = None

    def during_training(self) -> EngineMemoryFacts:
        """Return the facts once training has begun: master weights cannot move any more."""
        movable = tuple(name for name in self.offloadable if name != MASTERS)
        before = self.before_sharding if movable == self.offloadable else (MASTERS,)
        return replace(self, offloadable=movable, before_sharding=before)

    def without_deferred_reduction(self) -> EngineMemoryFacts:
        """Return the facts of a training without announced gradient accumulation."""
        return replace(self, gradients=replace(self.gradients, full=0))

    def without_grad_aliasing(self) -> EngineMemoryFacts:
        """Return the facts of a training whose gradients cannot alias compute copies."""
        return replace(self, gradients=replace(self.gradients, aliasable=0))

    def inputs(self, source: str, limit: float, peak: float, current: MemoryConfig) -> PlannerInputs:
        """Return planner inputs in which nothing is known about a pass."""
        link = self.host_bytes_per_s
        known = "measured" if link else "nominal"
        return PlannerInputs(
            source,
            limit,
            peak,
            current,
            states=self.states,
            masters=self.masters,
            gradients=self.gradients,
            ring=self.ring,
            prefetches_state=self.prefetches_state,
            host_free=float("inf") if self.host_free is None else self.host_free,
            times=StepTimes(gather_s=self.gather_s, host_bytes_per_s=link or HOST_BYTES_PER_S, host_known=known),
        )


def memory_config(config: EngineConfig, on_host: Iterable[str] = ()) -> MemoryConfig:
    """Return the configuration that the options alone give. ``on_host``: names already on the host."""
    offload = tuple(name for name in OFFLOAD_CHOICES if name in {*config.offload, *on_host})
    over = bool(config.tuning.grad_aliasing)
    return MemoryConfig(
        config.activation_memory_budget, offload, until=config.unsharded_cache_until, grad_aliasing=over
    )


def constraints_of(config: EngineConfig, offloadable: Iterable[str] = ()) -> Constraints:
    """Return the choices that the options leave open: only options at their defaults are planned.

    Args:
        offloadable: names of the option ``offload`` that this training can move to the host.
    """
    tuning = config.tuning
    planned = config.memory is not None
    kept = (
        config.stage == 3
        and tuning.prefetch
        and tuning.unsharded_cache_mb is None
        and bool(config.reshard_after_forward)
    )
    return Constraints(
        activations=planned and config.compile and config.activation_memory_budget == 1.0 and tuning.recompute is None,
        weights=config.compile and kept and (planned or config.reshard_after_forward == "auto"),
        offload=tuple(offloadable) if planned and not config.offload else None,
        gradients=planned and config.stage == 3,
        ring=planned and tuning.offload_buffer_mb == DEFAULT_BUFFER_MB,
        grad_aliasing=planned and tuning.grad_aliasing is None and config.may_alias_gradients,
    )


def apply_memory_config(config: EngineConfig, chosen: MemoryConfig) -> EngineConfig:
    """Return the options with ``chosen`` filled in, except for kept weights, which are no option."""
    offload = config.offload if set(chosen.offload) == set(config.offload) else chosen.offload
    tuning = config.tuning
    if chosen.ring:
        tuning = replace(tuning, offload_buffer_mb=chosen.ring / MIB)
    if chosen.grad_aliasing:
        tuning = replace(tuning, grad_aliasing=True)
    budget = chosen.activation_memory_budget
    return replace(config, activation_memory_budget=budget, offload=cast(Any, offload), tuning=tuning)
