"""Whether a machine runs on battery, from what the systems say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchkv_producer.local.power import drains_linux, drains_mac, is_on_battery
from support.fake_mac import ON_BATTERY, ON_MAINS, ON_UPS, WITHOUT_BATTERY, FakeMac

# Supplies as the kernel shows them (Documentation/ABI/testing/sysfs-class-power).
MAINS = {"AC": {"type": "Mains", "online": "1"}}
UNPLUGGED = {"AC": {"type": "Mains", "online": "0"}}
DRAINING = {"BAT0": {"type": "Battery", "status": "Discharging"}}
MOUSE = {"hid-1": {"type": "Battery", "status": "Discharging", "scope": "Device"}}
USB_C = {"ucsi-source-psy-1": {"type": "USB", "online": "1"}}


def supplies(folder: Path, *found: dict[str, dict[str, str]]) -> Path:
    """A folder like /sys/class/power_supply."""
    for name, files in ((name, files) for each in found for name, files in each.items()):
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("text", "drains"),
    [(ON_MAINS, False), (WITHOUT_BATTERY, False), (ON_BATTERY, True), (ON_UPS, True)],
)
def test_pmset_names_the_source(text: str, drains: bool) -> None:
    """Anything but AC power runs empty: the battery of a laptop, and a UPS."""
    assert drains_mac(text) is drains


@pytest.mark.parametrize("text", ["", "pmset: not found\n", "No batteries\n"])
def test_a_pmset_that_says_nothing_is_an_error(text: str) -> None:
    """Text without a source is no answer."""
    with pytest.raises(OSError, match="names no power source"):
        drains_mac(text)


@pytest.mark.parametrize(
    ("found", "drains"),
    [
        ((), False),
        ((MAINS, DRAINING), False),
        ((UNPLUGGED, USB_C, DRAINING), False),
        ((UNPLUGGED, DRAINING), True),
        ((DRAINING,), True),
        ((UNPLUGGED, MOUSE), False),
        ((UNPLUGGED,), False),
        (({"BAT0": {"type": "Battery", "status": "Full"}},), False),
        (({"ups": {"type": "UPS", "status": "Discharging"}},), True),
    ],
)
def test_linux_lists_its_supplies(
    tmp_path: Path, found: tuple[dict[str, dict[str, str]], ...], drains: bool
) -> None:
    """A supply from outside decides, then a battery that drains; that of a mouse does not count."""
    assert drains_linux(supplies(tmp_path, *found)) is drains


def test_a_machine_without_supplies_is_on_mains(tmp_path: Path) -> None:
    """A container has no such folder; a folder without files is no battery either."""
    assert not is_on_battery("linux", tmp_path / "none")
    (tmp_path / "BAT0").mkdir()
    assert not is_on_battery("linux", tmp_path)


def test_a_mac_is_asked_by_pmset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS the program decides; a machine without it gives OSError."""
    mac = FakeMac(tmp_path).install()
    monkeypatch.setenv("PATH", mac.path)
    assert not is_on_battery("darwin")
    mac.plant(ON_BATTERY)
    assert is_on_battery("darwin")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(OSError):
        is_on_battery("darwin")
