"""Gives each row what its answer needs: who reads it, a guide of its thought, a forced call."""

from __future__ import annotations

from dataclasses import replace

from batchkv_producer.wire.job import Request
from batchkv_worker.engine.answers.answer_format import answer_format, with_tokens
from batchkv_worker.engine.answers.forced_calls import ForcedCalls
from batchkv_worker.engine.answers.reader import AnswerReader
from batchkv_worker.engine.answers.thinking import ThinkingGuide
from batchkv_worker.engine.answers.thoughts import first_part, first_state, thoughts_of
from batchkv_worker.engine.answers.tool_calls import TimeLimit
from batchkv_worker.engine.tokens.guide import AllOf
from batchkv_worker.engine.tokens.template_options import shows_tools, wants_no_thought
from batchkv_worker.model.chat_template import chat_template_of
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.sequence import Sequence


class Answers:
    """The answers of one model's rows."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = loaded.tokenizer
        self._form = answer_format(loaded.tokenizer)
        self._form_without_calls = with_tokens(self._form.without_calls(), loaded.tokenizer)
        self._limit = TimeLimit()
        self._forced_calls = ForcedCalls(self._form)
        self._thoughts = thoughts_of(self._form, loaded) if self._form.can_think else None

    def attach(self, row: Sequence, request: Request) -> Request:
        """Give the row its reader, and a guide if its thought has limits.

        Returns the request with the constraint that the row's tool choice means. Raises RowRefused.
        """
        if not self._is_chat(request):
            return request
        may_call, has_form = shows_tools(request), request.constraint is not None
        if may_call and request.tool_choice is not None:
            request = replace(request, constraint=self._forced_calls.constraint(request))
        form = self._form if may_call else self._form_without_calls
        if not form.is_plain:
            row.reader = AnswerReader(
                *(form, first_part(form, row.prompt, self._tokenizer)),
                tokenizer=self._tokenizer,
                limit=self._limit,
                tools=request.tools or (),
                is_single=request.parallel_tool_calls is False,
                is_exact=has_form,
            )
            hidden = row.generation.hidden_tokens - form.tokens
            row.generation = replace(row.generation, hidden_tokens=hidden)
            if request.parallel_tool_calls is False and form.tool_call_end:
                self._end_after_call(row)
        guides = [guide for guide in (self._guide(row, request), row.guide) if guide is not None]
        row.guide = AllOf(guides) if len(guides) > 1 else next(iter(guides), None)
        return request

    def _is_chat(self, request: Request) -> bool:
        """Whether its prompt went through the chat template."""
        is_styled = request.style == "auto" and bool(self._tokenizer.has_chat_template)
        return request.messages is not None or is_styled

    def _end_after_call(self, row: Sequence) -> None:
        """A second call would be left out, so the row ends after the first."""
        stop = (*row.generation.stop, self._form.tool_call_end)
        row.generation = replace(row.generation, stop=stop)
        row.detokenizer = row.detokenizer or self._tokenizer.detokenizer

    def _guide(self, row: Sequence, request: Request) -> ThinkingGuide | None:
        budget = self._budget(request)
        if self._thoughts is None or (budget is None and request.constraint is None):
            return None
        thoughts, may_call = self._thoughts, shows_tools(request)
        if may_call and request.tool_choice is not None:  # the call's own grammar begins it
            thoughts = replace(thoughts, answer=())
        if not may_call:
            thoughts = replace(thoughts, call=())
        state = first_state(self._form, row.prompt, self._tokenizer)
        return ThinkingGuide(thoughts, state, budget)

    def _budget(self, request: Request) -> int | None:
        """The row's own; 0 if it wants no thought and its template cannot see to that."""
        if wants_no_thought(request):
            return 0
        wants = request.chat_template_kwargs.get("enable_thinking", True)
        if wants is False and "enable_thinking" not in chat_template_of(self._tokenizer).variables:
            return 0
        return request.params.thinking_budget
