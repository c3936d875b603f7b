"""The page in Chromium, in short. `make page` does it at length, with pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.client import Client
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.worker import BUSY_SECONDS, WorkerFigures, encode_figures
from batchkv_producer.wire.job import Result as RowResult
from batchkv_producer.wire.job import Usage, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions
from support.browser.chromium import Tab, browser, program
from support.gateway import chat_file, running_gateway, working
from support.redis_server import RedisServer

pytestmark = pytest.mark.skipif(program() is None, reason="needs Chromium: apt install chromium")

MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> & <b>"
HEBREW = "שלום עולם، مرحبا"
EMOJI = "👩‍💻🚀 family 👨‍👩‍👧‍👦"
LONG_CODE = "context_length_exceeded"
OPENER = """#!/bin/sh
printf %s "$1" > '{}'
"""


@pytest.fixture(scope="module")
def tab(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tab, str]]:
    """A browser that `serve --open` led to the page of a gateway with keys, and a batch's id."""
    folder = tmp_path_factory.mktemp("browser")
    opener, opened = folder / "opener", folder / "opened"
    opener.write_text(OPENER.format(opened))
    opener.chmod(0o700)
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": text, "model": "fake"} for text in (MARKUP, HEBREW, EMOJI)]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"prompt": 7}]))
    with redis_server.connect() as connection, pytest.MonkeyPatch.context() as patch:
        connection.flushall()
        batch_id = make_batch(connection, redis_server.url, prompts)
        patch.setenv("BROWSER", f"{opener} %s")
        flags = ("--open", "--port", "0")
        with running_gateway(redis_server.url, folder / "home", *flags), browser(folder) as found:
            until = time.monotonic() + 20
            while not (opened.exists() and opened.read_text()):
                assert time.monotonic() < until
                time.sleep(0.02)
            found.look()
            found.open(opened.read_text())
            found.wait("document.querySelector('h1')?.textContent === 'Batches'")
            yield found, batch_id


def make_batch(connection: Redis, url: str, prompts: Path) -> str:
    """A batch of the rows, which a worker has answered by their own text."""
    KeyStore(connection).add("laptop")
    client = Client(connection)
    batch_id = client.submit(prompts, model="fake", name=MARKUP).batch_id
    with working(url):
        client.wait(batch_id, timeout_seconds=30)
    return batch_id


def add_worker(connection: Redis, name: str, model: str, **more: str) -> None:
    facts = {"birth": "now", "queues": redis_keys.queue_name(model), "bkv_model": model}
    facts |= {"bkv_seen": str(int(time.time())), **more}
    connection.hset(redis_keys.worker(name), mapping=facts)  # type: ignore[arg-type]
    connection.sadd(redis_keys.workers(""), redis_keys.worker(name))


def test_serve_open_leads_to_the_page_signed_in(tab: tuple[Tab, str]) -> None:
    """The browser is the operator's. Its address has no ticket, and the folder keeps none."""
    page, batch_id = tab
    assert page.run("location.href").endswith(("/", "/#/"))
    page.wait(f"document.querySelector('a[href=\"#/batches/{batch_id}\"]')")
    assert page.run("document.cookie") == ""
    assert "operator of this gateway" in page.text()


def test_texts_of_rows_are_text(tab: tuple[Tab, str]) -> None:
    """Markup in names, answers and errors is shown as it was written, and nothing of it runs."""
    page, batch_id = tab
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelectorAll('.rows tbody tr').length === 4")
    page.run("document.querySelectorAll('.rows button').forEach((one) => one.click())")
    page.wait("document.querySelectorAll('.sides').length === 4")
    shown = page.text()
    for text in (MARKUP, HEBREW, EMOJI):
        assert text in shown
    assert "1 failed row" in shown and "invalid_request" in shown
    assert page.run("window.hacked") is None
    assert page.run("document.querySelectorAll('main script, main img').length") == 0


