"""Options of ``step_time.py`` for torchao's float8, and its decoder with fewer heads of keys and values."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.cli.models import SIZES, Decoder
from step_time import Torchao, make_parser, torchao_options


def chosen(line: str) -> Torchao:
    parser = make_parser()
    return torchao_options(parser, parser.parse_args(line.split()))


def test_torchao_gathers_in_fp8_only_where_it_can_and_several_ranks_gain() -> None:
    assert chosen("--strategy fsdp2") == Torchao()
    assert not chosen("--strategy fsdp2 --torchao tensorwise --devices 1").fp8_gather
    assert chosen("--strategy fsdp2 --torchao tensorwise --devices 2").fp8_gather
    assert not chosen("--strategy fsdp2 --torchao rowwise --devices 2").fp8_gather
    assert not chosen("--strategy fsdp2 --torchao tensorwise --devices 2 --torchao-gather 16").fp8_gather


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--strategy zero3_compile --torchao tensorwise", "not of zero3_compile"),
        ("--strategy ddp_compile --torchao tensorwise --torchao-gather fp8", "needs --strategy fsdp2"),
        ("--strategy fsdp2 --torchao rowwise --torchao-gather fp8", "needs --strategy fsdp2 --torchao tensorwise"),
    ],
)
def test_torchao_options_that_contradict_are_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chosen(line)
    assert words in capsys.readouterr().err


def test_groups_of_query_heads_share_keys_and_values() -> None:
    torch.manual_seed(0)
    few, many = Decoder(32, 1, 4, 48, 2), Decoder(32, 1, 4, 48)
    state = few.state_dict()
    for name in ("key", "value"):
        weight = state[f"blocks.0.{name}.weight"]
        assert weight.shape == (16, 32)
        state[f"blocks.0.{name}.weight"] = weight.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    many.load_state_dict(state)
    tokens = torch.randint(100, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(few(tokens[:, :-1], tokens[:, 1:]), many(tokens[:, :-1], tokens[:, 1:]))


def test_the_8b_decoder_has_the_size_of_llama_8b_but_for_its_vocabulary() -> None:
    with torch.device("meta"):
        block = Decoder(SIZES["8b"][0], 1, *SIZES["8b"][2:]).blocks[0]
    # Llama-8B: four attention matrices, three of the MLP, two norms
    assert sum(p.numel() for p in block.parameters()) == 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2)
    assert SIZES["8b"][1] == 32
