"""Decides a batch's model: the one of the command, else the one that all lines name.

Lines may come from somebody else than the user who submits them. So a line never chooses the model
of lines that name none, and a line never names a folder: the command decides whose files are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.checks import model_name, shown
from batchkv_producer.intake.formats import Row, RowError


class NoSingleModelError(UsageError):
    """The lines do not name one model. ``for_api`` says so to a caller who has no command.

    ``line`` is the number of a line with another model than the first one that is named; None if
    lines name none.
    """

    def __init__(self, message: str, for_api: str, line: int | None = None) -> None:
        super().__init__(message)
        self.for_api, self.line = for_api, line


class ModelVote:
    """Yields rows and keeps the models that they name, two at most."""

    def __init__(self, place: Callable[[int], str]) -> None:
        self.named: dict[str, int] = {}
        self.note = ""  # models in the lines that are ignored
        self._place = place
        self._has_unnamed = False

    def watch(self, rows: Iterator[Row | RowError]) -> Iterator[Row | RowError]:
        for row in rows:
            if isinstance(row, Row) and row.model is None:
                self._has_unnamed = True
            elif isinstance(row, Row) and row.model is not None and len(self.named) < 2:
                self.named.setdefault(row.model, row.line)
            yield row

    def need(self, explicit: str | None, default: str | None) -> str:
        model = self.decide(explicit, default)
        if not model:
            raise NoSingleModelError(
                "no model: name one with -m MODEL or BATCHKV_MODEL, or in the lines themselves",
                "no line names a model",
            )
        return model

    def decide(self, explicit: str | None, default: str | None) -> str:
        """The batch's model. Empty if neither the caller nor the lines name one."""
        if explicit:
            return _checked_model(explicit)
        if not self.named:
            return _checked_model(default) if default else ""
        if len(self.named) == 1:
            return self._of_lines(default)
        first, second = (
            f"{json.dumps(name)} ({self._place(line)})" for name, line in self.named.items()
        )
        differ = f"the lines name different models, {first} and {second}; a batch has one model: "
        raise NoSingleModelError(
            f"{differ}split the file, or choose one for all with -m MODEL",
            f"{differ}split the file",
            [*self.named.values()][1],
        )

    def _of_lines(self, default: str | None) -> str:
        """The one model that lines name, if lines may choose it."""
        ((name, line),) = self.named.items()
        where = f"{json.dumps(name)} ({self._place(line)})"
        if self._has_unnamed and default:
            chosen = _checked_model(default)
            if chosen != name:
                self.note = (
                    f"only some lines name a model, {where}: all are for {chosen}, the default"
                )
            return chosen
        if self._has_unnamed:
            some = f"only some lines name a model, {where}: "
            raise NoSingleModelError(
                f"{some}choose one for all with -m MODEL", f"{some}name it in each line"
            )
        if _is_path(name):
            raise UsageError(
                f"the lines name a folder as their model, {where}; only the command may: "
                "choose it with -m FOLDER"
            )
        return name


def _is_path(name: str) -> bool:
    """Whether this can only be a folder: a repository's name has the form ``owner/name``."""
    return name.startswith(("/", "~", ".")) or name.count("/") > 1 or "\\" in name


def _checked_model(name: str) -> str:
    try:
        return model_name(name)
    except ValueError as fault:
        raise UsageError(f"the model's name {fault}: {shown(name)}") from None
