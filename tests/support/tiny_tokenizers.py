"""Small tokenizers of real kinds: a token for each byte, and the markers of a model's answers.

They are loaded by mlx-lm as those of real models are, so its own code finds markers and parsers.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"

_TURNS = """{%- if tools %}{{ '<|im_start|>system\\n' }}TOOLS
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content }}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}OPENED{% endif %}"""
_WITHOUT_TOOLS = """{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' }}
{{- turn.content + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"""
_NO_THOUGHT = """{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
_GPT_OSS = """{%- macro system() %}{%- if reasoning_effort is not defined %}
{%- set reasoning_effort = 'medium' %}{%- endif %}{{ 'Reasoning: ' + reasoning_effort }}
{%- endmacro %}{{ '<|start|>system<|message|>' + system() }}
{%- for tool in tools or [] %}{{ '\\ntype ' + tool.function.name }}{% endfor %}{{ '<|end|>' }}
{%- for turn in messages %}{{ '<|start|>' + turn.role + '<|message|>' + turn.content + '<|end|>' }}
{%- endfor %}{{ '<|start|>assistant' }}"""


def _turns(tools: str, opened: str = "") -> str:
    return _TURNS.replace("TOOLS", tools).replace("OPENED", opened)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model's markers: ``special`` tokens, which texts leave out, and ``plain`` ones."""

    template: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    ends: tuple[str, ...] = (END,)
    config: dict[str, Any] = field(default_factory=dict)


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
KINDS: dict[str, Kind] = {
    "qwen3": Kind(
        _turns("<tool_call> {{ '' if tool_call is not defined else tool_call.name }}", _NO_THOUGHT),
        plain=(*_THINK, *_CALL),
    ),
    "deepseek_r1": Kind(_turns("", "{{ '<think>\\n' }}"), plain=_THINK),
    "no_tools": Kind(_WITHOUT_TOOLS),
    "no_parser": Kind(_turns("tools:")),
    "qwen3_coder": Kind(_turns("{{ '<tool_call>\\n<function=' }}"), plain=_CALL),
    "glm47": Kind(
        _turns("<arg_key>"),
        plain=(*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "longcat": Kind(
        _turns("<longcat_tool_call>"),
        plain=(
            *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"),
            *("</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
        ),
    ),
    "minimax_m2": Kind(
        _turns("<minimax:tool_call>"), plain=("<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "minicpm5": Kind(
        _turns(
            """{{ '<function name="' + '<param name="' }}"""
            """{{- '' }}<function name="f"><param name="p">"""
        )
    ),
    "mistral": Kind(_turns("[TOOL_CALLS]"), special=("[TOOL_CALLS]", "[ARGS]")),
    "mistral_list": Kind(_turns("[TOOL_CALLS]"), special=("[TOOL_CALLS]",)),
    "magistral": Kind(_turns("[TOOL_CALLS]"), special=("[TOOL_CALLS]", "[THINK]", "[/THINK]")),
    "kimi_k2": Kind(
        _turns("<|tool_calls_section_begin|>"),
        special=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "kimi_k3": Kind(
        _turns("tools:"), special=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    ),
    "pythonic": Kind(
        _turns("<|tool_list_start|>"), special=("<|tool_call_start|>", "<|tool_call_end|>")
    ),
    "function_gemma": Kind(
        _turns("<start_function_call>"),
        plain=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": Kind(
        _turns("<|tool_call> <tool_call|>"),
        special=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "muse_spark": Kind(
        _turns("<atem:function_calls>"),
        special=("<|message|>", "<|eom|>", "<|eot|>"),
    ),
    "gpt_oss": Kind(
        _GPT_OSS,
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"),
        ends=("<|return|>", "<|call|>"),
    ),
}


@cache
def tokenizer(name: str) -> Any:
    """mlx-lm's wrapper around the tokenizer of this kind."""
    kind = KINDS[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    special = [END, "<|im_start|>", *kind.ends, *kind.special]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in kind.plain])
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": kind.ends[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": kind.template,
            **kind.config,
        }
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        ids = [made.token_to_id(text) for text in kind.ends]
        return load(Path(folder), eos_token_ids=ids)
