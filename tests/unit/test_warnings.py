"""Warnings that users cannot act on are not shown to them."""

import os
import subprocess
import sys

from tests.helpers.command import python_path

DATALOADERS = """
import torch
from lightning.pytorch.utilities import CombinedLoader
CombinedLoader([torch.ones(1)])
"""


def test_no_warning_comes_of_torch_and_lightning_alone() -> None:
    # -W error: any warning would end the process.
    env = os.environ | {"PYTHONPATH": python_path()}
    # Constants of the package are float32 whatever users have made the default.
    code = f"import torch\ntorch.set_default_dtype(torch.bfloat16)\nimport lightning_zero\n{DATALOADERS}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
