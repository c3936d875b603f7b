"""The order in which rooms may import, for ``check_tree.py``. Standard library only.

A room is a folder of a package. ``ORDER`` lists each package's rooms, and the modules beside them,
from top to bottom. Each may import from itself and from all that come after it, and from none
before it, not even a type. A module belongs to the longest name in the list that fits it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_FOLDER_MODULES = 20
MAX_FAN_OUT = 12

ORDER: dict[str, tuple[str, ...]] = {
    "batchkv_worker": (
        *(
            "cli",
            "__init__",
            "rq_config",
            "tune",
            "doctor",
            "queue.models",
            "queue",
            "queue.live",
            "queue.runs",
            "bench",
        ),
        *("engine", "engine.orders"),
        *("engine.answers", "engine.grammar", "engine.tokens", "engine.schedule"),
        *("prefix.explain", "prefix.shared", "prefix", "report", "model"),
        *("kv.start", "kv.layers", "kv.slots", "kv.attention"),
        *("kv.backends.cuda", "kv.backends.metal", "kv.backends.gpu", "kv.backends.cpu"),
        *("kv.backends", "kv.kernels"),
        *("settings", "kv.schemes", "kv.types", "kv", "demo"),
        *("events", "figures", "sequence", "guide", "trace", "faults", "kept_files", "errors"),
    ),
    "batchkv_producer": (
        *("__main__", "entry", "cli", "__init__", "doctor", "service", "top", "local"),
        "connecting",
        *(
            "batch_facts",
            "remote",
            "client",
            "interface",
            "report",
            "submit",
            "manage",
            "results",
            "live",
            "monitor",
            "order",
            "intake",
            "server",
            "wire",
        ),
        *("retry", "disk", "tables", "progress", "settings_table", "setting", "agreed", "errors"),
    ),
    "batchkv_gateway": (
        *("cli", "assembly", "page", "native", "http", "parts", "metrics", "live", "batches"),
        *(
            "files",
            "keys",
            "webhooks",
            "settings",
            "secret",
            "worker_history",
            "kept_facts",
            "stopping",
            "scripts",
            "redis_keys",
        ),
        *("pages", "ids", "errors", "__init__"),
    ),
    "batchkv_cache_store": (
        *("cli", "upkeep", "opening", "store", "lookup", "writer", "guarded", "tiers", "blocks"),
        *("uses", "lease", "breaker", "load_or_compute", "sizes", "keys", "errors", "__init__"),
    ),
}

# Module -> the reason why it imports more than MAX_FAN_OUT others of the project. An entry that is
# no longer needed is a breach, too.
ALLOWED_FAN_OUT: dict[str, str] = {
    "batchkv_gateway.batches.steps": "each step of a batch calls another part of the producer",
    "batchkv_gateway.assembly": "makes every part and lists every route once",
    "batchkv_producer": "the public names, from many modules",
    "batchkv_producer.cli.ask": "a command puts parts together",
    "batchkv_producer.cli.run_submit": "two commands put most parts together",
    "batchkv_producer.client": "one method for each operation on a batch",
    "batchkv_producer.doctor.examine": "lists every check of every part once",
    "batchkv_producer.local.ask": "submits, keeps workers and follows, in one function each",
    "batchkv_producer.interface": "one method for each operation, with the types of all of them",
    "batchkv_producer.local.remote_run": "submits and follows, as local.run does",
    "batchkv_producer.local.run": "submits, keeps workers and follows, in one function each",
    "batchkv_producer.manage.reconcile": "each fault of a batch is repaired by another part",
    "batchkv_producer.remote.client": "one method for each operation on a batch",
    "batchkv_producer.submit.enqueue": "where plan, options, model and Redis meet",
    "batchkv_producer.submit.restore": "a submit of its own, of rows that were there before",
    "batchkv_producer.submit.submission": "where reading, ordering and queueing meet",
    "batchkv_worker.cli": "one line for each command's parts",
    "batchkv_worker.engine.decode_rows": "rows come from prefill and prefix, and go back there",
    "batchkv_worker.engine.engine": "builds every part of the engine and calls each in a step",
    "batchkv_worker.engine.factory": "settings, model, memory and measurements become an engine",
    "batchkv_worker.engine.row_ends": "each part of the engine is told of a row's end",
    "batchkv_worker.kv.start.plan": "plans every part of the KV cache",
    "batchkv_worker.prefix.shared.client": "all requests to the store",
    "batchkv_worker.queue.rq_worker": "builds every part of a session",
}


def modules_in(root: Path, files: list[Path]) -> dict[str, Path]:
    """Dotted name -> file, of all modules of the packages in ORDER."""
    found = {}
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        if file.suffix == ".py" and len(parts) > 2 and parts[1] in ORDER:
            is_package = parts[-1] == "__init__"
            found[".".join(parts[1:-1] if is_package else parts[1:])] = file
    return found


def project_imports(file: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the project that a file imports, also only for types or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules.keys()


def place(name: str) -> tuple[str, int]:
    """A module's package, and the position of its room in the order; -1 if it is in no room."""
    package, _, rest = name.partition(".")
    rest = rest or "__init__"
    while rest not in ORDER[package]:
        rest, _, last = rest.rpartition(".")
        if not last or not rest:
            return package, -1
    return package, ORDER[package].index(rest)


