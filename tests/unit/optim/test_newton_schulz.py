"""Newton-Schulz iterations beside those of single matrices in float32, and in float16 on Gram matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_zero.optim.newton_schulz import (
    iterate_in_half,
    iterations_per_gram,
    kind,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_of_batches,
    newton_schulz_workspace,
)
from tests.helpers.muon import orthogonalize

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
DEFAULTS = COEFFICIENTS, 5, 1e-7


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 8)])
def test_a_batch_equals_single_matrices(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    updates = torch.randn(3, *shape)
    expected = torch.stack([orthogonalize(update, *DEFAULTS) for update in updates])
    torch.testing.assert_close(newton_schulz(updates.clone(), *DEFAULTS), expected, rtol=1e-4, atol=1e-5)


def test_singular_values_are_near_one() -> None:
    torch.manual_seed(0)
    updates = torch.randn(1, 30, 50)
    for found in (newton_schulz(updates, *DEFAULTS), iterate_in_half([updates], *DEFAULTS)[0].float()):
        values = torch.linalg.svdvals(found[0])
        assert values.min() > 0.5
        assert values.max() < 1.5


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 3)])
def test_zeros_stay_zeros(shape: tuple[int, int, int]) -> None:
    assert not newton_schulz(torch.zeros(shape), *DEFAULTS).any()
    assert not iterate_in_half([torch.zeros(shape)], *DEFAULTS)[0].any()


# -- float16

ROWS, COLUMNS = 96, 256


def spectra() -> dict[str, Tensor]:
    """Return matrices with singular values as those of gradients: some large ones, and many small ones."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, ROWS)).Q for size in (ROWS, COLUMNS))
    number = torch.arange(1, ROWS + 1)
    noise = torch.randn(ROWS, COLUMNS)
    return {
        "noise": noise,
        "inverse": left * number**-1.0 @ right.T,
        "exponential": left * 10 ** (-4 * number / ROWS) @ right.T,
        "one large": 3e-4 * noise + torch.outer(left[:, 0], right[:, 0]),
        "low rank": left[:, :8] @ right[:, :8].T + 1e-4 * noise,
    }


def in_bfloat16(update: Tensor) -> Tensor:
    """Return the result of the loop of ``torch.optim.Muon``."""
    a, b, c = COEFFICIENTS
    x = update / update.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@pytest.mark.parametrize("kind", spectra())
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("columns", [ROWS, COLUMNS])  # with a Gram matrix for each iteration, and for several
def test_float16_is_nearer_to_float32_than_torchs_loop(kind: str, tall: bool, columns: int) -> None:
    update = spectra()[kind][:, :columns].bfloat16()
    expected = orthogonalize(update.float(), *DEFAULTS)
    updates = (update.T if tall else update)[None].expand(2, -1, -1)
    found = iterate_in_half([updates], *DEFAULTS)[0]
    assert found.dtype is torch.float16
    assert torch.equal(found[0], found[1])

    def error(result: Tensor) -> float:
        return float((result.float() - expected).norm() / expected.norm())

    assert error(found[0].T if tall else found[0]) < 0.8 * error(in_bfloat16(update))


def test_batches_of_several_shapes_equal_batches_of_their_own() -> None:
    torch.manual_seed(0)
    shapes = [(2, 24, 60), (1, 60, 24), (3, 24, 40), (1, 24, 60)]
    assert {kind(*shape[1:]) for shape in shapes} == {(24, True)}
    batches = [torch.randn(shape).bfloat16() for shape in shapes]
    for function in (newton_schulz_of_batches, iterate_in_half):
        for updates, found in zip(batches, function(batches, *DEFAULTS), strict=True):
            assert found.shape == updates.shape
            torch.testing.assert_close(found, function([updates], *DEFAULTS)[0])


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_the_scale_of_updates_does_not_matter(scale: float) -> None:
    torch.manual_seed(0)
    update = torch.randn(1, 24, 40)
    found = iterate_in_half([(update * scale).bfloat16()], COEFFICIENTS, 5, eps=1e-30)[0]
    torch.testing.assert_close(found.float(), newton_schulz(update, *DEFAULTS), rtol=0.03, atol=0.03)


def test_rows_of_tiny_norm_keep_their_direction() -> None:
    torch.manual_seed(0)
    update = torch.randn(1, 40, 100)
    update[:, 20:] *= 1e-4
    expected = newton_schulz(update, *DEFAULTS)[0, 20:]
    found = iterate_in_half([update], *DEFAULTS)[0][0, 20:].float()
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_nan_is_not_hidden() -> None:
    updates = torch.zeros(2, 8, 16)
    updates[1, 3, 3] = torch.nan
    found = iterate_in_half([updates], *DEFAULTS)[0]
    assert found[1].isnan().all()
    assert not found[0].any()


@pytest.mark.parametrize(
    ("shape", "coefficients", "steps", "expected"),
    [
        ((2048, 5632), COEFFICIENTS, 5, (3, 2)),
        ((5632, 2048), COEFFICIENTS, 6, (3, 3)),
        ((2048, 5632), COEFFICIENTS, 1, (1,)),
        ((2048, 5632), (8.3, -23.6, 17.3), 5, (2, 2, 1)),  # larger steps lose small values sooner
        ((2048, 2048), COEFFICIENTS, 5, (1, 1, 1, 1, 1)),
    ],
)
def test_iterations_of_one_gram_matrix(
    shape: tuple[int, int], coefficients: tuple[float, float, float], steps: int, expected: tuple[int, ...]
) -> None:
    assert iterations_per_gram(*shape, coefficients, steps) == expected


def test_operations_and_memory_are_those_of_the_products() -> None:
    """Gram matrices of 2 x 4 save operations; counted by hand."""
    square, wide = (newton_schulz_flops(2, columns, COEFFICIENTS, 5) for columns in (2, 4))
    assert square == 5 * (4 + 4 + 8)  # Gram matrix, polynomial, product
    assert wide == 2 * (8 + 16) + 4 * (5 + 3 + 6)
    assert newton_schulz_flops(4, 2, COEFFICIENTS, 5) == wide
    assert newton_schulz_workspace(2, 2) == 12
    assert newton_schulz_workspace(4, 2) == 28
    assert newton_schulz_workspace(2, 16) == 68
