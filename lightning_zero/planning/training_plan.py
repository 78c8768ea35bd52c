"""The result of ``lightning_zero.plan``: bytes and seconds of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.config.text import format_table
from lightning_zero.memory_planner.inputs import CAPTURE_GAP_SHARE
from lightning_zero.memory_planner.memory_plan import MemoryPlan
from lightning_zero.planning.fake_step import StepEstimate
from lightning_zero.planning.step_seconds import StepSeconds
from lightning_zero.profiling.devices import Device

__all__ = ["PassEstimates", "TrainingPlan"]


@dataclass(frozen=True)
class PassEstimates:
    """Estimates of a forward and backward.

    Attributes:
        compiled: of compiled code; None if nothing is compiled or could be traced.
        eager: of the first pass, which is not compiled; None if it could not be traced.
        why: reason why one could not be traced.
        buffers: bytes of the module's buffers.
    """

    compiled: StepEstimate | None
    eager: StepEstimate | None
    why: str
    buffers: int


@dataclass(frozen=True)
class TrainingPlan:
    """Estimated memory and time of one rank; prints as tables.

    Attributes:
        device: Device of each rank.
        ranks: Number of ranks.
        parameters: Number of elements of all weights.
        roles: Bytes that persist between steps, by role.
        passes: Estimates of forward and backward.
        temporary: Bytes of the optimizer's own step, which is the first one.
        graphs: True if forward and backward are CUDA graphs.
        seconds: Seconds of a step by part; None if no pass could be traced.
        memory: Plan for the option ``memory``; None without it.
        first_peak: Peak bytes of the eager first step; None if unknown.
    """

    device: Device
    ranks: int
    parameters: int
    roles: dict[str, int]
    passes: PassEstimates
    temporary: int
    graphs: bool
    seconds: StepSeconds | None = None
    memory: MemoryPlan | None = None
    first_peak: int | None = None

    @property
    def stays(self) -> int:
        """Return the bytes that persist between steps."""
        return sum(self.roles.values())

    @property
    def transient(self) -> int | None:
        """Return the bytes at the peak that do not persist between steps; None if unknown."""
        step = self.passes.compiled or self.passes.eager
        if step is None:
            return None
        captured = self.graphs and self.passes.compiled is not None
        return int(step.peak * (1 + CAPTURE_GAP_SHARE * captured))

    @property
    def peak(self) -> int:
        """Return the peak bytes of a steady step, as far as they are known."""
        return self.stays + (self.transient or 0)

    def first_peak_with(self, eager: StepEstimate, extra: float = 0.0) -> int:
        """Return the peak bytes of the first step, whose pass is ``eager``.

        Before that pass optimizers have no state, and its memory is freed before they make it. ``extra``: bytes that
        are allocated during that pass only.
        """
        fresh = int(self.stays - self.roles.get("optimizer_state", 0) + extra)
        return max(fresh + eager.peak, self.stays + self.temporary)

    @property
    def on_device(self) -> int:
        """Return the peak bytes of the device, with those that no allocator sees."""
        return int(max(self.peak, self.first_peak or 0) + self.device.context)

    def known(self) -> dict[str, str]:
        """Return how sure each number is."""
        context = f"{self.device.context / 2**30:g} GiB for contexts and libraries, nominal"
        return {
            "parameters, bytes": "counted",
            "transient": "estimated, from traced operations, as torch partitions them and as fused code would run. "
            "CUDA graphs may take more: their memory does not serve other code",
            "first_step_peak": "estimated, from traced operations",
            "on_device": f"these, and {context}",
            "seconds": "estimated, from operations and bytes, at nominal shares of what data sheets say",
            "copies to and from the host": f"{HOST_BYTES_PER_S / 1e9:g} GB/s each way, nominal",
        }

    @property
    def fits(self) -> bool:
        """Return True if the peak is at most the memory of the device."""
        return self.on_device <= self.device.memory

    def facts(self) -> dict[str, Any]:
        """Return GiB by name for display, None if unknown, and whether they fit."""
        values = self.as_dict()
        sizes = {name: size for name, size in self.roles.items() if size}
        sizes |= {name: values[name] for name in ("transient", "peak", "first_step_peak", "on_device", "device_memory")}
        in_gib = {f"{name} (GiB)": None if size is None else size / 2**30 for name, size in sizes.items()}
        return {"parameters": f"{self.parameters:,}", **in_gib, "fits": self.fits}

    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds of a step by part; empty if no pass could be traced."""
        return {} if self.seconds is None else {k: 1e3 * s for k, s in self.as_dict()["seconds"].items()}

    def __str__(self) -> str:
        facts = {name: _words(fact) for name, fact in self.facts().items()}
        lines = [f"Estimated, for each of {self.ranks} x {self.device.name}:", *_table(facts)]
        if self.memory is not None:
            lines.append(self.memory.with_advice())
        if self.seconds is not None:
            lines += ["ms of a step:", *_table({name: f"{ms:.1f}" for name, ms in self.milliseconds().items()})]
        if self.passes.why:
            lines.append(f"Not all could be traced: {self.passes.why}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold."""
        step = self.passes.compiled or self.passes.eager
        return {
            "device": self.device.name,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "bytes": self.roles,
            "saved_for_backward": None if step is None else step.saved,
            "activations_on_host": None if step is None else step.graphs.offloaded,
            "transient": self.transient,
            "peak": self.peak,
            "first_step_peak": self.first_peak,
            "on_device": self.on_device,
            "device_memory": int(self.device.memory),
            "fits": self.fits,
            "flops": None if step is None else step.flops,
            "seconds": None if self.seconds is None else vars(self.seconds) | {"total": self.seconds.total},
            "memory": None if self.memory is None else self.memory.as_dict(),
            "known": self.known(),
            "not_traced": self.passes.why,
        }


def _words(fact: float | str | bool | None) -> str:
    if fact is None:
        return "not known"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return f"{fact:.2f}" if isinstance(fact, float) else str(fact)


def _table(facts: dict[str, str]) -> list[str]:
    return format_table(("", ""), [(name.replace("_", " "), fact) for name, fact in facts.items()])
