"""Commands of ``python -m lightning_zero``; :mod:`lightning_zero.cli.main` lists them."""