def test_the_keyboard_reaches_everything(tab: tuple[Tab, str]) -> None:
    """The first Tab is the way to the content; Escape closes a dialog and returns to its button."""
    page, batch_id = tab
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelector('.rows')")
    page.run("location.reload()")
    page.wait("document.querySelector('.rows') && document.activeElement === document.body")
    page.press("Tab")
    assert "Skip" in page.run("document.activeElement.textContent")
    page.press("Enter")
    assert page.run("document.activeElement.id") == "main"
    page.run("location.hash = '#/'")
    page.wait("document.activeElement.textContent === 'Batches'")
    page.run(f"location.hash = '#/batches/{batch_id}'")
    forget = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Forget')"
    page.wait(forget.replace("find", "some"))
    page.run(f"{forget}.focus()")
    page.press("Enter")
    page.wait("document.querySelector('dialog[open]')")
    assert page.run("document.activeElement.textContent") == "Keep"
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    assert page.run("document.activeElement.textContent") == "Forget"


def test_the_slow_worker_is_named(tab: tuple[Tab, str], redis_server: RedisServer) -> None:
    """Of the workers of one model, the one far below the median is marked.

    What one did in less than five seconds is not compared.
    """
    page, _ = tab
    with redis_server.connect() as connection:
        for name, rate, busy in (
            ("mini", 20, 5),
            ("studio", 100, 60),
            ("air", 90, 9),
            ("new", 9, 4),
        ):
            figures = encode_figures(WorkerFigures(0.0, {}, {BUSY_SECONDS: busy}))
            more = {"bkv_tokens_per_second": str(rate), "bkv_figures": figures}
            add_worker(connection, name, "fake", **more)
    page.run("location.hash = '#/workers'")
    page.wait("document.querySelectorAll('.worker').length >= 4")
    marked = page.run(
        "[...document.querySelectorAll('.worker')].filter((one) => /slow/.test(one.textContent))"
        ".map((one) => one.querySelector('h2').textContent)"
    )
    assert marked == ["mini"]


def test_a_speed_that_is_not_measured_yet_is_no_zero(
    tab: tuple[Tab, str], redis_server: RedisServer
) -> None:
    """A worker with rows and without a measured speed shows none, and so does the sum with it.

    An idle one shows 0. It still reports the speed and the slots of its last rows.
    """
    page, _ = tab
    wip = redis_keys.registry("wip", redis_keys.queue_name("fake"))
    with redis_server.connect() as connection:
        figures = WorkerFigures(0.0, {}, {"rows.decode": 32.0})
        for name, rate in (("starts", "0"), ("rests", "902")):
            more = {"bkv_tokens_per_second": rate, "bkv_slots": "32"}
            add_worker(connection, name, "fake", **more, bkv_figures=encode_figures(figures))
        connection.hset(redis_keys.job("held"), "worker_name", "starts")
        connection.zadd(wip, {"held:1": time.time() + 600})
        page.run("location.hash = '#/workers'")
        for name, speed in (("starts", "\N{EN DASH}"), ("rests", "0 tok/s")):
            page.wait(f"document.querySelector('[aria-labelledby=worker-{name}] .speed')")
            shown = page.run(
                f"document.querySelector('[aria-labelledby=worker-{name}] .speed').textContent"
            )
            assert shown == speed
        assert "0 of 32 in use" in page.run(
            "document.querySelector('[aria-labelledby=worker-rests]').textContent"
        )
        page.run("location.hash = '#/'")
        page.wait("document.querySelector('.tile dd')?.textContent === '\N{EN DASH}'")
        connection.zrem(wip, "held:1")
        connection.delete(redis_keys.job("held"))
        page.wait("document.querySelector('.tile dd')?.textContent === '0 tok/s'")


def test_failures_are_as_new_as_their_count(tab: tuple[Tab, str]) -> None:
    """Facts that were read before the last row failed do not hide its code."""
    page, batch_id = tab
    page.run(
        "window.fetchNow = window.fetch, window.fetch = async (path, ...more) => {"
        "  const found = await window.fetchNow(path, ...more);"
        "  if (!String(path).includes('/page/facts/')) return found;"
        "  const old = {code: 'an_older_code', count: 2, lines: [1, 2], examples: []};"
        "  return Response.json({...await found.json(), failures: [old]});"
        "}, 0"
    )
    page.run("location.hash = '#/'")
    page.wait("document.activeElement.textContent === 'Batches'")
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelector('.charts')")
    shown = page.run("document.querySelector('[aria-labelledby=failures-title]').innerText")
    page.run("window.fetch = window.fetchNow, 0")
    assert "invalid_request" in shown and "an_older_code" not in shown


