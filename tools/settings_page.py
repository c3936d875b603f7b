"""Write docs/settings.md from the table of settings (``batchkv_producer.settings_table``).

usage: python tools/settings_page.py [--check]

With --check it writes nothing, and exits with 1 if the page differs from the table.
"""

from __future__ import annotations

import sys

from batchkv_producer.settings_table import GATEWAY_TABLE, TABLE, Setting
from page_tool import DOCS, write_or_check

PAGE = DOCS / "settings.md"
HEAD = """\
# Settings of a worker

<!-- Written by tools/settings_page.py from the table of settings. Change the table, and run it. -->

Most settings are a flag and a variable. Where the first column is empty, there is only
the variable. A flag overrides its variable.
An invalid value is refused with the name of its setting.

| flag | variable | default | allowed | what it does |
|---|---|---|---|---|
"""
GATEWAY_HEAD = """
## Settings of the gateway

Each is a flag of `batchkv serve` and a variable. [The gateway](gateway.md) explains them.

| flag | variable | default | allowed | what it does |
|---|---|---|---|---|
"""
FOOT = """
`BATCHKV_HOME` is the folder of the embedded server, of logs, of worker files,
of the gateway's files and of kept measurements. The default is `~/.batchkv`.
Commands with a gateway's URL have two more, `BATCHKV_API_KEY` and `BATCHKV_CA_FILE`:
see [From a laptop](gateway.md#from-a-laptop).

Next: [The cache](cache.md)
"""


def page() -> str:
    """The whole page."""
    own, gateway = ("".join(f"{row(each)}\n" for each in part) for part in (TABLE, GATEWAY_TABLE))
    return HEAD + own + GATEWAY_HEAD + gateway + FOOT


def row(setting: Setting) -> str:
    """One line of the table."""
    flag = f"`{setting.flag}`" if setting.flag else ""
    variables = ", ".join(f"`{name}`" for name in setting.variables)
    is_word = setting.default and not setting.default[0].isdigit() and setting.default != "off"
    default = f"`{setting.default}`" if is_word else setting.default or setting.no_default
    allowed = setting.allowed().replace("|", "\\|") if setting.is_plain else ""
    cells = (flag, variables, default, allowed, setting.about)
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], __file__, PAGE, page, __doc__))
