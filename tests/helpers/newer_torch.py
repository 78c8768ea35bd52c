"""A torch newer than any that was tested, faked: ``python -m tests.helpers.newer_torch [NAME ...]``.

Each private name that this package asks for is taken away in turn while the package is imported, in a process of its
own that calls its torch 2.99. Then a small model is trained by ``zero3`` and by ``zero3_compile``. Prints a table, and
fails unless each training gives the losses of a plain loop or an error that names the missing name or the tested
versions.

``+NAME`` is a function that needs one argument more. ``?NAME`` is one that returns ``(result, None)``: the training may
fail with any error, and must not go on with other losses. ``--changed`` chooses both kinds of all functions.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import logging
import os
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

REPO = Path(__file__).resolve().parents[2]
STRATEGIES = ("zero3", "zero3_compile")
LIMIT_S = 120
RIGHT, CLEAR, FAILS, NEEDED = "right", "clear error", "an error", "torch itself fails without it"


def names() -> list[str]:
    """Return the private names of torch that the package asks for while it is imported."""
    from lightning_zero.compat.patches import PATCHES

    found = {name for patch in PATCHES for name in (*patch.names, *patch.needs)}
    for path in (REPO / "lightning_zero" / "compat").glob("*.py"):
        found.update(re.findall(r'(?:private|module)\(\s*"(torch[\w.]+)"', path.read_text()))
    return sorted(name for name in found if re.search(r"\._[A-Za-z]", name))


def loaded() -> list[str]:
    """Return the modules of other packages that importing this package loads."""
    code = "import sys, lightning_zero; print('\\n'.join(n for n in sys.modules if not n.startswith('lightning_zero')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    return done.stdout.split()


class CannotFake(Exception):
    """A class of C++ loses no attribute, and only functions have parameters."""


MORE_ARGUMENTS, OTHER_RESULT = "+", "?"
# Errors about arguments have the caller's frame as their last one: here it is this file's name that says "ours".
CHANGED = """
def change(plain, how):
    def changed(*args, **kwargs):
        ours = "/lightning_zero/" in sys._getframe(1).f_code.co_filename
        if how == "+" and ours:
            raise TypeError(f"{plain.__name__}() missing 1 required keyword-only argument: 'more'")
        result = plain(*args, **kwargs)
        return (result, None) if how == "?" and ours else result
    return changed
