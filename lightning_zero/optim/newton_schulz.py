"""Newton-Schulz iterations, which orthogonalize matrices by products alone.

:func:`newton_schulz` computes the quintic iteration of Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024), as ``torch.optim.Muon`` does. bfloat16 updates on GPUs are iterated in float16 by
:func:`iterate_in_half`: with as many operations per second, its results are nearer to those of float32.

Matrices of several shapes are iterated together if their :func:`kind` is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.optim.symmetric_products import can_launch, symmetric_product

Coefficients = tuple[float, float, float]

# Matrices are scaled to this Frobenius norm in float16. So rows that are 1e-4 of the largest keep their precision, and
# singular values may grow 60-fold before an element overflows.
SCALE = 1024.0
# Bounds how much the rounding errors of a Gram matrix grow until it is computed again. With Muon's coefficients, up to
# three iterations use one, and errors stay below those of torch's loop in bfloat16 (tests/unit/optim).
MAX_GROWTH = 150.0
# Columns per row from which iterations on Gram matrices are used. For square matrices they save no operations.
MIN_ASPECT = 1.5


def newton_schulz(updates: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Return approximate orthogonal factors of matrices, as ``torch.optim.Muon`` computes them.

    Args:
        updates: Matrices of shape (number, rows, columns).
        coefficients: a, b, c of ``a X + b (X X^T) X + c (X X^T)^2 X``.
        steps: Number of iterations.
        eps: Lower bound of the Frobenius norm by which a matrix is divided first.

    Returns:
        Matrices of the same shape, in the dtype of ``updates``, or in float16 for bfloat16 on a GPU.
    """
    return newton_schulz_of_batches([updates], coefficients, steps, eps)[0]


def newton_schulz_of_batches(
    batches: Sequence[Tensor], coefficients: Coefficients, steps: int, eps: float
) -> list[Tensor]:
    """Return the results of :func:`newton_schulz` for batches whose matrices have one :func:`kind`."""
    first = batches[0]
    if first.dtype is torch.bfloat16 and first.is_cuda:
        return iterate_in_half(batches, coefficients, steps, eps)
    return [_iterate(updates, coefficients, steps, eps) for updates in batches]


