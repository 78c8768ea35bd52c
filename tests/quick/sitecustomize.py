"""Shorten the start and the end of processes that tests start; Python imports this first.

Garbage collections during the imports of torch and Lightning, and at the end, take a third of a short program's time.
Imports of torchmetrics for pictures and metrics of texts, which no test uses, take a sixth of the rest."""

import atexit
import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

gc.set_threshold(200_000, 50, 50)
atexit.register(gc.freeze)


class Sparing:
    """Run torchmetrics' module that reports installed packages, and report these as missing."""

    def __init__(self, loader: Any) -> None:
        self.create_module, self.run = loader.create_module, loader.exec_module

    def exec_module(self, module: Any) -> None:
        self.run(module)
        module._TRANSFORMERS_GREATER_EQUAL_4_4 = module._MATPLOTLIB_AVAILABLE = False


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torchmetrics.utilities.imports":
            return None
        sys.meta_path.remove(Finder)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = Sparing(spec.loader)  # type: ignore[assignment]
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
