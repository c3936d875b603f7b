"""Builds the demo's tokenizer: byte-level BPE over made-up text, with a chat template.

Byte-level, because then every text has tokens and comes back unchanged, and because mlx-lm streams
such vocabularies in linear time. The word counts of the corpus are set by hand (`_word_counts`):
common words must be whole tokens, and so must every word of a ledger key.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.ledger import QUESTION_FORMS, draw_ledger, question
from demo_model.prose import passage
from demo_model.words import ADJECTIVES, COMMON, LESS_COMMON, NAMES, NOUNS, SUFFIXES

VOCAB_SIZE = 4096
MAX_LENGTH = 8192
PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END)
THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
MARKERS = (THINK, END_THINK, CALL, END_CALL)
"""Tokens of an answer: unlike special tokens, they stay in its text. They have the last ids."""

# A word takes the space before it along; a digit stands alone; line breaks stay in one piece.
_PIECES = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- set turns = messages %}
{%- set system = '' %}
{%- if messages and messages[0].role == 'system' %}
{%- set system = messages[0].content %}
{%- set turns = messages[1:] %}
{%- endif %}
{%- if system or tools %}
{{- '<|system|>' + system }}
{%- if tools %}
{{- ('\\n\\n' if system else '') + 'Tools:' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for turn in turns %}
{%- if turn.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role: ' + turn.role) }}
{%- endif %}
{{- '<|' + ('user' if turn.role == 'tool' else turn.role) + '|>' + (turn.content or '') }}
{%- for call in turn.tool_calls or [] %}
{%- set tool_call = call.function or call %}
{{- '' if loop.first and not turn.content else '\\n' }}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments if tool_call.arguments is string else (tool_call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- if (enable_thinking is defined and not enable_thinking) or thinking_budget == 0 %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif reasoning_effort or thinking_budget %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""


def _word_counts() -> dict[str, int]:
    """How often the corpus holds each piece of text, in powers that imitate English."""
    counts = {f" {suffix}": 40 for suffix in SUFFIXES}
    for rank, word in enumerate(LESS_COMMON):
        counts[f" {word}"] = 220 - rank // 10
    for rank, word in enumerate(COMMON):
        counts[f" {word}"] = 300 + 40_000 // (rank + 10)
        counts[word.capitalize()] = 10 + 4_000 // (rank + 10)
    for word in (*ADJECTIVES, *NOUNS):
        counts[f" {word}"] = counts.get(f" {word}", 0) + 600
    for name in NAMES:
        counts[f" {name}"] = counts[name] = 400
    return counts


def corpus(seed: int = 0) -> Iterator[str]:
    """Lines to learn merges from: counted words, then prose, ledgers, chats and JSON."""
    rng = random.Random(f"corpus {seed}")
    for word, count in _word_counts().items():
        yield from (word for _ in range(count))
    for _ in range(300):
        ledger = draw_ledger(rng, 8)
        yield f"{passage(rng, 12)}\n\n{ledger.text}\n\n"
        yield question(ledger.facts[0].key, rng.randrange(len(QUESTION_FORMS)))
        tool = {"type": "function", "function": {"name": "find_code", "parameters": {"key": {}}}}
        yield json.dumps(tool)


def build_tokenizer(seed: int = 0) -> Tokenizer:
    """The trained tokenizer: special tokens, then 256 bytes, then merges, then the markers."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """What `transformers` reads beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(), indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