"""


def changed_names() -> list[str]:
    """Return the functions that the package calls, in both ways in which they may change.

    Replaced functions are left out: a Patch compares their parameters.
    """
    from lightning_zero.compat.patches import PATCHES

    replaced = {name for patch in PATCHES for name in patch.names}
    functions = [name for name in names() if isinstance(_get(name), FunctionType | BuiltinFunctionType)]
    return [how + name for how in (MORE_ARGUMENTS, OTHER_RESULT) for name in functions if name not in replaced]


def _get(name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(find(path), attribute, None)


def change(name: str, how: str) -> None:
    """Change the parameters or the result of a function for calls of the package, to the end of the process."""
    path, _, attribute = name.rpartition(".")
    owner, plain = find(path), _get(name)
    if not isinstance(plain, FunctionType | BuiltinFunctionType):
        raise CannotFake(name)
    made: dict[str, Any] = {"sys": sys}
    exec(compile(CHANGED, "/lightning_zero/changed.py", "exec"), made)
    new = made["change"](plain, how)
    if how == MORE_ARGUMENTS:
        more = inspect.Parameter("more", inspect.Parameter.KEYWORD_ONLY)
        new.__signature__ = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL), more])
    elif isinstance(plain, FunctionType):
        new.__signature__ = inspect.signature(plain)
    setattr(owner, attribute, new)


def find(path: str) -> Any:
    """Return a module or a class without help of this package, which is not imported yet."""
    first, *parts = path.split(".")
    owner = importlib.import_module(first)
    for part in parts:
        first = f"{first}.{part}"
        owner = sys.modules.get(first) or getattr(owner, part)
    return owner


@contextmanager
def without(name: str) -> Iterator[None]:
    """Inside, the module or class that has this name lacks it."""
    path, _, attribute = name.rpartition(".")
    owner = find(path)
    owner = next((base for base in getattr(owner, "__mro__", ()) if attribute in vars(base)), owner)
    before, module = vars(owner).get(attribute, getattr(owner, attribute)), sys.modules.get(name)
    if getattr(owner, "__module__", "") == "torch._C":
        raise CannotFake(name)
    delattr(owner, attribute)
    if module is not None:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        setattr(owner, attribute, before)
        if module is not None:
            sys.modules[name] = module


def losses_of(strategy: str | None) -> list[float]:
    """Return the losses of five steps, by a plain loop or by a strategy."""
    import lightning as L
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(16, 4)
            self.seen: list[float] = []

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.seen.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    torch.manual_seed(0)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.randn(20, 16), torch.randint(0, 4, (20,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    if strategy is None:
        optimizer = model.configure_optimizers()
        for batch in loader:
            model.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.seen
    from lightning_zero import ZeroStrategy

    chosen = ZeroStrategy(compile=strategy == "zero3_compile", compile_backend="aot_eager")
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=chosen, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model.seen


def use_executor_of(version: Any) -> None:
    """Use the C++ executor of the real torch, which would otherwise be built again for the faked version."""
    import torch

    from lightning_zero.native import build

    faked, torch.__version__ = torch.__version__, version
    digest = build._digest(build.source_directory())
    torch.__version__ = faked
    build._digest = lambda sources: digest


def verdict(name: str) -> dict[str, str]:
    """Train without a name, or with a changed one, in this process, by each strategy."""
    import torch

    how, name = (name[0], name[1:]) if name[0] in (MORE_ARGUMENTS, OTHER_RESULT) else ("", name)
    words = (name.rpartition(".")[2] if how else name, "was tested with torch")

    expected = losses_of(None)
    real = torch.__version__
    torch.__version__ = torch.torch_version.TorchVersion("2.99.0")  # type: ignore[assignment, attr-defined]
    said = io.StringIO()
    logging.getLogger("lightning_zero").addHandler(logging.StreamHandler(said))
    try:
        with warnings.catch_warnings(record=True) as warned, nullcontext() if how else without(name):
            warnings.simplefilter("always")
            if how:
                change(name, how)
            importlib.import_module("lightning_zero")
    except CannotFake:
        return dict.fromkeys(("import", *STRATEGIES), f"{NEEDED}, or cannot be taken away")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "lightning_zero" not in frames[-1].filename and Path(__file__).name not in frames[-1].filename:
            return dict.fromkeys(("import", *STRATEGIES), f"{NEEDED}: {type(error).__name__}: {error}")
        return {"import": f"FAILS: {type(error).__name__}: {error}"}
    use_executor_of(real)
    told = [str(one.message) for one in warned if "lightning_zero was tested with torch" in str(one.message)]
    found = {"import": RIGHT if len(told) == 1 else f"WARNS {len(told)} times"}
    for strategy in STRATEGIES:
        try:
            found[strategy] = RIGHT if _equal(losses_of(strategy), expected) else "WRONG"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            if any(word in text for word in words):
                found[strategy] = CLEAR
            else:
                found[strategy] = f"{FAILS if how == OTHER_RESULT else 'UNCLEAR'}: {text[:300]}"
    found["left out"] = "; ".join(re.findall(r"Disabled with torch [\w.+]+: (.*?) \(", said.getvalue()))
    return found


def _equal(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True))


def attempt(name: str, modules: list[str]) -> dict[str, str]:
    """Fork a process that takes a name away and trains."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                found = verdict(name)
        except BaseException as error:
            found = {"import": f"ENDS: {type(error).__name__}: {error}"}
        os.write(write, json.dumps(found).encode()[:60000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"import": "DIES"}


def table(chosen: list[str]) -> tuple[str, int]:
    """Return a Markdown table, and the number of names with a result that is neither right nor a clear error."""
    modules = loaded()
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    rows, bad = ["| missing name | import | zero3 | zero3_compile | left out |", "|---|---|---|---|---|"], 0
    for name in chosen:
        found = attempt(name, modules)
        cells = [found.get(column, "") for column in ("import", *STRATEGIES, "left out")]
        bad += any(not cell.startswith((RIGHT, CLEAR, FAILS, NEEDED)) for cell in cells[:3])
        rows.append(f"| `{name}` | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(rows), bad


def listed(function: str) -> list[str]:
    """Return the result of a function of this module, which imports the package, from a process of its own."""
    code = f"import json; from tests.helpers.newer_torch import {function}; print(json.dumps({function}()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    return list(json.loads(done.stdout))


if __name__ == "__main__":
    chosen = listed("changed_names") if sys.argv[1:] == ["--changed"] else sys.argv[1:] or listed("names")
    text, bad = table(chosen)
    print(text)
    sys.exit(1 if bad else 0)
