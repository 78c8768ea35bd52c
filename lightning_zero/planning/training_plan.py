"""The result of ``lightning_zero.plan``: bytes and seconds of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.config.text import format_bytes, format_table
from lightning_zero.memory_planner.inputs import CAPTURE_GAP_SHARE
from lightning_zero.memory_planner.memory_plan import MemoryPlan
from lightning_zero.planning.fake_step import StepEstimate
from lightning_zero.planning.step_seconds import StepSeconds
from lightning_zero.profiling.devices import Device

MEMORY_HEADS, TIME_HEADS = ("memory", "size", "meaning"), ("part of a step", "time", "meaning")
# Meanings of the roles in an engine's memory report.
MEANINGS = {
    "master_shard": "this GPU's part of the weights that the optimizer updates",
    "gradient": "this GPU's part of the gradients",
    "deferred_gradient": "gradients of earlier micro-batches, before their reduction",
    "compute_shard": "this GPU's part of the weights, in the precision of forward and backward",
    "full_precision_shard": "this host's part of weights that keep their own precision",
    "unsharded_cache": "weights of all GPUs that stay unsharded between steps",
    "optimizer_state": "this GPU's part, such as the moments of AdamW",
    "offload_buffers": "staging buffers for copies to and from the host",
    "matrix_updates": "full updates of matrices, for optimizers such as Muon",
    "reduce_buckets": "gradients during their reduction between GPUs",
    "buffers": "the module's buffers",
}


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
        temporary: Bytes that the first optimizer step takes for a moment.
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
        context = f"{_size(self.device.context)} for contexts and libraries, nominal"
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

    def memory_rows(self) -> list[tuple[str, str, str]]:
        """Return names, sizes with units and meanings of one GPU's memory, in the order of their sum."""
        rows = [(_spoken(name), _size(size), MEANINGS.get(name, "")) for name, size in self.roles.items() if size]
        context = _size(self.device.context)
        return [
            *rows,
            ("activations", _size(self.transient), "activations, unsharded weights and temporary tensors at the peak"),
            ("peak", _size(self.peak), "sum of the rows above: the largest memory of a step"),
            (
                "peak of first step",
                _size(self.first_peak),
                "this step runs eagerly, and makes the optimizer's state",
            ),
            ("needed", _size(self.on_device), f"the higher of the two peaks, and {context} for CUDA and its libraries"),
            ("available", _size(self.device.memory), f"memory of one {self.device.name}"),
        ]

    def time_rows(self) -> list[tuple[str, str, str]]:
        """Return names, times with units and meanings of a step's parts; empty if no pass could be traced."""
        if self.seconds is None:
            return []
        return [
            ("compute", _ms(self.seconds.compute), "forward and backward of all micro-batches"),
            ("communication", _ms(self.seconds.exposed), "time in which the GPU waits for other GPUs (exposed)"),
            ("optimizer", _ms(self.seconds.optimizer), "gradient norm, clipping, update and copy of the weights"),
            ("step", _ms(self.seconds.total), "sum of the rows above"),
        ]

    @property
    def title(self) -> str:
        """Return a heading with the number of parameters and of GPUs."""
        gpus = "one" if self.ranks == 1 else f"each of {self.ranks}"
        return f"Estimate for {self.parameters:,} parameters on {gpus} {self.device.name}"

    def verdict(self) -> str:
        """Return a sentence that says if the training fits, and by how much."""
        room = self.device.memory - self.on_device
        if self.fits and self.memory is not None and not self.memory.fits:
            return (
                f"The training fits into a GPU, but not into the limit of {_size(self.memory.limit)}: "
                f"{_size(self.memory.missing)} are missing. Raise the limit, or take fewer samples in a batch."
            )
        if self.fits:
            return f"The training fits: {_size(room)} of each GPU stay free."
        return (
            f"The training does not fit: each GPU lacks {_size(-room)}. Use more GPUs or a smaller batch, or set "
            "memory='auto' (--memory auto), which plans recomputation and offload."
        )

    def sources(self) -> list[str]:
        """Return sentences on how the numbers were found."""
        lines = [
            "Weights, gradients and optimizer state are counted. Activations are estimated from traced operations.",
            "Times are estimated from operations and bytes, at the shares of the data sheet that trainings reach.",
        ]
        if self.memory is not None or self.roles.get("offload_buffers"):
            rate = f"{HOST_BYTES_PER_S / 1e9:g} GB/s"
            lines.append(f"Copies to and from the host are estimated at {rate} in each direction.")
        if self.graphs:
            lines.append("CUDA graphs may need more memory than estimated: they do not share it with other code.")
        if self.passes.why:
            lines.append(f"A part could not be traced, and is not counted: {self.passes.why}")
        return lines

    def __str__(self) -> str:
        lines = [self.title, "", *format_table(MEMORY_HEADS, self.memory_rows()), "", self.verdict()]
        if self.memory is not None:
            lines += ["", self.memory.with_advice()]
        if self.seconds is not None:
            lines += ["", *format_table(TIME_HEADS, self.time_rows())]
        return "\n".join([*lines, "", *self.sources()])

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


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _size(nbytes: float | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
