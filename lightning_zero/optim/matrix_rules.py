"""Update rules of optimizers that need a parameter's full matrix, such as Muon.

Such an update has three parts. ``prepare`` updates elementwise state on every rank's flat shard and returns the shard's
part of the update. ``transform`` receives the full updates on one rank, which owns the matrix in this step. ``finish``
applies the transformed update to the shards, elementwise again. ``optim/matrix_exchange.py`` moves the updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.newton_schulz import (
    kind,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_of_batches,
    newton_schulz_workspace,
)

Tensors = dict[str, Tensor]


def at_least_float32(value: Tensor) -> Tensor:
    """Return the value in the dtype in which rules compute: float32, or its own float64."""
    return value if value.dtype is torch.float64 else value.float()


def as_matrices(shape: torch.Size) -> tuple[int, int, int]:
    """Return (number, rows, columns) of the matrices in a parameter of this shape.

    A 3-D parameter is a batch of matrices, such as one per expert. Others are one matrix, see :func:`as_one_matrix`.

    Raises:
        UnsupportedError: The parameter has fewer than two dimensions.
    """
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else as_one_matrix(shape)


def as_one_matrix(shape: torch.Size) -> tuple[int, int, int]:
    """Return (1, rows, columns), with one row per output channel of a convolution.

    Raises:
        UnsupportedError: The parameter has fewer than two dimensions.
    """
    if len(shape) < 2:
        raise UnsupportedError(
            f"An optimizer of matrices got a parameter of shape {tuple(shape)}. Give it the parameters with two or "
            "more dimensions: [p for p in self.parameters() if p.ndim >= 2], and the others to AdamW."
        )
    return 1, shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class MatrixRule:
    """The update of one optimizer of full matrices.

    Attributes:
        settings: Floats of a parameter group that the rule reads, by name; ``"betas.0"`` is the first of a pair.
        state: Names of the parameter-shaped state, which is sharded.
        scalars: (settings and ``counts``, all 0-dim float64; step count) -> 0-dim float64 tensors, including the new
            ``counts`` other than ``step``. The step count is NaN unless ``counts`` has ``"step"``.
        prepare: (parameter, gradient, state, scalars; flat shards in float32) -> (update, new state). Elementwise.
        transform: (updates of shape (number, rows, columns) in ``dtype``) -> transformed updates of the same shape. The
            updates may be overwritten.
        transform_batches: Instead of ``transform``, for matrices of several shapes: (batches of updates, each of shape
            (number, rows, columns)) -> transformed batches.
        kind: (rows, columns) -> value that is equal for matrices that one call of ``transform_batches`` transforms.
        finish: (parameter, update, scalars; flat shards in float32; factor) -> new parameter. Elementwise.
        factor: (parameter's shape) -> number that ``finish`` receives.
        flops: (rows, columns) -> operations of ``transform`` for one matrix, by which matrices are assigned to ranks.
        workspace: (rows, columns) -> elements that ``transform`` allocates for one matrix at its peak, with its result.
            Memory plans count them.
        matrices: (parameter's shape) -> number, rows and columns of its matrices.
        dtype: In which updates are sent and transformed.
        result_dtype: In which transformed updates are stored, of the same size as ``dtype``; None: ``dtype``.
        counts: Names of 0-dim state. ``"step"`` counts the steps, from 1.
        shared: (rows, columns) -> shapes by name of the state of one matrix, such as a value per row. Every rank stores
            it in full, so it should be small. A 3-D parameter has one for each of its matrices.
        transform_with_state: Instead of ``transform`` if there is ``shared`` state: (updates, state with one more
            dimension for the number of matrices, scalars; state in float32) -> (transformed updates, new state).
        captured: The step may be replayed as a CUDA graph. False if a transform makes the host wait for the device.
    """

    settings: tuple[str, ...]
    state: tuple[str, ...]
    scalars: Callable[[Tensors, Tensor], Tensors]
    prepare: Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensors]]
    transform: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, Tensor, Tensors, float], Tensor]
    factor: Callable[[torch.Size], float] = lambda shape: 1.0
    flops: Callable[[int, int], float] = lambda rows, columns: float(rows * columns)
    workspace: Callable[[int, int], float] = lambda rows, columns: 2.0 * rows * columns
    matrices: Callable[[torch.Size], tuple[int, int, int]] = as_matrices
    dtype: torch.dtype = torch.bfloat16
    result_dtype: torch.dtype | None = None
    counts: tuple[str, ...] = ()
    transform_batches: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    kind: Callable[[int, int], Hashable] = lambda rows, columns: (rows, columns)
    shared: Callable[[int, int], dict[str, tuple[int, ...]]] | None = None
    transform_with_state: Callable[[Tensor, Tensors, Tensors], tuple[Tensor, Tensors]] | None = None
    captured: bool = True

    def __post_init__(self) -> None:
        if self.result_dtype is not None and self.result_dtype.itemsize != self.dtype.itemsize:
            raise ValueError(
                f"A MatrixRule has dtype={self.dtype} and result_dtype={self.result_dtype}, which differ in size. Pass "
                "dtypes of one size: results are stored in the memory of updates."
            )

    def batch_key(self, shape: torch.Size) -> Hashable:
        """Return a value that is equal for parameters that are transformed together."""
        together = self.transform_batches is not None and self.shared is None
        return self.kind(*self.matrices(shape)[1:]) if together else shape

    def shared_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        """Return the shapes of the shared state of a parameter of this shape, by name."""
        if self.shared is None:
            return {}
        number, rows, columns = self.matrices(shape)
        lead = (number,) if len(shape) == 3 and (rows, columns) == tuple(shape[1:]) else ()
        return {name: torch.Size((*lead, *own)) for name, own in self.shared(rows, columns).items()}


_FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),  # from torch 2.15 on
}


def muon(group: Mapping[str, Any]) -> MatrixRule:
    """Return the rule of ``torch.optim.Muon`` for a parameter group, with torch's defaults.

    ``flatten=True`` in the group makes a 3-D parameter, such as the weight of ``nn.Conv1d``, one matrix.
    ``split_sizes`` gives the rows of each part of a fused weight, such as those of queries, keys and values. Parts are
    orthogonalized and scaled as if they were parameters of their own.
    """
    return _muon(
        bool(group.get("nesterov", True)),
        tuple(group.get("ns_coefficients", (3.4445, -4.775, 2.0315))),
        int(group.get("ns_steps", 5)),
        float(group.get("eps", 1e-7)),
        group.get("adjust_lr_fn") or "original",
        torch.bfloat16,
        bool(group.get("flatten", False)),
        tuple(group.get("split_sizes") or ()),
    )


@cache
def _muon(
    nesterov: bool,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    adjust: str,
    dtype: torch.dtype,
    flatten: bool = False,
    split_sizes: tuple[int, ...] = (),
) -> MatrixRule:
    """Muon (Jordan et al., 2024), with the learning rate factors of ``torch.optim.Muon``."""
    if adjust not in _FACTORS:
        raise UnsupportedError(f"adjust_lr_fn={adjust!r} of Muon is not known here. Use one of {sorted(_FACTORS)}.")

    def matrices(shape: torch.Size) -> tuple[int, int, int]:
        number, rows, columns = as_one_matrix(shape) if flatten else as_matrices(shape)
        if split_sizes and (sum(split_sizes) != rows or min(split_sizes) < 1):
            raise UnsupportedError(
                f"split_sizes={split_sizes} of Muon do not divide the {rows} rows of a parameter of shape "
                f"{tuple(shape)}. Give rows that add up to {rows}, in a parameter group of the fused weights only."
            )
        return number, rows, columns

    def factor(rows: int, columns: int) -> float:
        return _FACTORS[adjust](rows, columns)

    def flops(rows: int, columns: int) -> float:
        return newton_schulz_flops(rows, columns, coefficients, steps)

    def orthogonalize(updates: Tensor) -> Tensor:
        return newton_schulz(updates, coefficients, steps, eps)

    def orthogonalize_batches(batches: Sequence[Tensor]) -> list[Tensor]:
        return newton_schulz_of_batches(batches, coefficients, steps, eps)

    def orthogonalize_parts(updates: Tensor) -> Tensor:
        parts = updates.split(split_sizes, dim=-2)
        return torch.cat([orthogonalize(part) * factor(*part.shape[-2:]) for part in parts], dim=-2)

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {
            "lr": setting["lr"],
            "keep": 1 - setting["lr"] * setting["weight_decay"],
            "momentum": setting["momentum"],
            "rise": 1 - setting["momentum"],
        }

    def prepare(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        average = torch.lerp(state["momentum_buffer"], grad, s["rise"])
        return torch.lerp(grad, average, s["momentum"]) if nesterov else average, {"momentum_buffer": average}

    def finish(param: Tensor, update: Tensor, s: Tensors, factor: float) -> Tensor:
        return param * s["keep"] - update * (s["lr"] * factor)

    return MatrixRule(
        settings=("lr", "momentum", "weight_decay"),
        state=("momentum_buffer",),
        scalars=scalars,
        prepare=prepare,
        transform=orthogonalize_parts if split_sizes else orthogonalize,
        finish=finish,
        factor=lambda shape: 1.0 if split_sizes else factor(*matrices(shape)[1:]),
        flops=lambda rows, columns: sum(flops(part, columns) for part in split_sizes or (rows,)),
        workspace=lambda rows, columns: newton_schulz_workspace(rows, columns) + (rows * columns if split_sizes else 0),
        matrices=matrices,
        dtype=dtype,
        result_dtype=torch.float16 if dtype is torch.bfloat16 else None,
        transform_batches=None if split_sizes else orthogonalize_batches,
        kind=kind,
    )
