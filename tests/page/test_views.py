"""All views of the page in Chromium, over live batches and a killed worker: `make page`.

It takes some minutes, and npm for axe-core. Pictures of each view, light, dark and as on a phone,
are in ``build/page``: look at them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Client as HttpClient
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.client import Client
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, Usage, encode_result
from support.browser.chromium import Tab, browser, program
from support.gateway import Gateway, chat_file, working
from support.redis_server import running_server

pytestmark = [
    pytest.mark.skipif(os.environ.get("BATCHKV_PAGE") != "all", reason="`make page` runs it"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
PRINT = {"media": "print", "width": 800}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"width": 360, "height": 780},
}
ODD = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> & <b>bold",
    "שלום עולם, مرحبا بالعالم ‮ reversed",
    "👩‍💻🚀 family 👨‍👩‍👧‍👦 flag 🏳️‍🌈",
    "long " * 200_000,
)
MANY = 1_000_000
SYSTEM = "You are a helper that answers in one or two sentences. " * 8
CPU_SHARE = 0.05  # of one core, with ten viewers
CPU_SECONDS = 60.0


@dataclass(slots=True)
class Stage:
    """What runs for all tests of this module."""

    redis_url: str
    connection: Redis
    gateway: Gateway
    home: Path
    tab: Tab
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def base(self) -> str:
        """The address of the page."""
        return self.gateway.url.removesuffix("v1")

    def start_worker(self) -> None:
        """A real worker of the demo model."""
        environment = {**os.environ, "BATCHKV_REDIS_URL": self.redis_url}
        environment |= {"BATCHKV_HOME": str(self.home), "BATCHKV_HEARTBEAT": "2"}
        command = [sys.executable, "-m", "batchkv_producer", "worker", "-m", "demo"]
        with (self.home.parent / f"worker-{len(self.workers)}.log").open("wb") as log:
            worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.workers.append(worker)

    def view(self, name: str) -> None:
        """Go to a view, and wait until it has its figures."""
        self.tab.run(f"location.hash = '#/{name}'")
        self.tab.wait(
            f"document.querySelector('h1') && location.hash === '#/{name}' && "
            "!/Loading|Counting/.test(document.body.innerText)"
        )
        time.sleep(0.5)

    def pictures(self, name: str, only: tuple[str, ...] = tuple(LOOKS)) -> None:
        """A picture of what is shown now, in each look."""
        for look in only:
            self.tab.look(**LOOKS[look])
            time.sleep(0.3)
            assert self.tab.run("document.documentElement.scrollWidth <= innerWidth"), (name, look)
            self.tab.picture(BUILD / "page" / f"{name}-{look}.png")
        self.tab.look()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server, a gateway with a key, and a browser that is signed in with it."""
    assert program() is not None, "make page needs Chromium: apt install chromium"
    folder = tmp_path_factory.mktemp("page")
    home = folder / "home"
    with running_server() as server, server.connect() as connection, browser(folder) as tab:
        gateway = Gateway(server.url, home, "--max-rows", "2000000")
        stage = Stage(server.url, connection, gateway, home, tab)
        try:
            tab.look()
            tab.open(stage.base)
            tab.wait("document.querySelector('h1')?.textContent === 'Batches'")
            yield stage
        finally:
            stage.gateway.stop()
            for worker in stage.workers:
                worker.kill()
                worker.wait(10)


def rows(count: int) -> list[dict[str, Any]]:
    """Rows for the demo model, three of them wrong."""
    found = []
    for number in range(count):
        body: dict[str, Any] = {"model": "demo", "max_tokens": 120, "min_tokens": 60}
        text = f"Say something about the number {number}."
        body["messages"] = [{"role": "system", "content": SYSTEM},
                            {"role": "user", "content": text}]  # fmt: skip
        if number in (10, 20):
            body["temperature"] = "hot"
        if number == 30:
            body |= {"max_tokens": 10**8, "min_tokens": 0}
        found.append({"custom_id": f"row-{number}", "url": "/v1/chat/completions", "body": body})
    return found


def write_rows(file: Path, found: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return file


def choose_file(tab: Tab, selector: str, file: Path) -> None:
    """Choose a file in a field, as a viewer does."""
    document = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
    tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])


def click(tab: Tab, text: str) -> None:
    """Click the button or link whose text begins so."""
    all_of = "[...document.querySelectorAll('button, a')]"
    found = f"{all_of}.find((one) => one.textContent.startsWith({text!r}))"
    tab.wait(found)
    tab.run(f"{found}.click()")


def batch_of(tab: Tab) -> str:
    tab.wait("/batches.\\w{16}/.test(location.hash)")
    return str(tab.run("location.hash.split('/').pop()"))


