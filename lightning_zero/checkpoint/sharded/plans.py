"""What every rank writes where: the same in each save of a training, and long where there are many ranks. A rank tells
it once, and then its checksum; rank 0 makes the metadata of it once, and then only names another save in them.

Protocol: in each save every rank tells rank 0 what :meth:`Plans.brief` gives, and rank 0 makes the metadata; then all
call :meth:`Plans.confirm`, or, where the save has failed for anybody, :meth:`Plans.forget`.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning_zero.checkpoint.sharded.hashed import FileChecksum, digest_of
from lightning_zero.checkpoint.sharded.metadata import build_metadata
from lightning_zero.checkpoint.sharded.paths import Keys
from lightning_zero.checkpoint.sharded.plan_text import encode_plan, decode_plan
from lightning_zero.checkpoint.sharded.writing import RankFiles
from lightning_zero.errors import CheckpointError

__all__ = ["Brief", "Plans"]


@dataclass(frozen=True)
class Brief:
    """What one rank has written, in few words.

    Attributes:
        sums: of its files by name.
        digest: of its plan.
        plan: what lies where in the files, packed; None where rank 0 has it.
    """

    sums: Mapping[str, FileChecksum]
    digest: str
    plan: bytes | None

    def to_text(self) -> str:
        """Return it as JSON."""
        sums = {name: (of.bytes, of.xxh3_128) for name, of in self.sums.items()}
        plan = None if self.plan is None else base64.b64encode(self.plan).decode()
        return json.dumps({"sums": sums, "digest": self.digest, "plan": plan})

    @classmethod
    def from_text(cls, text: str) -> Brief:
        """
        Raises:
            CheckpointError: ``text`` is not one of :meth:`to_text`.
        """
        try:
            read = json.loads(text)
            sums = {name: FileChecksum(int(size), str(of)) for name, (size, of) in read["sums"].items()}
            plan = None if read["plan"] is None else base64.b64decode(read["plan"], validate=True)
            return cls(sums, str(read["digest"]), plan)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"What a rank has told of its files cannot be read ({type(error).__name__}: {error})."
            ) from error


class Plans:
    """Of one rank, over all saves of a training."""

    def __init__(self) -> None:
        self._last: Brief | None = None  # of this rank, in the save that goes on
        self._confirmed: str | None = None
        self._got: list[tuple[str, bytes]] = []  # on rank 0, of all ranks, in the save that goes on
        self._known: list[tuple[str, bytes]] = []  # and of the last one
        self._metadata: tuple[Any, str, bytes] | None = None  # of which plans, of which save

    def brief(self, files: RankFiles) -> Brief:
        """What this rank tells rank 0 of its files."""
        packed = encode_plan(files.placed)
        digest = digest_of(packed)
        self._last = Brief(files.sums, digest, None if digest == self._confirmed else packed)
        return self._last

    def metadata(self, briefs: Sequence[Brief], paths: Mapping[str, Keys], save_id: str) -> bytes:
        """The contents of ``.metadata``. On rank 0.

        Args:
            briefs: all ranks'.
            paths: see :func:`~lightning_zero.checkpoint.sharded.metadata.build_metadata`.
            save_id: of this save; those of all saves are equally long.
        """
        self._got = [(brief.digest, self._plan(rank, brief)) for rank, brief in enumerate(briefs)]
        key = [digest for digest, _ in self._got], digest_of(pickle.dumps(list(paths.items())))
        if self._metadata is not None and self._metadata[0] == key:
            _, before, data = self._metadata
            # A text of a pickle has its length before it, so another one of the same length may take its place.
            if len(before) == len(save_id) and data.count(before.encode()) == 1:
                return data.replace(before.encode(), save_id.encode())
        placed = [decode_plan(plan) for _, plan in self._got]
        data = pickle.dumps(build_metadata(chain.from_iterable(placed), paths, save_id))
        self._metadata = key, save_id, data
        return data

    def _plan(self, rank: int, brief: Brief) -> bytes:
        if brief.plan is not None:
            return brief.plan
        digest, plan = self._known[rank] if rank < len(self._known) else ("", b"")
        if digest != brief.digest:
            raise CheckpointError(f"rank {rank} goes by a plan that rank 0 has not got. Save again.")
        return plan

    def confirm(self) -> None:
        """The save has ended well, on all ranks."""
        self._confirmed = None if self._last is None else self._last.digest
        self._last, self._known, self._got = None, self._got, []

    def forget(self) -> None:
        """It has not: all will be told again."""
        self._last, self._confirmed = None, None
        self._known, self._got, self._metadata = [], [], None
