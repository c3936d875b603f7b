"""Small models of mlx-lm's real classes with random float32 weights, and a tokenizer of numbers."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from batchkv_worker.kv.backends import blas

blas.load()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache  # noqa: E402

from batchkv_worker.engine.config import EngineConfig  # noqa: E402
from batchkv_worker.kv.backends.contract import Backend  # noqa: E402
from batchkv_worker.kv.backends.measurements import Measurements  # noqa: E402
from batchkv_worker.kv.layers.discover import CacheTree, discover  # noqa: E402
from batchkv_worker.kv.start.backend import choose_backend  # noqa: E402
from batchkv_worker.model.loader import LoadedModel  # noqa: E402
from parity.families import CONFIGS, VOCABULARY  # noqa: E402
from support import tiny_tokenizers  # noqa: E402
from support.homes import shared_folder  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # every layer is full attention
ALL_FAMILIES = tuple(CONFIGS)


@dataclass(frozen=True, slots=True)
class GreedyStep:
    """A greedy token, the next best, and the lead over it in standard deviations of the logits."""

    token: int
    second: int
    margin: float


class NumberTokenizer:
    """Token 7 is written "7 "; nothing is special. Stands where mlx-lm's tokenizer wrapper does."""

    eos_token_ids: frozenset[int] = frozenset()
    has_chat_template = False

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    @property
    def detokenizer(self) -> Any:
        text = SimpleNamespace(text="")

        def add_token(token: int) -> None:
            text.text += f"{token} "

        text.add_token, text.finalize = add_token, lambda: None
        return text


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of the family; the same seed gives the same weights."""
    name, config = CONFIGS[family]
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **config, **changes}))
    _enliven(model)
    mx.eval(model.parameters())
    return model


def _uniform(low: float, high: float, like: mx.array) -> mx.array:
    return mx.random.uniform(low, high, like.shape)


# Parameters by the end of their path, and how they are drawn: the first that fits. What a class
# leaves at zero or fading at once, training would have changed, and a fault would not show there.
_DRAWN: tuple[tuple[str, Any], ...] = (
    (r"A_log", lambda a: mx.log(_uniform(0.005, 0.1, a))),  # states that last tens of tokens
    (r"dt_bias", lambda a: _uniform(-2.0, 0.5, a)),
    (r"sinks|\.D", lambda a: mx.random.normal(a.shape)),
    (r"e_score_correction_bias", lambda a: _uniform(-0.1, 0.1, a)),
    (r"\.x_[rwkvag]", lambda a: _uniform(0.0, 1.0, a)),  # rwkv7: how much of the token before
    (r"w_lora\.lora\.2\.bias", lambda a: _uniform(-5.0, -2.0, a)),  # rwkv7: slow decay
    (r"g_norm\.weight|k_k", lambda a: _uniform(0.5, 1.5, a)),
    (r"k_a|r_k|correct_output_scale", lambda a: _uniform(0.0, 1.0, a)),
    (r"(gate|router)\.weight", lambda a: mx.random.normal(a.shape) * a.shape[-1] ** -0.5),
    # A small residual stream and sharp attention: else a tied model says its last token again.
    (r"(embed_tokens|embeddings)\.weight", lambda a: 0.1 * a),
    (r"(q|k|qkv|q_b)_proj\.weight", lambda a: 3.0 * a),
    (r"(q|k)_norm\.weight", lambda a: 2.0 * a),
)


def _enliven(model: Any) -> None:
    """Numbers for what a class leaves at zero, so that every part of a model tells."""
    drawn = []
    for path, array in tree_flatten(model.parameters()):
        draw = next((draw for end, draw in _DRAWN if re.search(f"(?:{end})$", path)), None)
        if draw is not None:
            drawn.append((path, draw(array).astype(array.dtype)))
    model.update(tree_unflatten(drawn))


def _caches(model: Any) -> CacheTree:
    """What the engine must know of the model's caches."""
    return discover("tiny", model)


