"""Test wrong uses of the Trainer: messages name the error, the place and the remedy.

The first half of the table is in tests/distributed/test_wrong_uses.py; wrong options are in tests/unit/test_config.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_zero import PassSchedule, PassSpec, full_parameters
from lightning_zero.engine import engine_of
from tests.helpers.trainer import Regression, close, make_loader, make_strategy, make_trainer, mlp
from tests.helpers.wrong import WrongUses
from tests.ranks.pool import Ranks

WRONG = wrong = WrongUses()


def fit(module: pl.LightningModule, kind: str = "eager", fit: dict[str, Any] | None = None, **arguments: Any) -> None:
    try:
        make_trainer(kind, **arguments).fit(module, make_loader(kind), **fit or {})
    finally:
        close(module)


def file(module: pl.LightningModule, name: str) -> str:
    """Train this module, and end its engine."""
    path = f"wrong-{name}.ckpt"
    trainer = make_trainer("eager")
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(path)
    close(module)
    return path


class Optimized(Regression):
    """With another optimizer."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(list(self.parameters()))


# -- weights


@wrong(
    r"MisconfigurationException: 'net.0.weight' is the gathered weight, which has no gradient.*"
    r"dict\(self\.named_parameters\(\)\)\['net\.0\.weight'\]\.grad"
)
def the_gradient_of_a_weight_that_was_read() -> None:
    class Looks(Regression):
        def on_after_backward(self) -> None:
            self.log("norm", self.net[0].weight.grad.norm())

    fit(Looks())


# -- callbacks


