"""Names in ``compat/lightning_private.py`` have the expected meaning."""

import inspect
import signal
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric, wrappers  # noqa: E402
from lightning.fabric.plugins import Precision as FabricPrecision  # noqa: E402
from lightning.fabric.strategies import DDPStrategy  # noqa: E402
from lightning.fabric.wrappers import _FabricModule  # noqa: E402
from lightning.pytorch.core import saving  # noqa: E402
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop  # noqa: E402
from lightning.pytorch.plugins.precision import HalfPrecision, Precision  # noqa: E402
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from lightning_zero.compat import lightning_private as private  # noqa: E402
from lightning_zero.compat.patches import parameters  # noqa: E402


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Order(Precision):
    """Records the order in which Lightning calls overridden methods."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def _wrap_closure(self, model: Any, optimizer: Any, closure: Any) -> Any:
        self.seen.append("wrap")

        def noted() -> Any:
            self.seen.append("closure")
            return closure()

        result = super()._wrap_closure(model, optimizer, noted)
        self.seen.append("step")
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        self.seen.append("after")
        super()._after_closure(model, optimizer)

    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append("clip")
        super()._clip_gradients(model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        self.seen.append("norm")


@pytest.fixture
def trainer(tmp_path: Any) -> Any:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)


def test_a_step_runs_closure_hooks_clipping_and_update_in_this_order(tmp_path: Any) -> None:
    order = Order()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=1, gradient_clip_val=1.0, plugins=[order], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Network(), torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert order.seen == ["wrap", "closure", "after", "clip", "norm", "step"]


def test_a_strategy_has_the_expected_attributes() -> None:
    strategy = pl.strategies.DDPStrategy()
    network, plugin = Network(), Precision()
    strategy._launcher = launcher = object()
    assert strategy.launcher is launcher
    strategy.connect(network)
    assert strategy._lightning_module is network
    strategy._precision_plugin = plugin
    assert strategy.precision_plugin is plugin
    strategy._optimizers = optimizers = [network.configure_optimizers()]
    assert strategy.optimizers is optimizers
    assert strategy._layer_sync is None
    assert "_configure_launcher" in inspect.getsource(pl.trainer.connectors.accelerator_connector)


def test_the_trainer_gives_a_strategy_its_layer_sync() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="ddp", sync_batchnorm=True, logger=False, enable_checkpointing=False
    )
    synchronised = trainer.strategy._layer_sync.apply(nn.Sequential(nn.BatchNorm1d(1)))
    assert isinstance(synchronised[0], nn.SyncBatchNorm)


def test_a_launcher_is_made_of_environment_and_counts() -> None:
    names = list(inspect.signature(private.SubprocessScriptLauncher).parameters)
    assert names[:3] == ["cluster_environment", "num_processes", "num_nodes"]


def test_fabrics_launcher_is_made_of_the_same() -> None:
    names = list(inspect.signature(private.FabricScriptLauncher).parameters)
    assert names[:3] == ["cluster_environment", "num_processes", "num_nodes"]


def test_fabric_asks_a_strategy_for_what_we_keep_there() -> None:
    seen = []

    class Control(private.BackwardSyncControl):
        def no_backward_sync(self, module: Any, enabled: bool) -> Any:
            seen.append(enabled)
            return nullcontext()

    class Strategy(DDPStrategy):
        def _set_world_ranks(self) -> None:
            seen.append("ranks")
            super()._set_world_ranks()

    strategy = Strategy(precision=FabricPrecision())
    assert isinstance(strategy._precision, FabricPrecision)
    strategy._backward_sync_control = Control()
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    assert seen == ["ranks"]
    with fabric.no_backward_sync(_FabricModule(nn.Linear(1, 1), strategy), enabled=True):
        assert seen[-1] is True


def test_a_method_that_is_called_as_forward_shows_it() -> None:
    """Fabric assigns a function of its own there, the only trace of the call."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            seen.append(self.inner.forward.__module__)
            return self.inner(*args)

    class Inner(nn.Linear):
        def training_step(self, x: Tensor) -> Tensor:
            return self(x).sum()

    seen: list[str] = []
    inner = Inner(1, 1)
    module = _FabricModule(Outer(inner), DDPStrategy(), inner)
    module.training_step(torch.ones(1, 1))
    module(torch.ones(1, 1))
    assert seen == [wrappers.__name__, Inner.forward.__module__]


