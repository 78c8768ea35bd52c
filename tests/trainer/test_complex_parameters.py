"""Complex parameters train, are clipped, saved and resumed as under DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, Regression, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks

MODES = INPUTS // 2 + 1


class Spectral(nn.Module):
    """Multiplies frequencies by complex weights, one of which is stored as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.weight = nn.Parameter(torch.randn(MODES, MODES, dtype=torch.complex64, generator=draw) * 0.3)
        self.pairs = nn.Parameter(torch.randn(MODES, 2, generator=draw) * 0.3)
        self.bias = nn.Parameter(torch.randn(MODES, dtype=torch.complex128, generator=draw) * 0.3)
        self.phase = nn.Parameter(torch.tensor(0.3 - 0.1j))
        self.none = nn.Parameter(torch.zeros(0, 3, dtype=torch.complex64))
        self.out = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        modes = modes @ self.weight.conj() + modes * torch.view_as_complex(self.pairs) + self.bias.to(modes.dtype)
        modes = modes * self.phase + self.none.sum()
        return self.out(torch.fft.irfft(modes, n=INPUTS))


class Fourier(Regression):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = Spectral()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)


def state_of(module: Any) -> dict[str, Tensor]:
    found = whole_state(module)
    assert found["net.weight"].dtype is torch.complex64
    assert found["net.bias"].dtype is torch.complex128
    return {name: torch.view_as_real(value) if value.is_complex() else value for name, value in found.items()}


def fit_and_resume(kind: str, name: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    loader = make_loader(kind, 4)
    first, trainer = Fourier(), make_trainer(kind, gradient_clip_val=0.2, **options)
    trainer.fit(first, loader)
    trainer.save_checkpoint(name)
    states = [state_of(first)]
    close(first)
    second = Fourier()
    make_trainer(kind, gradient_clip_val=0.2, max_epochs=2, **options).fit(second, loader, ckpt_path=name)
    states.append(state_of(second))
    close(second)
    return states


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("eager", {}),
    ("compiled", {"shard_checkpoint": True}),
    ("eager", {"gather_transport": "collective"}),
    ("captured", {}),
    ("compiled", {"stage": 1, "accumulate_grad_batches": 2}),
]


def compare(ways: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (kind, options) in enumerate(ways):
        plain = {key: value for key, value in options.items() if key == "accumulate_grad_batches"}
        expected = fit_and_resume("ddp", f"ddp{number}.ckpt", plain)
        ours = fit_and_resume(kind, f"ours{number}.ckpt", options)
        for what, mine, theirs in zip(("after a fit", "resumed"), ours, expected, strict=True):
            assert_close_relative(mine, theirs, 1e-5, what=f"{kind}, {options}: weights {what}")
        torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_complex_parameters_train_and_resume_as_under_ddp(
    ranks: Ranks, world_size: int, way: tuple[str, dict[str, Any]]
) -> None:
    ranks.run(world_size, compare, [way], deadline=300)
