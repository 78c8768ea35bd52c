"""Complex parameters train, are clipped, saved and resumed as in a single process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, Regression, close, make_loader, make_trainer, seeded, whole_state
from tests.ranks.pool import Ranks

MODES = INPUTS // 2 + 1


class Spectral(nn.Module):
    """Multiply frequencies by complex weights, some of them conjugated, and one stored as pairs of real numbers."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(4))
        self.weight = nn.Parameter(draw(MODES, 2 * MODES, dtype=torch.complex64) * 0.3)
        self.back = nn.Parameter(draw(2 * MODES, MODES, dtype=torch.complex64) * 0.3)
        self.pairs = nn.Parameter(draw(MODES, MODES, 2) * 0.3)
        self.bias = nn.Parameter(draw(MODES, dtype=torch.complex128 if wide else torch.complex64) * 0.3)
        self.phase = nn.Parameter(torch.tensor(0.3 - 0.1j))
        self.unused = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.complex64))
        self.out = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x.float())
        modes = modes @ self.weight.conj() @ self.back + modes @ torch.view_as_complex(self.pairs)
        modes = (modes + self.bias.to(modes.dtype)) * self.phase + self.empty.sum()
        return self.out(torch.fft.irfft(modes, n=INPUTS))


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-4, centered=True, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-4),
}


class Fourier(Regression):
    def __init__(self, optimizer: str = "Adam", wide: bool = False) -> None:
        super().__init__()
        self.optimizer = optimizer
        with seeded():
            self.net = Spectral(wide)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():  # torch's own clipping fails on conjugated gradients
            if param.grad is not None and param.grad.is_conj():
                param.grad = param.grad.resolve_conj()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


Way = tuple[str, str, dict[str, Any]]

WAYS: list[Way] = [
    ("eager", "Adam", {"gather_transport": "collective", "reduce_transport": "collective"}),
    ("compiled", "AdamW", {"state_dict_type": "sharded"}),
    ("eager", "SGD", {"wide": True}),
    ("captured", "Adam", {}),
    ("compiled, captured", "RMSprop", {"accumulate_grad_batches": 2}),
    ("compiled", "Adagrad", {"stage": 1, "accumulate_grad_batches": 2}),
    ("compiled", "Adam", {"stage": 2, "wide": True}),
]


def pairs(values: Any) -> Any:
    """Return all values with complex tensors as pairs of real numbers, of which the oracle can take differences."""
    if isinstance(values, dict):
        return {str(key): pairs(value) for key, value in values.items()}
    if isinstance(values, list):
        return [pairs(value) for value in values]
    return torch.view_as_real(values) if isinstance(values, Tensor) and values.is_complex() else values


def fit(kind: str, optimizer: str, options: dict[str, Any], path: str, resume: bool = False) -> dict[str, Tensor]:
    options = {"gradient_clip_val": 0.2} | options
    module = Fourier(optimizer, options.pop("wide", False))
    trainer = make_trainer(kind, max_epochs=1 + resume, **options)
    trainer.fit(module, make_loader(kind), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    found = whole_state(module)
    close(module)
    torch._dynamo.reset()
    return found


def plain(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("wide", "accumulate_grad_batches", "precision") if key in options}


def train(ways: list[Way], folder: Path) -> None:
    for number, (kind, optimizer, options) in enumerate(ways):
        what = f"{kind}, {optimizer}, {options}"
        theirs, ours = str(folder / f"single{number}.ckpt"), str(folder / f"ours{number}.ckpt")
        expected = fit("single", optimizer, plain(options), f"{theirs}-{torch.distributed.get_rank()}")
        found = fit(kind, optimizer, options, ours)
        assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
        assert_close_relative(pairs(found), pairs(expected), 1e-5, what=f"{what}: weights")


def resume(ways: list[Way], folder: Path) -> None:
    for number, (kind, optimizer, options) in enumerate(ways):
        what = f"{kind}, {optimizer}, {options}"
        theirs, ours = str(folder / f"single{number}.ckpt"), str(folder / f"ours{number}.ckpt")
        expected = fit("single", optimizer, plain(options), f"{theirs}-0", resume=True)
        found = fit(kind, optimizer, options, ours, resume=True)
        assert_close_relative(pairs(found), pairs(expected), 1e-5, what=f"{what}: weights, resumed")
        if "state_dict_type" not in options:
            files = [torch.load(file, weights_only=True)["optimizer_states"][0] for file in (ours, f"{theirs}-0")]
            assert_close_relative(*(pairs(file["state"]) for file in files), 1e-4, what=f"{what}: optimizer in files")


@pytest.mark.parametrize(("first", "then"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_complex_parameters_train_and_resume_as_in_a_single_process(
    ranks: Ranks, tmp_path: Path, first: int, then: int
) -> None:
    ranks.run(first, train, WAYS, tmp_path, deadline=300)
    ranks.run(then, resume, WAYS, tmp_path, deadline=300)