def test_1_empty_views_name_the_next_command(stage: Stage) -> None:
    """Without batches and workers each view says how to get some."""
    for view, words in (
        ("", "batchkv submit"),
        ("workers", "batchkv worker"),
        ("throughput", "batchkv worker"),
        ("ask", "batchkv worker"),
    ):
        stage.view(view)
        stage.tab.wait(f"document.body.innerText.includes({words!r})")
        stage.pictures(f"empty-{view or 'batches'}", ("light", "phone"))


def test_2_a_file_is_dropped_tried_and_queued(stage: Stage, tmp_path: Path) -> None:
    """The plan is shown first; the batch has its terms; a killed worker costs no row."""
    stage.start_worker()
    stage.start_worker()
    tab = stage.tab
    stage.view("new")
    choose_file(tab, "#file", write_rows(tmp_path / "evening.jsonl", rows(400)))
    tab.wait("document.body.innerText.includes('2 lines would fail')")
    assert not stage.connection.exists(redis_keys.BATCHES)
    tab.run("document.querySelector('#priority').value = 'high'")
    tab.run("document.querySelector('#priority').onchange({target: {value: 'high'}})")
    stage.pictures("new")
    click(tab, "Queue 400 rows")
    batch_id = batch_of(tab)
    client = Client(stage.connection)
    assert client.status(batch_id).priority == "high"
    tab.wait("document.querySelector('.badge.busy')", 240)
    wait_until(lambda: client.status(batch_id).ok > 20)
    stage.workers[0].send_signal(signal.SIGKILL)
    stage.pictures("running")
    stage.view("workers")
    stage.pictures("workers-running")
    stage.view("")
    stage.pictures("batches-running")
    assert client.wait(batch_id, timeout_seconds=400).ok == 397


def test_3_it_says_why_rows_failed_and_what_helps(stage: Stage, tmp_path: Path) -> None:
    """Codes, sentences and lines are there; a line leads to its row; the prompt is of the file."""
    tab = stage.tab
    batch_id = Client(stage.connection).list_batches()[0].batch_id
    stage.view(f"batches/{batch_id}")
    tab.wait("document.querySelectorAll('.chart').length >= 4")
    tab.wait("/2 rows cannot be retried/.test(document.body.innerText)")  # the events have its end
    shown = tab.text()
    assert "3 failed rows" in shown and "temperature must be a number" in shown
    stage.pictures("done")
    tab.look(**PRINT)
    assert "Retry" not in tab.text()  # nothing to press is on paper
    tab.picture(BUILD / "page" / "done-print.png")
    tab.look()
    tab.run("document.querySelector('button[aria-label=\"Show line 31\"]').click()")
    tab.wait("document.querySelector('#detail-31 .sides')")
    stage.pictures("row")
    assert "2 rows cannot be retried: their lines are wrong in the input." in shown
    assert "1 failed row would fail again: its line is too long" in shown
    assert "Retry" not in shown
    look_at_report(stage, batch_id, tmp_path / "report.html")
    with HttpClient(base_url=stage.base, timeout=60) as http:
        report = http.get(f"/page/report/{batch_id}")
        assert report.headers["content-disposition"].startswith("attachment")
        assert "<script" not in report.text


