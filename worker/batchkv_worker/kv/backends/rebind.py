"""How a function that mlx-lm's models import by name is replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def rebind(
    model: Any, name: str, original: Callable[..., Any], replacement: Callable[..., Any]
) -> bool:
    """Let ``name`` mean ``replacement`` in the modules that define ``model``.

    Only where it means ``original`` so far. False when none of the modules has it.
    """
    found = False
    for module_name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(module_name)
        if module is not None and getattr(module, name, None) in (original, replacement):
            setattr(module, name, replacement)
            found = True
    return found