def loaded(model: Any, **changes: Any) -> LoadedModel:
    """As ``model.load`` would give it."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": model,
        "tokenizer": NumberTokenizer(),
        "dtype": mx.float32,
        "caches": _caches(model),
        "context": 4096,
        "weight_bytes": 0,
        "defaults": {"temperature": 0.0},
        "config": dict(vars(model.args)),
    }
    return LoadedModel(**{**values, **changes})


def with_measured(model: Any, config: EngineConfig) -> EngineConfig:
    """The configuration with the backend ``measured``, unless it names one."""
    if config.backend is not None:
        return config
    fixed = (config.path, config.group_cost, config.prefix_cells)
    return replace(config, backend=measured(model, config.scheme, config.slots, fixed))


def measured(model: Any, scheme: str, slots: int, fixed: object = None) -> Backend:
    """The backend for an engine of this model; all tests of this run share its measurements.

    ``fixed``: what is not measured. Not for tests that break what is measured: they would not see
    it.
    """
    return choose_backend(measurements(model, scheme=scheme, slots=slots, fixed=fixed))


def measurements(model: Any, **others: object) -> Measurements:
    """Those that all engines of this run share whose model has these shapes; and ``others``."""
    shapes = [(path, a.shape, str(a.dtype)) for path, a in tree_flatten(model.parameters())]
    facts = {
        "test": type(model).__module__,
        "shapes": str(shapes),
        "config": str(getattr(model, "args", "")),
    }
    facts |= {name: str(value) for name, value in others.items()}
    return Measurements(shared_folder() / _file_name(facts), facts)


def _file_name(facts: dict[str, str]) -> str:
    return hashlib.sha256(str(facts).encode()).hexdigest()[:32] + ".json"


def loaded_chat(model: Any, kind: str) -> LoadedModel:
    """The model with a tokenizer of this kind (``tiny_tokenizers``)."""
    tokenizer = tiny_tokenizers.tokenizer(kind)
    special = frozenset(
        token for token, facts in tokenizer.added_tokens_decoder.items() if facts.special
    )
    return loaded(model, tokenizer=tokenizer, vocabulary=VOCABULARY, special_tokens=special)


def alone(
    model: Any,
    prompt: list[int],
    count: int,
    bits: int | None = None,
    chunk_tokens: int | None = None,
) -> list[int]:
    """Greedy tokens of one row on mlx-lm's own caches; as ``alone_with_margins``."""
    steps = alone_with_margins(model, prompt, count, bits, chunk_tokens)
    return [step.token for step in steps]


def alone_with_margins(
    model: Any,
    prompt: list[int],
    count: int,
    bits: int | None = None,
    chunk_tokens: int | None = None,
) -> list[GreedyStep]:
    """Greedy steps of one row on the caches that mlx-lm makes for the model.

    ``bits`` quantizes keys and values from token 0 (models of full attention only).
    ``chunk_tokens`` None computes the whole prompt at once; else, as ``mlx_lm.generate`` does, all
    but its last token in chunks of so many, then the last.
    """
    cache: list[Any] = make_prompt_cache(model)
    if bits:
        cache = [QuantizedKVCache(64, bits) for _ in cache]
    inputs = prompt
    if chunk_tokens is not None:
        for start in range(0, len(prompt) - 1, chunk_tokens):
            chunk = prompt[start : min(start + chunk_tokens, len(prompt) - 1)]
            mx.eval(model(mx.array([chunk]), cache=cache))
        inputs = prompt[-1:]
    steps: list[GreedyStep] = []
    for _ in range(count):
        steps.append(_greedy(model(mx.array([inputs]), cache=cache)[0, -1]))
        inputs = [steps[-1].token]
    return steps


def _greedy(logits: mx.array) -> GreedyStep:
    first, second = mx.argsort(-logits)[:2].tolist()
    lead = (logits[first] - logits[second]) / mx.maximum(logits.std(), 1e-9)
    return GreedyStep(first, second, float(lead.item()))


def spread(model: Any) -> float:
    """Standard deviation of the model's logits, after a few tokens."""
    return float(model(mx.array([[1, 2, 3, 4]]))[0, -1].std().item())
