"""Collect the numbers of a training for the report, and summarize them in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_zero.config.text import format_bytes
from lightning_zero.engine import Engine
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge
from lightning_zero.report.engine_report import FORWARD_BACKWARD, memory_by_role, replay_blockers
from lightning_zero.report.step_metrics import exposed_per_pass
from lightning_zero.report.step_recorder import BACKWARD, BETWEEN, FORWARD, OPTIMIZER, StepRecorder, StepTimes

PART_NAMES = {
    FORWARD: "Forward and loss",
    BACKWARD: "Backward and reduce-scatter of gradients",
    OPTIMIZER: "Gradient clipping and optimizer step",
    BETWEEN: "Between batches: data, callbacks, loggers",
}
ROLE_NAMES = {
    "master_shard": "Master weights (shards)",
    "compute_shard": "Weights in the compute dtype (shards)",
    "full_precision_shard": "Weights in full precision (shards)",
    "unsharded_cache": "Unsharded weights that are kept",
    "gradient": "Gradients",
    "deferred_gradient": "Accumulated gradients",
    "optimizer_state": "Optimizer state",
    "matrix_updates": "Full updates of matrices (Muon)",
    "reduce_buckets": "Buckets of reduce-scatters",
    "captures": "CUDA graphs",
    "other": "Activations, temporary tensors, allocator's cache",
    "master_shard_on_host": "Master weights, in host memory",
    "optimizer_state_on_host": "Optimizer state, in host memory",
    "activations_on_host": "Activations, in host memory",
}
OTHER = "other"  # the role of memory that the allocator reserved for no other role
# Shares of the step's time, or of the device's memory, from which the summary suggests something. Chosen by judgement:
# below them, the suggestion can gain less than a tenth of the step.
MUCH_BETWEEN, MUCH_WAITING, MUCH_OPTIMIZER, LITTLE_MEMORY = 0.15, 0.1, 0.3, 0.7


@dataclass(frozen=True)
class TrainingNumbers:
    """Numbers of one training on rank 0; all are measured, unless their name says otherwise.

    Attributes:
        module: class name of the LightningModule.
        steps: optimizer steps of the training so far.
        device: name of the device.
        ranks: number of ranks.
        stage: of ZeRO.
        dtype: of the computation.
        times: of the steps; None if no step was measured.
        roles: bytes by role between steps.
        memory: bytes by part of the step, read at its end; of the allocator, on a CPU of the process.
        device_memory: peaks of the device; None on a CPU.
        exposed_estimated_s: seconds of a step in which compute waits for other ranks; None if unknown.
        exposed_unknown: reason why they are unknown.
        not_captured: reasons why parts of the step are no CUDA graphs; "" for parts that are.
    """

    module: str
    steps: int
    device: str
    ranks: int
    stage: int
    dtype: str
    times: StepTimes | None = None
    roles: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    device_memory: DeviceMemory | None = None
    exposed_estimated_s: float | None = None
    exposed_unknown: str = ""
    not_captured: dict[str, str] = field(default_factory=dict)

    @property
    def on_host(self) -> dict[str, int]:
        return {role: size for role, size in self.roles.items() if role.endswith("_on_host")}

    @property
    def on_device(self) -> dict[str, int]:
        return {role: size for role, size in self.roles.items() if not role.endswith("_on_host")}


def collect_numbers(
    engine: Engine, optimizers: Sequence[torch.optim.Optimizer], recorder: StepRecorder, module: str, steps: int
) -> TrainingNumbers:
    """Return the numbers of a training on this rank. Waits for the device to end the recorded steps."""
    times, device = recorder.times(), engine.device
    roles = memory_by_role(engine, optimizers)
    symmetric = roles.pop("peers")  # counts under the roles, too
    gauge = MemoryGauge(device)
    read = gauge.read() if gauge.reports_memory else None
    if read is not None:
        known = sum(size for role, size in roles.items() if not role.endswith("_on_host"))
        roles[OTHER] = max(read.reserved + symmetric - known, 0)
    exposed: float | str = "no step was measured"
    if times is not None and recorder.gathered_bytes is not None:
        pass_s = (times.parts[FORWARD] + times.parts[BACKWARD]) / times.batches
        exposed = exposed_per_pass(engine, recorder.gathered_bytes, pass_s)
    dtype = engine.config.compute_dtype or next((p.dtype for p in engine.module.parameters()), None)  # type: ignore[union-attr]
    return TrainingNumbers(
        module,
        steps,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper(),
        engine.world_size,
        engine.config.stage,
        str(dtype).removeprefix("torch."),
        times,
        {role: size for role, size in roles.items() if size},
        dict(recorder.memory),
        read,
        exposed * times.batches if times is not None and isinstance(exposed, float) else None,
        exposed if isinstance(exposed, str) else "",
        replay_blockers(engine, optimizers) if device.type == "cuda" else {},
    )


def summary_sentences(numbers: TrainingNumbers) -> list[str]:
    """Return three to five sentences: the largest part, the wait for other ranks, memory, and what to try."""
    times = numbers.times
    if times is None:
        return [
            "No step was measured, because every step of this training compiled something.",
            _memory(numbers),
            "Train for more steps to get times.",
        ]
    part, seconds = max(times.parts.items(), key=lambda one: one[1])
    largest = (
        f"A step takes {times.total_s * 1e3:.1f} ms; the largest part is "
        f"“{PART_NAMES[part]}” with {seconds / times.total_s:.0%} of the time (measured)."
    )
    found = [largest, _waiting(numbers, times), _memory(numbers)]
    reason = numbers.not_captured.get(FORWARD_BACKWARD)
    if reason:
        found.append(f"Forward and backward do not run as CUDA graphs: {reason}.")
    return [*found, _advice(numbers, times)]


def _waiting(numbers: TrainingNumbers, times: StepTimes) -> str:
    exposed = numbers.exposed_estimated_s
    if numbers.ranks == 1:
        return "There is one rank, so that nothing waits for other ranks."
    if exposed is None:
        return f"The time in which compute waits for other ranks is unknown: {numbers.exposed_unknown}."
    return (
        f"Compute waits {exposed * 1e3:.1f} ms of a step for weights and gradients of other ranks, which is "
        f"{exposed / times.total_s:.0%} of the time (estimated)."
    )


def _memory(numbers: TrainingNumbers) -> str:
    if not numbers.on_device:
        return "Memory was not measured."
    role, size = max(numbers.on_device.items(), key=lambda one: one[1])
    total = sum(numbers.on_device.values())
    if numbers.device_memory is None:
        stores = f"Each rank stores {format_bytes(total)} of weights, gradients and optimizer state"
    else:
        stores = f"Each rank takes {format_bytes(total)} of the device's memory at the peak"
    share = size / max(total, 1)
    return f"{stores}; the largest part is “{ROLE_NAMES.get(role, role)}” with {share:.0%} of it (measured)."


def _advice(numbers: TrainingNumbers, times: StepTimes) -> str:
    """Return the first advice that fits, by the share of time that it concerns."""
    total, memory = max(times.total_s, 1e-12), numbers.device_memory
    if times.parts[BETWEEN] > MUCH_BETWEEN * total:
        return (
            "Try to shorten the time between batches: more DataLoader workers (num_workers), a larger "
            "log_every_n_steps, fewer callbacks."
        )
    if (numbers.exposed_estimated_s or 0.0) > MUCH_WAITING * total:
        return (
            "Try to give compute more work for each transfer: a larger batch, longer sequences, or "
            "reshard_after_forward=False if memory allows."
        )
    if times.parts[OPTIMIZER] > MUCH_OPTIMIZER * total:
        return "Try fewer optimizer steps for the same samples: a larger batch, or accumulate_grad_batches."
    if numbers.not_captured.get(FORWARD_BACKWARD):
        return "Try to remove the reason against CUDA graphs: they save the launch time of each kernel."
    if memory is not None and memory.taken < LITTLE_MEMORY * memory.total:
        free = format_bytes(memory.total - memory.taken)
        return f"Try a larger batch: {free} of the device's memory stay free."
    if numbers.dtype == "float32":
        return 'Compute takes most of the time: try precision="bf16-mixed" if the device has fast bfloat16 products.'
    return "Compute takes most of the time, so that a smaller model or faster products are what can shorten the step."