def _by_shape(batches: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the batches of each shape of matrices."""
    found: dict[torch.Size, list[int]] = {}
    for number, updates in enumerate(batches):
        found.setdefault(updates.shape[1:], []).append(number)
    return list(found.values())


def _iterate(updates: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    tall = updates.size(-2) > updates.size(-1)
    x = updates / torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True).clamp(min=eps)

    def iterate(x: Tensor) -> Tensor:
        gram = symmetric_product(x.mT if tall else x)
        polynomial = symmetric_product(gram, base=gram, alpha=c, beta=b)
        del gram  # bounds the memory, see newton_schulz_workspace
        # Tall matrices are multiplied from the right, so that nothing is transposed.
        left, right = (x, polynomial) if tall else (polynomial, x)
        return torch.baddbmm(x, left, right, beta=a)

    for _ in range(steps):
        x = iterate(x)
    return x


def iterate_in_half(batches: Sequence[Tensor], coefficients: Coefficients, steps: int, eps: float) -> list[Tensor]:
    """Return what :func:`newton_schulz_of_batches` returns, in float16 and with fewer operations.

    An iteration multiplies ``X`` by a polynomial of its Gram matrix ``X X^T``. The Gram matrix of the result is a
    polynomial of the first one, too. So several iterations need only products of the Gram matrix's size, and one with
    ``X``. They are symmetric, of which half is computed. See Zhang et al., "Gram Newton-Schulz" (2026).

    Small singular values are lost among the rounding errors of a Gram matrix. So it is computed from ``X`` again after
    a few iterations, see :func:`iterations_per_gram`.
    """
    if not steps:
        return [_iterate(updates, coefficients, steps, eps).half() for updates in batches]
    rows, columns = batches[0].shape[-2:]
    groups = _by_shape(batches)
    xs = [_scaled([batches[number] for number in numbers], eps) for numbers in groups]
    left = steps
    for iterations in iterations_per_gram(rows, columns, coefficients, steps):
        left -= iterations
        factor = _factor([_gram_matrices(xs, min(rows, columns))], coefficients, iterations)
        factors = factor.split([len(x) for x in xs])
        xs = [_multiply(x, part, 1.0 if left else 1 / SCALE) for x, part in zip(xs, factors, strict=True)]
        del factor, factors  # bounds the memory, see newton_schulz_workspace
    results: dict[int, Tensor] = {}
    for numbers, x in zip(groups, xs, strict=True):
        results |= zip(numbers, x.split([len(batches[number]) for number in numbers]), strict=True)
    return [results[number] for number in range(len(batches))]


def _scaled(batches: Sequence[Tensor], eps: float) -> Tensor:
    """Return all matrices of these batches of one shape in float16, with the Frobenius norm ``SCALE``."""
    sizes, first = [len(updates) for updates in batches], batches[0]
    x = torch.empty(sum(sizes), *first.shape[1:], dtype=torch.float16, device=first.device)
    for updates, out in zip(batches, x.split(sizes), strict=True):
        norm = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True, dtype=torch.float32)
        factors = SCALE / norm.clamp(min=eps)
        if updates.is_cuda and updates.is_contiguous() and can_launch(updates.device):
            from lightning_zero.optim.scale_kernel import scale  # imports Triton

            scale(updates, factors, out)
        else:
            torch.mul(updates, factors, out=out)
    return x


def _gram_matrices(xs: Sequence[Tensor], size: int) -> Tensor:
    """Return the Gram matrices of all, divided by the square of ``SCALE``."""
    gram = xs[0].new_empty(sum(map(len, xs)), size, size)
    for x, out in zip(xs, gram.split([len(x) for x in xs]), strict=True):
        symmetric_product(x.mT if x.size(-2) > x.size(-1) else x, alpha=SCALE**-2, out=out)
    return gram


def _multiply(x: Tensor, factor: Tensor, alpha: float) -> Tensor:
    first, second = (x, factor) if x.size(-2) > x.size(-1) else (factor, x)
    return torch.baddbmm(x.new_empty(()), first, second, beta=0.0, alpha=alpha)


def _factor(grams: list[Tensor], coefficients: Coefficients, iterations: int) -> Tensor:
    """Return the matrices by which iterations multiply those with these Gram matrices.

    The list has one batch and is emptied: if Dynamo evaluates frames, a caller holds arguments until the call returns.
    """
    gram = grams.pop()
    a, b, c = coefficients
    factor = None
    for number in range(iterations):
        polynomial = symmetric_product(gram, base=gram, alpha=c, beta=b, shift=a)
        # All are polynomials of one matrix: they commute, and their products are symmetric.
        factor = polynomial if factor is None else symmetric_product(factor, polynomial)
        if number + 1 < iterations:
            gram = symmetric_product(symmetric_product(gram, polynomial), polynomial)
    assert factor is not None
    return factor


def kind(rows: int, columns: int) -> tuple[int, bool]:
    """Return a value that is equal for matrices that are iterated together."""
    return min(rows, columns), _shares_gram(rows, columns)


def iterations_per_gram(rows: int, columns: int, coefficients: Coefficients, steps: int) -> tuple[int, ...]:
    """Return how many of the iterations use one Gram matrix, for each that is computed from the matrices."""
    most = 1
    if _shares_gram(rows, columns):
        while most < steps and coefficients[0] ** (2 * most) <= MAX_GROWTH:
            most += 1
    return tuple(min(most, steps - begin) for begin in range(0, steps, most))


def newton_schulz_flops(rows: int, columns: int, coefficients: Coefficients, steps: int) -> float:
    """Return the multiplications of :func:`iterate_in_half` for one matrix: of symmetric products, half."""
    short, long = sorted((rows, columns))
    counts = iterations_per_gram(rows, columns, coefficients, steps)
    # For each Gram matrix: itself, polynomials, factors after the first, two products for the next one, X.
    products = sum(count + (count - 1) + 2 * (count - 1) for count in counts)
    return float(short * short * (len(counts) * (long / 2 + long) + products * short / 2))


def newton_schulz_workspace(rows: int, columns: int) -> float:
    """Return the elements of 16 bits that :func:`newton_schulz` allocates for a matrix at its peak."""
    square = min(rows, columns) ** 2
    # The Gram matrix, its polynomial, their product, the next Gram matrix, the factor.
    squares = 5 if _shares_gram(rows, columns) else 2
    return float(rows * columns + max(rows * columns + square, squares * square))


def _shares_gram(rows: int, columns: int) -> bool:
    return max(rows, columns) >= MIN_ASPECT * min(rows, columns)
