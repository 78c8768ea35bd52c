"""Test wrong uses of a loop: the messages name the error, the place and the remedy."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import nn

from lightning_zero import FabricZeroStrategy, unshard
from tests.helpers.fabric import adamw, closing, loss_of, make_fabric, network, set_up
from tests.helpers.trainer import make_loader, mlp
from tests.helpers.wrong import WrongUses
from tests.ranks.pool import Ranks

WRONG = wrong = WrongUses()


def batch() -> Any:
    [found] = make_loader("ddp", 1)
    return found


# -- setup


@wrong(
    r"UnsupportedError: AdamW was set up before its model\. Call fabric\.setup\(model, optimizer\), or model = fabric\.setup_m"
)
def an_optimizer_before_its_model() -> None:
    make_fabric("eager").setup_optimizers(adamw(network()))


@wrong(
    r"UnsupportedError: Parameter 0 of group 0 in AdamW \(shape \(25, 23\)\) belongs to no model that was set up.*Register it"
)
def an_optimizer_of_another_model() -> None:
    fabric = make_fabric("eager")
    model = fabric.setup_module(network())
    with closing(model):
        fabric.setup_optimizers(adamw(network()))


@wrong(
    r"UnsupportedError: Parameter 0 .* on the meta device.*Create the optimizer from model\.parameters\(\) after model = fabric"
)
def an_optimizer_of_what_has_no_value_yet() -> None:
    fabric = make_fabric("eager")
    with torch.device("meta"):
        model = mlp()
    optimizer = adamw(model)
    with closing(fabric.setup_module(model)._forward_module):
        fabric._strategy.setup_optimizer(optimizer)


@wrong(
    r"UnsupportedError: AdamW has parameters of 2 models that were set up one by one.*nn\.ModuleList.*optimizer of its own"
)
def one_optimizer_of_two_models() -> None:
    fabric = make_fabric("eager")
    models = [fabric.setup_module(network()) for _ in range(2)]
    with closing(*models):
        fabric.setup_optimizers(torch.optim.AdamW([p for model in models for p in model.parameters()]))


class Shampoo(torch.optim.SGD): ...


@wrong(r"UnsupportedError: Shampoo preconditions with full matrices.*Use an optimizer that treats elements one by one")
def an_optimizer_that_needs_whole_matrices() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    try:
        make_fabric("eager").setup(model, Shampoo(model.parameters()))
    finally:
        unshard(model)


@wrong(
    r"MisconfigurationException: Sequential, or a part of it, is sharded already: it was set up before.*unshard\(model\)"
)
def a_model_twice() -> None:
    fabric = make_fabric("eager")
    model = fabric.setup_module(network())
    with closing(model):
        fabric.setup_module(model.module)


@wrong(r"MisconfigurationException: Sequential, or a part of it, is sharded already")
def a_model_with_a_part_that_was_set_up() -> None:
    fabric = make_fabric("eager")
    model = fabric.setup_module(network())
    with closing(model):
        fabric.setup_module(nn.Sequential(model.module, nn.Linear(19, 2)))


@wrong(
    r"MisconfigurationException: Sequential, .* built in one fabric\.init_module\(\) with a model that was set up before"
)
def two_models_of_one_construction() -> None:
    fabric = make_fabric("eager")
    with fabric.init_module():
        first, second = mlp(), mlp()
    model = fabric.setup_module(first)
    with closing(model):
        fabric.setup_module(second)


@wrong(
    r"MisconfigurationException: Tanh has no parameters, so there is nothing to shard\. Use it as it is, without fabric\.setup\(\)"
)
def a_model_without_parameters() -> None:
    make_fabric("eager").setup_module(nn.Tanh())


@wrong(r"RuntimeError: To use Fabric with more than one device, you must call `\.launch\(\)`")
def setup_before_launch() -> None:
    Fabric(accelerator="cpu", devices=2, strategy="zero3").setup_module(network())


@wrong(r"MisconfigurationException: No model was set up yet\. Call fabric\.setup\(model, optimizer\)")
def a_plan_of_nothing() -> None:
    make_fabric("eager").strategy.plan()


@wrong(r"TypeError: FabricZeroStrategy has no option 'prefetch_mb'\. Did you mean tuning=Tuning\(prefetch_mb=\.\.\.\)")
def an_option_in_the_wrong_place() -> None:
    FabricZeroStrategy(prefetch_mb=3)


class Own(Precision):
    pass


class OwnScaler(torch.amp.GradScaler):
    pass


@wrong(
    r"MisconfigurationException: Fabric\(precision='32-true'\) with the plugin Own is not supported .* Choose '32-true', 'bf16-mixed'"
)
def a_precision_of_ones_own() -> None:
    FabricZeroStrategy(precision=Own())


@wrong(
    r"MisconfigurationException: The loss scaler OwnScaler decides on each rank by itself.*Use torch\.distributed\.fsdp"
)
def a_scaler_of_ones_own() -> None:
    FabricZeroStrategy(precision=MixedPrecision("16-mixed", "cpu", OwnScaler("cpu")))


# -- steps


@wrong(r"RuntimeError: The current strategy and precision selection requires you to call `fabric\.backward\(loss\)`")
def a_backward_past_fabric() -> None:
    model, _ = set_up(make_fabric("eager"), network())
    with closing(model):
        loss_of(model, batch()).backward()


@wrong(r"RuntimeError: train_step\(\) was called in the state STEP, .* Let the optimizer make its step first")
def a_forward_while_the_optimizer_steps() -> None:
    fabric = make_fabric("eager")
    model, optimizer = set_up(fabric, network())
    with closing(model):
        optimizer.optimizer.register_step_pre_hook(lambda *_: loss_of(model, batch()))
        with torch.enable_grad():
            fabric.backward(loss_of(model, batch()))
        optimizer.step()


@wrong(r"RuntimeError: before_backward\(\) was called in the state STEP, .* Let the optimizer make its step first")
def a_backward_while_the_optimizer_steps() -> None:
    fabric = make_fabric("eager")
    model, optimizer = set_up(fabric, network())
    with closing(model):
        fabric.backward(loss_of(model, batch()), retain_graph=True)
        loss = loss_of(model, batch())
        optimizer.optimizer.register_step_pre_hook(lambda *_: fabric.backward(loss))
        optimizer.step()


@wrong(r"RuntimeError: the step of an optimizer was called in the state STEP, .* Let the optimizer make its step first")
def a_step_within_a_step() -> None:
    fabric = make_fabric("eager")
    net = network()
    model, first, second = fabric.setup(net, adamw(net[0]), adamw(net[2]))
    with closing(model):
        fabric.backward(loss_of(model, batch()))
        first.optimizer.register_step_pre_hook(lambda *_: second.step())
        first.step()


@wrong(
    r"UnsupportedError: The weight '4\.weight' was changed between forward and backward.*Run backward before changing weights"
)
def a_backward_after_the_step() -> None:
    fabric = make_fabric("eager")
    model, optimizer = set_up(fabric, network())
    with closing(model):
        first, second = loss_of(model, batch()), loss_of(model, batch())
        fabric.backward(first)
        optimizer.step()
        fabric.backward(second)


@wrong(r"RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation")
def a_compiled_backward_after_the_step() -> None:
    fabric = make_fabric("compiled")
    model, optimizer = set_up(fabric, network())
    with closing(model):
        fabric.backward(loss_of(model, batch()))
        first, second = loss_of(model, batch()), loss_of(model, batch())
        fabric.backward(first)
        optimizer.step()
        fabric.backward(second)


@wrong(r"RuntimeError: The total norm of gradients is nan, so they cannot be clipped\. .*error_if_nonfinite=False")
def a_norm_that_is_not_finite() -> None:
    fabric = make_fabric("eager")
    model, optimizer = set_up(fabric, network())
    with closing(model):
        fabric.backward(loss_of(model, batch()) * float("nan"))
        assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


@wrong(
    r"MisconfigurationException: optimizer\.step\(closure\) cannot be used with a loss scaler .* Run forward and fabric\.backward"
)
def a_closure_with_a_scaler() -> None:
    scaled = MixedPrecision("16-mixed", "cpu")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricZeroStrategy(compile=False, precision=scaled))
    fabric.launch()
    model, optimizer = set_up(fabric, network())
    with closing(model):
        optimizer.step(lambda: torch.zeros(()))


# -- saving


def _save_with_options(kind: str) -> None:
    fabric = make_fabric("eager", state_dict_type=kind)
    model, _ = set_up(fabric, network())
    with closing(model):
        fabric.strategy.save_checkpoint("x.ckpt", {"model": model}, storage_options={"key": 1})


@wrong(r"TypeError: `Trainer\.save_checkpoint\(.*`storage_options` arg is not supported for `FileIO`.*your custom")
def storage_options_for_a_file() -> None:
    _save_with_options("full")


@wrong(r"MisconfigurationException: storage_options are for a CheckpointIO.*save with state_dict_type='full'")
def storage_options_for_a_folder() -> None:
    _save_with_options("sharded")


def collect() -> dict[str, str]:
    return WRONG.messages()


@pytest.fixture(scope="module")
def messages(ranks: Ranks) -> list[dict[str, str]]:
    return ranks.run(2, collect, deadline=120)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_an_error_that_says_what_to_do(messages: list[dict[str, str]], name: str) -> None:
    for found in messages:
        WRONG.check(name, found)


def goes_on_after_an_error() -> list[float]:
    """Drop an unfinished step after an exception, so that the next step trains."""
    fabric = make_fabric("compiled")
    model, optimizer = set_up(fabric, network())
    losses = []
    with closing(model):
        for number in range(6):
            loss = loss_of(model, batch())
            if number in (1, 4):
                with pytest.raises(ZeroDivisionError):
                    loss.register_hook(lambda grad: 1 / 0)
                    fabric.backward(loss)
                with pytest.raises(RuntimeError):
                    model(torch.zeros(2, 3))
            else:
                fabric.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            optimizer.zero_grad()
    torch._dynamo.reset()
    return losses


def test_a_loop_goes_on_after_an_exception(ranks: Ranks) -> None:
    for losses in ranks.run(2, goes_on_after_an_error):
        assert all(after < before for before, after in zip(losses, losses[1:], strict=False)), losses
