"""Public exceptions. Each message says what is wrong, where, and what to do next."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged or of another kind, or could not be written."""


class HostMemoryError(RuntimeError):
    """The host has too little memory for the offloaded tensors, or the memory cannot be pinned."""


class NativeBuildError(RuntimeError):
    """The C++ executor could not be built or loaded."""


class RankFailedError(RuntimeError):
    """Another rank failed, was killed or did not arrive in time; this rank cannot continue without it."""


class RankMismatchError(RuntimeError):
    """Ranks were given different models, or made different calls where all must make the same ones."""


class UnsupportedError(ValueError):
    """The request cannot be trained correctly from shards."""
