"""The type of a setting (``settings_table`` lists all)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class ValueType(Enum):
    """The kind of a setting's text. ``batchkv_worker.settings`` reads each kind."""

    MODEL = auto()
    SCHEME = auto()
    SIZE = auto()
    WHOLE = auto()
    NUMBER = auto()
    CHOICE = auto()
    SWITCH = auto()
    FILE = auto()
    ADAPTERS = auto()
    TIERS = auto()
    ADDRESS = auto()
    DURATION = auto()
    OTHER = auto()  # read elsewhere; the table has it for the page only


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``name`` is the field of ``WorkerSettings``; empty if it is no field.

    ``default`` is the text that a user would write. Without a default, ``no_default`` describes
    what is used. ``low``, ``high`` and ``step`` bound a number in ``unit``. ``auto`` is allowed if
    it is the default. ``help`` is the help of the worker's flag, ``run_help`` that of ``batchkv
    run``'s flag, or empty if ``run`` has none. ``about`` is the text on the page.
    """

    name: str
    variables: tuple[str, ...]
    flag: str = ""
    value_type: ValueType = ValueType.OTHER
    default: str = ""
    no_default: str = ""
    unit: str = ""
    low: float = 0
    high: float = 0
    step: int = 1
    choices: tuple[str, ...] = ()
    metavar: str = ""
    is_bare: bool = False  # a switch whose flag takes no value and turns it on
    is_repeated: bool = False  # a flag that may be given several times
    help: str = ""
    run_help: str = ""
    about: str = ""

    @property
    def variable(self) -> str:
        """The variable with the value. Others name a file with it."""
        return self.variables[0]

    @property
    def is_plain(self) -> bool:
        """Whether one text is the whole setting. Tiers may also come from a file."""
        return self.value_type not in (ValueType.TIERS, ValueType.OTHER)

    def allowed(self) -> str:
        """The allowed values in words, for errors."""
        span = f"{self.low:g} to {self.high:.0f}"
        texts = {
            ValueType.MODEL: "a model's name or folder",
            ValueType.SCHEME: "a KV scheme, like affine8 or affine4,last=float",
            ValueType.SIZE: "a size of at least 1MiB, like 4GB or 512MiB",
            ValueType.CHOICE: f"one of {', '.join(self.choices)}"
            if len(self.choices) > 2
            else " or ".join(self.choices),
            ValueType.SWITCH: "on or off",
            ValueType.FILE: "a file to write" if self.name == "trace" else "a file",
            ValueType.ADDRESS: "an address or a name",
            ValueType.DURATION: "a time of at least 1h, like 12h or 30d",
            ValueType.ADAPTERS: "NAME=FOLDER, several with commas between them",
            ValueType.NUMBER: f"{self.unit}, {span}",
            ValueType.WHOLE: f"a whole number, {span}",
        }
        text = texts[self.value_type]
        if self.value_type is ValueType.WHOLE and self.unit == "seconds":
            text = f"whole seconds, {span}"
        if self.step > 1:
            text = f"a multiple of {self.step} {self.unit}, {span}"
        return (
            f"auto, or {text}"
            if self.default == "auto" and self.value_type is ValueType.WHOLE
            else text
        )

    def option(self) -> dict[str, Any]:
        """The arguments of click's option besides its names and help."""
        if self.is_bare:
            return {"is_flag": True, "flag_value": "on"}
        if self.is_repeated:
            return {"metavar": self.metavar, "multiple": True}
        return {"metavar": self.metavar or None}

    def words(self, value: Any) -> list[str]:
        """The flag with its value, as a command line has it; ``value`` is what click gives."""
        if self.is_bare:
            return [self.flag]
        values = value if self.is_repeated else [value]
        return [word for each in values for word in (self.flag, each)]

    def flag_help(self) -> str:
        """The help of the flag, with its default."""
        shown = "" if self.is_bare else self.default or self.no_default
        return f"{self.help}  [{shown}]" if shown else self.help
