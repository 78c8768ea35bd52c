"""Full checkpoints are plain Lightning files: any strategy on any number of devices goes on from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.helpers.oracle import assert_close_relative
from tests.helpers.saved import MODULES, Scheduled, TwoOptimizers, resume, uninterrupted_fit
from tests.helpers.trainer import (
    INPUTS,
    RTOL,
    WIDTH,
    Regression,
    check_captured,
    close,
    global_losses,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks

PLACES = [("single", 1), ("ddp", 2), ("eager", 1), ("eager", 2), ("eager", 3)]
# Transfers between numbers of ranks do not depend on the number of optimizers.
READERS = [("Scheduled", *place) for place in PLACES]
READERS += [(name, *place) for name in MODULES if name != "Scheduled" for place in (("single", 1), ("eager", 2))]


def _write(kind: str, name: str, path: str) -> list[int]:
    """Train for an epoch and save; return each rank's values of the model and the optimizers."""
    held = []

    class Noting(MODULES[name]):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            held.append(len(checkpoint["state_dict"]))
            held.extend(len(state) for state in checkpoint["optimizer_states"])

    Noting.__qualname__ = Noting.__name__ = name
    module, trainer = Noting(note="written"), make_trainer(kind)
    trainer.fit(module, make_loader(kind))
    trainer.save_checkpoint(path)
    close(module)
    return held


@pytest.fixture(scope="module")
def files(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], str]:
    """Checkpoints of every kind of module, written in every place."""
    home = tmp_path_factory.mktemp("checkpoints")
    written = {}
    for name in MODULES:
        for kind, world in PLACES:
            if name != "Scheduled" and (kind, world) == ("eager", 1):
                continue
            path = str(home / f"{name}-{kind}-{world}.ckpt")
            held = ranks.run(world, _write, kind, name, path)
            assert all(held[0])
            assert kind != "eager" or not any(any(counts) for counts in held[1:]), "a rank but the first held values"
            written[name, world, kind] = path
    return written


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {name: ranks.run(1, uninterrupted_fit, name)[0] for name in MODULES}


@pytest.mark.parametrize(("name", "kind", "world"), READERS, ids=str)
@pytest.mark.exhaustive_variants("Scheduled-single-1", "Scheduled-eager-1", "Scheduled-eager-3", "PlainSGD-eager-2")
def test_resumed_training_equals_uninterrupted(
    ranks: Ranks, files: Any, uninterrupted: Any, name: str, kind: str, world: int
) -> None:
    paths = {path: (k, w) for (n, w, k), path in files.items() if n == name and "eager" in (k, kind)}
    for result in ranks.run(world, resume, kind, name, list(paths)):
        for path, (losses, state) in result.items():
            expected_losses, expected = uninterrupted[name]
            what = "written by {} on {} ranks".format(*paths[path])
            assert_close_relative(losses, expected_losses, RTOL, what=what)
            assert_close_relative(state, expected, 5 * RTOL, what=what)


def _flatten(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flatten(item, f"{at}/{key}").items()} or {at: {}}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in _flatten(item, f"{at}/{i}").items()} or {at: []}
    return {at: value}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("kind", "world"), [("eager", 2), ("eager", 3)], ids=lambda value: str(value))
def test_file_is_the_one_a_single_device_writes(files: Any, name: str, kind: str, world: int) -> None:
    ours = torch.load(files[name, world, kind], weights_only=True)
    plain = torch.load(files[name, 1, "single"], weights_only=True)
    assert list(ours["state_dict"]) == list(MODULES[name]().state_dict())
    a, b = _flatten(ours), _flatten(plain)
    assert a.keys() == b.keys()
    for key, expected in b.items():
        if isinstance(expected, Tensor):
            assert (a[key].dtype, a[key].shape, a[key].device) == (expected.dtype, expected.shape, expected.device), key
            assert_close_relative(a[key], expected, 5 * RTOL, what=key)
        else:
            assert a[key] == expected, key
    tensors = [value for value in a.values() if isinstance(value, Tensor)]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors), "padding takes space in the file"
    tied = [ours["state_dict"][key].data_ptr() for key in ("net.1.weight", "net.2.weight")]
    assert tied[0] == tied[1], "a tied weight takes its space twice"
    assert ours["hyper_parameters"] == {"width": WIDTH, "note": "written"}


@pytest.mark.parametrize("name", MODULES)
def test_file_loads_into_a_plain_module(files: Any, uninterrupted: Any, name: str) -> None:
    module = MODULES[name].load_from_checkpoint(files[name, 3, "eager"])
    plain = MODULES[name].load_from_checkpoint(files[name, 1, "single"])
    assert module.hparams == {"width": WIDTH, "note": "written"}
    assert_close_relative(dict(module.state_dict()), dict(plain.state_dict()), 5 * RTOL)
    assert module.net[1].weight is module.net[2].weight


