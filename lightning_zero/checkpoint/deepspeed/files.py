"""The files of a checkpoint that DeepSpeed has written.

Lightning's strategy has it write ``NAME.ckpt/checkpoint/``, and, beside that folder, ``latest`` with its name. In it:

- ``zero_pp_rank_R_mp_rank_00_optim_states.pt`` for each rank (``bf16_zero_...``, where it trained in bfloat16): its
  parts of float32 weights and of the optimizer's state;
- ``mp_rank_00_model_states.pt``, with ZeRO-3 ``zero_pp_rank_R_mp_rank_00_model_states.pt`` for each rank: what
  parameters there are, buffers, frozen weights, and what the Trainer saves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.damaged import named_damage
from lightning_zero.checkpoint.sharded.folder import read_at
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.errors import CheckpointError

__all__ = ["Files", "find_files", "is_deepspeeds"]

LATEST, TAG = "latest", "checkpoint"
LONGEST = 255  # bytes of a folder's name
ENDING = "_model_states.pt"
MODEL = re.compile(r"(?:(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
NOT_READ = (  # of what kind of training a name tells
    (re.compile(r"layer_\d+_expert_.*|expp_rank_.*"), "a mixture of experts, whose experts are spread over ranks"),
    (re.compile(r"layer_\d+-model.*"), "pipeline parallelism"),
    (re.compile(r"zero"), "DeepSpeed's universal format"),
)
OTHERWISE = (
    "That is not read here. Load it under DeepSpeed where it was saved, and save the model's state_dict() from there "
    "as one file."
)


@dataclass(frozen=True)
class Files:
    """Of one checkpoint.

    Attributes:
        model: what each rank knows of the model, or, but for ZeRO-3, rank 0 alone.
        optim: each rank's parts.
    """

    model: list[Path]
    optim: list[Path]


def is_deepspeeds(path: str) -> bool:
    """Whether DeepSpeed seems to have written what is at ``path``: such a folder, or the one above it."""
    fs, place = read_at(path)
    if not fs.isdir(place) or fs.exists(f"{place}/{METADATA}"):
        return False
    if fs.isfile(f"{place}/{LATEST}"):
        return True
    return any(_names_models(fs.ls(home, detail=False)) for home in (place, f"{place}/{TAG}") if fs.isdir(home))


def find_files(path: str) -> Files:
    """The files there.

    Raises:
        CheckpointError: one is missing, or they are of a kind that is not read.
    """
    fs, place = read_at(path)
    if not isinstance(fs, LocalFileSystem):
        raise CheckpointError(
            f"{path} is DeepSpeed's, whose files can only be read from a disk. Copy the folder to one."
        )
    home = _home(Path(place))
    with named_damage(home):
        names = sorted(entry.name for entry in home.iterdir())
    for pattern, kind in NOT_READ:
        if any(pattern.fullmatch(name) for name in names):
            raise CheckpointError(f"{path} is DeepSpeed's, of {kind}. {OTHERWISE}")
    model, optim = _by_rank(home, names, MODEL), _by_rank(home, names, OPTIM)
    if not model:
        raise CheckpointError(f"{home} has no file '*{ENDING}'. Use another checkpoint.")
    if not optim:
        raise CheckpointError(
            f"{home} has no file '*_optim_states.pt': it was saved without ZeRO, or these were removed. Without ZeRO, "
            f"{model[0].name!r} holds all weights whole, under 'module'; load them with torch.load()."
        )
    if len(model) not in (1, len(optim)):
        raise CheckpointError(
            f"{home} has files '*{ENDING}' of {len(model)} ranks, and '*_optim_states.pt' of {len(optim)}. Some are "
            "missing, or some are of another save. Use another checkpoint."
        )
    return Files(model, optim)


def _home(place: Path) -> Path:
    """Where the files themselves are."""
    if _names_models(entry.name for entry in place.iterdir()):
        return place
    latest = place / LATEST
    tag = TAG
    if latest.is_file():
        with open(latest, "rb") as file:
            tag = file.read(LONGEST + 1).decode(errors="replace").strip()
    home = place / tag
    if len(tag) > LONGEST or Path(tag).name != tag or tag in ("", "..") or not home.is_dir():
        raise CheckpointError(f"{latest} speaks of a folder {tag[:80]!r}, which is not there. Use another checkpoint.")
    return home


def _names_models(names: Iterable[str]) -> bool:
    return any(str(name).endswith(ENDING) for name in names)


def _by_rank(home: Path, names: Iterable[str], pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank, part = int(match[1] or 0), int(match[2])
        if part:
            raise CheckpointError(f"{home} is DeepSpeed's, of tensor or pipeline parallelism ({name!r}). {OTHERWISE}")
        if rank in found:
            raise CheckpointError(
                f"{home} has two files for rank {rank}: {found[rank].name!r} and {name!r}, of different saves. Move "
                "those of the older one away."
            )
        found[rank] = home / name
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"{home} lacks rank {missing}'s file beside {found[max(found)].name!r}. All ranks' files must lie in one "
            "folder: copy them there, or use another checkpoint."
        )
    return [found[rank] for rank in range(len(found))]