def test_only_rows_that_can_be_retried_are_counted(
    tab: tuple[Tab, str], redis_server: RedisServer, tmp_path: Path
) -> None:
    """The button has their number. A sentence beside it says how many others there are, and why.

    Codes break behind underscores alone. The notice of a retry goes when its rows have ended.
    Of rows that would fail again it says what helps; if there are no others, there is no button.
    """
    page, _ = tab
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text} for text in ("a", 7, 8, "b", "c")]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    queue = redis_keys.queue_name("failing")

    def fail(connection: Redis, *codes: str) -> None:
        moves = Transitions(connection)
        ends = [
            JobResult(
                row.lease,
                "failed",
                encode_result(RowResult("1", "completion", "failed", error=(code, "a reason"))),
            )
            for row, code in zip(moves.pull(queue, "w", len(codes), 60), codes, strict=True)
        ]
        moves.finish(queue, "w", ends)

    with redis_server.connect() as connection:
        batch_id = Client(connection).submit(prompts, model="failing").batch_id
        fail(connection, "timeout", "timeout", LONG_CODE)
        connection.delete(f"rq:job:{batch_id}-4")
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelector('.beyond')")
    shown = page.text()
    assert "2 rows cannot be retried: their lines are wrong" in shown
    assert "1 row has no job in Redis any more" in shown
    assert "1 of them would fail again: its line is too long" in shown
    assert LONG_CODE in shown
    for width in (1280, 1000, 760):
        page.look(width=width)
        assert max(lines_of_codes(page)) == 1, width
    page.look()
    button = "[...document.querySelectorAll('button')].find((b) => /^Retry/.test(b.textContent))"
    assert page.run(f"{button}.textContent") == "Retry 2 failed rows"
    page.run(f"{button}.click()")
    page.wait(
        "/2 rows were queued again\\. 2 rows cannot be retried/.test(document.body.innerText)"
    )
    with redis_server.connect() as connection:
        fail(connection, LONG_CODE, LONG_CODE)
    page.wait("/2 of the rows that were queued again have failed/.test(document.body.innerText)")
    page.wait("/2 failed rows would fail again: their lines are/.test(document.body.innerText)")
    assert "were queued again." not in page.text() and page.run(f"!{button}")


