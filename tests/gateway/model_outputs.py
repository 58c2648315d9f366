"""Documented answers in each format of tool calls and reasoning, with their parsed contents."""

from dataclasses import dataclass

from services.gateway.core.text.parsing.catalog import REASONING_FORMATS, TOOL_FORMATS
from services.gateway.core.text.parsing.output_form import OutputForm

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "options": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = {"city": 'São "Paulo"\n</b>', "days": 3, "metric": True, "options": {"k": ["}", None]}}
CALLS = [("get_weather", WEATHER), ("now", {})]
_JSON = (
    '{"city": "São \\"Paulo\\"\\n</b>", "days": 3, "metric": true, "options": {"k": ["}", null]}}'
)


@dataclass(frozen=True)
class Recorded:
    """The text of an answer in some format, and its parsed content, reasoning and tool calls."""

    format: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: bool = True
    thinks: str = "qwen3"

    @property
    def form(self) -> OutputForm:
        return OutputForm(
            tools=TOOL_FORMATS[self.format],
            schemas=SCHEMAS,
            reasoning=REASONING_FORMATS[self.thinks],
            is_harmony=self.format == "openai",
        )


_HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'
)
_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_NOT_A_CALL = '{"name": "Bob", "age": 3}.'
_DSML_VALUE = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'

RECORDED = [
    Recorded("hermes", _HERMES),
    Recorded(
        "hermes",
        f"<think>\nThe user asks.\n\nSo: call.\n</think>\n\nI look.\n{_HERMES}",
        "I look.",
        "The user asks.\n\nSo: call.",
    ),
    Recorded("hermes", "Nothing to call.  \n", "Nothing to call.  \n", calls=False),
    Recorded(
        "qwen3_coder",
        "<think>\nhm\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n"
        '<parameter=city>\nSão "Paulo"\n</b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        '<parameter=metric>\nTrue\n</parameter>\n<parameter=options>\n{"k": ["}", null]}\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "I look.",
        "hm",
    ),
    Recorded(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    Recorded(
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {_JSON}}};'
        '{"name": "now", "parameters": {}}',
    ),
    Recorded("llama3_json", _NOT_A_CALL, _NOT_A_CALL, calls=False),
    Recorded(
        "mistral",
        f"I look.[TOOL_CALLS]get_weather[ARGS]{_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        "I look.",
    ),
    Recorded(
        "mistral",
        f'[THINK]hm[/THINK][TOOL_CALLS][{{"name": "get_weather", "arguments": {_JSON}}}, '
        '{"name": "now", "arguments": {}}]',
        reasoning="hm",
        thinks="mistral",
    ),
    Recorded(
        "pythonic",
        "[get_weather(city='São \"Paulo\"\\n</b>', days=3, metric=True, "
        "options={'k': ['}', None]}), now()]",
    ),
    Recorded("pythonic", "[1] is a list", "[1] is a list", calls=False),
    Recorded(
        "deepseek_v3",
        f"I look.{_ALL}{_CALL}function{_SEP}get_weather\n```json\n{_JSON}\n```{_END}\n"
        f"{_CALL}function{_SEP}now\n```json\n{{}}\n```{_END}{_ALL_END}",
        "I look.",
    ),
    Recorded(
        "deepseek_v31",
        f"<think>hm</think>{_ALL}{_CALL}get_weather{_SEP}{_JSON}{_END}{_CALL}now{_SEP}{{}}{_END}"
        + _ALL_END,
        reasoning="hm",
    ),
    Recorded(
        "deepseek_v32",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        + _DSML_VALUE.format("city", "true", WEATHER["city"])
        + _DSML_VALUE.format("days", "false", "3")
        + _DSML_VALUE.format("metric", "false", "true")
        + _DSML_VALUE.format("options", "false", '{"k": ["}", null]}')
        + '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "I look.",
    ),
    Recorded(
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_JSON}<|call|><|start|>assistant<|channel|>commentary "
        "to=functions.now <|constrain|>json<|message|>{}<|call|>",
        "I look.",
        "hm",
        thinks="openai_gptoss",
    ),
]