def direction_breaches(imports: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """(module, message) of modules without a room, and of imports that go up."""
    for name, imported in imports.items():
        package, own = place(name)
        if own < 0:
            yield name, "in no room of ORDER (tools/rooms.py)"
            continue
        for other in sorted(imported):
            other_package, below = place(other)
            if other_package == package and 0 <= below < own:
                room, upper = ORDER[package][own], ORDER[package][below]
                yield name, f"imports {other}: {room} must not import from {upper}"


def cycles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """The cycles of imports: one through each module that is in any, each cycle once."""
    seen: set[frozenset[str]] = set()
    for name in imports:
        circle = circle_through(name, imports)
        if circle and frozenset(circle) not in seen:
            seen.add(frozenset(circle))
            yield circle


def circle_through(name: str, imports: Mapping[str, set[str]]) -> list[str]:
    """The shortest path of imports from a module back to itself; empty if there is none."""
    ways = [[name]]
    known: set[str] = set()
    while ways:
        further = [[*way, other] for way in ways for other in sorted(imports[way[-1]] - known)]
        for way in further:
            if way[-1] == name:
                return way[:-1]
        known |= {way[-1] for way in further}
        ways = list({way[-1]: way for way in further}.values())
    return []


def fan_out_breaches(imports: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """(module, message) of modules that import too many others."""
    for name, imported in imports.items():
        if len(imported) > MAX_FAN_OUT and name not in ALLOWED_FAN_OUT:
            message = f"imports {len(imported)} modules of the project (at most {MAX_FAN_OUT})"
            yield name, message


def full_folders(root: Path, files: list[Path]) -> Iterator[str]:
    """Folders with too many modules. ``__init__`` is not counted."""
    counts = Counter(
        file.parent.relative_to(root).as_posix()
        for file in files
        if file.suffix == ".py" and file.name != "__init__.py"
    )
    for folder, count in sorted(counts.items()):
        if count > MAX_FOLDER_MODULES:
            yield f"{folder}: {count} modules in one folder (at most {MAX_FOLDER_MODULES})"


def unlike_rooms(root: Path, files: list[Path]) -> Iterator[str]:
    """Folders of a package's tests that do not have the name of one of its rooms."""
    names = {file.parent.relative_to(root).parts for file in files if file.suffix == ".py"}
    rooms = {(parts[0], *parts[2:]) for parts in names if len(parts) > 1 and parts[1] in ORDER}
    for parts in sorted(names):
        if parts[0] == "tests" and (parts[1:2] in rooms) and parts[1:] not in rooms:
            yield f"{'/'.join(parts)}: folders of tests must have the name of a room"


def room_breaches(root: Path, files: list[Path]) -> Iterator[str]:
    """All breaches of the rules about rooms, one line each."""
    modules = modules_in(root, files)
    imports = {name: project_imports(file, modules) for name, file in sorted(modules.items())}
    for name, message in [*direction_breaches(imports), *fan_out_breaches(imports)]:
        yield f"{modules[name].relative_to(root).as_posix()}: {message}"
    for circle in cycles(imports):
        yield f"import cycle: {', '.join(circle)}"
    yield from full_folders(root, files)
    yield from unlike_rooms(root, files)


def stale_fan_out(root: Path, files: list[Path]) -> Iterator[str]:
    """Entries of ALLOWED_FAN_OUT whose module is gone, or imports few enough."""
    modules = modules_in(root, files)
    for name in ALLOWED_FAN_OUT:
        if name not in modules or len(project_imports(modules[name], modules)) <= MAX_FAN_OUT:
            yield f"tools/rooms.py: ALLOWED_FAN_OUT need not name {name}"