def two_rows(connection: Redis, folder: Path, model: str) -> str:
    """Queue a batch of two rows; its id."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return Client(connection).submit(prompts, model=model).batch_id


def test_rows_that_a_worker_has_taken_are_held(
    tab: tuple[Tab, str], redis_server: RedisServer, tmp_path: Path
) -> None:
    """Whether it has begun them is not known. The page says what the word means."""
    page, _ = tab
    with redis_server.connect() as connection:
        batch_id = two_rows(connection, tmp_path, "taken")
        Transitions(connection).pull(redis_keys.queue_name("taken"), "w", 1, 60)
        page.run(f"location.hash = '#/batches/{batch_id}'")
        page.wait("/1 queued \\+ 1 held/.test(document.querySelector('.sum')?.innerText)")
        page.wait("document.querySelector('.rows .busy')?.textContent === 'held'")
        assert "now or next" in page.run("document.querySelector('.sum').title")
        Client(connection).forget(batch_id)


def test_the_speed_of_a_batch_has_no_pauses(
    tab: tuple[Tab, str], redis_server: RedisServer, tmp_path: Path
) -> None:
    """A row that was retried an hour after the others does not make the batch an hour slow."""
    page, _ = tab
    with redis_server.connect() as connection:
        batch_id = two_rows(connection, tmp_path, "paused")
        queue, moves = redis_keys.queue_name("paused"), Transitions(connection)
        ends = []
        for row, ago in zip(moves.pull(queue, "w", 2, 60), (3600, 0), strict=True):
            result = RowResult("1", "completion", "ok", usage=Usage(1, 600), worker="w",
                               created=int(time.time()) - ago, busy_ms=9000)  # fmt: skip
            ends.append(JobResult(row.lease, "ok", encode_result(result), 1, 600, 0, 9000))
        moves.finish(queue, "w", ends)
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelector('.charts')")
    speed = "[...document.querySelectorAll('.tile')].find((one) => /^Speed/.test(one.innerText))"
    assert int(page.run(f"/(\\d+) tok/.exec({speed}.innerText)[1]")) > 1200 / 60
    url = f"{page.run('location.origin')}/batchkv/v1/batches/{batch_id}"
    found = page.run(f"fetch('{url}').then((answer) => answer.json())")
    assert found["tokens_per_second"] > 1200 / 60


def lines_of_codes(page: Tab) -> list[int]:
    """On how many lines each part of a code between two underscores is."""
    found: list[int] = page.run(
        "[...document.querySelectorAll('th code, .rows .badge + .note')]"
        ".flatMap((one) => [...one.childNodes]).map((part) => {"
        "  const range = document.createRange(); range.selectNodeContents(part);"
        "  return range.getClientRects().length; })"
    )
    return found


def test_a_batch_of_openais_api_is_shown_after_its_end(
    tab: tuple[Tab, str], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows, prompts and charts are there, and a retry leads to the batch that it made."""
    page, _ = tab
    monkeypatch.setenv("FAKE_FAIL", "b")
    with redis_server.connect() as connection:
        key = KeyStore(connection).add("scripts")
    url = f"{page.run('location.origin')}/v1"
    with OpenAI(base_url=url, api_key=key) as client, working(redis_server.url):
        file = client.files.create(file=chat_file("a", "b"), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        page.run(f"location.hash = '#/batches/{batch.id}'")
        page.wait("document.querySelector('#workers, .charts') && /text of a/.test("
                  "document.querySelector('.rows')?.innerText)")  # fmt: skip
        page.wait("document.querySelectorAll('.rows .good').length === 1")  # and none that runs
        page.wait("document.querySelectorAll('.rows .bad').length === 1")
        page.wait("/Download errors/.test(document.body.innerText)")
        button = (
            "[...document.querySelectorAll('button')].find((b) => /^Retry/.test(b.textContent))"
        )
        page.wait(f"{button}.textContent === 'Retry 1 failed row'")  # once they are counted
        page.run(f"{button}.click()")
        page.wait("document.querySelector('.note-box a')")
        assert "1 row was queued again as a new batch." in page.text()
        page.run("document.querySelector('.note-box a').click()")
        page.wait("/retry of/.test(document.querySelector('h1')?.textContent)")
        assert len(client.batches.list().data) == 2
    assert page.problems == []


def choose_questions(page: Tab, row: str = '{"prompt": "Hello"}') -> None:
    """Choose a file of one row for a new batch, and wait for the dry run."""
    page.run("location.hash = '#/'")
    page.wait("document.querySelector('h1').textContent === 'Batches'")
    page.run("location.hash = '#/new'")
    page.wait("document.querySelector('#file')")
    page.run(
        "(() => { const files = new DataTransfer(), field = document.querySelector('#file');"
        f"  files.items.add(new File([{json.dumps(row)} + '\\n'], 'questions.jsonl'));"
        "  field.files = files.files; field.dispatchEvent(new Event('change')); })()"
    )
    page.wait("document.querySelector('#plan-title')")


def test_a_file_without_a_model_gets_the_only_one_that_is_served(
    tab: tuple[Tab, str], redis_server: RedisServer
) -> None:
    """Without one, the field itself asks for it, until it changes. The lines' own model wins."""
    page, _ = tab
    field = "document.querySelector('#model')"
    queue = "[...document.querySelectorAll('button')].find((b) => /^Queue/.test(b.textContent))"
    with redis_server.connect() as connection:
        connection.delete(redis_keys.workers(""))
        choose_questions(page)
        page.wait("/No worker runs now/.test(document.body.innerText)")
        page.run(f"{queue}.click()")
        page.wait("document.querySelector('#model-fault')")
        assert "Choose a model: the lines name none." in page.text()
        assert page.run("document.querySelectorAll('.alert').length") == 1
        page.run(f"({field}.value = 'x', {field}.dispatchEvent(new Event('input')), 0)")
        page.wait("!document.querySelector('#model-fault')")
        choose_questions(page)
        add_worker(connection, "only", "served")  # it comes after the form is there
        page.wait(f"{field}.value === 'served'")
        choose_questions(page, '{"prompt": "Hello", "model": "own"}')
        assert page.run(f"{field}.value") == "own"
        choose_questions(page)
        page.wait(f"{field}.value === 'served'")
        page.run(f"{queue}.click()")
        page.wait("location.hash.startsWith('#/batches/')")
        batch_id = page.run("location.hash").rpartition("/")[2]
        assert Client(connection).status(batch_id).model == "served"
        connection.delete(redis_keys.workers(""))


def test_facts_of_a_file_can_be_read_on_a_phone(tab: tuple[Tab, str]) -> None:
    """Beside long names, the values of the dry run keep more than a third of the screen."""
    page, _ = tab
    page.look(width=360, height=780)
    choose_questions(page)
    widths = page.run("[...document.querySelectorAll('.facts dd')].map((one) => one.clientWidth)")
    page.look()
    assert min(widths) > 360 / 3


def test_tables_of_a_batch_fit_a_phone(
    tab: tuple[Tab, str], redis_server: RedisServer, tmp_path: Path
) -> None:
    """Reasons of one code are below each other, and each column of the workers is on the screen.

    The prompts of ended rows are asked for by the name of their file.
    """
    page, _ = tab
    prompts = tmp_path / "evening.jsonl"
    rows = [{"prompt": "a"}, {"prompt": 7}, {"prompt": "b", "temperature": "warm"}]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with redis_server.connect() as connection, working(redis_server.url):
        client = Client(connection)
        batch_id = client.submit(prompts, model="fake", name=prompts.name).batch_id
        client.wait(batch_id, timeout_seconds=30)
    page.look(width=390, height=780)
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelectorAll('[data-label=Why] bdi').length === 2")
    page.wait("document.querySelector('.shares')")
    lefts = page.run(
        "[...document.querySelectorAll('[data-label=Why] bdi')]"
        ".map((one) => one.getBoundingClientRect().left)"
    )
    boxes = page.run(
        "[...document.querySelectorAll('.scroll:has(.shares)')]"
        ".map((one) => [one.scrollWidth, one.clientWidth])"
    )
    page.wait("/Choose evening.jsonl again to see them; it is not uploaded/"
              ".test(document.querySelector('.chooser')?.innerText)")  # fmt: skip
    page.look()
    assert lefts[0] == lefts[1] > 390 / 4
    assert boxes and all(whole <= seen for whole, seen in boxes)


def test_no_view_is_wider_than_a_phone_or_complains(tab: tuple[Tab, str]) -> None:
    """At 360 pixels nothing has to be moved sideways, and the console is empty after all views."""
    page, batch_id = tab
    page.look(width=360, height=780, dark=True)
    for view in ("", f"batches/{batch_id}", "workers", "throughput", "new", "ask"):
        page.run(f"location.hash = '#/{view}'")
        page.wait("document.querySelector('h1') && !document.body.innerText.includes('Loading')")
        assert page.run("document.documentElement.scrollWidth") <= 360, view
    assert page.problems == []


def test_rows_are_short_on_a_phone(tab: tuple[Tab, str]) -> None:
    """A row is its line, its outcome and the beginning of its answer. Opened, it has the rest."""
    page, batch_id = tab
    page.look(width=360, height=780)
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelectorAll('.rows tbody tr').length === 4")
    heights = page.run(
        "[...document.querySelectorAll('.rows tbody tr')].map((r) => r.offsetHeight)"
    )
    assert max(heights) < 130, heights
    page.run("document.querySelector('.rows tbody button').click()")
    page.wait("document.querySelector('.detail .sides')")
    assert page.run("/ on fake-/.test(document.querySelector('.detail').innerText)")
    page.look()


def test_a_refused_request_asks_to_sign_in(tab: tuple[Tab, str], redis_server: RedisServer) -> None:
    """The session is gone: the next request of the page leads to the sign-in, and says why."""
    page, batch_id = tab
    page.run("location.hash = '#/'")
    page.wait("document.activeElement.textContent === 'Batches'")
    with redis_server.connect() as connection:
        connection.delete(*connection.scan_iter("batchkv:gateway:session:*"))
    page.run(f"location.hash = '#/batches/{batch_id}'")
    page.wait("document.querySelector('#key')")
    assert "Your session has ended. Sign in again." in page.text()
    page.problems.clear()  # the browser writes each refused request to its console
