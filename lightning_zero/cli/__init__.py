"""Commands of ``python -m lightning_zero``: each is a :class:`~lightning_zero.cli.command.Command`, and stands in the
list in :mod:`lightning_zero.cli.main`."""
