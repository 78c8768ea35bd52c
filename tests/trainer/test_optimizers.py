"""Let optimizers see shards as parameters, and refuse those that need full parameters by name."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.helpers.muon import WideMuon
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    WIDTH,
    Regression,
    close,
    make_loader,
    make_trainer,
    seeded,
    train,
    whole_state,
)
from tests.helpers.wrapping import Counting, Renaming, Wrapping
from tests.ranks.pool import Ranks


class Grouped(Regression):
    """Decays weights of matrices only, selected by their dimensions; one layer has its own learning rate."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.net = nn.Sequential(
                nn.Linear(INPUTS, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.Unflatten(1, (1, WIDTH)),
                nn.Conv1d(1, 49, 5, 5),
                nn.Flatten(),
                nn.Linear(49 * WIDTH // 5, OUTPUTS),
            )
        self.groups: list[list[tuple[int, str]]] = []

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        last = [param for name, param in named if name.startswith("net.5")]
        rest = [(name, param) for name, param in named if not name.startswith("net.5")]
        groups = [
            {"params": [param for _, param in rest if param.ndim >= 2], "weight_decay": 0.5},
            {"params": [param for _, param in rest if param.ndim < 2], "weight_decay": 0.0},
            {"params": last, "lr": 1e-3},
        ]
        names = {id(param): name for name, param in named}
        self.groups = [[(param.ndim, names[id(param)]) for param in group["params"]] for group in groups]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def _grouped(*kinds: str) -> dict[str, Any]:
    out = {}
    for kind in kinds:
        made: list[Grouped] = []

        def make(made: list[Grouped] = made) -> Grouped:
            made.append(Grouped())
            return made[0]

        out[kind] = (*train(kind, make), made[0].groups)
    return out


@pytest.mark.parametrize(("world_size", "kind"), [(2, "eager"), (3, "eager"), (2, "captured"), (3, "captured")])
@pytest.mark.exhaustive_variants("3-eager")
def test_weight_decay_groups_by_dimensions_equal_ddps(ranks: Ranks, world_size: int, kind: str) -> None:
    for result in ranks.run(world_size, _grouped, "ddp", kind):
        (*ours, groups), (*ddp, expected) = result[kind], result["ddp"]
        assert groups == expected
        assert [len(group) for group in groups] == [2, 4, 2]
        assert_close_relative(ours, ddp, RTOL)


OPTIMIZERS: dict[str, Any] = {
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5, centered=True, eps=1e-3),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2, eps=1e-3),
    "Adam with amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, eps=1e-3, foreach=False),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2, eps=1e-3),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "Muon of matrices": lambda params: WideMuon([param for param in params if param.ndim > 1], lr=1e-2),
}


class Optimized(Regression):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self.parameters())


def _optimized(kind: str) -> dict[str, Any]:
    return {name: train(kind, lambda name=name: Optimized(name)) for name in OPTIMIZERS}


def _all_optimized() -> tuple[dict[str, Any], dict[str, Any]]:
    return _optimized("eager"), _optimized("ddp")


def test_elementwise_optimizers_equal_ddps(ranks: Ranks) -> None:
    for ours, ddp in ranks.run(2, _all_optimized):
        assert_close_relative(ours, ddp, 2 * RTOL)


class Muon(torch.optim.SGD):
    """In torch from 2.9 on, and in several packages."""


class MuonWithAuxAdam(torch.optim.SGD): ...


class Shampoo(torch.optim.SGD): ...


class Adafactor(torch.optim.SGD): ...


class OurOwnShampoo(Shampoo):
    """Subclass with the computation of its base."""


WHOLE = {cls.__name__: cls for cls in (Muon, MuonWithAuxAdam, Shampoo, Adafactor, OurOwnShampoo)}
WHOLE |= {"LBFGS": torch.optim.LBFGS}


class Refused(Regression):
    """The refused optimizer is the second."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return torch.optim.AdamW(params[2:]), WHOLE[self.name](params[:2], lr=0.1)


class Stranger(Regression):
    """An optimizer of a parameter that is not the module's."""

    def configure_optimizers(self) -> Any:
        self.__dict__["loose"] = nn.Parameter(torch.zeros(3, 2))
        return torch.optim.SGD([{"params": list(self.parameters())}, {"params": [self.__dict__["loose"]]}], lr=0.1)


