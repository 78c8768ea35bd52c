"""A checkpoint of DeepSpeed's that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_zero.checkpoint.archive import check_archive
from lightning_zero.checkpoint.damaged import named_damage
from lightning_zero.checkpoint.deepspeed.contents import Contents
from lightning_zero.checkpoint.deepspeed.files import find_files
from lightning_zero.checkpoint.opened import Opened

__all__ = ["DeepSpeedFolder"]

# What DeepSpeed itself saves beside what it is given. (to 0.19)
OWN = {
    "buffer_names",
    "checkpoint_parallel_dimensions",
    "csr_tensor_module_names",
    "data_sampler",
    "dp_world_size",
    "ds_config",
    "ds_version",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "global_samples",
    "global_steps",
    "lr_scheduler",
    "module",
    "mp_world_size",
    "optimizer",
    "param_shapes",
    "random_ltd",
    "shared_params",
    "skipped_steps",
    "sparse_tensor_module_names",
    "universal_checkpoint_info",
}


class DeepSpeedFolder(Opened):
    """Reads no tensor until it is asked for one.

    Args:
        path: of the folder that Lightning's strategy made, or of the one in it.

    Attributes:
        path: as given.
        world_size: number of ranks that wrote it.
        save_id: None: files do not tell of which save they are.
        has_checksums: torch has written them into each file.

    Raises:
        CheckpointError: a file is missing, or they are of a kind that is not read.
    """

    def __init__(self, path: str) -> None:
        self.path, self.save_id, self.has_checksums = path, None, True
        self._files = find_files(path)
        self._places = {place.name: place for place in (*self._files.model, *self._files.optim)}
        self.world_size = len(self._files.optim)

    def sizes(self) -> dict[str, int]:
        """Bytes of its files."""
        return {name: place.stat().st_size for name, place in self._places.items()}

    def check(self, names: Iterable[str], read: Callable[[int], None] = lambda count: None) -> None:
        """Compares files with their checksums.

        Raises:
            CheckpointError: one is damaged.
        """
        for name in names:
            check_archive(self._places[name], read=read)

    def content(self, weights_only: bool | None = None) -> dict[str, Any]:
        """See :meth:`Opened.content <lightning_zero.checkpoint.opened.Opened.content>`: as Lightning's full checkpoints
        are, but that the optimizer's parameters have names."""
        with named_damage(self.path):
            found = Contents(self._files, weights_only)
            content = {key: value for key, value in found.model.items() if key not in OWN}
            content["state_dict"] = found.weights()
            optimizer = found.optimizer()
        return content if optimizer is None else content | {"optimizer_states": [optimizer]}

    @property
    def written_by(self) -> str:
        """DeepSpeed's version, and the stage."""
        with named_damage(self.path):
            found = Contents(self._files, None)
        return f"DeepSpeed {found.version}, ZeRO-{found.stage}"
