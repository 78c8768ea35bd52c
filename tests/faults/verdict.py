"""Judge if a job ended as a user may expect.

It ends in time, with the traceback, and the other ranks name the one that failed. Texts are matched loosely: the word
"rank" and the number of the rank that failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.faults.job import Outcome
from tests.faults.points import POINTS
from tests.faults.records import Rank
from tests.faults.spec import Fault, Training

__all__ = ["Case", "about", "judge", "names", "shows", "watch"]

LIMIT_S = 30.0  # most jobs end within 5; a machine may be busy
AT_ONCE_S = 3.0  # in which the rank sleeps or waits, until an exception's traceback is there

TRACE = "Traceback (most recent call last)"
ELSEWHERE = re.compile(r"\(traceback: printed by rank \d+\)")  # where several ranks share an exception

# The output of the rank that fails. A killed rank prints nothing.
TRACES = {
    "raise": r"Planned: planned",
    "cuda_error": r"Error: CUDA error: an illegal memory access",
    "out_of_memory": r"OutOfMemoryError: ",
    "device_assert": r"device-side assert",
}


@dataclass(frozen=True)
class Case:
    """
    Args:
        how: see ``job``.
        ends: ``"fails"``: all ranks end, none with status 0; ``"stops"``: all end; ``"finishes"``: the training does.
        limit_s: from the fault to the end of the last rank.
        named: the other ranks name the failed one,
        named_within_s: and do so this long after it.
        meanwhile: work of other ranks, which takes longer than a wait for them may.
        quick: among the tests that always run; slow: among those that take longer. The others are the table's.
    """

    fault: Fault
    training: Training
    world: int = 2
    how: str = "torchrun"
    ends: str = "fails"
    limit_s: float = LIMIT_S
    named: bool = True
    named_within_s: float | None = None
    meanwhile: Fault | None = None
    quick: bool = False
    slow: bool = False

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.fault.ranks]

    def __str__(self) -> str:
        ranks = "all ranks" if not self.survivors else " and ".join(f"rank {rank}" for rank in self.fault.ranks)
        extra = {"torchrun": "", "rank0": ", rank 0 serves the store", "lightning": ", started by Lightning"}[self.how]
        step = "" if self.fault.step is None else f", step {self.fault.step}"
        strategy = "" if self.training.strategy == "zero3" else f", {self.training.strategy}"
        device = "" if self.training.device == "cpu" else f", {self.training.device}"
        world = "" if self.world == 2 else f" of {self.world}"
        busy = self.meanwhile
        others = "" if busy is None else f", while rank {busy.ranks[0]}: {busy.action} at {busy.point}"
        needed = POINTS[self.fault.point].training
        more: dict[str, Any] = {key: getattr(self.training, key) for key in ("accumulate", "workers", "catches")}
        if "options" not in needed:
            more |= self.training.options
        told = (key for key, value in more.items() if value != needed.get(key, getattr(Training, key, None)))
        place = f"{self.fault.action} at {self.fault.point}, {ranks}{world}{step}{others}"
        return ", ".join([f"{place}{strategy}{device}{extra}", *(f"{key}={more[key]}" for key in told)])


def names(rank: int) -> re.Pattern[str]:
    """Finds "rank 1", "[rank: 1]", "ranks 0, 1 and 2"."""
    return re.compile(rf"\branks?[ :#]*(?:\d+(?:, | and | or |/))*{rank}(?![\d.]*\d)", re.IGNORECASE)


def shows(action: str) -> re.Pattern[str] | None:
    """Finds the traceback's last line, where the action raises."""
    return re.compile(TRACES[action]) if action in TRACES else None


def watch(case: Case, ranks: list[Rank]) -> None:
    """Texts to wait for while the ranks end."""
    trace = shows(case.fault.action)
    for rank in ranks:
        if rank.number in case.fault.ranks and trace is not None:
            rank.watch_for("trace", trace)
        if rank.number not in case.fault.ranks:
            for failed in case.fault.ranks:
                rank.watch_for(f"names {failed}", names(failed))


