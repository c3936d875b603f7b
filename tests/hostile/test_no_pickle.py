"""Nothing that comes as data becomes code: looked for in what is installed, and while it works."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from support.worker_harness import (
    WorkerProcess,
    assert_reconciled,
    num_ended,
    submit,
    wait_until,
    workers,
)

PACKAGES = ("batchkv_producer", "batchkv_cache_store", "batchkv_worker", "batchkv_gateway")
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
MODULES |= {"jsonpickle", "code", "codeop", "runpy", "imp"}
NAMES = {"eval", "exec", "compile", "__import__"}
# Attributes that run, import or unpickle what they are given; of which objects does not matter.
ATTRIBUTES = {"perform", "func", "call_string", "system", "popen", "import_attribute"}
ATTRIBUTES |= {"allow_pickle", "exec_module", "import_module", "load_module", "unsafe_load"}
# The package's own names, from a table beside the call.
ALLOWED = {"batchkv_producer/__init__.py": {"import_module"}}
SHELLS = {"shell", "allow_pickle", "weights_only", "trust_remote_code"}


def sources() -> Iterator[Path]:
    """Every Python file of the installed packages."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        for folder in spec.submodule_search_locations:
            yield from sorted(Path(folder).rglob("*.py"))


def breaches(text: str) -> list[str]:
    """What a module's text names of all that makes code of data."""
    return [
        f"{getattr(node, 'lineno', 0)}: {what}"
        for node in ast.walk(ast.parse(text))
        for what in (*imported(node), *named(node), *switched_on(node))
    ]


def imported(node: ast.AST) -> Iterator[str]:
    """Modules and functions that should not be imported."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom):
        if (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        yield from (a.name for a in node.names if a.name in ATTRIBUTES)


def named(node: ast.AST) -> Iterator[str]:
    """Names and attributes that should not be used."""
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield node.id
    elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
        # A prompt has a system text, too: that is read, and belongs to no module.
        is_module = isinstance(node.value, ast.Name) and node.value.id in ("os", "posix")
        if node.attr != "system" or is_module:
            yield node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "system":
        yield "system"


def switched_on(node: ast.AST) -> Iterator[str]:
    """Switches that let code in, as arguments or in a dict, unless they are plainly off."""
    pairs: list[tuple[object, ast.expr]] = []
    if isinstance(node, ast.keyword):
        pairs = [(node.arg, node.value)]
    elif isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        pairs = list(zip(keys, node.values, strict=True))
    for name, value in pairs:
        is_off = isinstance(value, ast.Constant) and value.value is False
        if name in SHELLS and not is_off:
            yield str(name)


def test_no_module_makes_code_of_data() -> None:
    """No unpickling, no evaluation, no import of a name that came as data, no shell."""
    found = []
    for path in sources():
        allowed = ALLOWED.get(f"{path.parent.name}/{path.name}", set())
        for what in breaches(path.read_text("utf-8")):
            if what.split()[-1] not in allowed:
                found.append(f"{path}:{what}")
    assert not found, "\n".join(found)
    assert len(list(sources())) > 150


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "def f(x):\n    return eval(x)",
        "job.perform()",
        "f = job.func",
        "import os\nos.system('x')",
        "import os\nrun = os.system",
        "import os as o\no.system('x')",
        "subprocess.run(x, shell=True)",
        "numpy.load(x, allow_pickle=True)",
        "from rq.utils import import_attribute",
        "load(x, trust_remote_code=True)",
        "load(x, {'trust_remote_code': True})",
    ],
)
def test_the_search_finds_what_it_is_for(text: str) -> None:
    """Each of these in a module would be a breach."""
    assert breaches(text)


WITHOUT = """
import marshal, pickle, sys
import redis, rq.cli, rq.worker, rq.job, click  # Python's own imports use marshal
import batchkv_worker.queue.rq_worker, support.fake_engine, batchkv_worker.rq_config

def refuse(*_, **__):
    sys.stderr.write('UNPICKLED\\n')
    raise SystemExit(99)

class Refused(pickle.Unpickler):
    def __init__(self, *_, **__):
        refuse()

pickle.loads = pickle.load = marshal.load = refuse
pickle.Unpickler = pickle._Unpickler = Refused
import _pickle
_pickle.loads = _pickle.load = refuse
_pickle.Unpickler = Refused

def hear(event, args):
    if event == 'pickle.find_class':
        refuse()
sys.addaudithook(hear)
from rq.serializers import DefaultSerializer
DefaultSerializer.loads = staticmethod(refuse)
sys.argv = ['rq', 'worker', '-c', 'batchkv_worker.rq_config']
sys.argv += ['-w', 'support.fake_engine.FakeWorker']
rq.cli.main()
"""


def test_a_worker_through_rqs_own_command_unpickles_nothing(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """`rq worker -w BatchWorker` with unpickling made fatal: a batch with failures, to its end."""
    batch = submit(redis_connection, ["a", "b", "reject:engine_error", "c"])
    redis_connection.hset(f"rq:job:{batch}-1", "meta", b"\x80\x04N.")
    foreign = b"cos\nmkdir\n(S'made-by-a-payload'\ntR."
    redis_connection.hset(f"rq:job:{batch}-4", "data", foreign)
    settings: dict[str, object] = {"MAINTENANCE_SECONDS": 0.1, "HEARTBEAT_SECONDS": 0.1}
    command = (sys.executable, "-c", WITHOUT)
    worker = WorkerProcess(redis_url, tmp_path / "log", settings=settings, command=command)
    with workers(worker):
        wait_until(lambda: num_ended(redis_connection, batch) == 4 or worker.process.poll(), 60)
        worker.process.terminate()
        assert worker.wait(60) == 0, worker.said
    assert "UNPICKLED" not in worker.said
    assert_reconciled(redis_connection, batch)
    assert not (tmp_path / "made-by-a-payload").exists()


def test_that_worker_would_have_told(redis_url: str, tmp_path: Path) -> None:
    """The same process ends with 99 when something in it does unpickle."""
    spoiled = WITHOUT.replace("rq.cli.main()", "DefaultSerializer.loads(b'x')")
    command = (sys.executable, "-c", spoiled)
    worker = WorkerProcess(redis_url, tmp_path / "log", command=command)
    with workers(worker):
        assert worker.wait(60) == 99
    assert "UNPICKLED" in worker.said
