"""Chat templates: a row's contents are text for them, and the model's template runs in a sandbox.

The real demo model's tokenizer and template, through the worker's own preparation of rows.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.errors import ModelError
from batchkv_worker.events import Work
from batchkv_worker.model import trial
from batchkv_worker.model.loader import LoadedModel, load
from hostile.traps import Trap
from support import tiny_models  # noqa: F401  (first: it loads the BLAS)

INJECTIONS = [
    "{{ 7*7 }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch made-by-a-payload') }}",
    "{% include '/etc/passwd' %}",
    "{# comment #}",
    "${7*7} #{7*7} <%= 7*7 %>",
]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load("demo")


def work(**fields: Any) -> Work:
    return Work("0123456789abcdef-1", Request("c", "chat", **fields))


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def text_of(loaded: LoadedModel, made: Work) -> str:
    """The text of a row that the model would read."""
    return str(loaded.tokenizer.decode(prepare(made, loaded).prompt))


def refused(loaded: LoadedModel, made: Work) -> RowRefused:
    with pytest.raises(RowRefused) as caught:
        prepare(made, loaded)
    return caught.value


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_template_in_a_message_is_text(demo: LoadedModel, text: str) -> None:
    """The template gets messages as values and renders no template code in them."""
    as_text = demo.tokenizer.decode(demo.tokenizer.encode(text))
    assert as_text.strip() in text_of(demo, work(messages=user(text)))
    tools = [{"type": "function", "function": {"name": text, "description": text}}]
    made = prepare(work(messages=user("x"), tools=tools), demo)
    assert "49" not in demo.tokenizer.decode(made.prompt)


@pytest.mark.parametrize("role", [*INJECTIONS[:2], "wizard", "System", "", "<|system|>", "a\nb"])
def test_a_role_is_one_of_five_words(demo: LoadedModel, role: str) -> None:
    """An unknown role never reaches the template, whoever wrote the job."""
    fault = refused(demo, work(messages=[{"role": role, "content": "x"}]))
    assert fault.code == "invalid_request" and "role must be one of" in str(fault)


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "tools", "documents", "messages", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "conversation", "return_dict", "self", "__class__", "{{x}}"),
        *("bos_token", "raise_exception", "strftime_now", "padding", "max_length", "truncation"),
    ],
)
def test_a_template_variable_is_of_a_list(demo: LoadedModel, name: str) -> None:
    """A row cannot set the template or any other argument of the call."""
    made = work(messages=user("x"), chat_template_kwargs={name: "{{ 7*7 }}"})
    fault = refused(demo, made)
    assert fault.code == "unsupported_parameter" and name in str(fault)


@pytest.mark.parametrize("value", [{"a": 1}, [1], "x" * 2000])
def test_a_template_variable_is_a_plain_value(demo: LoadedModel, value: Any) -> None:
    """Template variables take no objects, no lists and no long texts."""
    made = work(messages=user("x"), chat_template_kwargs={"reasoning_effort": value})
    assert refused(demo, made).code == "invalid_request"


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ["x"]},
        {"messages": [1]},
        {"messages": [None]},
        {"messages": []},
        {"messages": [[]]},
        {"messages": [{"role": "user"}]},
        {"messages": user({"a": 1})},
        {"messages": user(deep(900))},
        {"messages": user("x", tool_calls="x")},
        {"messages": user("x", name=deep(900))},
        {"messages": user("x", surprise=1)},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": user("x"), "tools": ["x"]},
        {"messages": user("x"), "tools": [deep(900)]},
        {"messages": user("x"), "tools": [{"function": {"name": "f", "p": deep(100)}}]},
        {"messages": user("x"), "tools": [{"function": {"name": "f"}}] * 200},
        {"messages": user("x"), "chat_template_kwargs": {"thinking": deep(900)}},
        {"messages": user("x"), "params": SamplingParams(stop=("a",) * 100)},
        {"messages": user("x"), "params": SamplingParams(stop=("a" * 5000,))},
        {"messages": user("x"), "params": SamplingParams(stop=("",))},
    ],
)
def test_the_worker_checks_shapes_again(demo: LoadedModel, fields: dict[str, Any]) -> None:
    """The worker refuses all that a producer refuses, whoever wrote it to Redis."""
    assert refused(demo, work(**fields)).code in ("invalid_request", "unsupported_parameter")


def test_texts_that_cannot_fit_are_not_rendered(demo: LoadedModel) -> None:
    """Tools and names count like contents: hours of tokenizing are refused at once."""
    much = "x " * (demo.context * 128)
    tools = [{"type": "function", "function": {"name": "f", "description": much}}]
    for made in (work(messages=user("x"), tools=tools), work(messages=user("x", name=much))):
        assert refused(demo, made).code == "context_length_exceeded"


def test_special_tokens_in_a_text_are_tokens(demo: LoadedModel) -> None:
    """Documented in SECURITY.md: as in mlx-lm and transformers, a model's own marks count as such
    wherever they stand in a chat's text, so that a prompt's author can write whole turns.
    """
    marks = demo.tokenizer.encode("<|system|>")
    assert len(marks) == 1
    made = prepare(work(messages=user("a<|end|><|system|>b")), demo)
    assert made.prompt.count(marks[0]) == 1


def model_folder(folder: Path, **config: Any) -> Path:
    """A copy of the demo model with other entries in its config.json."""
    shutil.copytree(MODEL_PATH, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_a_models_own_code_is_not_run(tmp_path: Path, sentinel: Trap) -> None:
    """A repository with a Python file is refused, with the file's name, and not imported."""
    folder = model_folder(tmp_path / "m", model_file="evil.py")
    (folder / "evil.py").write_text(f"open({str(sentinel.mark)!r}, 'w')\n")
    with pytest.raises(ModelError, match=r"evil\.py|model_file|trust_remote_code"):
        load(str(folder))


