"""Functions compiled by hand that read a model's weights are taken apart, and no others."""

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.compat.compiler import compiled_from
from lightning_zero.integrations.uncompile import uncompile_functions


def loudly(function: Any) -> Any:
    @wraps(function)
    def run(*args: Any) -> Any:
        return 2 * function(*args)

    return run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.by_closure = torch.compile(lambda x: self.net(x), backend="eager")
        self.by_default = torch.compile(lambda x, net=self.net: net(x), backend="eager")
        self.of_a_method = torch.compile(self.net.forward, backend="eager")
        self.around_another = torch.compile(lambda x: self.by_closure(x), backend="eager")
        self.several = [torch.compile(self.net, backend="eager"), 3]
        self.named = {"loss": torch.compile(self.loss, backend="eager")}
        self.__dict__["hidden"] = torch.compile(self.net, backend="eager")
        outside = nn.Linear(2, 2)
        self.of_no_weights = torch.compile(F.mse_loss, backend="eager")
        self.of_others = torch.compile(lambda x: outside(x), backend="eager")
        self.louder = loudly(torch.compile(self.loss, backend="eager"))
        self.left_alone = torch.compiler.disable(self.loss)
        self.numbers = [1, 2]

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x).sum()

    @torch.compile(backend="eager")
    def decorated(self, x: Tensor) -> Tensor:
        return self.loss(x)

    @torch.compiler.disable
    def kept(self, x: Tensor) -> Tensor:
        return self.loss(x)


class Inner(Model):
    def decorated(self, x: Tensor) -> Tensor:
        return 3 * super().decorated(x)


def test_functions_that_hold_the_modules_run_as_they_were_written() -> None:
    root = nn.ModuleDict({"a": Model()})
    model: Any = root["a"]
    before = dict(vars(model))
    x = torch.randn(3, 2)
    expected = model.net(x)
    taken = ["by_closure", "by_default", "of_a_method", "around_another", "several", "named", "hidden", "decorated"]
    assert sorted(uncompile_functions(root)) == sorted(f"a.{name}" for name in taken)
    for name in ("by_closure", "by_default", "of_a_method", "around_another", "hidden"):
        assert compiled_from(before[name]) is getattr(model, name) if name != "hidden" else model.hidden is model.net
        torch.testing.assert_close(getattr(model, name)(x), expected)
    assert model.several == [model.net, 3]
    assert model.named == {"loss": model.loss}
    assert vars(type(model))["decorated"]._torchdynamo_orig_callable is model.decorated.__func__
    torch.testing.assert_close(model.decorated(x), expected.sum())
    for name in ("of_no_weights", "of_others", "louder", "left_alone", "numbers"):
        assert vars(model)[name] is before[name]
    assert "kept" not in vars(model)
    assert uncompile_functions(root) == []


def test_methods_that_override_compiled_ones_stay() -> None:
    model = Inner()
    uncompile_functions(model)
    x = torch.randn(3, 2)
    assert "decorated" not in vars(model)
    torch.testing.assert_close(model.decorated(x), 3 * model.loss(x))
