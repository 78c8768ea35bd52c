"""Run ``python -m lightning_zero COMMAND``."""

import sys

from lightning_zero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