def test_an_empty_beginning_is_left_as_it_is() -> None:
    for enabled in (True, False):
        with private.EmptyInit(enabled=enabled):
            value = torch.full((2, 2), 9.0)
            nn.init.kaiming_uniform_(value)
        assert bool((value == 9).all()) is enabled


def test_a_process_group_is_made_of_environment_and_backend() -> None:
    signature = inspect.signature(private.init_process_group)
    signature.bind("environment", "gloo", timeout=None, device_id=None)
    assert list(signature.parameters)[:2] == ["cluster_environment", "torch_distributed_backend"]


def test_a_value_stays_what_it_is_without_a_process_group() -> None:
    assert private.reduce_value(torch.tensor(3.0), None, reduce_op="mean").item() == 3
    assert list(inspect.signature(private.reduce_value).parameters) == ["result", "group", "reduce_op"]


def test_all_of_an_optimizers_state_moves_but_its_step() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.Adam([param]) for _ in range(2)]
    for optimizer in optimizers:
        param.sum().backward()
        optimizer.step()
    private.optimizer_to_device(optimizers[0], torch.device("meta"))
    assert {key: value.device.type for key, value in optimizers[0].state[param].items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    assert optimizers[1].state[param]["exp_avg"].device.type == "cpu"
    private.optimizers_to_device(optimizers, torch.device("meta"))
    assert optimizers[1].state[param]["exp_avg"].device.type == "meta"


def test_a_module_stores_its_device_and_dtype() -> None:
    network = Network()
    assert isinstance(network, private.DeviceDtypeModule)
    network._dtype, network._device = torch.float64, torch.device("meta")
    assert network.dtype is torch.float64
    assert network.device == torch.device("meta")
    assert network.layer.weight.dtype is torch.float32


def test_a_module_compiled_by_hand_shows_it() -> None:
    network = Network()
    assert network._compiler_ctx is None
    compiled = from_compiled(torch.compile(network))
    assert compiled._compiler_ctx is not None
    to_uncompiled(compiled)
    assert network._compiler_ctx is None


def test_averaged_weights_are_swapped_and_copied() -> None:
    network, callback = Network(), pl.callbacks.WeightAveraging(device="cpu")
    assert callback._average_model is None
    assert callback._device == torch.device("cpu")
    callback._average_model = AveragedModel(network)
    average = callback._average_model.module.layer.weight
    with torch.no_grad():
        network.layer.weight.fill_(1)
        average.fill_(2)
    callback._swap_models(network)
    assert (network.layer.weight.item(), average.item()) == (2, 1)
    callback._copy_average_to_current(network)
    assert (network.layer.weight.item(), average.item()) == (1, 1)


def test_the_loop_asks_for_sigterms_by_a_method_that_can_be_replaced(trainer: Any) -> None:
    loop = trainer.fit_loop.epoch_loop
    assert type(loop) is _TrainingEpochLoop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_the_handler_of_slurms_signal_saves_and_can_be_replaced(trainer: Any) -> None:
    handler = type(trainer._signal_connector)._slurm_sigusr_handler_fn
    assert "self.trainer.save_checkpoint(hpc_save_path)" in inspect.getsource(handler)
    assert "self._slurm_sigusr_handler_fn" in inspect.getsource(
        type(trainer._signal_connector).register_signal_handlers
    )


def test_the_handler_of_a_sigterm_can_be_replaced_before_it_is_registered(trainer: Any) -> None:
    connector, got = trainer._signal_connector, []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another one would be called, too
    connector._sigterm_notifier_fn = lambda signum, frame: got.append(signum)
    connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        connector.teardown()
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert not connector.received_sigterm


def test_public_names_that_took_the_place_of_private_ones() -> None:
    """``LightningOptimizer._optimizer``, ``HalfPrecision._desired_input_dtype``."""
    optimizer = Network().configure_optimizers()
    assert LightningOptimizer(optimizer).optimizer is optimizer
    assert HalfPrecision("bf16-true").precision == "bf16-true"
    assert HalfPrecision("16-true").precision == "16-true"


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        (private.checkpoint_connector._CheckpointConnector._parse_ckpt_path,
         "self, state_fn, ckpt_path, model_provided, model_connected"),
        (saving.pl_load, "path_or_url, map_location, weights_only"),
    ],
    ids=["_parse_ckpt_path", "pl_load"],
)  # fmt: skip
def test_replaced_functions_have_the_expected_parameters(replaced: Any, expected: str) -> None:
    assert parameters(inspect.unwrap(replaced)) == expected
