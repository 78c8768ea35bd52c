"""Build models in __init__ or configure_model, on the CPU or the meta device, never in full on a rank."""

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics import MeanMetric

from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    WIDTH,
    Regression,
    close,
    global_losses,
    make_loader,
    make_trainer,
    mlp,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks


class Scale(nn.Module):
    """Has parameters in addition to its children, one of them with a single element and no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.shift = nn.Parameter(torch.empty(OUTPUTS))
        self.inner = nn.Linear(OUTPUTS, OUTPUTS)
        self.register_buffer("offset", torch.empty(OUTPUTS))
        # not on the meta device even if the parameters are, since no code computes it again
        self.register_buffer("table", torch.linspace(0, 1, OUTPUTS, device="cpu"), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)
        nn.init.normal_(self.shift)
        self.offset.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.shift + self.offset * self.table


def build() -> nn.Sequential:
    return nn.Sequential(*mlp(), Scale(), nn.LayerNorm(OUTPUTS))


def initialise(module: nn.Module) -> None:
    """In all the ways that people write to parameters."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
        module.weight.data[0] *= 2
        if module.bias is not None:
            with torch.no_grad():
                module.bias.fill_(0.125)
    if isinstance(module, Scale):
        module.shift.data.zero_()
        module.scale.data = torch.tensor(0.75)
    if isinstance(module, nn.LayerNorm):
        module.weight = nn.Parameter(module.weight.detach() * 0.5)


def reset(net: nn.Module) -> None:
    """Return the result of materializing a module from the meta device without sharding."""
    for module in net.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()


class Built(Regression):
    """Base class; subclasses decide device and place. `plain` is the same on a single device."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def plain(self) -> None:
        self.net = build()


class InInit(Built):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()


class InConfigureModel(Built):
    def configure_model(self) -> None:
        if self.net is None:
            self.net = build()


class OnMeta(Built):
    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = build()

    def plain(self) -> None:
        with seeded():
            super().plain()
        reset(self.net)


class InInitOnMeta(OnMeta):
    def __init__(self) -> None:
        super().__init__()
        super().configure_model()

    def configure_model(self) -> None: ...


class Initialised(InConfigureModel):
    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.apply(initialise)

    def plain(self) -> None:
        super().plain()
        self.apply(initialise)


class Shaped(nn.Linear):
    """Draw no random numbers, so that the order of resets of tied modules does not matter."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).view_as(self.weight))
            if self.bias is not None:
                self.bias.fill_(0.1 / self.weight.size(1))


class Tied(Built):
    """One weight read by two modules: it stays one parameter."""

    def configure_model(self) -> None:
        if self.net is None:
            self.plain()

    def plain(self) -> None:
        self.net = nn.Sequential(
            Shaped(INPUTS, WIDTH),
            nn.Tanh(),
            Shaped(WIDTH, WIDTH),
            nn.Tanh(),
            Shaped(WIDTH, WIDTH),
            Shaped(WIDTH, OUTPUTS),
        )
        self.net[4].weight = self.net[2].weight


class TiedOnMeta(Tied):
    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


