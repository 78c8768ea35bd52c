"""What a step is estimated from: a model as it is trained, and a cluster as it was measured."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

__all__ = ["Cluster", "Decoder", "Model"]


@dataclass(frozen=True)
class Model:
    """A training, seen from one GPU.

    Attributes:
        parameters: elements of all weights.
        layers: into which weights and work are taken to be divided equally; one layer is gathered at a time.
        tokens: of a GPU in a micro-batch.
        flops_per_token: of forward and backward, with what is computed again.
        activation_bytes: saved for backward by one micro-batch, and what one layer needs while it runs.
        micro_batches: in one step of the optimizer.
        master_bytes: of one element's master weight; likewise the next ones:
        state_bytes: all that the optimizer keeps.
        grad_bytes: the gradient that the optimizer reads.
        compute_bytes: what weights travel and compute in.
        wire_bytes: what gradients travel in.
        backward_share: of the flops.
        kept: gathered weights stay on every GPU: not at all, from forward to backward, or until the step.
    """

    parameters: int
    layers: int
    tokens: int
    flops_per_token: float
    activation_bytes: float = 0.0
    micro_batches: int = 1
    master_bytes: int = 4
    state_bytes: int = 8
    grad_bytes: int = 4
    compute_bytes: int = 2
    wire_bytes: int = 2
    backward_share: float = 2 / 3
    kept: Literal["no", "backward", "step"] = "no"

    def __post_init__(self) -> None:
        _check_positive(self, {"parameters", "layers", "tokens", "flops_per_token", "micro_batches"})
        if not 0 < self.backward_share < 1:
            raise ValueError(f"backward_share={self.backward_share}: pass a share between 0 and 1, 2/3 say.")

    @property
    def flops(self) -> float:
        """Of one micro-batch on one GPU."""
        return self.flops_per_token * self.tokens

    @property
    def step_bytes(self) -> int:
        """That an elementwise step reads and writes for one element: the norm reads the gradient, the update reads
        gradient, master weight and state and writes the last two, the copy is made of the master weight.
        38 for AdamW in float32 with a bfloat16 copy."""
        return 2 * self.grad_bytes + 3 * self.master_bytes + 2 * self.state_bytes + self.compute_bytes


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal GPUs. Bandwidths and flops are those that are reached, not those of data sheets.

    Attributes:
        hosts: number of them.
        gpus: of one host.
        memory: bytes of one GPU that training may take.
        flops: per second of one GPU.
        memory_bandwidth: bytes per second that an elementwise kernel reads and writes.
        inside: bytes per second that a GPU receives from others of its host, while it sends as many.
        across: likewise from other hosts, each GPU by a network card of its own.
        launch_s: seconds that a collective takes to begin.
        inside_hop_s: seconds that a message needs from one GPU to the next in its host.
        across_hop_s: likewise from one host to another.
    """

    hosts: int
    gpus: int
    memory: float
    flops: float
    memory_bandwidth: float
    inside: float
    across: float
    launch_s: float = 14e-6
    inside_hop_s: float = 1.9e-6
    across_hop_s: float = 4e-6

    def __post_init__(self) -> None:
        _check_positive(self, {"hosts", "gpus", "memory", "flops", "memory_bandwidth", "inside", "across"})

    @property
    def ranks(self) -> int:
        """Of the whole cluster, one for each GPU."""
        return self.hosts * self.gpus


@dataclass(frozen=True)
class Decoder:
    """The shape of a Llama-like decoder.

    Attributes:
        parameters: elements of all weights.
        layers: equal ones.
        width: of the residual stream.
        hidden: width of the gated MLP.
        key_value: width of all keys, or of all values.
        vocabulary: number of tokens that there are.
    """

    parameters: int
    layers: int
    width: int
    hidden: int
    key_value: int
    vocabulary: int

    def model(self, sequences: int, length: int, recompute: bool = False, micro_batches: int = 1) -> Model:
        """As it is trained in mixed bfloat16 with AdamW.

        Operations: 6 for each weight and token, and 6 x layers x width x length for each token in causal attention
        (Narayanan et al., 2021, halved since half of the scores are masked); a third more where forward runs again.
        Activations, in bfloat16: the inputs of all matrix products and of attention, or, with ``recompute``, the inputs
        of layers and what one layer saves; and the logits, also in float32.

        Args:
            sequences: of a GPU in a micro-batch.
            length: of each, in tokens.
            recompute: every layer's forward is computed again in backward.
            micro_batches: in one step of the optimizer.
        """
        tokens = sequences * length
        per_layer = 2 * (4 * self.width + 2 * self.key_value + 2 * self.hidden) * tokens
        saved = 2 * self.width * tokens * self.layers + per_layer if recompute else per_layer * self.layers
        flops = 6.0 * self.parameters + 6.0 * self.layers * self.width * length
        return Model(
            self.parameters,
            self.layers,
            tokens,
            flops * (4 / 3 if recompute else 1),
            saved + 6 * self.vocabulary * tokens,
            micro_batches,
            backward_share=3 / 4 if recompute else 2 / 3,
        )


def _check_positive(given: Model | Cluster, names: set[str]) -> None:
    for field in fields(given):
        value, positive = getattr(given, field.name), field.name in names
        if isinstance(value, (int, float)) and (value < 0 or (positive and value == 0)):
            what = "positive" if positive else "non-negative"
            raise ValueError(f"{type(given).__name__}.{field.name}={value}: pass a {what} number.")
