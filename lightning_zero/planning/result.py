"""What a plan says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_zero.budget.facts import CAPTURE_GAP_SHARE
from lightning_zero.budget.plan import MemoryPlan
from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.config.text import format_table
from lightning_zero.planning.seconds import StepSeconds
from lightning_zero.planning.training import StepEstimate
from lightning_zero.profiling.devices import Device

__all__ = ["PassEstimates", "TrainingPlan"]


@dataclass(frozen=True)
class PassEstimates:
    """A pass forward and backward.

    Attributes:
        compiled: as generated code runs it; None where nothing is compiled, or could be traced.
        eager: the first one, which is not compiled; None where it could not be traced.
        why: not, in words.
        buffers: bytes of the module's buffers.
    """

    compiled: StepEstimate | None
    eager: StepEstimate | None
    why: str
    buffers: int


@dataclass(frozen=True)
class TrainingPlan:
    """Of one rank; prints as tables.

    Attributes:
        device: of each rank.
        ranks: how many.
        parameters: elements of all weights.
        roles: bytes that stay from step to step, by what they are for.
        passes: what forward and backward take besides.
        temporary: bytes of an optimizer's own step, which the first one is.
        graphs: forward and backward are replayed as CUDA graphs.
        seconds: of a step; None where no pass could be traced.
        memory: how ``memory`` would be spent; None without it.
        first_peak: the most bytes of the first step, which runs eagerly; None where that is not known.
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
        """Bytes that are there between steps."""
        return sum(self.roles.values())

    @property
    def transient(self) -> int | None:
        """Bytes of activations, gathered weights and temporary tensors at the peak of a steady step; None where that is
        not known."""
        step = self.passes.compiled or self.passes.eager
        if step is None:
            return None
        replayed = self.graphs and self.passes.compiled is not None
        return int(step.peak + replayed * (CAPTURE_GAP_SHARE * step.peak + step.outside))

    @property
    def peak(self) -> int:
        """The most bytes of a steady step, as far as they are known."""
        return self.stays + (self.transient or 0)

    def first_peak_with(self, eager: StepEstimate, besides: float = 0.0) -> int:
        """The most bytes of the first step, with a pass: before it optimizers have made no state, and what it took is
        given back before they do. ``besides``: are there in that pass, and never again."""
        fresh = int(self.stays - self.roles.get("optimizer_state", 0) + besides)
        return max(fresh + eager.peak, self.stays + self.temporary)

    @property
    def on_device(self) -> int:
        """The most bytes that the device is asked for, with what no allocator sees."""
        return int(max(self.peak, self.first_peak or 0) + self.device.context)

    def known(self) -> dict[str, str]:
        """How sure each number is."""
        context = f"{self.device.context / 2**30:g} GiB for contexts and libraries, nominal"
        return {
            "parameters, bytes": "counted",
            "transient": "estimated, from traced operations, as torch partitions them, as fused code would run, with "
            "what replays add",
            "first_step_peak": "estimated, from traced operations",
            "on_device": f"these, and {context}",
            "seconds": "estimated, from operations and bytes, at nominal shares of what data sheets say",
            "copies to and from the host": f"{HOST_BYTES_PER_S / 1e9:g} GB/s each way, nominal",
        }

    @property
    def fits(self) -> bool:
        return self.on_device <= self.device.memory

    def facts(self) -> dict[str, Any]:
        """What is shown to people: GiB by name, None where they are not known, and whether they fit."""
        told = self.as_dict()
        sizes = {name: size for name, size in self.roles.items() if size}
        sizes |= {name: told[name] for name in ("transient", "peak", "first_step_peak", "on_device", "device_memory")}
        in_gib = {f"{name} (GiB)": None if size is None else size / 2**30 for name, size in sizes.items()}
        return {"parameters": f"{self.parameters:,}", **in_gib, "fits": self.fits}

    def milliseconds(self) -> dict[str, float]:
        """Of a step, by what they are for; empty where no pass could be traced."""
        return {} if self.seconds is None else {k: 1e3 * s for k, s in self.as_dict()["seconds"].items()}

    def __str__(self) -> str:
        facts = {name: _in_words(fact) for name, fact in self.facts().items()}
        lines = [f"Estimated, for each of {self.ranks} x {self.device.name}:", *_listed(facts)]
        if self.memory is not None:
            lines.append(self.memory.with_advice())
        if self.seconds is not None:
            lines += ["ms of a step:", *_listed({name: f"{ms:.1f}" for name, ms in self.milliseconds().items()})]
        if self.passes.why:
            lines.append(f"Not all could be traced: {self.passes.why}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON can hold."""
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


def _in_words(fact: float | str | bool | None) -> str:
    if fact is None:
        return "not known"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return f"{fact:.2f}" if isinstance(fact, float) else str(fact)


def _listed(facts: dict[str, str]) -> list[str]:
    return format_table(("", ""), [(name.replace("_", " "), fact) for name, fact in facts.items()])
