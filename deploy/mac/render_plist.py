"""Fill in a launchd template: every ``@NAME@`` in any of its strings becomes NAME's value.

usage: python render_plist.py TEMPLATE NAME=VALUE ...    (the result goes to standard output)

The template is parsed before and written after, so that no value needs escaping and the result
is a property list whatever the values hold. Standard library only.
"""

from __future__ import annotations

import plistlib
import re
import sys
from pathlib import Path
from typing import Any

PLACEHOLDER = re.compile(r"@([A-Z_]+)@")


def fill(node: Any, values: dict[str, str]) -> Any:
    """A copy of ``node`` with the placeholders of all its strings filled in."""
    if isinstance(node, dict):
        return {key: fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, values) for value in node]
    if isinstance(node, str):
        return PLACEHOLDER.sub(lambda match: values[match[1]], node)
    return node


def main() -> None:
    """Read, fill in, write; a placeholder without a value is an error that names it."""
    template, *assignments = sys.argv[1:]
    values = dict(assignment.split("=", 1) for assignment in assignments)
    try:
        filled = fill(plistlib.loads(Path(template).read_bytes()), values)
    except KeyError as error:
        sys.exit(f"render_plist: no value for {error}")
    sys.stdout.buffer.write(plistlib.dumps(filled, sort_keys=False).rstrip() + b"\n")


if __name__ == "__main__":
    main()
