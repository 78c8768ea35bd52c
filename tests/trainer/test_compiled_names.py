"""Name compiled modules in files as the user's own module does, and read files of either kind."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    Regression,
    close,
    global_losses,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks

WIDTH = 64
KEYS = ["weight", "bias"]


class Plain(Regression):
    """Nothing is compiled by hand."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, OUTPUTS)
        self.put_together()

    def put_together(self) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))


class Compiled(Plain):
    """A container, a layer that owns parameters itself, and one within another that is compiled, too."""

    def put_together(self) -> None:
        self.net[0] = torch.compile(self.net[0], backend="eager")
        self.net = torch.compile(self.net, backend="eager")
        self.head = torch.compile(self.head, backend="eager")


class Late(Compiled):
    def put_together(self) -> None:
        self.parts = (self.net, self.head)
        del self.net, self.head

    def configure_model(self) -> None:
        if self.parts:
            (self.net, self.head), self.parts = self.parts, ()
            super().put_together()


def _fit(kind: str, make: Any, **arguments: Any) -> tuple[Any, Any]:
    module = make(seed=arguments.pop("seed", 0))
    trainer = make_trainer(kind, callbacks=arguments.pop("callbacks", []), max_epochs=arguments.pop("epochs", 1))
    trainer.fit(module, make_loader(kind), **arguments)
    return module, trainer


def _files(kind: str, make: Any) -> dict[str, Any]:
    """Return the keys, and the results of resuming from each other's files."""
    out: dict[str, Any] = {}
    for name in ("ddp", kind):
        module, trainer = _fit(name, make)
        trainer.save_checkpoint(f"{name}.ckpt")
        out[f"{name} keys"] = list(torch.load(f"{name}.ckpt", weights_only=True)["state_dict"])
        out[f"{name} state"] = whole_state(module)
        close(module)
    _, trainer = _fit("ddp", Plain)
    trainer.save_checkpoint("plain.ckpt")
    ways = [
        ("ddp", make, "ddp"),
        ("ddp", make, kind),
        (kind, make, "ddp"),
        (kind, Plain, kind),
        (kind, make, kind),
        (kind, make, "plain"),
        (kind, Plain, "ddp"),
    ]
    for reader, cls, source in ways[:4] if kind == "compiled" else ways:
        module, _ = _fit(reader, cls, epochs=2, seed=7, ckpt_path=f"{source}.ckpt")
        out[f"{reader} {cls.__name__} from {source}"] = global_losses(reader, module)
        close(module)
    return out


@pytest.mark.parametrize(
    ("kind", "make"), [("eager", Compiled), pytest.param("compiled", Compiled, marks=pytest.mark.slow), ("eager", Late)]
)
@pytest.mark.exhaustive_variants("compiled-Compiled")
def test_files_of_compiled_modules_fit_either_way(ranks: Ranks, kind: str, make: Any) -> None:
    for result in ranks.run(2, _files, kind, make):
        keys = [f"net._orig_mod.{part}.{key}" for part in ("0._orig_mod", "2") for key in KEYS]
        assert result["ddp keys"] == keys + [f"head._orig_mod.{key}" for key in KEYS]
        assert result[f"{kind} keys"] == result["ddp keys"]
        assert_close_relative(result[f"{kind} state"], result["ddp state"], 3 * RTOL)
        expected = result[f"ddp {make.__name__} from ddp"]
        resumed = {name: losses for name, losses in result.items() if " from " in name}
        assert len(resumed) == (4 if kind == "compiled" else 7)
        for name, losses in resumed.items():
            assert_close_relative(losses, expected, 3 * RTOL, what=name)
    assert list(Compiled().state_dict()) == keys + [f"head._orig_mod.{key}" for key in KEYS]


def _parts() -> None:
    module, _ = _fit("eager", Compiled)
    values = {key: torch.randn_like(value) for key, value in Plain().state_dict().items()}
    renamed = {key.replace("net.", "net._orig_mod."): value for key, value in values.items()}
    for state in (values, renamed):
        module.load_state_dict({key: torch.zeros_like(value) for key, value in values.items()})
        module.load_state_dict(state)
        assert_close_relative(list(whole_state(module).values()), list(values.values()), 0.0)
    part = {key.removeprefix("net."): value for key, value in values.items() if key.startswith("net.")}
    for mark in ("", "_orig_mod."):
        module.net.load_state_dict({mark + key: 2 * value for key, value in part.items()})
        assert list(module.net.state_dict()) == [
            f"_orig_mod.{key}" for key in ("0._orig_mod.weight", "0._orig_mod.bias", "2.weight", "2.bias")
        ]
        module.head.load_state_dict({mark + key: torch.ones_like(values[f"head.{key}"]) for key in KEYS})
        assert module.head.weight.eq(1).all()
    assert_close_relative(module.net[2].weight, 2 * values["net.2.weight"], 0.0)
    with pytest.raises(RuntimeError, match='Unexpected key.*"net._orig_mod.9.weight"|Unexpected key.*"net.9.weight"'):
        module.load_state_dict({**values, "net._orig_mod.9.weight": torch.zeros(1)})
    close(module)


def test_parts_of_a_module_read_either_name(ranks: Ranks) -> None:
    ranks.run(2, _parts)


def _averaged(*kinds: str) -> dict[str, Any]:
    out = {}
    for kind in kinds:
        module, trainer = _fit(kind, Compiled, callbacks=[EMAWeightAveraging(decay=0.6)])
        trainer.save_checkpoint(f"{kind}-average.ckpt")
        file = torch.load(f"{kind}-average.ckpt", weights_only=True)
        out[kind] = whole_state(module), file["state_dict"], file["current_model_state"]
        close(module)
    return out


def test_averages_of_compiled_modules_equal_ddps(ranks: Ranks) -> None:
    for result in ranks.run(2, _averaged, "ddp", "eager"):
        assert_close_relative(result["eager"], result["ddp"], 3 * RTOL)
