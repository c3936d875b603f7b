"""Changes a loaded model, and undoes the changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.contract import Change, Undo

_INSTALLED = "_batchkv_undo"  # an attribute of a model that has changes


def install(model: Any, changes: Sequence[Change]) -> Undo:
    """Make changes to ``model``, and undo earlier ones first. Returns a function to undo them.

    If later changes were installed, that function does nothing.
    """
    restore(model)
    made: list[Undo] = []

    def undo() -> None:
        if getattr(model, _INSTALLED, None) is undo:
            delattr(model, _INSTALLED)
            while made:
                made.pop()()

    setattr(model, _INSTALLED, undo)
    try:
        for change in changes:
            made.append(change.install(model))
    except BaseException:
        undo()
        raise
    return undo


def restore(model: Any) -> None:
    """Undo what ``install`` did to ``model``, or to another model that the same modules define."""
    undo: Undo | None = getattr(model, _INSTALLED, None)
    if undo is not None:
        undo()
    for module in _modules(model):
        for name, value in [*vars(module).items()]:
            if isinstance(value, Replacement):
                setattr(module, name, value.original)


class Replacement:
    """A function that replaces one that mlx-lm's models import by name."""

    def __init__(self, original: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.original, self._function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def rebind(
    model: Any, name: str, original: Callable[..., Any], replacement: Callable[..., Any]
) -> bool:
    """Let ``name`` mean ``replacement`` in the modules that define ``model``.

    Only where it means ``original`` so far. False when none of the modules has it.
    """
    found = False
    for module in _modules(model):
        if getattr(module, name, None) in (original, replacement):
            setattr(module, name, replacement)
            found = True
    return found


def binds(model: Any, name: str, meanings: Sequence[Callable[..., Any]]) -> bool:
    """Whether ``name`` means one of these in a module that defines ``model``."""
    return any(getattr(module, name, None) in meanings for module in _modules(model))


def swap_class(module: Any, kind: type[Any], **held: Any) -> Undo:
    """Make one layer of a model an instance of ``kind``, a subclass of its own, that has ``held``.

    Models may refer to a layer from several places, so the object stays the same.
    """
    before = type(module)
    for name, value in held.items():
        setattr(module, name, value)
    module.__class__ = kind

    def undo() -> None:
        module.__class__ = before
        for name in held:
            delattr(module, name)

    return undo


@contextmanager
def watched(
    model: Any, kinds: Sequence[type[Any]], note: Callable[[Any, Any], object]
) -> Iterator[None]:
    """Inside the block, ``note`` gets each call of a layer of these kinds: layer and input.

    An array that is kept holds on to all weights before it.
    """

    def noting(kind: type[Any]) -> type[Any]:
        def call(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
            note(self, x)
            return kind.__call__(self, x, *rest, **named)

        return type(kind.__name__, (kind,), {"__call__": call})

    noted = {kind: noting(kind) for kind in kinds}
    layers = {id(layer): layer for layer in model.modules() if type(layer) in noted}
    with ExitStack() as stack:
        for layer in layers.values():
            stack.callback(swap_class(layer, noted[type(layer)]))
        yield


def undo_all(undos: Sequence[Undo]) -> Undo:
    """One for several, the last of them first."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def kept_if_right(
    attempt: Callable[[], bool],
    done: list[Undo],
    faults: tuple[type[Exception], ...],
    failed: Callable[[Exception], object],
) -> Undo | None:
    """What undoes a change that ``attempt`` makes and finds right; else undo it, and give None.

    ``attempt`` adds to ``done`` what undoes each of its steps. One of ``faults`` means that it is
    not right, and is given to ``failed``; but a fault of the device says nothing of the change.
    That, and each other exception, is raised when all is undone.
    """
    undo = undo_all(done)
    is_right = False
    try:
        is_right = attempt()
    except faults as fault:
        if is_device_fault(fault):
            undo()
            raise
        failed(fault)
    except BaseException:
        undo()
        raise
    if is_right:
        return undo
    undo()
    return None


def _modules(model: Any) -> Iterator[ModuleType]:
    """The Python modules that define the classes of ``model``."""
    for name in {type(module).__module__ for module in model.modules()}:
        if (module := sys.modules.get(name)) is not None:
            yield module
