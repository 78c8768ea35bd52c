"""The update rule of NorMuon (Li et al., "NorMuon: Making Muon more efficient and scalable", 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.matrix_rules import MatrixRule, Tensors, muon

_EPS = 1e-8  # keeps divisors from zero, as in the authors' code


def normuon(group: Mapping[str, Any]) -> MatrixRule:
    """Return NorMuon's rule for a group with the settings of ``torch.optim.Muon`` and ``muon_beta2``.

    Muon's orthogonalized update is divided by the root of the running mean of each row's squares, and scaled back to
    its Frobenius norm. ``variance_neuron`` has one value per row, which every rank stores.

    Example:
        A class of your own with these settings::

            class NorMuon(torch.optim.Muon):
                def __init__(self, params, muon_beta2=0.95, **options):
                    super().__init__(params, **options)
                    for group in self.param_groups:
                        group["muon_beta2"] = muon_beta2


            lightning_zero.register_matrix_rule(NorMuon, normuon)
    """
    return with_neuron_norms(muon(group), tuple(group.get("split_sizes") or ()))


@cache
def with_neuron_norms(rule: MatrixRule, split_sizes: tuple[int, ...] = ()) -> MatrixRule:
    """Return a rule whose transformed updates have rows of about equal norm.

    Args:
        split_sizes: Rows of the parts that keep their norms, see :func:`~lightning_zero.optim.matrix_rules.muon`.
    """

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return rule.scalars(setting, step) | {"rise2": 1 - setting["muon_beta2"]}

    def transform(updates: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        wide = rule.transform(updates).to(state["variance_neuron"].dtype)
        variance = torch.lerp(state["variance_neuron"], wide.square().mean(-1, keepdim=True), s["rise2"])
        even = wide / (variance.sqrt() + _EPS)
        sizes = split_sizes or (wide.size(-2),)
        pairs = zip(wide.split(sizes, -2), even.split(sizes, -2), strict=True)
        parts = [part * (_norms(before) / _norms(part).clamp(min=_EPS)) for before, part in pairs]
        return torch.cat(parts, -2), {"variance_neuron": variance}

    return replace(
        rule,
        settings=(*rule.settings, "muon_beta2"),
        scalars=scalars,
        workspace=_wider(rule.workspace),
        shared=lambda rows, columns: {"variance_neuron": (rows, 1)},
        transform_with_state=transform,
        result_dtype=None,
    )


def _norms(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)


def _wider(workspace: Callable[[int, int], float]) -> Callable[[int, int], float]:
    # The factor, its square and its quotient are float32, which counts as two elements of bfloat16.
    return lambda rows, columns: max(workspace(rows, columns), 8.0 * rows * columns)
