"""Wrong uses, each with an error that names the fault, the place, and the solution.

Elsewhere: options (tests/unit/test_config.py), optimizers and precision plugins (tests/trainer), checkpoints of another
model (tests/trainer/test_full_checkpoints.py), `devices` against torchrun (tests/trainer/test_launching.py), replaced
parameters and copies (test_surgery.py), arguments of the executor (tests/native/test_backward.py).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zero import UnsupportedError, full_parameters, unshard
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine
from tests.helpers.trainer import Regression, close, make_loader, make_strategy, make_trainer, mlp
from tests.helpers.wrong import WrongUses
from tests.ranks.pool import Ranks

CPU = torch.device("cpu")
EAGER = EngineConfig(compile=False)
WRONG = wrong = WrongUses()


def fit(module: pl.LightningModule, **arguments: Any) -> None:
    try:
        make_trainer("eager", **arguments).fit(module, make_loader("eager"))
    finally:
        close(module)


class With(Regression):
    """A valid module without the fault that is added."""

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def sharded(module: nn.Module) -> Engine:
    engine = Engine(CPU, EAGER)
    engine.shard(module)
    return engine


# -- the model


@wrong(
    r"MisconfigurationException: Empty has no parameters, so there is nothing to train.*__init__\(\) or configure_model\(\)"
)
def model_without_parameters() -> None:
    class Empty(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Identity()

    fit(Empty())


@wrong(r"MisconfigurationException: Parameter 'table'.*layout torch\.sparse_coo.*only dense")
def sparse_parameter() -> None:
    fit(With(table=nn.Parameter(torch.eye(3).to_sparse())))


@wrong(
    r"MisconfigurationException: Parameter 'head\.weight' has no shape yet \(a lazy module\)\. Run one batch.*or give it"
)
def lazy_module() -> None:
    fit(With(head=nn.LazyLinear(3)))


@wrong(
    r"MisconfigurationException: Parameter 'part\.weight' is a DTensor.*fully_shard.*Remove that call from configure_model"
)
def module_sharded_by_something_else() -> None:
    from torch.distributed.fsdp import fully_shard

    part = nn.Linear(3, 3)
    fully_shard(part)
    fit(With(part=part))


@wrong(r"MisconfigurationException: .*Script.*is a torch\.jit\.ScriptModule.*Pass the Python module")
def scripted_module() -> None:
    fit(With(part=torch.jit.script(nn.Linear(3, 3))))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@wrong(
    r"MisconfigurationException: Module 'part' \(NoReset\) has parameters on the meta device but no reset_parameters\(\).*Add"
)
def meta_module_without_reset_parameters() -> None:
    with torch.device("meta"):
        part = NoReset()
    fit(With(part=part))


@wrong(r"MisconfigurationException: Buffer 'part\.table' .*meta device.*Set it in reset_parameters\(\)")
def meta_buffer() -> None:
    part = nn.Module()
    part.register_buffer("table", torch.empty(3, device="meta"))
    fit(With(part=part))


@wrong(
    r"MisconfigurationException: 2 parameters were added after.*the first is 'extra\.weight'.*add parameters before fit\(\)"
)
def parameter_added_after_setup() -> None:
    module = Regression()
    try:
        make_trainer("eager").fit(module, make_loader("eager"))
        module.extra = nn.Linear(2, 2)
        make_trainer("eager").fit(module, make_loader("eager"))
    finally:
        close(module)


@wrong(
    r"MisconfigurationException: 6 parameters were added.*configure_model\(\) built the network again.*if self\.model is not None"
)
def configure_model_that_builds_again() -> None:
    class Again(Regression):
        def configure_model(self) -> None:
            self.net = mlp()

    module = Again()
    try:
        trainer = make_trainer("eager")
        trainer.fit(module, make_loader("eager"))
        trainer.validate(module, make_loader("eager"), verbose=False)
    finally:
        close(module)


@wrong(
    r"UnsupportedError: The \.data of 'net\.0\.weight' was given.*float16.*is this rank's shard.*module\.weight\.data = x.*unshard"
)
def halved_after_sharding() -> None:
    module = Regression()
    try:
        make_trainer("eager").validate(module, make_loader("eager"), verbose=False)
        module.half()
        make_trainer("eager").fit(module, make_loader("eager"))
    finally:
        close(module)


@wrong(
    r"UnsupportedError: The module is already sharded by another engine\. Call lightning_zero\.unshard\(module\) first"
)
def sharded_twice() -> None:
    model = mlp()
    first = sharded(model)
    try:
        sharded(model)
    finally:
        first.close()


# -- state


@wrong(r"UnsupportedError: load_state_dict\(assign=True\) would replace shards\. Leave out assign=True")
def loading_by_assignment() -> None:
    model = mlp()
    engine = sharded(model)
    try:
        model.load_state_dict(model.state_dict(), assign=True)
    finally:
        engine.close()


@wrong(r"RuntimeError: (?s:.*)size mismatch for 0\.weight: the checkpoint has shape \(4, 23\), the model \(25, 23\)")
def loading_another_shape() -> None:
    model = mlp()
    engine = sharded(model)
    try:
        model.load_state_dict(mlp(4).state_dict())
    finally:
        engine.close()


@wrong(r"UnsupportedError: Sequential is not sharded\. Sharding happens when trainer\.fit\(\)")
def whole_parameters_of_a_plain_module() -> None:
    with full_parameters(mlp()):
        pass


@wrong(r"UnsupportedError: Sequential is not sharded\. Sharding happens when trainer\.fit\(\)")
def unsharding_a_plain_module() -> None:
    unshard(mlp())


@wrong(
    r"MisconfigurationException: .*sharded by an earlier Trainer over 2 ranks on cpu.*on 2 ranks on meta.*lightning_zero\.unshard"
)
def another_device_without_unsharding() -> None:
    from lightning_zero.integrations.trainer.strategy import check_sharded_module

    module = mlp()
    engine = sharded(module)
    try:
        check_sharded_module(engine, module, torch.device("meta"), Precision(), sync_batchnorm=False)
    finally:
        engine.close()


# -- steps


@wrong(r"RuntimeError: The engine has no module yet\. Call engine\.shard\(module\) first")
def step_before_sharding() -> None:
    engine = Engine(CPU, EAGER)
    try:
        with engine.train_step():
            pass
    finally:
        engine.close()


@wrong(r"RuntimeError: The engine has no module yet\. Call engine\.shard\(module\) first")
def state_before_sharding() -> None:
    engine = Engine(CPU, EAGER)
    try:
        engine.model_state()
    finally:
        engine.close()


@wrong(
    r"UnsupportedError: The weight '0\.weight' was changed between forward and backward.*Run backward before changing weights"
)
def weight_changed_before_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = sharded(model)
    try:
        x = torch.ones(2, 4, requires_grad=True)
        with engine.train_step():
            loss = model(x).sum()
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        loss.backward()
    finally:
        with suppress(Exception):
            engine.cycle.reset()
        engine.close()


@wrong(
    r"UnsupportedError: The weight '1\.weight' was changed between forward and backward.*Run backward before changing weights"
)
def stepped_before_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = sharded(model)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4, requires_grad=True)
        with engine.train_step():
            first, second = model(x).sum(), model(x).sum()
        first.backward()
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        second.backward()
    finally:
        with suppress(Exception):
            engine.cycle.reset()
        engine.close()


@wrong(
    r"MisconfigurationException: StochasticWeightAveraging is not supported.*Use lightning.pytorch.callbacks.WeightAveraging or EMA"
)
def stochastic_weight_averaging() -> None:
    fit(Regression(), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])


# -- the Trainer


@wrong(r"MisconfigurationException: .*the plugin Mine is not supported by the ZeRO-3 strategies\. Choose '32-true'")
def users_precision_plugin() -> None:
    class Mine(pl.plugins.MixedPrecision):
        pass

    make_trainer("eager", plugins=[Mine("bf16-mixed", "cpu")])


@wrong(r"ValueError: reduce_dtype='half' must be 'bf16', '16', '32' or None")
def unknown_dtype_of_gradients() -> None:
    make_strategy("eager", reduce_dtype="half")


@wrong(r"ValueError: reduce_bucket_mb=-1 must be a positive number of MiB\. Try 64")
def bucket_of_no_size() -> None:
    make_trainer("eager", reduce_bucket_mb=-1)


@wrong(
    r"MisconfigurationException: Parameter 1 of group 0 in SGD \(shape \(2,\)\) does not belong to the model.*configure_optimizers"
)
def optimizer_of_somebody_elses_parameters() -> None:
    class Foreign(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([next(self.parameters()), nn.Parameter(torch.ones(2))])

    fit(Foreign())


@wrong(
    r"MisconfigurationException: Muon orthogonalizes full matrices.*each rank holds only a flat piece.*Use an optimizer that"
)
def optimizer_of_whole_matrices() -> None:
    class Muon(torch.optim.SGD):
        pass

    class WithMuon(Regression):
        def configure_optimizers(self) -> Any:
            return Muon(self.parameters(), lr=0.1)

    fit(WithMuon())


@wrong(r"MisconfigurationException: Parameter 0 of group 0 in AdamW.*does not belong to the model")
def optimizer_of_gathered_weights() -> None:
    class Gathered(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([self.net[0].weight.detach().requires_grad_()])

    fit(Gathered())


# -- ranks that differ


def differ(change: Callable[[], nn.Module]) -> None:
    model = change() if dist.get_rank() == dist.get_world_size() - 1 else mlp()
    Engine(CPU, EAGER).shard(model)


@wrong(
    r"RankMismatchError: Ranks hold different models.*rank 0 and rank 1: '0\.weight \(25, 23\).*'0\.weight \(4, 23\).*Build the same model"
)
def other_shapes_on_a_rank() -> None:
    differ(lambda: mlp(4))


@wrong(
    r"RankMismatchError: Ranks hold different models.*rank 0 and rank 1: '\(nothing\)' against '5\.weight.*Build the same model"
)
def another_layer_on_a_rank() -> None:
    differ(lambda: mlp().append(nn.Linear(3, 3)))


@wrong(
    r"RankMismatchError: Ranks hold different models.*'0\.weight \(25, 23\) torch\.float32 True' against .*torch\.float64 True'"
)
def another_dtype_on_a_rank() -> None:
    differ(lambda: mlp().double())


@wrong(
    r"RankMismatchError: Ranks hold different models.*'0\.weight .* True' against '0\.weight .* False'.*requires_grad"
)
def frozen_on_one_rank() -> None:
    differ(lambda: mlp().requires_grad_(False))


def messages() -> dict[str, str]:
    return WRONG.messages()


@pytest.fixture(scope="module")
def raised(ranks: Ranks) -> list[dict[str, str]]:
    return ranks.run(2, messages)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_refused_with_what_where_and_what_to_do(raised: list[dict[str, str]], name: str) -> None:
    for found in raised:
        WRONG.check(name, found)


def refused_in_the_end() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    values = [param.detach().clone() for param in model.parameters()]
    sparse = nn.Linear(2, 2)
    sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
    for bad in (nn.LazyLinear(2), torch.jit.script(nn.Linear(2, 2)), sparse):
        with pytest.raises(UnsupportedError):
            sharded(model.append(bad))
        model.pop(2)
        assert type(model[0]) is nn.Linear
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), values, strict=True))
    sharded(model).close()  # without the fault


def test_a_refused_module_stays_as_it_was(ranks: Ranks) -> None:
    ranks.run(2, refused_in_the_end)


def test_an_engine_without_processes_says_how_to_get_some() -> None:
    with pytest.raises(
        RuntimeError, match=r"torch\.distributed is not initialised\. Call .*init_process_group\(\) first"
    ):
        Engine(CPU, EAGER)


def test_a_strategy_that_is_not_set_up_says_when_it_is() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="zero3", logger=False, enable_checkpointing=False)
    for ask in (trainer.strategy.lightning_module_state_dict, lambda: trainer.strategy.optimizer_state(None)):
        with pytest.raises(MisconfigurationException, match=r"before its setup\..*while trainer\.fit\(\) or another"):
            ask()


def test_an_unknown_name_lists_ours() -> None:
    with pytest.raises(ValueError, match="zero3_compile"):
        pl.Trainer(accelerator="cpu", strategy="zero3_compiled", logger=False)


def test_the_table_is_long() -> None:
    assert len(WRONG) >= 25
