"""The model's tokenizer as llguidance reads it: the bytes of each token, and the end tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchkv_worker.engine.grammar.text import GrammarFault

if TYPE_CHECKING:  # it imports MLX, which the process that tries grammars does not need
    from batchkv_worker.model.loader import LoadedModel

_SLOW = (
    "this model has a slow tokenizer, which cannot follow a grammar: response_format, "
    "structured_outputs and guided_* need one with a tokenizer.json"
)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What llguidance needs: a ``tokenizer.json``, the number of ids, and those that end a text.

    ``num_tokens`` covers the ids of the model's logits, also those that the tokenizer lacks.
    """

    text: str
    num_tokens: int
    ends: tuple[int, ...]

    def build(self) -> Any:
        """llguidance's own form. It takes some tenths of a second for a large vocabulary."""
        from llguidance import LLTokenizer

        # What belongs to a batch of texts would change single ones.
        text = json.dumps({**json.loads(self.text), "padding": None, "truncation": None})
        return LLTokenizer(text, n_vocab=self.num_tokens, eos_token=list(self.ends))

    def markers(self) -> tuple[str, ...]:
        """The texts of the tokens that are no part of a text, such as the end token."""
        added = json.loads(self.text).get("added_tokens") or ()
        return tuple(token["content"] for token in added if token["content"].strip())


def token_table(loaded: LoadedModel) -> TokenTable:
    """The table of a model; raises GrammarFault if its tokenizer is a slow one.

    The tokenizer is only read here, so that another thread may use it meanwhile.
    """
    tokenizer = getattr(loaded.tokenizer, "_tokenizer", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise GrammarFault(_SLOW)
    num_tokens = max(loaded.vocabulary, int(backend.get_vocab_size(with_added_tokens=True)))
    ends = sorted(token for token in loaded.tokenizer.eos_token_ids if 0 <= token < num_tokens)
    if not ends:
        raise GrammarFault("this model has no end token, so that no grammar can end")
    return TokenTable(str(backend.to_str()), num_tokens, tuple(ends))
