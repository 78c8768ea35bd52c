"""Convert a checkpoint folder of DeepSpeed (ZeRO-1, 2 or 3) to one full checkpoint of Lightning.

    python examples/convert_deepspeed_checkpoint.py runs/last.ckpt runs/last-full.ckpt

The new file holds float32 weights, the optimizer's state with parameters by name, and all that the Trainer saved.
`trainer.fit(ckpt_path="runs/last-full.ckpt")` of lightning_zero resumes from it on any number of ranks. DeepSpeed is
not needed. The loss scale and the state of Random-LTD are dropped. The host needs memory for the weights and the
optimizer's state: 12 bytes per parameter with Adam.
"""

import argparse
import os
import re
import sys
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

MODEL = re.compile(r"(?:(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
UNSUPPORTED = {
    r"layer_\d+_expert_.*|expp_rank_.*": "a mixture of experts, whose experts are spread over ranks",
    r"layer_\d+-model.*": "pipeline parallelism",
    r"zero": "DeepSpeed's universal format",
}
# Keys that DeepSpeed adds to those of the Trainer. (to 0.19)
OWN = re.compile(
    "buffer_names|checkpoint_parallel_dimensions|(csr|sparse)_tensor_module_names|data_sampler|[dm]p_world_size|"
    "ds_(config|version)|frozen_param_(fragments|shapes)|global_(samples|steps)|lr_scheduler|module|optimizer|"
    "param_shapes|random_ltd|shared_params|skipped_steps|universal_checkpoint_info"
)
OTHERWISE = "Load it under DeepSpeed where it was saved, and save the model's state_dict() from there as one file."
LATER = "Load the checkpoint under a later version of DeepSpeed, and save it again."
NVME = "the optimizer's state was on an NVMe disk, which is not in the checkpoint. Load it under DeepSpeed with "
NVME += 'offload_optimizer={"device": "cpu"}, and save it again'
Span = tuple[int, int, int, int]  # rank, start in its partition, begin and end in the flat parameter


class ConversionError(Exception):
    """The folder cannot be converted."""


class StandIn:
    """Replace an object of one of DeepSpeed's classes, none of whose code runs."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of


def check(condition: object, text: str) -> None:
    if not condition:
        raise ConversionError(text)


def find_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of the model's and of the optimizer's state, by rank."""
    check(path.is_dir(), f"There is no folder {path}.")
    home = path
    if not any(entry.name.endswith("_model_states.pt") for entry in path.iterdir()):
        latest = path / "latest"
        tag = latest.read_text(errors="replace").strip()[:255] if latest.is_file() else "checkpoint"
        home = path / tag
        is_name = Path(tag).name == tag and tag not in ("", "..") and "\0" not in tag
        check(is_name and home.is_dir(), f"{latest} names a folder {tag[:80]!r}, which is not there.")
    names = sorted(entry.name for entry in home.iterdir())
    for pattern, kind in UNSUPPORTED.items():
        known = not any(re.fullmatch(pattern, name) for name in names)
        check(known, f"{home} is of {kind}, which is not supported. {OTHERWISE}")
    model, optim = _by_rank(home, names, MODEL), _by_rank(home, names, OPTIM)
    check(model, f"{home} has no file '*_model_states.pt'. Use another checkpoint.")
    without = "it was saved without ZeRO, or these were removed. Without ZeRO torch.load() of '*_model_states.pt' has"
    check(optim, f"{home} has no file '*_optim_states.pt': {without} all weights in full, under 'module'.")
    counts = f"'*_model_states.pt' of {len(model)} ranks, and '*_optim_states.pt' of {len(optim)}"
    check(len(model) in (1, len(optim)), f"{home} has files {counts}. Some are missing, or some are of another save.")
    return model, optim


def _by_rank(home: Path, names: list[str], pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        rank = int(match[1] or 0)
        check(not int(match[2]), f"{home} is of tensor or pipeline parallelism ({match[0]!r}). {OTHERWISE}")
        twice = f"two files for rank {rank}, {match[0]!r} is one of them. Move those of the older save away."
        check(rank not in found, f"{home} has {twice}")
        found[rank] = home / match[0]
    for rank in range(len(found)):
        check(rank in found, f"{home} lacks rank {rank}'s file: it has {found[max(found)].name!r}. Copy it there.")
    return [found[rank] for rank in range(len(found))]


def load(path: Path, trusted: bool) -> dict[str, Any]:
    """Map one file after a comparison with its checksums. Code that it names runs only if it is trusted."""
    others: list[str] = []
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} differs from its checksum")
        named = get_unsafe_globals_in_checkpoint(str(path))
        others = [name for name in named if not name.startswith("deepspeed.")]
        with safe_globals([(StandIn, name) for name in named if name.startswith("deepspeed.")]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=not (others and trusted))
    except Exception as error:  # damage may appear as any exception
        unsafe = f"{path} holds objects of {', '.join(others)}, and reading them runs code that the file names."
        check(trusted or not others, f"{unsafe} If you trust it, pass --trusted.")
        raise ConversionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    check(isinstance(found, dict), f"{path} holds a {type(found).__name__}. Use another checkpoint.")
    return found


class Checkpoint:
    """The mapped files of all ranks, checked against each other."""

    def __init__(self, path: Path, trusted: bool) -> None:
        self.model_files, self.optim_files = find_files(path)
        self.models = [load(file, trusted) for file in self.model_files]
        optim = [load(file, trusted) for file in self.optim_files]
        self.parts: list[dict[str, Any]] = [held.get("optimizer_state_dict") or {} for held in optim]
        self.model, self.ranks = self.models[0], len(optim)
        other = "Some are missing or of another save; or parts were kept on fewer ranks (MiCS, experts)."
        for file, part in zip(self.optim_files, self.parts, strict=True):
            check("zero_stage" in part, f"{file} is no part of a ZeRO checkpoint: it has no 'zero_stage'.")
            count = part.get("partition_count", self.ranks)
            wrong = set(count if isinstance(count, list | tuple) else [count]) - {self.ranks}
            check(not wrong, f"{file} was saved by {[*wrong]} ranks, and there are files of {self.ranks}. {other}")
        same("global_steps", self.model_files, [model.get("global_steps") for model in self.models])
        files = [*self.model_files, *self.optim_files]
        same("ds_version", files, [held.get("ds_version") for held in (*self.models, *optim)])
        # An enum's member is a StandIn of its value.
        stages = [getattr(part["zero_stage"], "made_of", (part["zero_stage"],))[0] for part in self.parts]
        self.stage = same("zero_stage", self.optim_files, stages)
        check(self.stage in (1, 2, 3), f"{self.optim_files[0]} is of ZeRO-{self.stage}, and there are 1, 2 and 3.")
        is_complete = self.stage != 3 or len(self.models) == self.ranks
        check(is_complete, f"{path} lacks '*_model_states.pt' of ranks other than 0. Copy them there.")
        self.shapes: list[dict[str, torch.Size]] = self.model["param_shapes"]  # by group
        names = [name for named in self.shapes for name in named]
        check(len(names) == len({*names}), f"{self.model_files[0]} lists a parameter twice in 'param_shapes'.")
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self.weights: list[list[Tensor]] = [part.get(key) for part in self.parts]
        for file, groups in zip(self.optim_files, self.weights, strict=True):
            fits = isinstance(groups, list) and len(groups) == len(self.shapes)
            check(fits, f"{file} does not hold float32 weights of {len(self.shapes)} groups. Use another checkpoint.")
        nvme = "nvme" in str((self.model.get("ds_config") or {}).get("zero_optimization"))
        self._hint = f"Maybe {NVME}." if nvme else "One is damaged, or of another save: use another checkpoint."
        self.spans: dict[str, list[Span]] = {}
        for group, named in enumerate(self.shapes):
            (self._cut_each if self.stage == 3 else self._cut_rows)(group, named)

    def _check_fit(self, condition: bool, why: str) -> None:
        check(condition, f"The files in {self.model_files[0].parent} do not fit together: {why}. {self._hint}")

    def _cut_each(self, group: int, named: dict[str, torch.Size]) -> None:
        """ZeRO-3 pads and cuts each parameter. A rank stores its parts in the order of the parameters."""
        offset = 0
        for name, shape in named.items():
            self.spans[name] = spans_of(shape, self.ranks, offset)
            offset += -(-prod(shape) // self.ranks)
        for rank, groups in enumerate(self.weights):
            count = groups[group].numel()
            self._check_fit(count == offset, f"rank {rank} has {count:,} elements of group {group}, not {offset:,}")

    def _cut_rows(self, group: int, named: dict[str, torch.Size]) -> None:
        """ZeRO-1 and 2 cut the concatenation of all parameters. Each rank's file lists the pieces that it holds."""
        pieces: list[dict[str, tuple[int, int]]] = []
        for file, part in zip(self.optim_files, self.parts, strict=True):
            mappings = part.get("param_slice_mappings")
            old = f"{file} does not say where each parameter is in it: its version of DeepSpeed is too old. {LATER}"
            check(isinstance(mappings, list), old)
            pieces.append({name: (at.start, at.numel) for name, at in mappings[group].items()})
        for rank, held in enumerate(pieces):
            end = 0
            for name, (start, count) in sorted(held.items(), key=lambda piece: piece[1]):
                fits = not count or end <= start <= start + count <= self.weights[rank][group].numel()
                self._check_fit(fits, f"rank {rank} cannot have {count:,} elements of {name!r} from {start:,} on")
                end = max(end, start + count)
        for name, shape in named.items():
            begin, self.spans[name] = 0, []
            for rank, held in enumerate(pieces):
                start, count = held.get(name, (0, 0))
                self.spans[name].append((rank, start, begin, begin + count))
                begin += count
            why = f"ranks have {begin:,} elements of {name!r}, which has {prod(shape):,}"
            self._check_fit(begin == prod(shape), why)

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state: float32 weights, and the rest as it was. Tied weights are one tensor."""
        made: dict[str, Tensor] = {}
        for number, named in enumerate(self.shapes):
            parts = [groups[number] for groups in self.weights]
            made |= {name: gather(shape, self.spans[name], parts) for name, shape in named.items()}
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items() if self.stage == 3 else ():
            parts = [(model.get("frozen_param_fragments") or {}).get(name) for model in self.models]
            for file, part in zip(self.model_files, parts, strict=True):
                fits = isinstance(part, Tensor) and part.numel() == -(-prod(shape) // self.ranks)
                check(fits, f"{file} lacks its part of the frozen {name!r}. Use another checkpoint.")
            made[name] = gather(shape, spans_of(shape, self.ranks), parts)
        file, shared, buffers = (
            self.model_files[0],
            self.model.get("shared_params") or {},
            self.model.get("buffer_names") or (),
        )
        found: dict[str, Any] = {}
        for key, value in self.model["module"].items():
            name, ties = key, 0
            while name in shared:
                name, ties = shared[name], ties + 1
                check(ties <= len(shared), f"{file} says that {key!r} is tied to itself. Use another checkpoint.")
            lost = self.stage == 3 and name not in made and isinstance(value, Tensor) and not value.numel()
            check(not lost or key in buffers, f"{file} does not hold the frozen weight {key!r}. {LATER}")
            found[key] = made.get(name, value)
        return {name: made[name] for named in self.shapes for name in named} | found

    def optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's state by name; None if DeepSpeed saved none ("elastic_checkpoint")."""
        states = [part.get("base_optimizer_state", part.get("optimizer_state_dict")) for part in self.parts]
        if not all(isinstance(state, dict) and "param_groups" in state for state in states):
            return None
        settings = [[{k: plain(group[k]) for k in group} for group in state["param_groups"]] for state in states]
        same("settings of the optimizer", self.optim_files, settings)
        numbers = sorted(number for group in states[0]["param_groups"] for number in group["params"])
        fits = numbers == [*range(len(self.shapes))]
        check(fits, f"{self.optim_files[0]} has an optimizer of other parameters than {self.model_files[0].name!r}.")
        groups, found = [], {}
        for group in states[0]["param_groups"]:
            groups.append(group | {"params": [name for number in group["params"] for name in self.shapes[number]]})
            for number in group["params"]:
                held = [state["state"].get(number) or {} for state in states]
                same("entries of the optimizer", self.optim_files, [sorted(entries) for entries in held])
                for name, shape in self.shapes[number].items():
                    entries = {key: self._entry(key, number, name, shape, [h[key] for h in held]) for key in held[0]}
                    if entries:
                        found[name] = {key: group[key] for key in ("step",) if key in group} | entries
        return {"state": found, "param_groups": groups}

    def _entry(self, key: str, number: int, name: str, shape: torch.Size, values: list[Any]) -> Any:
        if key == "step" or not isinstance(values[0], Tensor) or not values[0].dim():
            same(repr(key), self.optim_files, [plain(value) for value in values])
            return values[0]
        for file, value, groups in zip(self.optim_files, values, self.weights, strict=True):
            counts = f"{value.numel():,} elements of {key!r} for {groups[number].numel():,} of its weights"
            check(value.numel() >= groups[number].numel(), f"{file} holds {counts}: it is damaged, or {NVME}.")
        return gather(shape, self.spans[name], values)


def spans_of(shape: torch.Size, ranks: int, offset: int = 0) -> list[Span]:
    """Return the spans of a parameter that ZeRO-3 cut, whose parts are at `offset`."""
    count, part = prod(shape), -(-prod(shape) // ranks)
    return [(r, offset, r * part, min(count, (r + 1) * part)) for r in range(ranks) if r * part < count]


def gather(shape: torch.Size, spans: list[Span], parts: list[Tensor]) -> Tensor:
    full = torch.empty(prod(shape), dtype=parts[0].dtype)
    for rank, start, begin, end in spans:
        full[begin:end] = parts[rank][start : start + end - begin]
    return full.view(shape)


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def same(what: str, files: list[Path], values: list[Any]) -> Any:
    for file, value in zip(files, values, strict=True):
        found = f"{what} is {value!s:.200} in it, and {values[0]!s:.200} there"
        check(value == values[0], f"{file} and {files[0].name!r} are of different saves: {found}.")
    return values[0]


def convert(folder: Path, output: Path, trusted: bool = False) -> None:
    """Write the checkpoint in `folder` as one file, which appears when it is complete."""
    check(not output.exists(), f"{output} exists. Give the new file another name.")
    try:
        found = Checkpoint(folder, trusted)
        content = {key: value for key, value in found.model.items() if not OWN.fullmatch(key)}
        content["state_dict"], optimizer = found.state_dict(), found.optimizer()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        text = f"{folder} is damaged, or of an unknown version of DeepSpeed: {type(error).__name__}: {error}"
        raise ConversionError(text) from error
    work = output.with_name(f"{output.name}.incomplete")
    with open(work, "wb") as file:
        torch.save(content | ({} if optimizer is None else {"optimizer_states": [optimizer]}), file)
        os.fsync(file.fileno())
    os.replace(work, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with 'latest' or '*_model_states.pt' in it")
    parser.add_argument("output", type=Path, help="of the new file")
    parser.add_argument("--trusted", action="store_true", help="run the code that the files name to make their objects")
    arguments = parser.parse_args()
    try:
        convert(arguments.folder, arguments.output, arguments.trusted)
    except ConversionError as error:
        sys.exit(str(error))
    print(arguments.output)
