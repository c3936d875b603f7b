"""Names of adapters, and of models with an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkv_producer.errors import UsageError
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import (
    Adapter,
    parse_adapter,
    parse_adapters,
    served_name,
    split_here,
    split_name,
    with_adapter,
)


def test_an_adapter_is_a_name_perhaps_with_a_folder() -> None:
    """A folder may have any printable characters, commas and signs too."""
    assert parse_adapter(" a.b-C_1 ") == Adapter("a.b-C_1")
    assert parse_adapter("a=~/my models/x=1") == Adapter("a", "~/my models/x=1")
    assert parse_adapters("a=/x,y,b=/z, c=/w") == (
        *(Adapter("a", "/x,y"), Adapter("b", "/z, c=/w")),
    )
    assert parse_adapters("") == ()
    assert parse_adapter("a=~").path == Path.home()


@pytest.mark.parametrize("text", ["", "=x", ".a", "-a", "a/b", "a@b", "a b", "ä", "x" * 65, "a="])
def test_other_names_are_refused(text: str) -> None:
    """A name has letters, digits, dots, dashes and underscores; never a part of a path."""
    with pytest.raises(UsageError, match="adapter"):
        parse_adapter(text)


def test_folders_that_cannot_be_are_refused() -> None:
    """A control character, a thousand characters and an unknown user are no folder."""
    for folder in ("a\nb", "x" * 1025):
        with pytest.raises(UsageError, match="folder of adapter a"):
            Adapter("a", folder)
    with pytest.raises(UsageError, match="folder of adapter a"):
        _ = Adapter("a", "~nobody-of-this-name/x").path


@pytest.mark.parametrize(
    ("served", "parts"),
    [
        ("demo@a", ("demo", "a")),
        ("org/Qwen3-4B@support.v2", ("org/Qwen3-4B", "support.v2")),
        ("/home/x@y/models/m", ("/home/x@y/models/m", "")),
        ("/home/x@y/m@a", ("/home/x@y/m", "a")),
        ("demo@", ("demo@", "")),
        ("@a", ("@a", "")),
        ("/@a", ("/@a", "")),
        ("demo", ("demo", "")),
    ],
)
def test_the_last_sign_divides_a_served_name(served: str, parts: tuple[str, str]) -> None:
    """Only the last part of a path can have an adapter, after its last sign."""
    assert split_name(served) == parts
    assert not parts[1] or served_name(*parts) == served


def test_a_folder_with_the_sign_is_a_model_without_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder called m@a keeps its name and its queue. No adapter may be called like that."""
    monkeypatch.chdir(tmp_path)
    Path("m@a").mkdir()
    assert split_here("m@a") == ("m@a", "") and split_here("n@a") == ("n", "a")
    assert with_adapter("m@a", "b") == "m@a@b"
    with pytest.raises(UsageError, match="would be called m@a, and a folder has that name"):
        with_adapter("m", "a")


def test_a_model_has_one_adapter() -> None:
    """The same adapter may be named in both ways, another one not."""
    assert with_adapter("demo", "") == "demo"
    assert with_adapter("demo", "a") == with_adapter("demo@a", "a") == "demo@a"
    with pytest.raises(UsageError, match="names adapter a already"):
        with_adapter("demo@a", "b")


def test_each_adapter_has_a_queue_of_its_own() -> None:
    """The queue's name is made from the whole name, and shows both parts."""
    names = {redis_keys.queue_name(name) for name in ("demo", "demo@a", "demo@b", "demo-a")}
    assert len(names) == 4
    assert redis_keys.queue_name("org/demo@a").startswith("batchkv:demo-a-")