def judge(case: Case, outcome: Outcome) -> list[str]:
    """Return the faults in words; empty if there are none."""
    complaints = []
    for rank in outcome.ranks:
        who = f"rank {rank.number}"
        if not rank.over:
            complaints.append(f"{who} was still there after {case.limit_s:.0f} s{place(rank)}")
        elif case.ends == "fails" and rank.code == 0:
            complaints.append(f"{who} ended with status 0")
        elif case.ends == "finishes" and rank.code != 0:
            complaints.append(f"{who} {rank.state}")
        if rank.number not in case.fault.ranks and (rank.code or 0) < 0:
            complaints.append(f"{who} {rank.state}")
        if rank.number in case.fault.ranks:
            complaints += [f"{who}: {words}" for words in _own(case, rank)]
        elif case.named and not any(names(failed).search(rank.text) for failed in case.fault.ranks):
            complaints.append(f"{who} does not name who failed")
        elif case.named and case.named_within_s is not None and min(rank.at.values(), default=0) > case.named_within_s:
            complaints.append(f"{who} names who failed after {min(rank.at.values()):.0f} s only")
    shown = [rank.number for rank in outcome.ranks if rank.number in case.fault.ranks and TRACE in rank.printed["err"]]
    if shows(case.fault.action) is not None and case.ends == "fails" and len(shown) > 1:
        complaints.append(f"ranks {shown} show one exception each")
    if outcome.left:
        complaints.append(f"left behind: {', '.join(outcome.left)}")
    if outcome.memory:
        complaints.append(f"left in shared memory: {', '.join(outcome.memory)}")
    return complaints


def _own(case: Case, rank: Rank) -> list[str]:
    trace = shows(case.fault.action)
    if trace is None or case.ends == "finishes":
        return []
    printed = rank.printed["err"]
    if not trace.search(printed) or not (TRACE in printed or ELSEWHERE.search(printed)):
        return ["its own traceback is missing"]
    if TRACE not in printed:
        return []
    seen = rank.slept.get("trace", 0.0)
    return [f"its traceback came after {seen:.0f} s only"] if seen > AT_ONCE_S else []


def place(rank: Rank) -> str:
    """Return the last frame of this project in the main thread of a rank that had to be killed."""
    main = rank.stacks.rpartition("(most recent call first)")[2]  # the current thread's is last
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    ours = [frame for frame in frames if "/lightning_zero/" in frame[0]] or frames
    if not ours:
        return ""
    path, line, function = ours[0]
    return f" (in {function}, {'/'.join(path.split('/')[-2:])}:{line})"


_PREFIX = re.compile(r"^\[rank\d+\]: ")  # torch's, before each line of a traceback
_NOISE = re.compile(r"^\s|^Traceback|^During handling|^The above exception|^$|^-{10}|^`Trainer|^GPU available")
_ERROR = re.compile(r"^[\w.]+(Error|Exception|Interrupt|Exit|Planned)\b")
_TELLS = re.compile(r"\brank|error|exception|planned|signal|terminat|interrupt|waiting|killed", re.IGNORECASE)


def about(rank: Rank, case: Case) -> str:
    """The first line that a rank printed about the fault, or nothing."""
    lines = [_PREFIX.sub("", line) for line in rank.text.splitlines()]
    lines = [line for line in lines if not _NOISE.search(line)]
    trace = shows(case.fault.action) if rank.number in case.fault.ranks else None
    wanted = [trace] if trace is not None else [names(failed) for failed in case.fault.ranks]
    found = (line.strip() for pattern in [*wanted, _ERROR, _TELLS] for line in lines if pattern.search(line))
    return next(found, "")


def described(case: Case) -> str:
    """The point, in words."""
    return POINTS[case.fault.point].what
