"""One tool call, as models of each kind write it (``tiny_tokenizers``)."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = '{"city": "Köln", "days": 2}'
JSON_CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'

CALLS = {
    "qwen3": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>Köln</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
    "<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln'
    '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minicpm5": '<function name="get_weather"><param name="city">Köln</param>'
    '<param name="days">2</param></function>',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "mistral_list": f"[TOOL_CALLS][{JSON_CALL}]",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    f'<|open|>json type="object"<|sep|>{ARGUMENTS}<|close|>json<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "pythonic": '<|tool_call_start|>[get_weather(city="Köln", days=2)]<|tool_call_end|>',
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Köln<escape>,days:2}"
    "<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Köln</atem:parameter>\n<atem:parameter name="days">2'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "gpt_oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    + ARGUMENTS,
}