def _refusals() -> dict[str, str]:
    messages = {}
    modules: dict[str, Regression] = {name: Refused(name) for name in WHOLE} | {"stranger": Stranger()}
    for name, module in modules.items():
        try:
            make_trainer("eager").fit(module, make_loader("eager"))
        except MisconfigurationException as error:
            messages[name] = str(error)
        assert not module.losses
        close(module)
    return messages


def test_optimizers_that_need_whole_parameters_are_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks.run(2, _refusals):
        for name, cls in WHOLE.items():
            assert messages[name].startswith(f"{cls.__name__} "), messages.get(name)
            assert "AdamW" in messages[name]
        assert messages["stranger"].startswith(
            "Parameter 0 of group 1 in SGD (shape (3, 2)) does not belong to the model"
        )


class Resumed(Regression):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=1e-3)


FORMS = (Wrapping, Renaming, Counting)


def _train_in_epochs(kind: str, epochs: int, before: str = "", after: str = "", **options: Any) -> list[Any]:
    found = []
    for make in FORMS:
        module, trainer = Resumed(make), make_trainer(kind, max_epochs=epochs, **options)
        trainer.fit(module, make_loader(kind, 3), ckpt_path=f"{before}-{make.__name__}" if before else None)
        if after:
            trainer.save_checkpoint(f"{after}-{make.__name__}")
        found.append(whole_state(module))
        close(module)
    return found


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.exhaustive_variants("full")
def test_optimizers_with_state_dicts_of_their_own_resume_at_another_world_size(
    ranks: Ranks, tmp_path: Any, form: Any
) -> None:
    path = str(tmp_path / form)
    ranks.run(2, _train_in_epochs, "eager", 1, after=path, state_dict_type=form)
    [expected] = ranks.run(1, _train_in_epochs, "single", 2)
    for found in ranks.run(3, _train_in_epochs, "eager", 2, path, state_dict_type=form):
        assert_close_relative(found, expected, RTOL)
    if form == "full":
        [found] = ranks.run(1, _train_in_epochs, "single", 2, path)
        assert_close_relative(found, expected, RTOL)


class Scaled(torch.optim.Optimizer):
    """By the norm of each gradient, or by the mean of each row, as their authors write them."""

    def __init__(self, params: Any, of: str) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.of = of

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for param in (param for group in self.param_groups for param in group["params"]):
            squared = param.grad.square()
            size = squared.mean(-1, keepdim=True) if self.of == "rows" else param.grad.norm() ** 2
            average = self.state[param].get("average", torch.zeros_like(size))
            self.state[param]["average"] = average = 0.9 * average + 0.1 * size
            param.sub_(1e-2 * param.grad / (average.sqrt() + 1e-3))
        return loss


class ByHand(Regression):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters(), self.of)


def _by_hand() -> dict[str, str]:
    messages = {}
    for of in ("norms", "rows"):
        module = ByHand(of)
        with pytest.raises(MisconfigurationException) as refused:
            make_trainer("eager").fit(module, make_loader("eager"))
        messages[of] = str(refused.value)
        close(module)
    return messages


class Allocating(torch.optim.Optimizer):
    """Looks at shapes only where they make no difference."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for param in (param for group in self.param_groups for param in group["params"]):
            average = self.state[param].setdefault("average", torch.zeros(param.shape))
            assert average.shape == param.grad.shape == param.size()
            average.add_(param.grad.reshape(-1).view(param.shape))
            rate = 1e-2 if len(param.shape) > 1 else 2e-2
            param.sub_(average[...], alpha=rate)
        return loss


class Allocated(Regression):
    def configure_optimizers(self) -> Any:
        return Allocating(self.parameters())


def _allocated() -> tuple[Any, Any]:
    return train("eager", Allocated), train("ddp", Allocated)


def test_steps_by_hand_may_allocate_by_shapes(ranks: Ranks) -> None:
    for ours, ddp in ranks.run(2, _allocated):
        assert_close_relative(ours, ddp, 2 * RTOL)


def test_steps_by_hand_that_take_elements_together_are_refused(ranks: Ranks) -> None:
    for messages in ranks.run(2, _by_hand):
        assert messages["norms"].startswith("The step() of Scaled takes norm of a parameter")
        assert messages["rows"].startswith("The step() of Scaled takes mean of a parameter")
        assert all("on_before_optimizer_step" in message for message in messages.values())
