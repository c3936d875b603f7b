"""Every field of a request's body, once: where it is valid, and whether it is used.

The table covers the fields of OpenAI's chat completions and completions, and those that vLLM adds.
It decides what ``body`` does with a field, and it makes the tables of docs/input-format.md
(``tools/fields_page.py``) and a test that tries each field.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from batchkv_producer.intake.answer_format import GUIDED
from batchkv_producer.intake.checks import MAX_STOP_BYTES, MAX_STOPS, NumberRule
from batchkv_producer.intake.messages import MAX_TOOLS
from batchkv_producer.intake.rules import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LISTED_TOKENS,
    BiasRule,
    Replacing,
    Rule,
    StopRule,
    SwitchRule,
    TokensRule,
    WordsRule,
)
from batchkv_producer.wire.constraint import MAX_CONSTRAINT_BYTES
from batchkv_producer.wire.job import MAX_PROMPT_TOKENS, MAX_TOKEN_ID, Endpoint

MAX_LOGPROBS = 20
MAX_CHOICES = 128
LARGEST_COUNT = 2**31 - 1

BOTH: tuple[Endpoint, ...] = ("chat", "completion")
CHAT: tuple[Endpoint, ...] = ("chat",)
PROMPT: tuple[Endpoint, ...] = ("completion",)


class Use(Enum):
    """What happens to a field."""

    TAKEN = "taken"
    IGNORED = "ignored"  # any value; it cannot change the answer
    REFUSED = "refused"  # unless the value is neutral


@dataclass(frozen=True, slots=True)
class Field:
    """One field. ``about`` is for the page, and the end of the error for a refused value.

    ``rule`` checks a value for the parameter ``param`` (``SamplingParams``). A taken field without
    a rule is read in ``body``. ``neutral`` values of a refused field change nothing, and are
    accepted.
    """

    name: str
    about: str
    use: Use = Use.TAKEN
    endpoints: tuple[Endpoint, ...] = BOTH
    rule: Rule | None = None
    param: str = ""
    neutral: tuple[Any, ...] = ()


def _param(name: str, rule: Rule, about: str, *neutral: Any, param: str = "") -> Field:
    return Field(name, about, rule=rule, param=param or name, neutral=neutral)


def _ignored(name: str, about: str, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(name, about, Use.IGNORED, endpoints)


def _refused(name: str, about: str, *neutral: Any, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(name, about, Use.REFUSED, endpoints, neutral=neutral)


_COUNT = NumberRule(1, LARGEST_COUNT, is_whole=True)
_PENALTY = Replacing(NumberRule(-2, 2), 0, is_real=True)
_BUDGET = Replacing(NumberRule(-1, LARGEST_COUNT, is_whole=True), -1)

_SAMPLING = (
    _param("max_tokens", _COUNT, "The most tokens of an answer. The default is 512, or less if the "
           "context leaves less room. A value that you give is never cut: a row with too little "
           "room is refused."),
    _param("max_completion_tokens", _COUNT, "The same as `max_tokens`.", param="max_tokens"),
    _param("temperature", NumberRule(0, 100), "The default is 1; 0 is greedy."),
    _param("top_p", NumberRule(0, 1), "The default is 1; 0 is the likeliest token alone."),
    _param("top_k", Replacing(NumberRule(-1, LARGEST_COUNT, is_whole=True), -1, 0),
           "0 and -1 are all tokens."),
    _param("min_p", NumberRule(0, 1), "The default is 0."),
    _param("seed", NumberRule(-(2**63), 2**64 - 1, is_whole=True),
           "A row without one has its own, made from its id."),
    _param("stop", StopRule(), f"A text, or a list of at most {MAX_STOPS} texts of at most "
           f"{MAX_STOP_BYTES:,} bytes. A special token may be one of them.", []),
    _param("stop_token_ids", TokensRule(), f"At most {MAX_LISTED_TOKENS:,} token ids that end the "
           "answer.", []),
    _param("include_stop_str_in_output", SwitchRule(stored=True),
           "`true` keeps the stop text, or the text of the stop token, at the end of the answer.",
           False, param="include_stop"),
    _param("min_tokens", Replacing(NumberRule(0, LARGEST_COUNT, is_whole=True), 0),
           "At least this many tokens come before the model's end token or one of "
           "`stop_token_ids`. A stop text counts if it ends after them.", 0),
    _param("ignore_eos", SwitchRule(stored=True),
           "`true`: the model's end token does not end the answer.", False),
    _param("repetition_penalty", NumberRule(0, 100, is_low_excluded=True),
           "Over the tokens of the prompt and of the answer. 1 is off."),
    _param("presence_penalty", _PENALTY, "-2 to 2, over the tokens of the answer.", 0),
    _param("frequency_penalty", _PENALTY, "-2 to 2, over the tokens of the answer.", 0),
    _param("logit_bias", BiasRule(), f"Token id to -{MAX_BIAS} to {MAX_BIAS}, for at most "
           f"{MAX_LISTED_TOKENS:,} tokens.", {}),
    _param("bad_words", WordsRule(), f"At most {MAX_BAD_WORDS} texts. Once all tokens of a text "
           "but the last have come, its last token is not chosen. The same text in other tokens is "
           "not found.", []),
    _param("n", Replacing(NumberRule(1, MAX_CHOICES, is_whole=True), 1),
           f"At most {MAX_CHOICES} answers. Answer k has the row's seed plus k, from k = 0. At "
           "temperature 0 all are equal: one is computed, and repeated.", 1),
    _param("skip_special_tokens", SwitchRule(stored=False),
           "`false` keeps special tokens in the text, except the end token.", True),
    _param("return_token_ids", SwitchRule(stored=True),
           "`true` adds `token_ids` and `prompt_token_ids`, where vLLM has them.", False),
    _param("thinking_budget", _BUDGET, "The most tokens of reasoning. Then the reasoning is ended, "
           "and the answer begins. 0 is none at all, -1 is no limit. It changes nothing on a model "
           "that does not reason."),
    _param("thinking_token_budget", _BUDGET, "The same as `thinking_budget`.",
           param="thinking_budget"),
)  # fmt: skip

_SCHEMA = f"The schema has at most {MAX_CONSTRAINT_BYTES // 1024} KiB."
_OTHERS = (
    Field("model", "`-m` overrides it; see above."),
    Field("messages", "Contents are text. Roles are `system`, `developer`, `user`, `assistant` and "
          "`tool`.", endpoints=CHAT),
    Field("prompt", "A text, or a list of token ids: at most "
          f"{MAX_PROMPT_TOKENS:,} ids of 0 to {MAX_TOKEN_ID:,}.", endpoints=PROMPT),
    Field("logprobs", "`true`: the model's log-probabilities, before penalties, biases and "
          "temperature. See `top_logprobs`.", endpoints=CHAT),
    Field("logprobs", f"The number of alternatives of each token, 0 to {MAX_LOGPROBS}. The "
          "log-probabilities are the model's, before penalties, biases and temperature.",
          endpoints=PROMPT),
    Field("top_logprobs", f"The number of alternatives of each token, 0 to {MAX_LOGPROBS}.",
          endpoints=CHAT),
    Field("response_format", "`text`, `json_object`, or `json_schema`. A schema is always "
          f"enforced, with `strict` or without. {_SCHEMA} See [Answers that match]"
          "(#answers-that-match).", neutral=({"type": "text"},)),
    Field("structured_outputs", "One of `json`, `regex`, `choice`, `grammar` and `json_object`, as "
          "vLLM has them. " + _SCHEMA),
    *(
        Field(name, f"The older form of `{name.removeprefix('guided_')}` in `structured_outputs`.")
        for name in GUIDED
    ),
    Field("tools", f"At most {MAX_TOOLS} functions, shown to the model by its chat template. A "
          "template that does not show them refuses the row.", endpoints=CHAT),
    Field("tool_choice", "`auto`, `none`, `required`, or the name of a function. `none` does not "
          "show the tools to the model. `required` and a name force a call in the model's own way "
          "to write it; a row whose call cannot be forced is refused.", endpoints=CHAT,
          neutral=("auto", "none")),
    Field("parallel_tool_calls", "`false`: the answer has one call at most, and ends after it.",
          endpoints=CHAT,
          neutral=(True,)),
    Field("reasoning_effort", "`none` is no reasoning, for every model. The other words are for "
          "chat templates that read them. Other models refuse the row.", endpoints=CHAT),
    Field("enable_thinking", "The template's variable of this name. Where the template does not "
          "read it, `false` is a `thinking_budget` of 0.", endpoints=CHAT),
    Field("chat_template_kwargs", "Named variables of the template, never a template.",
          endpoints=CHAT),
)  # fmt: skip

_IGNORED = (
    _ignored("metadata", "But `run` compares `metadata.expected` with the answer, and counts the "
             "right ones."),
    _ignored("user", "A name for your own use."),
    _ignored("safety_identifier", "A name for your own use.", CHAT),
    _ignored("store", "Nothing is stored outside your server.", CHAT),
    _ignored("service_tier", "All rows of a batch have one service.", CHAT),
    _ignored("prediction", "It changes the speed alone.", CHAT),
    _ignored("prompt_cache_key", "Common prefixes are found without it.", CHAT),
    _ignored("prompt_cache_options", "Common prefixes are found without it.", CHAT),
    _ignored("prompt_cache_retention", "The cache has settings of its own.", CHAT),
    _ignored("stream_options", "A batch has no streams."),
    _ignored("stream_interval", "A batch has no streams."),
    _ignored("priority", "`--priority` is for the whole batch."),
    _ignored("request_id", "`custom_id` names the row."),
    _ignored("session_id", "Rows are independent of each other."),
    _ignored("guided_decoding_backend", "There is one."),
    _ignored("truncation_side", "Prompts are never cut."),
    _ignored("return_mm_kwargs", "It is for other endpoints."),
    _ignored("return_token_offsets", "It is for other endpoints."),
)  # fmt: skip

_STREAM = "Results are written when they are complete."
_MEDIA = "Only text is supported."
_OTHER_TASK = "Use `logprobs` for the tokens of the answer."
_REFUSED = (
    _refused("stream", _STREAM, False),
    _refused("best_of", "Use `n`, and choose among the answers. The value of `n` is accepted.", 1),
    _refused("echo", "Join the prompt and the answer yourself.", False),
    _refused("suffix", "Write the suffix into the prompt.", "", endpoints=PROMPT),
    _refused("modalities", _MEDIA, ["text"], endpoints=CHAT),
    _refused("audio", _MEDIA, endpoints=CHAT),
    _refused("media_io_kwargs", _MEDIA, {}, endpoints=CHAT),
    _refused("mm_processor_kwargs", _MEDIA, {}, endpoints=CHAT),
    _refused("moderation", "There is no moderation: leave it out.", endpoints=CHAT),
    _refused("verbosity", "Ask for short or long answers in a message.", "medium", endpoints=CHAT),
    _refused("web_search_options", "There is no search: put what it finds into a message.",
             endpoints=CHAT),
    _refused("functions", "Use `tools`.", [], endpoints=CHAT),
    _refused("function_call", "Use `tool_choice`.", "auto", "none", endpoints=CHAT),
    _refused("include_reasoning", "Ignore `reasoning_content` in the output.", True,
             endpoints=CHAT),
    _refused("use_beam_search", "Use `n`.", False),
    _refused("length_penalty", "It is for beam search.", 1),
    _refused("watermarking", "Leave it out.", False),
    _refused("spaces_between_special_tokens", "Leave it out.", True),
    _refused("truncate_prompt_tokens", "Cut the prompt yourself."),
    _refused("prompt_logprobs", _OTHER_TASK),
    _refused("logprob_token_ids", _OTHER_TASK),
    _refused("allowed_token_ids", "Use `structured_outputs`."),
    _refused("logits_processors", "Rows never bring code."),
    _refused("guided_whitespace_pattern", "Answers in JSON have no optional whitespace."),
    _refused("repetition_detection", "Use `max_tokens` or a penalty."),
    _refused("return_tokens_as_token_ids", "Use `return_token_ids`.", False),
    _refused("routed_experts_prompt_start", "Leave it out.", 0),
    _refused("return_prompt_text", "Leave it out.", False, endpoints=CHAT),
    _refused("add_generation_prompt", "The answer is always a new message.", True, endpoints=CHAT),
    _refused("continue_final_message", "The answer is always a new message.", False,
             endpoints=CHAT),
    _refused("add_special_tokens", "The chat template adds them.", False, endpoints=CHAT),
    _refused("add_special_tokens", "Send the prompt as token ids.", True, endpoints=PROMPT),
    _refused("documents", "Put them into a message.", [], endpoints=CHAT),
    _refused("chat_template", "The model's own template is used. Send a prompt that you have "
             "rendered.", endpoints=CHAT),
    _refused("prompt_embeds", "Send a text or token ids.", endpoints=PROMPT),
    _refused("cache_salt", "Use a cache of its own for this batch."),
    _refused("kv_transfer_params", "Workers exchange blocks through the cache."),
    _refused("ec_transfer_params", "Workers exchange blocks through the cache."),
    _refused("vllm_xargs", "Leave it out.", {}),
)  # fmt: skip

FIELDS: tuple[Field, ...] = (*_OTHERS[:3], *_SAMPLING, *_OTHERS[3:], *_IGNORED, *_REFUSED)
BY_NAME: dict[tuple[Endpoint, str], Field] = {
    (endpoint, field.name): field for field in FIELDS for endpoint in field.endpoints
}
# The names in a line of parameters that a job stores under another one.
LINE_NAMES = {
    field.param: field.name
    for field in FIELDS
    if field.param and field.param not in {other.name for other in FIELDS}
}
NAMES = frozenset(field.name for field in FIELDS)


def number_rule(name: str) -> NumberRule:
    """The rule of a parameter that is a number."""
    rule = BY_NAME["completion", name].rule
    if isinstance(rule, Replacing):
        return rule.rule
    assert isinstance(rule, NumberRule)
    return rule
