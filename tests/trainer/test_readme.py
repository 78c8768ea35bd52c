"""Run the snippets of README and examples/docs/, and check their links."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.helpers.readme import NAMED, REPO, pages
from tests.helpers.trainer import Regression, make_loader, make_strategy
from tests.ranks.pool import Ranks

SNIPPET = re.compile(r"(?ms)^( *)```python\n(.*?)^ *```$")
GIVEN = ("accelerator", "devices", "max_steps", "enable_progress_bar", "enable_checkpointing", "logger")


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return make_loader("compiled", steps=12)


class SmallTrainer(pl.Trainer):
    """Adapt a snippet for four GPUs to the ranks of the test, and train a few steps."""

    def __init__(self, **arguments: Any) -> None:
        if arguments.get("strategy") == "zero3_compile":
            arguments["strategy"] = make_strategy("compiled")
        small = dict(zip(GIVEN, ("cpu", dist.get_world_size(), 8, False, False, False), strict=True))
        super().__init__(**arguments | small, use_distributed_sampler=False)


def snippets() -> list[str]:
    """Those with a name aside, which tests/fabric/test_examples.py runs."""
    texts = [NAMED.sub("", page.read_text()) for page in pages()]
    return [textwrap.dedent(code) for text in texts for _, code in SNIPPET.findall(text)]


def run_all(folder: str) -> list[str]:
    os.chdir(folder)
    names: dict[str, Any] = {"model": Regression(), "datamodule": Data()}
    done = []
    with patch("lightning.pytorch.Trainer", SmallTrainer):
        for code in snippets():
            exec(compile(code, f"README, snippet {len(done)}", "exec"), names)
            done.append(code)
    assert names["model"].losses
    return done


def test_snippets_run_one_after_the_other(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for done in ranks.run(2, run_all, str(tmp_path), deadline=240):
        assert len(done) == len(snippets()) > 4
    assert (tmp_path / "report" / "plan.txt").exists()


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_links_lead_to_files_of_the_project_and_to_headings() -> None:
    found = [(page, link) for page in pages() for link in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    inside = [(page, link) for page, link in found if not link.startswith("http")]
    assert len(inside) > 10
    assert [(page.name, link) for page, link in inside if not leads_somewhere(page, link)] == []


def test_files_that_are_named_are_there() -> None:
    texts = "\n".join(page.read_text() for page in pages())
    named = re.findall(r"`((?:examples|tests|csrc|lightning_zero)/[\w/.-]+)`", texts)
    assert len(named) > 10
    assert [name for name in named if "/X." not in name and not (REPO / name).exists()] == []
