"""Every entry of ``lightning_zero/compat`` is there, by its name, and is written down in one form."""

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.private_names import FORM, META, Entry, entries

REPO = Path(__file__).resolve().parents[3]
ENTRIES = entries(REPO / "lightning_zero")
# Missing where torch was built without CUDA.
WITH_CUDA = {"torch._C._cuda_clearCublasWorkspaces"}


def resolve(name: str) -> Any:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not error.name or not name.startswith(error.name):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def of(library: str) -> list[Any]:
    """The texts of ``graphs.py`` aside, which no object has: see test_graphs.py."""
    found = [entry for entry in ENTRIES if entry.name.split(".")[0] == library]
    return [pytest.param(entry, id=entry.name) for entry in found if not entry.name.startswith(META)]


def module_with_ignored_buffers() -> nn.Module:
    module = nn.Linear(1, 1)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    return module


def lightnings(name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: resolve(name)(*args, **kwargs)


# Objects with attributes that their class lacks, by the class in the entry.
EXAMPLES: dict[str, Callable[[], Any]] = {
    "torch.nn.Module": lambda: nn.Linear(1, 1),
    "torch.nn.RNNBase": lambda: nn.LSTM(1, 1),
    "torch.nn.parallel.DistributedDataParallel": module_with_ignored_buffers,
    "torch.optim.Optimizer": lambda: torch.optim.SGD([torch.zeros(1)]),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "torch.UntypedStorage": lambda: torch.zeros(1).untyped_storage(),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._dynamo.OptimizedModule": lambda: torch.compile(nn.Linear(1, 1)),
    "torch._dynamo.metrics_context.MetricsContext": lambda: torch._dynamo.utils.get_metrics_context(),
    "lightning.pytorch.strategies.ParallelStrategy": lightnings("lightning.pytorch.strategies.DDPStrategy"),
    "lightning.fabric.strategies.ParallelStrategy": lightnings("lightning.fabric.strategies.DDPStrategy"),
    "lightning.pytorch.LightningModule": lightnings("lightning.pytorch.LightningModule"),
    "lightning.pytorch.callbacks.WeightAveraging": lightnings("lightning.pytorch.callbacks.WeightAveraging"),
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": lightnings(
        "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector", None
    ),
    "lightning.pytorch.Trainer": lightnings(
        "lightning.pytorch.Trainer", accelerator="cpu", logger=False, enable_checkpointing=False
    ),
}
# A beginning of names, and a mark that AOTAutograd looks for: see test_torch.py.
NOT_ATTRIBUTES = {"torch._foreach_", "torch._fused_", "torch._functorch.aot_autograd._boxed_call"}


# Names of newer versions, which earlier ones have elsewhere.
ELSEWHERE = {
    "torch._dynamo.variables.hashable.HashableTracker": "torch._dynamo.variables.ConstDictVariable._HashableTracker"
}


def check(entry: Entry) -> None:
    if entry.name in ELSEWHERE and importlib.util.find_spec(entry.name.rpartition(".")[0]) is None:
        entry = replace(entry, name=ELSEWHERE[entry.name])
    if entry.name in WITH_CUDA and torch.version.cuda is None:
        pytest.skip("torch was built without CUDA")
    if entry.name in NOT_ATTRIBUTES:
        return
    owner, _, attribute = entry.name.rpartition(".")
    holder = resolve(owner)
    if not hasattr(holder, attribute) and owner in EXAMPLES:
        holder = EXAMPLES[owner]()
    assert hasattr(holder, attribute), (
        f"{entry.name} is gone (with torch {torch.__version__}): see compat/{entry.module}.py:{entry.line} for why it is "
        "needed, and look for what stands in its place"
    )


@pytest.mark.parametrize("entry", of("torch"))
def test_torch_has(entry: Entry) -> None:
    check(entry)


@pytest.mark.parametrize("entry", of("lightning"))
def test_lightning_has(entry: Entry) -> None:
    pytest.importorskip("lightning")
    check(entry)


def test_a_name_that_is_gone_is_missed() -> None:
    for name in (
        "torch._C._gone",
        "torch._gone.module.name",
        "torch.nn.Module._gone",
        "lightning.pytorch.Trainer._gone",
    ):
        with pytest.raises((AssertionError, AttributeError), match="_gone"):
            check(Entry("modules", None, name, "", 1))


def test_entries_were_found() -> None:
    assert len(of("torch")) > 50
    assert len(of("lightning")) > 20
    texts = [entry for entry in ENTRIES if entry.name.startswith(META)]
    assert {entry.module for entry in texts} == {"graphs"}
    assert len(of("torch")) + len(of("lightning")) + len(texts) == len(ENTRIES)


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in ENTRIES])
def test_comment_says_why_and_since_when(entry: Entry) -> None:
    matched = FORM.fullmatch(entry.comment)
    assert matched, f"compat/{entry.module}.py:{entry.line}: a reason and '(torch 2.11+)', not {entry.comment!r}"
    assert matched[1] == entry.name.split(".")[0]


def test_every_name_stands_once() -> None:
    assert [name for name, count in Counter(entry.name for entry in ENTRIES).items() if count > 1] == []


def test_every_entry_is_used() -> None:
    words = Counter(re.findall(r"\w+", "\n".join(path.read_text() for path in (REPO / "lightning_zero").rglob("*.py"))))
    unused = [entry.name for entry in ENTRIES if words[entry.alias or entry.name.rpartition(".")[2]] < 2]
    assert not unused, f"nobody needs {unused} any more"
