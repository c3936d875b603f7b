"""All that is done for a row before it comes to the engine: its tokens, and what its answer needs.

It needs neither MLX nor the state of the engine, so other threads may do it meanwhile.
"""

from __future__ import annotations

from batchkv_producer.wire.constraint import Constraint
from batchkv_worker.engine.answers.rows import Answers
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import refusals
from batchkv_worker.events import Work
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence


class Preparing:
    """Prepares rows.

    ``is_free``: whether this may happen on other threads, on several at once, while the engine's
    makes texts of tokens. Tokenizers of native code may be read by several threads, and let others
    run meanwhile.
    Their settings must stay: transformers makes them with the first text, which is done here.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._answers = Answers(loaded)
        self.is_free = bool(getattr(loaded.tokenizer, "is_fast", False))
        if self.is_free:
            loaded.tokenizer.encode("a")

    def prepare(
        self, work: Work, *, counts_shared: bool = False
    ) -> tuple[Sequence, Constraint | None]:
        """The row, and what its answer has to match; raises RowRefused."""
        with refusals("the prompt cannot be prepared"):
            row = prepare(work, self._loaded, counts_shared=counts_shared)
            return row, self._answers.attach(row, work.request).constraint