class TiedPartlyOnMeta(Tied):
    """Take the weight from a module that has values; its bias has none."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            with torch.device("meta"):
                self.net[4] = Shaped(WIDTH, WIDTH)
            self.net[4].weight = self.net[2].weight


class TiedInInit(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.plain()


class TiedInitialised(Tied):
    def plain(self) -> None:
        super().plain()
        self.apply(initialise)


def _fit(kind: str, make: Callable[[], Built]) -> dict[str, Any]:
    torch.manual_seed(5 + (dist.get_rank() if kind != "single" else 0))  # rank 0's random numbers decide
    module = make()
    if kind == "single":
        torch.manual_seed(5)
        module.net = None
        module.plain()
        module.configure_model = lambda: None  # type: ignore[method-assign]
    trainer = make_trainer(kind, max_epochs=2)
    trainer.fit(module, make_loader(kind))
    names = [name for name, _ in module.named_parameters()]
    ties = len(list(module.named_parameters(remove_duplicate=False))) - len(names)
    values = {"losses": global_losses(kind, module), "state": whole_state(module)}
    trainer.test(module, make_loader(kind), verbose=False)  # configure_model is called again
    close(module)
    return {"values": values, "names": names, "ties": ties}


def _fit_both(kind: str, make: Any) -> dict[str, Any]:
    return {"single": _fit("single", make), kind: _fit(kind, make)}


MODELS = [
    InInit,
    InConfigureModel,
    OnMeta,
    InInitOnMeta,
    Initialised,
    Tied,
    TiedOnMeta,
    TiedPartlyOnMeta,
    TiedInInit,
    TiedInitialised,
]


@pytest.mark.parametrize(
    ("world_size", "kind", "make"),
    [(2, "eager", make) for make in MODELS]
    + [(3, "eager", make) for make in (OnMeta, Initialised, TiedInitialised)]
    + [(2, "compiled", TiedInitialised)],
)
@pytest.mark.exhaustive_variants("3-eager-OnMeta", "2-eager-InInitOnMeta", "2-eager-OnMeta")
def test_model_equals_one_built_on_a_single_device(ranks: Ranks, world_size: int, kind: str, make: Any) -> None:
    for result in ranks.run(world_size, _fit_both, kind, make):
        ours, single = result[kind], result["single"]
        assert ours["names"] == single["names"]
        assert ours["ties"] == single["ties"] == int(issubclass(make, Tied))
        assert_close_relative(ours["values"], single["values"], 5 * RTOL)


class Wide(nn.Module):
    """Has one layer that is larger than all others together, with children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(Built):
    layers, width = 9, 24

    def configure_model(self) -> None:
        if self.net is None:
            self.plain()

    def plain(self) -> None:
        self.first = nn.Linear(INPUTS, self.width)
        self.net = nn.ModuleList(Wide(self.width) for _ in range(self.layers))
        self.last = nn.Linear(self.width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.net:
            x = layer(x)
        return self.last(x)


class DeepInitialised(Deep):
    def plain(self) -> None:
        super().plain()
        self.apply(initialise)


class DeepOnMeta(Deep):
    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


class Watermark(TorchDispatchMode):
    """The most bytes that were alive at once, of tensors that ops have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[Tensor]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.seen[id(tensor)] = weakref.ref(tensor)
        with no_shard_dispatch():  # a shard's bytes, not the full parameter's
            self.most = max(self.most, self._alive())
        return out

    def _alive(self) -> int:
        sizes: dict[int, int] = {}
        for key, ref in list(self.seen.items()):
            tensor = ref()
            if tensor is None:
                del self.seen[key]
            elif not tensor.is_meta:
                # not its storage: once Python has seen that, the executor takes the memory for being in use
                start = tensor.storage_offset() * tensor.element_size()
                base, size = tensor.data_ptr() - start, start + tensor.nbytes
                sizes[base] = max(sizes.get(base, 0), size)
        return sum(sizes.values())


class _Watched(pl.Callback):
    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.mark = Watermark()
        self.mark.__enter__()

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.mark.__exit__(None, None, None)


def _most_while_building(kind: str, make: Any) -> tuple[int, int]:
    watched, module = _Watched(), make()
    # other ranks' memory that can be read from here takes none of this rank's, but looks as if it did
    ways = {} if kind == "ddp" else {"gather_transport": "collective"}
    make_trainer(kind, callbacks=[watched], limit_train_batches=1, **ways).fit(module, make_loader(kind))
    whole = sum(value.numel() for value in whole_state(module).values())
    close(module)
    return watched.mark.most // 4, whole


@pytest.mark.parametrize(
    "make", [Deep, pytest.param(DeepInitialised, marks=pytest.mark.slow), DeepOnMeta], ids=lambda make: make.__name__
)
@pytest.mark.exhaustive_variants("DeepInitialised", "DeepOnMeta")
def test_no_rank_holds_the_whole_model_while_building(ranks: Ranks, make: Any) -> None:
    layer = 4 * Deep.width**2 + 5 * Deep.width
    for most, whole in ranks.run(3, _most_while_building, "eager", make):
        assert whole > Deep.layers * layer
        # twice a third, while shards move into the flat buffer; and one layer with its inputs at a time
        assert whole / 3 < most < 2 * whole / 3 + 2 * layer < whole


def test_ranks_under_ddp_do(ranks: Ranks) -> None:
    for most, whole in ranks.run(2, _most_while_building, "ddp", Deep):
        assert most >= whole, "the measurement above misses memory"


class HalfInInit(Regression):
    """One part built in __init__, another in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.extra: Any = None
        self.dtypes: set[torch.dtype] = set()

    def configure_model(self) -> None:
        if self.extra is None:
            with seeded(1):
                self.extra = nn.Sequential(nn.Linear(OUTPUTS, OUTPUTS), nn.BatchNorm1d(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        out = self.extra(self.net(x))
        self.dtypes |= {self.dtype, out.dtype, *(param.dtype for param in self.parameters())}
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _in_half(kind: str, sync_batchnorm: bool) -> tuple[set[torch.dtype], dict[str, Tensor]]:
    module = HalfInInit()
    trainer = make_trainer(kind, precision="bf16-true", sync_batchnorm=sync_batchnorm)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)  # torch's own refuses the CPU
        trainer.fit(module, make_loader(kind, 1))  # normalising three samples in bf16 soon blows up any difference
    state = whole_state(module)
    close(module)
    return module.dtypes, state


def _in_half_under(sync_batchnorm: bool) -> list[Any]:
    return [_in_half("ddp", False), _in_half("eager", sync_batchnorm)]


@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_all_parts_get_the_trainers_dtype(ranks: Ranks, sync_batchnorm: bool) -> None:
    for (_, expected), (dtypes, state) in ranks.run(2, _in_half_under, sync_batchnorm):
        assert dtypes == {torch.bfloat16}
        assert {key: value.dtype for key, value in state.items()} == {k: v.dtype for k, v in expected.items()}
        assert_close_relative(state, expected, 1e-2)
