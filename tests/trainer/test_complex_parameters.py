"""Complex parameters train, are clipped, saved and resumed as in a single process."""

import contextlib
import copy
import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_zero
from lightning_zero import UnsupportedError
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import EAGER, engine_for
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    Regression,
    check_captured,
    close,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks

MODES = INPUTS // 2 + 1


class Spectral(nn.Module):
    """Multiply frequencies by complex weights, some conjugated, one stored as pairs of real numbers."""

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
        self.first = nn.Linear(INPUTS, INPUTS)  # backward goes on through all of the others
        self.out = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.first(x).float())
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
    ("compiled", "SGD", {"ranks_per_host": 1, "replicate_over": "hosts"}),
    ("compiled", "Adam", {"offload": ("optimizer",), "reduce_transport": "copy"}),
]


def pairs(values: Any) -> Any:
    """Return all values, complex tensors as pairs of real numbers that the oracle can subtract."""
    if isinstance(values, dict):
        return {str(key): pairs(value) for key, value in values.items()}
    if isinstance(values, list):
        return [pairs(value) for value in values]
    return torch.view_as_real(values) if isinstance(values, Tensor) and values.is_complex() else values


def fit(kind: str, optimizer: str, options: dict[str, Any], path: str, resume: bool = False) -> dict[str, Tensor]:
    options = {"gradient_clip_val": 0.2} | options
    if torch.distributed.get_world_size() == 1:
        options.pop("reduce_transport", None)  # one rank reduces nothing
    module = Fourier(optimizer, options.pop("wide", False))
    trainer = make_trainer(kind, max_epochs=1 + resume, **options)
    trainer.fit(module, make_loader(kind), ckpt_path=path if resume else None)
    check_captured(trainer)
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


@pytest.mark.exhaustive_variants("2-3-all", "3-1-all")
@pytest.mark.parametrize(
    ("first", "then", "ways"), [(2, 3, WAYS[:3]), (2, 3, WAYS), (3, 1, WAYS)], ids=["2-3-three", "2-3-all", "3-1-all"]
)
def test_complex_parameters_train_and_resume_as_in_a_single_process(
    ranks: Ranks, tmp_path: Path, first: int, then: int, ways: list[Way]
) -> None:
    ranks.run(first, train, ways, tmp_path, deadline=300)
    ranks.run(then, resume, ways, tmp_path, deadline=300)


def _full(param: Tensor) -> Tensor:
    return torch.randn(param.shape, dtype=param.dtype, generator=torch.Generator().manual_seed(7))


def _pickled(param: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


NUMBERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "norms": lambda p, g: [torch.linalg.vector_norm(g, order) for order in (2, 1, math.inf, -math.inf, 3.5)],
    "norm methods": lambda p, g: [p.norm(), g.norm(p=1), *torch._foreach_norm([p.detach(), g, torch.ones(3)])],
    "wide norms": lambda p, g: [torch.linalg.vector_norm(p, dtype=torch.complex128), nn.utils.get_total_norm([g])],
    "sums": lambda p, g: [p.sum(), g.mean(), (p * g.conj()).sum(), p.abs().max()],
    "spread": lambda p, g: [g.std(unbiased=False), p.var(correction=0), p.var(correction=0.5)],
    "parts": lambda p, g: [p.real.norm(), g.imag.sum(), torch.real(p).max(), p.conj().imag.min(), p.angle().sum()],
    "tests": lambda p, g: [p.isfinite().all(), (p != 0).count_nonzero(), float(torch.equal(p, p.conj().conj()))],
    "with full values": lambda p, g: [(p * _full(p)).sum(), float(torch.equal(_full(p).copy_(p), p))],
    "copies": lambda p, g: [(_full(p) * other).sum() for other in (_pickled(p), _pickled(g.conj()))],
    "deep copies": lambda p, g: [copy.deepcopy(p).norm(), copy.copy(g).sum()],
    "sizes": lambda p, g: [*p.shape, p.numel(), p.nbytes, p.element_size(), *p.stride()],
}