@wrong(
    r"MisconfigurationException: ModelPruning is not supported by the ZeRO-3 strategies: it ranks.*Train without it and "
    r"prune the plain module that load_from_checkpoint\(\) returns, or prune with torch\.nn\.utils\.prune in __init__\(\)"
)
def pruning() -> None:
    fit(Regression(), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


@wrong(r"MisconfigurationException: Mine, a ModelPruning, is not supported by the ZeRO-3 strategies")
def pruning_of_ones_own() -> None:
    class Mine(ModelPruning):
        pass

    fit(Regression(), callbacks=[Mine("l1_unstructured", amount=0.5)])


@wrong(r"MisconfigurationException: ModelPruning is not supported")
def pruning_in_an_evaluation() -> None:
    module = Regression()
    try:
        trainer = make_trainer("eager", callbacks=[ModelPruning("l1_unstructured", amount=0.5)])
        trainer.validate(module, make_loader("eager", 1), verbose=False)
    finally:
        close(module)


@wrong(
    r"MisconfigurationException: BatchSizeFinder is not supported by the ZeRO-3 strategies: it raises the batch size "
    r"until memory runs out.*`python -m lightning_zero plan script\.py:Module --ranks 4 --device H200`, which exits with 1"
)
def finding_a_batch_size() -> None:
    fit(Regression(), callbacks=[BatchSizeFinder()])


@wrong(r"MisconfigurationException: Mine, a StochasticWeightAveraging, is not supported.*EMAWeightAveraging")
def averaging_of_ones_own() -> None:
    class Mine(StochasticWeightAveraging):
        pass

    fit(Regression(), callbacks=[Mine(swa_lrs=0.1)])


@wrong(
    r"MisconfigurationException: WeightAveraging copied the module before its parameters were complete: 'more\.bias'"
)
def averaging_of_what_is_built_later() -> None:
    class Late(Regression):
        def setup(self, stage: str) -> None:
            self.more = nn.Linear(32, 32)

    fit(Late(), callbacks=[EMAWeightAveraging()])


@wrong(r"MisconfigurationException: There is no pass 'group_gather'\. Choose from .*group_gathers.* or register yours")
def passes_that_do_not_exist() -> None:
    fit(Regression(), callbacks=[PassSchedule([(0, ["group_gather"])])])


@wrong(
    r"(MisconfigurationException|ValueError): There is a pass named 'group_gathers' already\. Give yours another name"
)
def a_pass_with_the_name_of_another() -> None:
    spec = PassSpec("group_gathers", lambda graph: graph)
    fit(Regression(), callbacks=[PassSchedule([(0, ["group_gathers"])], passes=[spec])])


# -- optimizers


@wrong(
    r"MisconfigurationException: LBFGS takes inner products over all parameters.*each rank holds only a flat piece.*AdamW"
)
def lbfgs() -> None:
    fit(Optimized(lambda params: torch.optim.LBFGS(params)))


@wrong(
    r"MisconfigurationException: cuda_graph_step=True, but the step of AdamW cannot be captured: there are no CUDA graphs on "
    r"device 'cpu'\. Pass cuda_graph_step='auto'"
)
def capture_where_there_are_no_graphs() -> None:
    fit(Regression(), strategy=make_strategy("eager", cuda_graph_step=True))


@wrong(
    r"MisconfigurationException: Parameter 0 of group 1 in SGD \(shape \(3,\)\) does not belong to the model.*"
    r"Register it as a parameter of the LightningModule"
)
def somebody_elses_parameters_in_a_later_group() -> None:
    class Later(Optimized):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    fit(Later(lambda params: torch.optim.SGD(params, lr=0.1)))


# -- precision


@wrong(
    r"MisconfigurationException: Trainer\(precision='transformer-engine'\) with the plugin TransformerEngine is not "
    r"supported.*Choose '32-true', 'bf16-mixed', 'bf16-true', '16-mixed', '16-true' or '64-true'"
)
def transformer_engine() -> None:
    class TransformerEngine(Precision):
        precision: Any = "transformer-engine"

    make_trainer("eager", plugins=[TransformerEngine()])


@wrong(r"MisconfigurationException: The loss scaler Own decides on each rank by itself.*Use torch\.distributed\.fsdp")
def scaler_of_ones_own() -> None:
    class Own(torch.amp.GradScaler):
        pass

    make_trainer("eager", plugins=[MixedPrecision("16-mixed", "cpu", Own("cpu"))])


@wrong(
    r"MisconfigurationException: The model was sharded by an earlier Trainer in torch\.float32, and cannot be converted "
    r"for Trainer\(precision='64-true'\) any more\. Call lightning_zero\.unshard\(model\)"
)
def another_precision_without_unsharding() -> None:
    module = Regression()
    make_trainer("eager").validate(module, make_loader("eager", 1), verbose=False)
    fit(module, precision="64-true")


# -- checkpoints


@wrong(
    r"MisconfigurationException: The checkpoint holds the state of 1 optimizers, but configure_optimizers\(\) returned 2"
)
def other_optimizers_than_the_files() -> None:
    class Two(Regression):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

    class Manual(Two):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    fit(Manual(), max_epochs=2, fit={"ckpt_path": file(Regression(), "one")})


@wrong(
    r"ValueError: The checkpoint was written where configure_optimizers\(\) returned nothing, so it holds no state for "
    r"AdamW\. Load only the weights"
)
def file_of_a_module_without_optimizer() -> None:
    path = file(Optimized(lambda params: None), "none")
    fit(Regression(), max_epochs=2, fit={"ckpt_path": path})


@wrong(r"KeyError: .*checkpoint contains only the model")
def file_of_weights_only() -> None:
    module, trainer = Regression(), make_trainer("eager")
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint("wrong-weights.ckpt", weights_only=True)
    close(module)
    fit(Regression(), max_epochs=2, fit={"ckpt_path": "wrong-weights.ckpt"})


@wrong(
    r"ValueError: The checkpoint's optimizer state 'exp_avg' for parameter 'net\.4\.bias' has shape \(25, 23\), but the "
    r"parameter has shape \(19,\)\. The optimizer's parameters must come in the order in which they were saved"
)
def parameters_in_another_order_than_the_files() -> None:
    path = file(Regression(), "order")
    fit(Optimized(lambda params: torch.optim.AdamW(params[::-1])), max_epochs=2, fit={"ckpt_path": path})


@wrong(r"FileNotFoundError: .*wrong-nowhere\.ckpt")
def no_file() -> None:
    fit(Regression(), fit={"ckpt_path": "wrong-nowhere.ckpt"})


@wrong(
    r"MisconfigurationException: 6 parameters were added after.*on_load_checkpoint\(\) built it again, call "
    r"lightning_zero\.unshard\(model\) before this stage"
)
def module_rebuilt_by_a_file_when_it_is_sharded() -> None:
    class Rebuilt(Regression):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.net = mlp()

    path = file(Regression(), "rebuilt")
    module = Rebuilt()
    make_trainer("eager").validate(module, make_loader("eager", 1), verbose=False)
    fit(module, max_epochs=2, fit={"ckpt_path": path})


# -- steps


@wrong(r"(ValueError|UnsupportedError|MisconfigurationException): .*net\.0\.weight")
def penalty_over_parameters() -> None:
    class Penalised(Regression):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 0.01 * next(self.parameters()).square().sum()

    fit(Penalised())


@wrong(
    r"\w+: (?s:.*)The weight 'net\.0\.weight' is edited in place inside compiled code, where the edit would be lost.*Edit it "
    r"between steps"
)
def edit_in_compiled_code() -> None:
    class Edited(Regression):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    fit(Edited(), kind="compiled")


@wrong(
    r"\w+: (?s:.*)_foreach_norm was given this rank's shard of 'net\.0\.weight'.*in a list inside compiled code.*"
    r"torch\.compiler\.disable"
)
def norms_of_a_list_of_parameters_in_compiled_code() -> None:
    class Norms(Regression):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                norms = torch._foreach_norm(list(self.net.parameters()))
            return super().forward(x) * torch.stack(norms).sum()

    fit(Norms(), kind="compiled")


@wrong(r"(ValueError|RuntimeError|UnsupportedError): .*(live engine|closed)")
def copy_after_the_engine_is_gone() -> None:
    module = Regression()
    make_trainer("eager").validate(module, make_loader("eager", 1), verbose=False)
    close(module)
    copy.deepcopy(module)


@wrong(r"UnsupportedError: Regression is not sharded\. Sharding happens when trainer\.fit\(\)")
def whole_parameters_of_a_copy() -> None:
    module = Regression()
    make_trainer("eager").validate(module, make_loader("eager", 1), verbose=False)
    twin = copy.deepcopy(module)
    close(module)
    assert engine_of(twin) is None
    with full_parameters(twin):
        pass


def messages() -> dict[str, str]:
    return WRONG.messages()


@pytest.fixture(scope="module")
def raised(ranks: Ranks) -> list[dict[str, str]]:
    return ranks.run(2, messages, deadline=120)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_refused_with_what_where_and_what_to_do(raised: list[dict[str, str]], name: str) -> None:
    for found in raised:
        WRONG.check(name, found)


def test_the_table_is_long() -> None:
    assert len(WRONG) >= 20
