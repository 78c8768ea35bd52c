"""Files that are downloaded, to where torch.hub keeps them, by one rank of a host: each would fetch all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import urlparse

import torch

from lightning_zero.checkpoint.rank_tasks import Together

__all__ = ["downloaded"]


def downloaded(url: str, ranks: Together) -> Path:
    """Where the file is on this host. One that has been downloaded before is not fetched again. Collective.

    Raises:
        CheckpointError: on every rank, when it cannot be downloaded.
    """
    name = Path(urlparse(url).path)
    # Two trainings have a last.ckpt each: a name alone would lead to the other's.
    known = hashlib.blake2s(url.encode()).hexdigest()[:16]
    place = Path(torch.hub.get_dir()) / "checkpoints" / f"{name.stem}-{known}{name.suffix}"

    def fetch() -> None:
        if ranks.share[0] == 0 and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(place), progress=False)

    ranks.each(f"download {url}", fetch)
    return place
