"""Write the tables of docs/input-format.md from the table of fields (``intake.fields``).

usage: python tools/fields_page.py [--check]

With --check it writes nothing, and exits with 1 if the page differs from the table.
"""

from __future__ import annotations

import json
import sys

from batchkv_producer.intake.fields import FIELDS, Field, Use
from page_tool import DOCS, write_or_check

PAGE = DOCS / "input-format.md"
START, END = "<!-- fields: ", "<!-- end of fields -->"
KINDS = {
    Use.TAKEN: "Fields that are used:",
    Use.IGNORED: "Fields that are ignored, whatever their value is, because they cannot change the "
    "answer:",
    Use.REFUSED: "Fields that make a row fail, unless their value changes nothing:",
}
LINES = {("chat", "completion"): "all", ("chat",): "chat", ("completion",): "prompt"}


def page() -> str:
    """The page with new tables between its two marks. ValueError if it lacks them."""
    head, start, rest = PAGE.read_text(encoding="utf-8").partition(START)
    mark, _, rest = rest.partition("\n")
    _, end, foot = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{PAGE.name} lacks the marks of the tables")
    return f"{head}{start}{mark}\n{tables()}\n{end}{foot}"


def tables() -> str:
    """One table for each use."""
    return "".join(
        f"\n{title}\n\n{head(use)}" + "".join(row(field) for field in FIELDS if field.use is use)
        for use, title in KINDS.items()
    )


def head(use: Use) -> str:
    """The first two lines of a table."""
    if use is Use.REFUSED:
        return "| field | rows | accepted | what to do |\n|---|---|---|---|\n"
    return "| field | rows | notes |\n|---|---|---|\n"


def row(field: Field) -> str:
    """One line of a table."""
    cells = [f"`{field.name}`", LINES[field.endpoints]]
    if field.use is Use.REFUSED:
        cells.append(", ".join(f"`{json.dumps(value)}`" for value in field.neutral) or "`null`")
    return f"| {' | '.join([*cells, field.about])} |\n"


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], __file__, PAGE, page, __doc__))