def _with_callback(kind: str, home: str) -> dict[str, Any]:
    """Train with ModelCheckpoint.

    Resume from the best file, and from the last in a run that overwrites it.
    """
    out: dict[str, Any] = {}
    module = Scheduled()
    kept = ModelCheckpoint(f"{home}/{kind}", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make_trainer(kind, max_epochs=3, callbacks=[kept], enable_checkpointing=True)
    trainer.fit(module, make_loader(kind), make_loader(kind, 2, seed=1))
    check_captured(trainer)
    out["best"] = (
        Path(kept.best_model_path).name,
        kept.best_model_score,
        sorted(f.name for f in Path(home, kind).iterdir()),
    )
    out["tested"] = trainer.test(module, make_loader(kind, 2, seed=2), ckpt_path="best", verbose=False)
    out["state"] = whole_state(module)
    close(module)

    module = Scheduled(seed=7)
    kept = ModelCheckpoint(
        f"{home}/{kind}", monitor="val_loss", mode="max", save_top_k=1, save_last=True, every_n_train_steps=1
    )
    trainer = make_trainer(kind, max_epochs=5, callbacks=[kept], enable_checkpointing=True)
    trainer.fit(module, make_loader(kind), make_loader(kind, 2, seed=1), ckpt_path="last")
    check_captured(trainer)
    out["resumed"] = (global_losses(kind, module), trainer.global_step, whole_state(module))
    close(module)
    return out


def _with_callback_under(home: str, *kinds: str) -> list[dict[str, Any]]:
    return [_with_callback(kind, home) for kind in kinds]


@pytest.mark.parametrize("kind", ["eager", "captured"])
@pytest.mark.exhaustive_variants("captured")
def test_best_and_last_of_model_checkpoint(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for ddp, ours in ranks.run(2, _with_callback_under, str(tmp_path), "ddp", kind):
        name, score, files = ours.pop("best")
        expected_name, expected_score, expected_files = ddp.pop("best")
        assert (name, files) == (expected_name, expected_files)
        assert len(files) == 3
        assert_close_relative(score, expected_score, RTOL)
        assert_close_relative(ours, ddp, 5 * RTOL)


def _weights_only(home: str) -> dict[str, Any]:
    module, trainer = Scheduled(), make_trainer("eager")
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(f"{home}/weights.ckpt", weights_only=True)
    state = whole_state(module)
    other, tester = Scheduled(seed=7), make_trainer("eager")
    tester.validate(other, make_loader("eager", 0), ckpt_path=f"{home}/weights.ckpt", verbose=False)
    loaded = whole_state(other)
    (tested,) = tester.test(other, make_loader("eager", 2), ckpt_path=f"{home}/weights.ckpt", verbose=False)
    (expected,) = trainer.test(module, make_loader("eager", 2), verbose=False)
    resumed, error = Scheduled(seed=7), ""
    try:
        make_trainer("eager").fit(resumed, make_loader("eager"), ckpt_path=f"{home}/weights.ckpt")
    except KeyError as found:
        error = str(found)
    close(module, other, resumed)
    return {"state": state, "loaded": loaded, "tested": tested, "expected": expected, "error": error}


def test_weights_only(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks.run(2, _weights_only, str(tmp_path)):
        assert_close_relative(result["loaded"], result["state"], 0.0)
        assert result["tested"] == result["expected"]
        assert "contains only the model" in result["error"]
    file = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in file
    assert_close_relative(dict(file["state_dict"]), result["state"], 0.0)


class Half(Regression):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # hooks may still change the contents of the file
        checkpoint["state_dict"] = {key.replace("old.", "net."): v for key, v in checkpoint["state_dict"].items()}


def _in_bf16(home: str) -> list[Any]:
    results = []
    for kind in ("ddp", "eager"):
        module, trainer = Half(), make_trainer(kind, precision="bf16-true")
        trainer.fit(module, make_loader(kind))
        trainer.save_checkpoint(f"{home}/{kind}.ckpt")
        dist.barrier()
        if dist.get_rank() == 0:
            file = torch.load(f"{home}/{kind}.ckpt", weights_only=True)
            file["state_dict"] = {key.replace("net.", "old."): v for key, v in file["state_dict"].items()}
            torch.save(file, f"{home}/{kind}.ckpt")
        dist.barrier()
        close(module)
        runs = []
        for path in (None, f"{home}/{kind}.ckpt"):
            module, trainer = Half(), make_trainer(kind, precision="bf16-true", max_epochs=2)
            trainer.fit(module, make_loader(kind), ckpt_path=path)
            runs.append((module.losses[-4:], whole_state(module)))
            close(module)
        results.append(runs)
    return results


def test_bf16_true(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks.run(2, _in_bf16, str(tmp_path)):
        for uninterrupted, resumed in result:
            assert_close_relative(resumed, uninterrupted, 0.0)
    ddp, ours = (torch.load(tmp_path / f"{kind}.ckpt", weights_only=True) for kind in ("ddp", "eager"))
    assert {value.dtype for value in ours["state_dict"].values()} == {torch.bfloat16}
    a, b = _flatten(ours["optimizer_states"]), _flatten(ddp["optimizer_states"])
    assert {k: getattr(v, "dtype", None) for k, v in a.items()} == {k: getattr(v, "dtype", None) for k, v in b.items()}


class Renamed(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.last
        del self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.net(x))


class Reordered(Scheduled):
    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        return torch.optim.NAdam([{"params": group["params"][::-1]} for group in optimizer.param_groups])


class Another(Scheduled):
    """Return a model with the same parameter groups."""

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class OneGroup(Scheduled):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters())


def _errors(files: dict[tuple[str, int, str], str]) -> dict[str, str]:
    path = files["Scheduled", 2, "eager"]
    cases: dict[str, tuple[Regression, str]] = {
        "other shapes": (Scheduled(width=WIDTH - 1), path),
        "other names": (Renamed(), path),
        "other optimizers": (TwoOptimizers(), path),
        "other order": (Reordered(), path),
        "another optimizer": (Another(), path),
        "another optimizer, sharded": (Another(), "sharded.ckpt"),
        "other groups": (OneGroup(), path),
        "no file": (Scheduled(), path + "x"),
    }
    errors = {}
    saver, source = make_trainer("eager", state_dict_type="sharded"), Scheduled()
    saver.fit(source, make_loader("eager", 1))
    saver.save_checkpoint("sharded.ckpt")
    close(source)
    for what, (module, file) in cases.items():
        try:
            make_trainer("eager", max_epochs=2).fit(module, make_loader("eager"), ckpt_path=file)
        except Exception as error:
            errors[what] = f"{type(error).__name__}: {error}"
        close(module)
    return errors


def test_files_that_do_not_fit_are_refused_on_every_rank(ranks: Ranks, files: Any) -> None:
    for errors in ranks.run(2, _errors, files):
        shapes = errors["other shapes"]
        assert shapes.startswith("RuntimeError: Error(s) in loading state_dict for Scheduled")
        assert (
            f"net.0.weight: the checkpoint has shape ({WIDTH}, {INPUTS}), the model ({WIDTH - 1}, {INPUTS})" in shapes
        )
        assert "Missing key" not in shapes
        assert 'Missing key(s) in state_dict: "other.weight", "other.bias"' in errors["other names"]
        assert 'Unexpected key(s) in state_dict: "last.weight", "last.bias"' in errors["other names"]
        assert "holds the state of 1 optimizers, but configure_optimizers() returned 2" in errors["other optimizers"]
        assert "in the order in which they were saved" in errors["other order"]
        for what in ("another optimizer", "another optimizer, sharded"):
            assert "ValueError: The checkpoint's optimizer is no SGD: its settings lack 'dampening', " in errors[what]
        assert "parameter groups of 4, 6 parameters, and NAdam of 10" in errors["other groups"]
        assert errors["no file"].startswith("FileNotFoundError")


def _saved_before_it_is_sharded(home: str) -> list[Any]:
    module, states = Scheduled(), []
    for name in ("before", "after"):
        trainer = make_trainer("eager")
        trainer.strategy.connect(module)
        trainer.save_checkpoint(f"{home}/{name}.ckpt", weights_only=True)
        dist.barrier()
        states.append(torch.load(f"{home}/{name}.ckpt", weights_only=True)["state_dict"])
        if name == "before":
            make_trainer("eager").fit(module, make_loader("eager"))
    states.append(whole_state(module))
    close(module)
    return states


def test_a_trainer_saves_a_module_that_it_has_not_set_up(ranks: Ranks, tmp_path: Path) -> None:
    for before, after, state in ranks.run(2, _saved_before_it_is_sharded, str(tmp_path)):
        assert_close_relative(dict(before), dict(Scheduled().state_dict()), 0.0)
        assert_close_relative(dict(after), state, 0.0)


def _loaded_by_hand(home: str) -> list[Any]:
    """By a strategy that has no module, and by one whose module belongs to no Trainer."""
    saving, loading = make_trainer("eager"), make_trainer("eager").strategy
    saving.strategy.connect(Scheduled())
    saving.save_checkpoint(f"{home}/x.ckpt", weights_only=True)
    dist.barrier()
    found = [loading.load_checkpoint(f"{home}/x.ckpt")["state_dict"]]
    loading.connect(Scheduled(seed=1))
    found.append(loading.load_checkpoint(f"{home}/x.ckpt")["state_dict"])
    with pytest.raises(FileNotFoundError):
        loading.load_checkpoint(f"{home}/none.ckpt")
    return found


def test_a_strategy_loads_before_there_is_a_module_or_its_trainer(ranks: Ranks, tmp_path: Path) -> None:
    for states in ranks.run(2, _loaded_by_hand, str(tmp_path)):
        for state in states:
            assert_close_relative(dict(state), dict(Scheduled().state_dict()), 0.0)
