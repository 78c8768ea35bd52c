"""The rule of SOAP (Vyas et al., "SOAP: Improving and stabilizing Shampoo using Adam", 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.matrix_rules import MatrixRule, Tensors

_EPS = 1e-30  # on the diagonal of the first Gram matrices, as in the authors' code
_SIDES = ("rows", "columns")


def soap(group: Mapping[str, Any]) -> MatrixRule:
    """Return SOAP's rule for a parameter group with the settings of ``pytorch_optimizer.SOAP``.

    Adam steps in the eigenbases of running means of ``G G^T`` and ``G^T G``. The first step only begins these means.
    Every rank stores all state: two squares of each side up to ``max_precondition_dim``, and two matrices of the
    parameter's size. A 3-D parameter is a batch of matrices.
    """
    beta = group["shampoo_beta"]
    return _soap(
        float(group["betas"][1] if beta is None else beta),
        int(group["precondition_frequency"]),
        int(group["max_precondition_dim"]),
        bool(group["correct_bias"]),
        bool(group["normalize_gradient"]),
    )


@cache
def _soap(gram_beta: float, every: int, most: int, corrects: bool, normalizes: bool) -> MatrixRule:
    def sides(rows: int, columns: int) -> dict[str, int]:
        sizes = zip(_SIDES, (rows, columns), strict=True)
        return {side: size for side, size in sizes if size <= most}

    def shared(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        squares: dict[str, tuple[int, ...]] = {
            f"{name}_{s}": (n, n) for s, n in sides(rows, columns).items() for name in ("gram", "basis")
        }
        return {"exp_avg": (rows, columns), "exp_avg_sq": (rows, columns)} | squares

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        done = step - 1  # the first step changes no parameter
        rate = setting["lr"]
        if corrects:
            rate = rate * (1 - setting["betas.1"] ** done).sqrt() / (1 - setting["betas.0"] ** done)
        begins = done < 1
        return {
            "rate": torch.where(begins, 0.0, rate),
            "keep": torch.where(begins, 1.0, 1 - setting["lr"] * setting["weight_decay"]),
            "rise1": 1 - setting["betas.0"],
            "rise2": 1 - setting["betas.1"],
            "eps": setting["eps"],
            "done": done,
        }

    def transform(grads: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        done = int(s["done"])
        finite = bool(grads.isfinite().all()) and bool(s["skip"] == 0 if "skip" in s else True)
        if not finite:
            return torch.full_like(grads, torch.nan), state
        used = list(sides(*grads.shape[1:]))
        grams = {side: state[f"gram_{side}"].lerp(_gram(grads, side), 1 - gram_beta) for side in used}
        new = {f"gram_{side}": gram for side, gram in grams.items()}
        if done < 1:
            return torch.zeros_like(grads), state | new | {f"basis_{s}": _eigenbasis(grams[s]) for s in used}
        bases = {side: state[f"basis_{side}"] for side in used}
        average = state["exp_avg"].lerp(grads, s["rise1"])
        squares = state["exp_avg_sq"].lerp(_project(grads, bases).square(), s["rise2"])
        update = _project_back(_project(average, bases) / (squares.sqrt() + s["eps"]), bases)
        if normalizes:
            update = update / (update.square().mean((-2, -1), keepdim=True).sqrt() + s["eps"])
        if done % every == 0:
            for side in used:
                bases[side], order = _next_basis(grams[side], bases[side])
                dim = -2 if side == "rows" else -1
                index = order.unsqueeze(-1 if side == "rows" else -2).expand_as(squares)
                squares = squares.gather(dim, index)
        new |= {f"basis_{side}": basis for side, basis in bases.items()}
        return update, state | new | {"exp_avg": average, "exp_avg_sq": squares}

    def finish(param: Tensor, update: Tensor, s: Tensors, factor: float) -> Tensor:
        return (param - update * s["rate"]) * s["keep"]

    def flops(rows: int, columns: int) -> float:
        # Gram matrices and projections in each step, and eigenbases in some.
        return float(sum(8 * rows * columns * n + 10 * n**3 / every for n in sides(rows, columns).values()) or 1)

    return MatrixRule(
        settings=("lr", "betas.0", "betas.1", "weight_decay", "eps"),
        state=(),
        scalars=scalars,
        prepare=lambda param, grad, state, s: (grad, {}),
        transform=_without_state,
        finish=finish,
        flops=flops,
        # Old and new state, projections.
        workspace=lambda rows, columns: (
            6.0 * rows * columns + sum(6.0 * n * n for n in sides(rows, columns).values()) + 2 * rows * columns
        ),
        dtype=torch.float32,
        counts=("step",),
        shared=shared,
        transform_with_state=transform,
        captured=False,
    )


def _without_state(updates: Tensor) -> Tensor:
    raise AssertionError("SOAP transforms with its state")


def _gram(grads: Tensor, side: str) -> Tensor:
    return grads @ grads.mT if side == "rows" else grads.mT @ grads


def _project(values: Tensor, bases: Tensors) -> Tensor:
    values = bases["rows"].mT @ values if "rows" in bases else values
    return values @ bases["columns"] if "columns" in bases else values


def _project_back(values: Tensor, bases: Tensors) -> Tensor:
    values = bases["rows"] @ values if "rows" in bases else values
    return values @ bases["columns"].mT if "columns" in bases else values


def _eigenbasis(gram: Tensor) -> Tensor:
    """Return eigenvectors as columns, those of the largest eigenvalues first."""
    eye = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    return torch.linalg.eigh(gram + _EPS * eye).eigenvectors.flip(-1)


def _next_basis(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis after one power iteration, and the order in which it has the old one's vectors."""
    product = gram @ basis
    order = (basis * product).sum(-2).argsort(-1, descending=True)
    product = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    return torch.linalg.qr(product).Q, order
