"""What is known of a training's memory and time, and what may be done about it: all that a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_zero.budget.curve import Curve
from lightning_zero.config.engine_config import HOST_BYTES_PER_S

__all__ = ["CAPTURE_GAP_SHARE", "MemoryConfig", "PlannerInputs", "Constraints", "GradientBytes", "StepTimes"]

GIB = 2**30

# Memory of a captured graph that lies between its tensors, as a share of what they take: measured on two H200s.
CAPTURE_GAP_SHARE = 0.04


@dataclass(frozen=True)
class MemoryConfig:
    """One way to spend the device's memory; the same as options.

    Attributes:
        activation_memory_budget: as the option of that name.
        offload: likewise.
        weights: bytes of whole weights that are not gathered again.
        until: how long they stay.
        reduce_once: gradients of accumulated micro-batches stay whole until the last one's backward, as with stage 1.
        ring: bytes of the buffers through which goes what lies on the host; 0: as many as the options say.
        over_copies: gradients lie, in bfloat16, over the copies of weights that were computed with.
    """

    activation_memory_budget: float = 1.0
    offload: tuple[str, ...] = ()
    weights: float = 0.0
    until: Literal["backward", "step"] = "backward"
    reduce_once: bool = False
    ring: int = 0
    over_copies: bool = False


@dataclass(frozen=True)
class Constraints:
    """What may be chosen; the rest is set by hand, or cannot be otherwise.

    Attributes:
        activations: how many are computed again.
        weights: how many stay whole.
        offload: what may go to the host, in addition to what is there now; None where the user has chosen.
        gradients: whether those of micro-batches stay whole.
        ring: how much of the device what lies on the host passes through.
        over_copies: whether gradients lie over copies of weights, where they can.
        below: share of activations of which is known that as many do not fit; None where that is of none.
    """

    activations: bool = True
    weights: bool = True
    offload: tuple[str, ...] | None = ()
    gradients: bool = True
    ring: bool = False
    over_copies: bool = False
    below: float | None = None


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of them.

    Attributes:
        whole: of all, whole, where those of micro-batches can wait to be reduced; 0 where they cannot.
        wire: of those that a pass reduces.
        over: that a rank's would not take if they lay over copies of weights; 0 where they cannot.
    """

    whole: float = 0.0
    wire: float = 0.0
    over: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """What things cost, in seconds.

    Attributes:
        pass_s: of one forward and backward. Where nobody has measured it, some number: it puts choices in order.
        forward_s: of compute in a compiled forward, as its passes reckon, who choose what leaves beside it; 0 where
            they do not know. Steps that are not replayed yet may take longer, for what their host does.
        passes: of them in a step of the optimizer.
        gather_s: of gathering one byte of weights, with nothing beside it; and of reducing one of gradients.
        host_bytes_per_s: that go to the host and come from it, at once.
        pass_known: how ``pass_s`` is, in words.
        host_known: likewise.
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
        """Whether ``pass_s`` only puts choices in order."""
        return self.pass_known.startswith("guessed")

    def in_words(self) -> str:
        """How sure what is reckoned from these is."""
        link = f"{self.host_known} ({self.host_bytes_per_s / 1e9:.0f} GB/s each way)"
        return f"of a pass {self.pass_known} ({self.pass_s * 1e3:.0f} ms), of copies to and from the host {link}"


@dataclass(frozen=True)
class PlannerInputs:
    """Bytes of the rank that has the least left; the same on every rank.

    Attributes:
        source: how they are known, in words.
        limit: that the peak of the device is to stay within.
        peak: of the device, as things are ``now``, with all that anybody has taken of it.
        now: the way in which memory is spent at that peak.
        activations: that would be saved for backward if nothing were computed again.
        curve: what passes take at their peak by the share that is saved, with what is on the host; None where nobody
            reckons that.
        weights: whole ones, in the dtype they are used in, that a pass gathers twice.
        states: of optimizers, as large as shards, wherever they are.
        masters: of the shards that optimizers step.
        gradients: of all weights that are trained.
        ring: of buffers through which goes what lies on the host, as the options say.
        ahead: what these hold of optimizers' state comes, and leaves, beside forward and backward: captured steps of
            one optimizer.
        host: free on the host, for this rank.
        speed: what things cost.
    """

    source: str
    limit: float
    peak: float
    now: MemoryConfig = field(default_factory=MemoryConfig)
    activations: float = 0.0
    curve: Curve | None = None
    weights: float = 0.0
    states: float = 0.0
    masters: float = 0.0
    gradients: GradientBytes = field(default_factory=GradientBytes)
    ring: float = 0.25 * GIB
    ahead: bool = True
    host: float = float("inf")
    speed: StepTimes = field(default_factory=StepTimes)
