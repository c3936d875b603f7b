"""All that is done for a row before it comes to the engine: its tokens, and what its answer needs.

It needs neither MLX nor the state of the engine, so other threads may do it meanwhile.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from batchkv_producer.wire.constraint import Constraint
from batchkv_worker.engine.answers.rows import Answers
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import refusals
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence

MANY = 1_000  # threads: there is no limit
ENCODING = ("__call__", "encode", "_encode_plus", "_encode", "_batch_encode_plus")


class Preparing:
    """Prepares rows.

    ``num_threads``: on how many other threads at once this may happen, while the engine's makes
    texts of tokens. Tokenizers of native code may be read by several threads, and let others run
    meanwhile. Their settings must stay: transformers makes them with the first text, which is done
    here. A class that does more with each text may change them, as Code Llama's does: then it is
    one thread. It is none for a tokenizer in Python.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._answers = Answers(loaded)
        self.num_threads = 0
        if getattr(loaded.tokenizer, "is_fast", False):
            self.num_threads = MANY if _only_reads(loaded.tokenizer) else 1
            loaded.tokenizer.encode("a")

    def prepare(
        self, work: Work, *, counts_shared: bool = False
    ) -> tuple[Sequence, Constraint | None]:
        """The row, and what its answer has to match; raises RowRefused."""
        with refusals("the prompt cannot be prepared"):
            row = prepare(work, self._loaded, counts_shared=counts_shared)
            return row, self._answers.attach(row, work.request).constraint


def _only_reads(tokenizer: Any) -> bool:
    """Whether making tokens is transformers' own work alone, which changes no settings."""
    kind = type(tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast):  # mlx-lm's wrapper
        kind = type(tokenizer._tokenizer)
    return issubclass(kind, PreTrainedTokenizerFast) and all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None)
        for name in ENCODING
    )