def look_at_report(stage: Stage, batch_id: str, file: Path) -> None:
    """`batchkv report` of the batch: a file that needs no network, with the sums of the status."""
    environment = {**os.environ, "BATCHKV_REDIS_URL": stage.redis_url}
    environment["BATCHKV_HOME"] = str(stage.home)
    command = [sys.executable, "-m", "batchkv_producer", "report", batch_id, "-o", str(file)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    batch = Client(stage.connection).status(batch_id)
    tab = stage.tab
    tab.call("Page.setBypassCSP", enabled=True)
    tab.open(file.as_uri())
    tab.wait("document.querySelector('h1')")
    for number in (batch.total, batch.ok, batch.failed, batch.completion_tokens):
        assert f"{number:,}" in tab.text(), (number, tab.text())
    assert tab.run("performance.getEntriesByType('resource').length") == 0
    for look in LOOKS:
        tab.look(**LOOKS[look])
        assert not barriers(tab), look
    stage.pictures("report")
    tab.call("Page.setBypassCSP", enabled=False)
    tab.open(stage.base)
    tab.wait("document.querySelector('h1')?.textContent === 'Batches'")


def test_4_an_answer_streams(stage: Stage) -> None:
    """The prompt box shows the answer while it is written."""
    tab = stage.tab
    stage.view("ask")
    tab.wait("document.querySelector('#prompt')")
    tab.run("document.querySelector('#prompt').value = 'Count from one to twenty.'")
    tab.run("document.querySelector('#max-tokens').value = '60'")
    click(tab, "Send")
    tab.wait("document.querySelector('.answer')?.textContent.length > 1")
    tab.wait("/first token after/.test(document.body.innerText)")
    tab.wait("!document.querySelector('main [aria-busy=true]')")
    stage.pictures("ask")


def test_5_odd_texts_stay_texts(stage: Stage, tmp_path: Path) -> None:
    """Markup, right-to-left text, emoji and a megabyte are shown, and nothing of them runs."""
    tab = stage.tab
    client = Client(stage.connection)
    found = [{"prompt": text, "model": "fake"} for text in ODD]
    batch_id = client.submit(write_rows(tmp_path / "odd.jsonl", found), name=ODD[0]).batch_id
    with working(stage.redis_url):
        client.wait(batch_id, timeout_seconds=60)
    stage.view(f"batches/{batch_id}")
    choose_file(tab, "#prompts", tmp_path / "odd.jsonl")
    tab.wait("/odd.jsonl/.test(document.body.innerText)")
    tab.run("document.querySelectorAll('.rows button').forEach((one) => one.click())")
    tab.wait("document.querySelectorAll('.sides').length === 4")
    assert all(text in tab.text() for text in ODD[:3])
    stage.pictures("odd")
    click(tab, "Show all 1")
    began = time.monotonic()
    tab.wait("[...document.querySelectorAll('pre')].some((one) => one.textContent.length >= 1e6)")
    tab.run("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    sys.stderr.write(f"a megabyte was drawn in {time.monotonic() - began:.2f} s\n")
    assert tab.run("window.hacked") is None


def test_5b_batches_of_openais_api_keep_their_views(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its end a batch has rows, failures, charts; one that was not queued has its lines."""
    monkeypatch.setenv("FAKE_FAIL", "b")
    tab = stage.tab
    with stage.gateway.client() as client, working(stage.redis_url):
        for content, name, words in (
            (chat_file(*"abcdef"), "openai-done", "Retry 1 failed row"),
            (b'{"custom_id": "a"}\n', "openai-failed", "failed before any row was queued"),
        ):
            file = client.files.create(file=("evening.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            stage.view(f"batches/{batch.id}")
            tab.wait(f"document.body.innerText.includes({words!r})")
            tab.wait("!document.querySelector('.rows .busy, .rows .idle')")  # all have ended
            stage.pictures(name)
    assert tab.problems == []


def test_6_the_page_has_no_barriers(stage: Stage) -> None:
    """axe-core finds nothing serious in any view, light or dark."""
    batch_id = Client(stage.connection).list_batches()[-1].batch_id
    stage.tab.call("Page.setBypassCSP", enabled=True)
    stage.tab.open(stage.base)
    for look in LOOKS:
        stage.tab.look(**LOOKS[look])
        for view in ("", f"batches/{batch_id}", "workers", "throughput", "new", "ask"):
            stage.view(view)
            assert not barriers(stage.tab), (look, view)
    stage.tab.call("Page.setBypassCSP", enabled=False)
    stage.tab.look()


def barriers(tab: Tab) -> list[Any]:
    """What axe-core finds serious in what is shown now."""
    tab.run(f"{axe()}; 1")
    found = tab.run(
        "axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, "
        "v.nodes.slice(0, 3).map((n) => n.html + n.failureSummary)]))"
    )
    return [one for one in found if one[0] in ("serious", "critical")]


def axe() -> str:
    """The source of axe-core, which npm fetches once."""
    folder = BUILD / "axe"
    file = folder / "node_modules/axe-core/axe.min.js"
    if not file.exists():
        assert shutil.which("npm"), "make page needs npm for axe-core"
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-save", "--ignore-scripts", "--silent", "axe-core@4"]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
    return file.read_text()


def test_7_a_million_rows_open_at_once(stage: Stage) -> None:
    """The first page of rows, one in the middle, and the last are there in less than a second."""
    batch_id = many_rows(stage.connection)
    tab = stage.tab
    stage.view("")
    began = time.monotonic()
    tab.run(f"location.hash = '#/batches/{batch_id}'")
    tab.wait("document.querySelectorAll('.rows tbody tr').length === 50")
    seconds = time.monotonic() - began
    sys.stderr.write(f"the first page of {MANY:,} rows: {seconds:.2f} s\n")
    assert seconds < 1
    for line in (MANY // 2, MANY - 10):
        tab.run(f"document.querySelector('#line').value = {line}")
        began = time.monotonic()
        click(tab, "Go")
        tab.wait(f"document.querySelector('#row-{line}')")
        assert time.monotonic() - began < 1
    assert "Draw the charts" in tab.text()
    stage.pictures("million", ("light",))
    stage.view("")
    Client(stage.connection).forget(batch_id)


def many_rows(connection: Redis) -> str:
    """A batch that looks as if all of its many rows had ended."""
    batch_id = "ab" * 8
    answer = Result("", "chat", "ok", "demo", "an answer", "stop", Usage(20, 0, 5), worker="w",
                    created=int(time.time()), busy_ms=900)  # fmt: skip
    value = encode_result(answer)
    for first in range(1, MANY + 1, 10_000):
        lines = range(first, first + 10_000)
        with connection.pipeline(transaction=False) as pipeline:
            pipeline.hset(redis_keys.results(batch_id), mapping={str(n): value for n in lines})
            pipeline.rpush(redis_keys.done(batch_id), *lines)
            pipeline.execute()
    facts = {"digest": "00", "name": "a million", "model": "demo", "chunks": 1, "num_chunks": 1}
    facts |= {"queue": redis_keys.queue_name("demo"), "total": MANY, "ok": MANY}
    facts |= {"created": int(time.time()), "last_line": MANY, "prompt_tokens": 20 * MANY}
    connection.hset(redis_keys.batch(batch_id), mapping=facts)  # type: ignore[arg-type]
    connection.zadd(redis_keys.BATCHES, {batch_id: int(time.time())})
    return batch_id


def test_8_ten_viewers_cost_little(stage: Stage, tmp_path: Path) -> None:
    """While a batch runs and ten viewers look, the gateway takes under 5 % of a core."""
    stage.start_worker()
    client = Client(stage.connection)
    found = [row | {"custom_id": f"more-{n}"} for n, row in enumerate(rows(3000))]
    batch_id = client.submit(write_rows(tmp_path / "more.jsonl", found)).batch_id
    ending = threading.Event()
    viewers = [threading.Thread(target=look_on, args=(stage.base, ending)) for _ in range(10)]
    for viewer in viewers:
        viewer.start()
    try:
        time.sleep(5)
        before, began = cpu_seconds(stage.gateway.process.pid), time.monotonic()
        time.sleep(CPU_SECONDS)
        seconds = cpu_seconds(stage.gateway.process.pid) - before
        share = seconds / (time.monotonic() - began)
        sys.stderr.write(f"ten viewers: {100 * share:.1f} % of a core\n")
        assert share < CPU_SHARE
    finally:
        ending.set()
        for viewer in viewers:
            viewer.join(30)
        client.cancel(batch_id)


def look_on(base: str, ending: threading.Event) -> None:
    """Read events as a page does."""
    with HttpClient(base_url=base, timeout=30) as http:
        while not ending.is_set():
            with http.stream("GET", "/page/events") as answer:
                for _ in answer.iter_lines():
                    if ending.is_set():
                        return


def cpu_seconds(pid: int) -> float:
    """The time that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_9_a_lost_gateway_and_a_key(stage: Stage) -> None:
    """A lost connection is shown and recovers; once there is a key, the page asks for one."""
    tab = stage.tab
    stage.view("throughput")
    stage.pictures("throughput")
    assert tab.problems == []
    port = stage.gateway.port
    stage.view("")
    stage.gateway.stop()
    tab.wait("/The gateway does not answer/.test(document.body.innerText)")
    stage.pictures("lost", ("light",))
    stage.gateway = Gateway(stage.redis_url, stage.home, "--port", str(port))
    tab.wait("!/The gateway does not answer/.test(document.body.innerText)")
    key = KeyStore(stage.connection).add("laptop", is_admin=True)
    tab.wait("document.querySelector('#key')", 90)  # the stream ends within a minute
    assert "This gateway has a key now." in tab.text()
    stage.pictures("login")
    tab.call("Page.setBypassCSP", enabled=True)
    tab.open(stage.base)
    tab.wait("document.querySelector('#key')")
    for is_wrong in (False, True):
        if is_wrong:
            tab.run("document.querySelector('#key').value = 'wrong'")
            click(tab, "Sign in")
            tab.wait("/no key of this gateway/.test(document.body.innerText)")
        for look in LOOKS:
            tab.look(**LOOKS[look])
            assert not barriers(tab), (look, is_wrong)
    stage.pictures("login-wrong")
    tab.call("Page.setBypassCSP", enabled=False)
    tab.problems.clear()
    tab.run(f"document.querySelector('#key').value = {key!r}")
    click(tab, "Sign in")
    tab.wait("document.querySelector('h1')?.textContent === 'Batches'")
    click(tab, "Sign out")
    tab.wait("document.querySelector('#key')")


def wait_until(is_true: Callable[[], bool], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.2)
