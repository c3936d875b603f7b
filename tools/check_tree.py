# ruff: noqa: T201  (a helper that talks to a terminal)
"""The tree's own rules, which no linter knows. Standard library only.

usage: python tools/check_tree.py [ROOT]

Prints one line for each breach and exits 1 when there is any. The rules:

- no .py file directly in a package's top folder (a user's worker.py would shadow it);
- imports go down only: gateway, producer and cache_store never import MLX, and only the gateway
  and the worker import another package;
- only the worker's ``kv/backends`` and ``kv/start`` ask which device serves;
- nothing in the four packages can run code that comes as data (pickle, eval, exec ...);
- rooms import in the order of tools/rooms.py, without cycles, and no module imports over 12 others;
- no folder has more than 20 modules, and the folders of tests have the names of the rooms;
- functions of at most 60 lines and modules of at most 400, or a reason in ALLOWED_LONG;
- no tracked file over 1 MB, the packaged model aside;
- the lock files name no index and no host.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rooms import room_breaches, stale_fan_out

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 400
MAX_FILE_BYTES = 1_000_000

# Room -> top-level packages that nothing in it may import.
MLX = {"mlx", "mlx_lm", "mlx_vlm"}
FORBIDDEN_IMPORTS = {
    "cache_store": MLX | {"batchkv_worker", "batchkv_producer", "batchkv_gateway"},
    "producer": MLX | {"batchkv_worker", "batchkv_cache_store", "batchkv_gateway"},
    "gateway": MLX | {"batchkv_worker", "batchkv_cache_store"},
    "worker": {"batchkv_gateway"},
}
# Modules that rebuild objects from bytes. They run code that the bytes name.
CODE_FROM_DATA = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
CODE_FROM_DATA |= {"joblib", "jsonpickle"}
EVALUATORS = {"eval", "exec"}
IMPORTERS = {"__import__", "import_module"}

# Names that distinguish devices. Only these rooms may use them; other rooms get a backend.
DEVICE_WORDS = {"default_device", "set_default_device", "Device", "cpu", "gpu", "metal", "cuda"}
DEVICE_ROOMS = ("kv/backends/", "kv/start/")
DEVICE_MODULES = tuple(
    f"batchkv_worker.kv.backends.{name}" for name in ("cpu", "gpu", "metal", "cuda")
)

# "path" or "path:function" -> the reason why it is longer than the limit. An entry that is no
# longer needed is a breach, too.
ALLOWED_LONG: dict[str, str] = {
    "producer/batchkv_producer/cli/run_submit.py:run": "a parameter for each flag, and its help",
}

# The packaged model's weights and tokenizer.
ALLOWED_LARGE = re.compile(
    r"(worker/batchkv_worker/demo|tests/upgrade/v[0-9.]+/model)/.*\.(safetensors|json)"
)

LOCK_NAMES_A_HOST = re.compile(r"://|^\s*--(index|extra-index|find-links|trusted)", re.MULTILINE)


def tracked_files(root: Path) -> list[Path]:
    """Files that git tracks or would track; without git, every file outside hidden folders."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        names = [name for name in listing.stdout.decode().split("\0") if name]
        return [root / name for name in names if (root / name).is_file()]
    hidden = (path for path in root.rglob("*") if path.is_file())
    return [p for p in hidden if not any(s.startswith(".") for s in p.relative_to(root).parts[:-1])]


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also of a constant handed to ``import_module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and called_name(node) in IMPORTERS and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def called_name(call: ast.Call) -> str | None:
    """The last part of the name that is called: ``b`` for ``a.b()``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def import_breaches(room: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Imports that go up, and modules that turn data into code."""
    for line, name in imported_modules(tree):
        top = name.split(".")[0]
        if top in FORBIDDEN_IMPORTS[room]:
            yield line, f"{room} must not import {top}"
        if top in CODE_FROM_DATA:
            yield line, f"{top} runs code that comes as data"


def evaluator_breaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The bare names eval and exec. Methods with these names, such as ``mx.eval``, are allowed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in EVALUATORS:
            yield node.lineno, f"{node.id}() runs code that comes as data"


def device_breaches(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of devices outside the rooms that may use them, and assignments to ``__class__``."""
    if not name.startswith("worker/") or any(room in name for room in DEVICE_ROOMS):
        return
    for line, module in imported_modules(tree):
        if module.startswith(DEVICE_MODULES):
            yield line, f"{module} is for {' and '.join(DEVICE_ROOMS)} alone: ask the backend"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        is_mlx = isinstance(node.value, ast.Name) and node.value.id == "mx"
        if is_mlx and node.attr in DEVICE_WORDS:
            yield node.lineno, f"mx.{node.attr} depends on the device: ask the backend"
        if node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            yield (
                node.lineno,
                "an assignment to __class__: use kv/backends/rebind.py instead",
            )


def too_long(name: str, text: str, tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """(name as in ALLOWED_LONG, line, message) of all functions and modules over their limits."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_MODULE_LINES:
        yield name, 1, f"module of {num_lines} lines (at most {MAX_MODULE_LINES})"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            message = f"{node.name} has {length} lines (at most {MAX_FUNCTION_LINES})"
            yield f"{name}:{node.name}", node.lineno, message


def source_breaches(root: Path, file: Path) -> Iterator[str]:
    """All breaches of one Python file of a room."""
    name = file.relative_to(root).as_posix()
    room = name.split("/")[0]
    if name.count("/") == 1:
        yield f"{name}: a .py file directly in {room}/ (packages only)"
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=name)
    found = [*import_breaches(room, tree), *evaluator_breaches(tree)]
    found += device_breaches(name, tree)
    for long_name, line, message in too_long(name, text, tree):
        if long_name not in ALLOWED_LONG:
            found.append((line, message))
    yield from (f"{name}:{line}: {message}" for line, message in sorted(found))


def breaches(root: Path) -> Iterator[str]:
    """Every breach in the tree, one line each."""
    files = sorted(tracked_files(root))
    yield from room_breaches(root, files)
    for file in files:
        name = file.relative_to(root).as_posix()
        if file.suffix == ".py" and name.split("/")[0] in FORBIDDEN_IMPORTS:
            yield from source_breaches(root, file)
        if file.stat().st_size > MAX_FILE_BYTES and not ALLOWED_LARGE.fullmatch(name):
            yield f"{name}: {file.stat().st_size:,} bytes (at most {MAX_FILE_BYTES:,})"
        if name.startswith("requirements/") and LOCK_NAMES_A_HOST.search(file.read_text()):
            yield f"{name}: a lock file must name no index and no host"


def stale_exceptions() -> Iterator[str]:
    """Exceptions that are no longer needed: the code is gone, or short enough."""
    yield from stale_fan_out(REPOSITORY, tracked_files(REPOSITORY))
    for entry in ALLOWED_LONG:
        name = entry.split(":")[0]
        file = REPOSITORY / name
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if entry not in [long_name for long_name, _, _ in too_long(name, text, ast.parse(text))]:
            yield f"tools/check_tree.py: ALLOWED_LONG need not name {entry}"


def main() -> int:
    """Print the breaches; returns the exit code."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else REPOSITORY
    found = [*breaches(root), *(stale_exceptions() if root == REPOSITORY else ())]
    for line in found:
        print(line)
    print(f"check_tree: {len(found)} breaches" if found else "check_tree: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