TORCH_REFUSES: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda p: p.max(),
    "amin": lambda p: p.amin(),
    "aminmax": lambda p: torch.aminmax(p),
    "clamp": lambda p: p.clamp(min=0),
}


def _write(param: Any) -> None:
    with torch.no_grad():
        param.mul_(0.9 - 0.2j).add_(_full(param), alpha=0.5)
        param.real.mul_(2)
        param.imag.add_(0.5)
        param.data.imag = _full(param).real
        param.data.real = param.data.imag * 0.5
        param.data.imag = 0.1
        param.data = param.data.conj() * 1.1
        param.mul_(1 / param.norm())


def use() -> None:
    with seeded():
        model = Spectral(wide=True)
    plain = copy.deepcopy(model)
    x = torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(1))
    with engine_for(model, EAGER) as engine:
        with engine.train_step():
            loss = model(x).square().sum()
        loss.backward()
        plain(x).square().sum().backward()
        of_both = [
            (name, mine, theirs)
            for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
            if theirs.is_complex() and theirs.grad is not None and theirs.dim() and theirs.numel()
        ]
        assert [name for name, *_ in of_both] == ["weight", "back", "bias"]
        for name, mine, theirs in of_both:
            assert mine.grad is not None
            assert mine.dtype is mine.grad.dtype is theirs.dtype
            theirs.grad = theirs.grad.resolve_conj()
            for what, function in NUMBERS.items():
                ours, expected = ([torch.as_tensor(v) for v in function(p, p.grad)] for p in (mine, theirs))
                assert [v.dtype for v in ours] == [v.dtype for v in expected], (name, what)
                assert_close_relative(pairs(ours), pairs(expected), 2e-6, 1e-6, what=f"{what} of {name}")
            for what, function in TORCH_REFUSES.items():
                # A TypeError of torch.aminmax since torch 2.15.
                with pytest.raises((RuntimeError, NotImplementedError, TypeError)) as refusal:
                    function(mine)
                with pytest.raises(type(refusal.value)) as expected:
                    function(theirs)
                assert "complex" in str(refusal.value).lower(), what
            with pytest.raises(UnsupportedError, match="view_as_real was called on"):
                torch.view_as_real(mine)
            _write(mine)
            _write(theirs)
        for of in (model, plain):
            context = lightning_zero.full_parameters(of) if of is model else contextlib.nullcontext()
            with context, torch.no_grad():
                of.weight[0] = 1j
                torch.view_as_real(of.bias)[..., 1] = 3
            with torch.no_grad():
                of.back.data = _full(of.back)
                of.phase.mul_(1j)
        for record in engine.sharder.live:
            begin, end = record.layout.shard_range(engine.rank)
            assert not record.shard[end - begin :].any(), record.name
        expected = plain.state_dict()
        assert_close_relative(pairs(dict(model.state_dict())), pairs(dict(expected)), 1e-6, what="written")
        lightning_zero.unshard(model)
    assert_close_relative(pairs(dict(model.state_dict())), pairs(dict(expected)), 1e-6, what="plain again")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_complex_shards_are_used_as_plain_parameters(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, use)


def refuse() -> None:
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    for chosen in ({"precision": "bf16-true"}, {"precision": "16-true"}, {"plugins": [scaler]}):
        for kind in ("eager", "compiled"):
            with pytest.raises(MisconfigurationException, match=r"'net\.weight' .*complex64.*Choose '32-true'"):
                make_trainer(kind, **chosen).fit(Fourier(), make_loader(kind))
    module = Fourier()
    make_trainer("eager").validate(module, make_loader("eager", 1), verbose=False)
    with pytest.raises(MisconfigurationException, match=r"'net\.weight' .*complex64.*Choose '32-true'"):
        make_trainer("eager", plugins=[scaler]).fit(module, make_loader("eager"))
    close(module)
    module = Fourier()
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex"):  # torch's own
        make_trainer("eager", **options).fit(module, make_loader("eager"))
    close(module)


def test_precisions_without_complex_numbers_are_refused(ranks: Ranks) -> None:
    ranks.run(2, refuse)
