"""supervise.sh, which launchd starts: stops, pauses after a wrong configuration, a bounded log."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchkv_producer.service.launchd import SUPERVISOR
from support.fake_mac import FakeMac
from support.fake_services import write_program
from support.worker_harness import wait_until

MAX_BYTES = 10 * 1024 * 1024
LIVES_UNTIL_STOPPED = "trap 'echo stopped; exit 7' TERM; echo up; while :; do sleep 0.05; done"


class House:
    """A folder with a log and the programs of a Mac, and services started there."""

    def __init__(self, folder: Path, shell: Sequence[str]) -> None:
        self.shell = shell
        self.mac = FakeMac(folder / "mac").install()
        self.log = folder / "service.log"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, *command: str, codes: str = "2", seconds: str = "0", awake: str = "no"
    ) -> subprocess.Popen[bytes]:
        words = (*self.shell, str(SUPERVISOR), str(self.log), codes, seconds, awake)
        process = subprocess.Popen([*words, *command], env={"PATH": self.mac.path})
        self.started.append(process)
        return process

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextmanager
def ended(house: House) -> Iterator[None]:
    try:
        yield
    finally:
        for process in house.started:
            process.kill()
            process.wait(10)


# The sh of Debian is dash, that of macOS bash. They differ in when they forget a child.
@pytest.fixture(params=[("/bin/sh",), ("bash", "--posix")], ids=["sh", "bash"])
def house(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    if shutil.which(request.param[0]) is None:
        pytest.skip("there is no bash")
    made = House(tmp_path, request.param)
    with ended(made):
        yield made


@pytest.mark.parametrize("code", [0, 3, 70])
def test_the_exit_code_is_the_programs(house: House, code: int) -> None:
    """A code that is none of a wrong configuration ends it at once, and the log has the output."""
    process = house.start("/bin/sh", "-c", f"echo out; echo err >&2; exit {code}", seconds="600")
    assert process.wait(10) == code
    assert house.said == "out\nerr\n"


def test_a_wrong_configuration_is_a_pause(house: House) -> None:
    """After code 2 it waits before it ends, and says so; a stop ends the wait."""
    process = house.start("/bin/sh", "-c", "exit 2", codes="1 2", seconds="600")
    wait_until(lambda: "Next try in 600 s" in house.said)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 2


def test_a_pause_ends(house: House) -> None:
    """When the time is over, it ends with the program's code, so that launchd starts it again."""
    assert house.start("/bin/sh", "-c", "exit 2", seconds="0").wait(10) == 2


def test_a_program_that_is_missing_is_a_wrong_configuration(house: House) -> None:
    """The shell's code 127 for it is among those that pause."""
    process = house.start("/nowhere/batchkv", codes="2 126 127", seconds="600")
    wait_until(lambda: "exit code 127" in house.said)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 127


def test_a_program_that_ends_at_a_stop_at_once_keeps_its_code(house: House) -> None:
    """The code is that of the program, and not that of the signal, however quick it is."""
    process = house.start("/bin/sh", "-c", "trap 'exit 9' TERM; echo up; while :; do :; done")
    wait_until(lambda: "up" in house.said)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 9


def test_a_stop_reaches_the_program(house: House) -> None:
    """The program gets TERM and the time that it needs; its code is the answer."""
    process = house.start("/bin/sh", "-c", LIVES_UNTIL_STOPPED)
    wait_until(lambda: "up" in house.said)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 7
    assert house.said == "up\nstopped\n"


def test_the_machine_is_kept_awake_for_a_server(house: House) -> None:
    """caffeinate watches the program, and does not outlive it."""
    process = house.start("/bin/sh", "-c", f"echo $$; {LIVES_UNTIL_STOPPED}", awake="yes")
    wait_until(lambda: "up" in house.said)
    wait_until(lambda: house.mac.awake)
    assert house.mac.awake[0][1] == f"-i -w {house.said.split()[0]}"
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    wait_until(lambda: not house.mac.awake)


def test_a_large_log_moves_aside_at_the_start(house: House) -> None:
    """At most twice 10 MB are kept, whatever was there before."""
    house.log.write_bytes(b"x" * (MAX_BYTES + 1))
    house.start("/bin/sh", "-c", "echo new").wait(10)
    assert house.said == "new\n"
    assert house.log.with_name("service.log.1").stat().st_size == MAX_BYTES + 1


def test_a_log_that_grows_moves_aside_while_it_runs(house: House) -> None:
    """The size is looked at now and then; the program goes on writing to the same log."""
    write_program(house.mac.folder / "bin" / "sleep", "#!/bin/sh\nexec /bin/sleep 0.05\n")
    grow = f"head -c {MAX_BYTES + 1} /dev/zero; {LIVES_UNTIL_STOPPED}"
    process = house.start("/bin/sh", "-c", grow)
    wait_until(lambda: house.log.with_name("service.log.1").exists())
    wait_until(lambda: house.log.stat().st_size < 100)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 7
    assert house.said.endswith("stopped\n")
