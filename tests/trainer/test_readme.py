"""Run every block of README and examples/docs/, and check their commands, links and files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.cli.main import COMMANDS, build_parser
from lightning_zero.engine import engine_of
from tests.helpers.readme import (
    DOCS,
    OPTIONAL,
    README,
    REPO,
    blocks,
    files_in_shell,
    files_of,
    imported,
    missing_package,
    own_command,
    page_name,
    pages,
    shell_lines,
)
from tests.helpers.trainer import Regression, make_loader
from tests.ranks.pool import Ranks

STEPS = 8
BATCHES = 12
TRANSFORMERS = {"peft", "transformers"}


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return make_loader("compiled", steps=BATCHES)

    def val_dataloader(self) -> DataLoader:
        return make_loader("compiled", steps=2, seed=1)


class SmallStrategy(ZeroStrategy):
    """Compile without generating code, which would be most of the time of so short a training."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"compile_backend": "aot_eager"} | options)


class SmallTrainer(pl.Trainer):
    """Adapt a block that was written for GPUs to the ranks of the test, and train a few steps."""

    def __init__(self, **arguments: Any) -> None:
        named = re.fullmatch("zero([123])_compile", str(arguments.get("strategy")))
        if named:
            arguments["strategy"] = SmallStrategy(stage=int(named[1]))
        callbacks = arguments.get("callbacks") or []
        saves = any(isinstance(one, ModelCheckpoint) for one in callbacks)
        defaults = {"logger": False, "enable_checkpointing": saves, "max_steps": STEPS, "log_every_n_steps": 2}
        forced = {"accelerator": "cpu", "devices": dist.get_world_size(), "num_nodes": 1}
        forced |= {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
        super().__init__(**defaults | arguments | forced)


def main_module(page: str) -> ModuleType:
    """Return a module with the names that blocks use without defining them."""
    module = ModuleType("__main__")
    vars(module).update(lightning_zero=lightning_zero, torch=torch, Trainer=SmallTrainer, __file__=page)
    vars(module).update(model=Regression(), datamodule=Data())
    return module


@contextlib.contextmanager
def small(folder: str, main: ModuleType) -> Iterator[None]:
    """Run blocks as the main program, which Dynamo and pickle look up by its name, and with the classes of the test."""
    before = sys.modules["__main__"]
    with ExitStack() as stack:
        stack.callback(sys.modules.__setitem__, "__main__", before)
        sys.modules["__main__"] = main
        stack.enter_context(contextlib.chdir(folder))
        for module in (pl, L):
            stack.enter_context(patch.object(module, "Trainer", SmallTrainer))
        stack.enter_context(patch.object(lightning_zero, "ZeroStrategy", SmallStrategy))
        stack.enter_context(
            patch.object(sys, "argv", ["train.py", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"])
        )
        stack.enter_context(patch.dict(os.environ, WANDB_MODE="offline", WANDB_SILENT="true"))
        yield


def run_page(page: str, folder: str) -> tuple[int, int, str | None]:
    """Run the blocks of a page; return their number, the trainings' number of steps, and a package that was missing."""
    main = main_module(page)
    names, done, missing = vars(main), 0, None
    try:
        with small(folder, main):
            for number, code in enumerate(blocks(Path(page).read_text(), "python")):
                missing = missing_package(code)
                if missing is not None:
                    break
                exec(compile(code, f"{Path(page).name}, block {number + 1}", "exec"), names)
                done += 1
    finally:
        for module in {id(value): value for value in names.values() if isinstance(value, nn.Module)}.values():
            engine = engine_of(module)
            if engine is not None:
                engine.close()
    return done, sum(one.global_step for one in names.values() if isinstance(one, pl.Trainer)), missing


def with_python() -> list[Any]:
    """Return the pages that have blocks.

    Those that import transformers take 20 s, most of them for that import.
    """
    found = []
    for page in pages():
        code = "\n".join(blocks(page.read_text(), "python"))
        slow = TRANSFORMERS & {*imported(code)}
        if code:
            found.append(pytest.param(page, id=page_name(page), marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize("page", with_python())
def test_blocks_of_a_page_run_in_order(ranks: Ranks, page: Path, tmp_path: Path) -> None:
    shutil.copytree(REPO / "examples", tmp_path / "examples", ignore=lambda _, names: {"docs", "benchmarks"} & {*names})
    for name, content in files_of(page.read_text()).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    # Importing transformers takes most of the time of a page, and pages share one rank that has done it.
    world = 1 if TRANSFORMERS & {*imported("\n".join(blocks(page.read_text(), "python")))} else 2
    found = ranks.run(world, run_page, str(page), str(tmp_path), deadline=240)
    assert len(set(found)) == 1, found
    done, steps, missing = found[0]
    assert page != README or steps >= STEPS
    if missing is not None:
        pytest.skip(f"{page_name(page)}: block {done + 1} needs the package {missing!r}")
    assert done == len(blocks(page.read_text(), "python")) > 0


# -- commands


def test_commands_of_ours_are_parsed_by_our_parser(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parser, wrong, parsed = build_parser(COMMANDS), [], 0
    for page in pages():
        for line in shell_lines(page.read_text()):
            words = own_command(line)
            if words is None:
                continue
            for script in re.findall(r"(?:^| )([\w-]+\.py):\w+", " ".join(words)):
                (tmp_path / script).touch()  # the reader's
            try:
                parser.parse_args(words)
                parsed += 1
            except SystemExit as end:
                if end.code:
                    wrong.append(f"{page_name(page)}: {line}\n{capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)
    assert parsed > 3


def test_shell_blocks_name_files_that_exist() -> None:
    named = [
        (page_name(page), file)
        for page in pages()
        for line in shell_lines(page.read_text())
        for file in files_in_shell(line)
    ]
    assert len(named) > 3
    assert [(page, file) for page, file in named if not (REPO / file).exists()] == []


def test_blocks_have_a_known_language() -> None:
    """A misspelled language would leave a block unchecked."""
    known = {"", "bash", "json", "python", "text", "yaml", "toml"}
    fences = [
        (page_name(page), word)
        for page in pages()
        for word in re.findall(r"(?m)^ *```(\S+)$", page.read_text())
        if word not in known
    ]
    assert fences == []


# -- links


def anchors(page: Path) -> set[str]:
    without_code = re.sub(r"(?ms)^( *)```.*?^\1```$", "", page.read_text())
    headings = re.findall(r"^#+ (.+)$", without_code, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_links_lead_to_files_of_the_project_and_to_headings() -> None:
    found = [(page, link) for page in pages() for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    inside = [(page, link) for page, link in found if not re.match("https?:", link)]
    assert len(inside) > 10
    assert [(page_name(page), link) for page, link in inside if not leads_somewhere(page, link)] == []


def test_files_that_are_named_are_there() -> None:
    texts = "\n".join(page.read_text() for page in pages())
    named = re.findall(r"`((?:examples|tests|csrc|lightning_zero)/[\w/.-]+)`", texts)
    assert len(named) > 10
    assert [name for name in named if "/X." not in name and not (REPO / name).exists()] == []


def test_the_checks_of_pages_find_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n[a](#a-page) [b](#no-heading) [c](missing.md)\n```bash\npython -m lightning_zero plan 1b \\\n"
        "    --ranks 2 && echo  # sixteen GPUs\ntorchrun -m lightning_zero doctor\nbash examples/none.sh\n```\n"
        "1. a list\n\n   ```python\n   import wandb\n   ```\n"
    )
    text = page.read_text()
    assert [leads_somewhere(page, link) for link in ("#a-page", "#no-heading", "missing.md")] == [True, False, False]
    lines = list(shell_lines(text))
    assert [own_command(line) for line in lines] == [["plan", "1b", "--ranks", "2"], ["doctor"], None]
    assert files_in_shell(lines[2]) == ["examples/none.sh"]
    assert blocks(text, "python") == ["import wandb\n"]
    with patch("importlib.util.find_spec", return_value=None):
        assert missing_package("import wandb.sdk") == "wandb"
        assert missing_package("TensorBoardLogger('runs')") == "tensorboard"
        assert missing_package("import json") is None
    assert DOCS.is_dir()
    assert "wandb" in OPTIONAL
