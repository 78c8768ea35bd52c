"""Python imports this at its start, in the processes that tests start: searching all that torch and Lightning ever
imported for garbage, while they are imported and once more at the end, takes a third of a short program's time, and what
torchmetrics imports for pictures and metrics of texts, which no test asks it for, a sixth of what is left."""

import atexit
import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

gc.set_threshold(200_000, 50, 50)
atexit.register(gc.freeze)


class Sparing:
    """Runs torchmetrics' module that says what is installed, and then says that these are not."""

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
