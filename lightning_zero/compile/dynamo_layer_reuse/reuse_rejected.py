"""What says that a call is not like another."""

__all__ = ["Unlike"]


class Unlike(Exception):
    """A call is to be traced, for this reason."""
