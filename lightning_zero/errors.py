"""Errors that users meet. Each message says what is wrong, where, and what to do next."""

__all__ = [
    "CheckpointError",
    "HostMemoryError",
    "NativeBuildError",
    "RankFailedError",
    "RankMismatchError",
    "UnsupportedError",
]


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged or of something else, or could not be written."""


class HostMemoryError(RuntimeError):
    """The host has too little memory for what is to be offloaded, or it cannot be pinned."""


class NativeBuildError(RuntimeError):
    """The C++ executor could not be built or loaded."""


class RankFailedError(RuntimeError):
    """Another rank failed, was killed, or did not come in time; this one cannot go on without it."""


class RankMismatchError(RuntimeError):
    """Ranks were given different models, or did different things where all must do the same."""


class UnsupportedError(ValueError):
    """Something that cannot be trained correctly from shards was asked for."""
