"""``python examples/benchmarks/compare``: run the command line of :mod:`compare.command_line`."""

import sys
from pathlib import Path

# Python starts a folder with itself on the path. The package has to be `compare`, as other benchmarks import it, and a
# user's script may import what is in the working directory, as with `python -m`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, "")

from compare.command_line import main

if __name__ == "__main__":
    sys.exit(main())
