"""With this folder in PYTHONPATH, each Python process has the CPU as MLX's default device.

MLX has no variable for that. It is set right after ``mlx.core`` was imported, whoever imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULE = "mlx.core"


class OnCpu(MetaPathFinder):
    """Finds ``mlx.core`` as it would be found without, and has the device set once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_choose(module: ModuleType) -> None:
            execute(module)
            module.set_default_device(module.cpu)

        spec.loader.exec_module = execute_and_choose  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, OnCpu())
