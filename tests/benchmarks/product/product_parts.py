"""What the product's benchmark runs: model folders of a named shape, and files of rows.

Weights are random and the same on every machine; the tokenizer is that of the demo model, its
vocabulary filled up to the shape's. The token that ends a row weighs nothing, so that it is never
the likeliest, and ``max_tokens`` is what each row gets.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from batchkv_worker.demo import MODEL_PATH as DEMO

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "600m": {  # Qwen3-0.6B
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "4b": {  # Qwen3-4B
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
}
CONTEXT = 16_384
END = 4  # the demo's token
GROUPS, PROMPT_TOKENS, ANSWER_TOKENS = 27, 634, 16
EXAMPLES, EXAMPLE_TOKENS = 3, 200  # that the rows of a group have in common

Line = dict[str, Any]


def make_model(folder: Path, shape: str) -> None:
    """A model folder of the shape, unless it is there already. Takes MLX."""
    if (folder / "config.json").exists():
        return
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = SHAPES[shape]["vocab_size"]
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SHAPES[shape],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": END,
    }
    _write_tokenizer(folder, vocabulary)
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    weights["model.embed_tokens.weight"][END] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    # Last, since it says that all the rest is there.
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """The demo's, with words that no text is cut into for the ids that it lacks."""
    found = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    known = found["model"]["vocab"]
    known |= {f"\u0120w{number}": number for number in range(len(known), vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(found), "utf-8")
    config = (DEMO / "tokenizer_config.json").read_text("utf-8")
    (folder / "tokenizer_config.json").write_text(config, "utf-8")


class Words:
    """Texts of a given number of tokens: each word is one."""

    def __init__(self, seed: int) -> None:
        known = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
        self._words = sorted(
            text[1:]
            for text in known
            if len(text) > 3 and text[0] == "\u0120" and text[1:].isascii() and text[1:].isalpha()
        )
        self.rng = random.Random(f"words {seed}")

    def draw(self, count: int) -> str:
        """A blank before each word, so that texts can be put behind each other."""
        return "".join(f" {word}" for word in self.rng.choices(self._words, k=count))


def line(custom_id: str, prompt: str, max_tokens: int) -> Line:
    """A row whose prompt is taken as it is, whatever template the model has."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def shared(seed: int, per_group: int, groups: int = GROUPS) -> list[Line]:
    """Groups of rows behind three examples of their own; 634 tokens each, 16 to generate."""
    words, lines = Words(seed), []
    own = PROMPT_TOKENS - EXAMPLES * EXAMPLE_TOKENS
    for group in range(groups):
        examples = words.draw(EXAMPLES * EXAMPLE_TOKENS)
        lines += [
            line(f"g{group}-{row}", examples + words.draw(own), ANSWER_TOKENS)
            for row in range(per_group)
        ]
    return lines


def lognormal(seed: int, rows: int) -> list[Line]:
    """Prompts around 128 tokens (8 to 1,024), answers around 48 (4 to 256), nothing in common."""
    words = Words(seed)

    def length(median: int, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(median * words.rng.lognormvariate(0, sigma))))

    return [
        line(f"l{row}", words.draw(length(128, 1.0, 8, 1024)), length(48, 0.8, 4, 256))
        for row in range(rows)
    ]


def gsm8k(
    data: Path, rows: int | None, *, others: bool = False, answer_tokens: int | None = None
) -> list[Line]:
    """The first rows of the file of 8-shot prompts; or ``others``, those behind them.

    ``answer_tokens`` None: as many as the file says.
    """
    texts = (data / "gsm8k_8shot.jsonl").read_text("utf-8").splitlines()
    texts = texts[rows:][:rows] if others else texts[:rows]
    lines: list[Line] = [json.loads(text) for text in texts]
    for line in lines:
        line["body"].pop("model", None)
        line["body"]["temperature"] = 0
        line["body"]["max_tokens"] = answer_tokens or line["body"]["max_tokens"]
    return lines


def write(file: Path, lines: list[Line]) -> None:
    """Rows as a file for ``batchkv run``."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
