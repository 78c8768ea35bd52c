"""What the README shows runs, and its links lead somewhere."""

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

from tests.helpers.readme import NAMED, README
from tests.helpers.trainer import Regression, make_loader, make_strategy
from tests.ranks.pool import Ranks

SNIPPET = re.compile(r"(?ms)^( *)```python\n(.*?)^ *```$")
GIVEN = ("accelerator", "devices", "max_steps", "enable_progress_bar", "enable_checkpointing", "logger")


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return make_loader("compiled", steps=12)


class SmallTrainer(pl.Trainer):
    """Takes what is written for four GPUs, and trains for a few steps on the ranks that there are."""

    def __init__(self, **arguments: Any) -> None:
        if arguments.get("strategy") == "zero3_compile":
            arguments["strategy"] = make_strategy("compiled")
        small = dict(zip(GIVEN, ("cpu", dist.get_world_size(), 8, False, False, False), strict=True))
        super().__init__(**arguments | small, use_distributed_sampler=False)


def snippets() -> list[str]:
    """Those with a name aside, which tests/fabric/test_examples.py runs."""
    return [textwrap.dedent(code) for _, code in SNIPPET.findall(NAMED.sub("", README.read_text()))]


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
    assert (tmp_path / "report" / "report.html").exists()


def test_links_lead_to_files_of_the_project_and_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", README.read_text(), flags=re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README.read_text()) if not link.startswith("http")]
    assert links
    assert [link for link in links if link not in anchors and not (README.parent / link).exists()] == []
    named = re.findall(r"`((?:examples|tests|csrc|lightning_zero)/[\w/.-]+)`", README.read_text())
    assert len(named) > 10
    assert [name for name in named if "/X." not in name and not (README.parent / name).exists()] == []
