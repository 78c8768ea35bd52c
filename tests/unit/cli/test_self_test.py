"""Test the result of the self-test; its ranks run in tests/trainer/test_commands.py."""

from lightning_zero.cli.local_ranks import run_ranks
from lightning_zero.cli.self_test import RANK_COMMAND, self_test
from lightning_zero.subprocess_main import program_without_lightning

WRITE = "import os, sys; os.environ['RANK'] == '0' and open(sys.argv[1], 'w').write('{}')"


def run(found: str) -> dict:
    return self_test(30.0, ["-c", WRITE.replace("{}", found)])


def test_ranks_that_agree_with_plain_training_pass() -> None:
    found = run('{"equal": true, "largest_difference": 0.0}')
    assert found["failed"] == ""
    assert found["equal"]


def test_other_weights_than_those_of_plain_training_fail() -> None:
    found = run('{"equal": false, "largest_difference": 0.5}')
    assert "difference 0.5)" in found["failed"]


def test_ranks_that_fail_or_say_nothing_fail() -> None:
    assert self_test(30.0, ["-c", "raise SystemExit('no links')"])["failed"].endswith("no links")
    assert self_test(30.0, ["-c", ""])["failed"] == "rank 0 ended without a result"


def test_ranks_do_without_lightning() -> None:
    assert "from lightning_zero.cli.self_test import main" in RANK_COMMAND[1]
    looks = "import lightning_zero.cli.self_test\nassert not {'lightning', 'torchmetrics'} & set(sys.modules)"
    assert run_ranks(["-c", program_without_lightning(looks)], 1, 100.0).failed == ""
