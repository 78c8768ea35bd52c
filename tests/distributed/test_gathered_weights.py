"""``module.weight.grad`` and ``module.weight.requires_grad`` are the parameter's, or an error that says where to look."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks


def error_of(job: Any) -> str:
    try:
        return f"no error, but {job()}"
    except UnsupportedError as error:
        return str(error)


def gradients(backend: str) -> tuple[Any, str, str, float, float, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 25))
    with engine_for(model, backend) as engine:
        before = model[0].weight.grad
        with engine.train_step():
            loss = model(torch.ones(2, 19)).square().mean()
        loss.backward()
        read = error_of(lambda: model[0].weight.grad)
        written = error_of(lambda: setattr(model[0].weight, "grad", None))
        norm = float(dict(model.named_parameters())["0.weight"].grad.norm())
        for param in model.parameters():
            param.grad = None
        return before, read, written, norm, float(loss), model[0].weight.grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_gradient_of_a_weight_that_was_read_is_none_or_an_error_with_the_line_to_write(
    ranks: Ranks, backend: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 25))
    model(torch.ones(2, 19)).square().mean().backward()
    expected = model[0].weight.grad
    assert isinstance(expected, Tensor)
    for before, read, written, norm, _, after in ranks.run(2, gradients, backend):
        assert before is None
        assert after is None
        for message in (read, written):
            assert "dict(self.named_parameters())['0.weight'].grad" in message
        assert norm == pytest.approx(float(expected.norm()), rel=1e-5)


def on_one_rank() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 25))
    with engine_for(model, "aot_eager") as engine:
        with engine.train_step():
            loss = model(torch.ones(2, 19)).square().mean()
        loss.backward()
        engine.cycle.after_backward()
        seen = model[0].weight.grad.clone()
        model[0].weight.grad.mul_(2)
        return seen, dict(model.named_parameters())["0.weight"].grad.norm()


def test_with_one_rank_it_is_the_gradient_itself(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 25))
    model(torch.ones(2, 19)).square().mean().backward()
    expected = model[0].weight.grad
    assert isinstance(expected, Tensor)
    ((seen, doubled),) = ranks.run(1, on_one_rank)
    assert_close_relative(seen, expected, 1e-6)
    assert_close_relative(doubled, 2 * expected.norm(), 1e-6)


def flags() -> tuple[list[bool], list[Any], list[Tensor]]:
    model = nn.Linear(19, 25)
    model.bias.requires_grad = False
    with engine_for(model, "eager") as engine:
        seen = [model.weight.requires_grad, model.bias.requires_grad]
        with torch.no_grad():
            engine.eval_step()
            seen += [model.weight.requires_grad, model.bias.requires_grad]
            weight = model.weight
            model.weight.requires_grad = False
            model.bias.requires_grad_()
        registered = dict(model.named_parameters())
        flags = [registered["weight"].requires_grad, registered["bias"].requires_grad]
        file = io.BytesIO()
        torch.save(weight, file)
        file.seek(0)
        kinds = [type(torch.load(file)), type(copy.deepcopy(weight)), type(weight + 1), type(weight)]
        assert torch.equal(copy.deepcopy(weight), weight)
        with engine.train_step():
            kinds.append(type(model.weight))
        return seen, flags, kinds


def test_whether_a_weight_is_trained_is_asked_and_told_of_its_parameter(ranks: Ranks) -> None:
    for seen, registered, kinds in ranks.run(2, flags):
        assert seen == [True, False] * 2
        assert registered == [False, True]
        assert [kind.__name__ for kind in kinds] == ["Tensor", "Tensor", "Tensor", "GatheredWeight", "Tensor"]