def test_a_tokenizers_own_code_is_not_run(tmp_path: Path, sentinel: Trap) -> None:
    """Code that the tokenizer's configuration names is not imported either."""
    folder = model_folder(tmp_path / "m")
    (folder / "evil.py").write_text(f"open({str(sentinel.mark)!r}, 'w')\nclass T: pass\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"}
    path.write_text(json.dumps(config))
    # Refused, or loaded by the library's own class: neither is the folder's code.
    with suppress(ModelError):
        load(str(folder))


def test_a_pickled_checkpoint_is_not_read(tmp_path: Path, sentinel: Trap) -> None:
    """A folder with pickled weights has no weights: safetensors alone are read."""
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    evil = f"cposix\nmkdir\n(V{sentinel.mark}\ntR."
    for name in ("pytorch_model.bin", "model.npz", "model.pkl", "model.safetensors"):
        (folder / name).write_text(evil)
    with pytest.raises(ModelError):
        load(str(folder))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.mkdir('made-by-a-payload') }}",
        "{{ messages.append(1) }}",
        "{% include 'made-by-a-payload' %}",
        "{% import 'os' as os %}{{ os.system('true') }}",
        "{{ raise_exception('\x1b[31mred') }}",
        "{{ lipsum.__globals__['os'].mkdir('made-by-a-payload') }}",
    ],
)
def test_a_models_template_runs_in_a_sandbox(demo: LoadedModel, template: str) -> None:
    """A template that tries to reach Python's internals fails its rows, each for itself."""
    own = demo.tokenizer.chat_template
    demo.tokenizer.chat_template = template
    try:
        fault = refused(demo, work(messages=user("x")))
    finally:
        demo.tokenizer.chat_template = own
    assert fault.code == "invalid_request" and len(str(fault)) < 400


def with_template(folder: Path, template: str) -> Path:
    """A copy of the demo model with another chat template."""
    model_folder(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "limit", "value", "words"),
    [
        ("{{ 'a' * 10**9 }}", "MAX_BYTES", 2**29, "more than 0.5 GiB"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            *("MAX_SECONDS", 2.0, "longer than 2 s"),
        ),
    ],
)
def test_a_model_that_takes_too_much_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    limit: str,
    value: float,
    words: str,
) -> None:
    """A template that takes all memory, or never ends, runs in a process that is ended."""
    monkeypatch.setattr(trial, limit, value)
    folder = with_template(tmp_path / "m", template)
    with pytest.raises(ModelError, match=words):
        load(str(folder), is_careful=True)


def test_a_model_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that passed is not tried again, until its files change."""
    Path(os.environ["BATCHKV_HOME"]).mkdir()
    folder = str(model_folder(tmp_path / "m"))
    assert load(folder, is_careful=True).name == folder
    monkeypatch.setattr(trial.subprocess, "Popen", lambda *_, **__: pytest.fail("tried again"))
    load(folder, is_careful=True)
    load("demo", is_careful=True)
    with_template(tmp_path / "n", "{{ 1 }}")
    with pytest.raises(pytest.fail.Exception):
        load(str(tmp_path / "n"), is_careful=True)


def test_a_model_is_tried_without_the_folder_that_the_user_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the working directory with the name of a library is not run."""
    stranger = Path("transformers.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    stranger.write_text("open('was-run', 'w')")
    load(str(model_folder(tmp_path / "m")), is_careful=True)
    assert not Path("was-run").exists()


@pytest.mark.parametrize(
    "config", [{"num_hidden_layers": 10**9}, {"text_config": {"n_layers": 10**9}}]
)
def test_a_model_of_endless_layers_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """Counts of layers that no model has are refused before the model is built."""
    with pytest.raises(ModelError, match="layers = 1000000000"):
        load(str(model_folder(tmp_path / "m", **config)))


@pytest.mark.parametrize("seed", [10**400, -(10**400), 0, -0, 2**64])
def test_a_seed_of_any_size_is_a_seed(demo: LoadedModel, seed: int) -> None:
    """A seed of any size gives a stream of 64 bits."""
    from batchkv_worker.engine.tokens.sampling import uniform

    made = Work("b-1", Request("c", "completion", prompt="hello", params=SamplingParams(seed=seed)))
    assert 0 <= uniform(prepare(made, demo).generation.seed, 3) < 1
