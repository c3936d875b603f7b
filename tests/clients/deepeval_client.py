"""deepeval: a metric whose judge is the gateway's model, with answers held to a schema."""

from __future__ import annotations

import os

from deepeval.metrics import GEval
from deepeval.models import LocalModel
from deepeval.test_case import LLMTestCase, SingleTurnParams

URL, MODEL = os.environ["GATEWAY_URL"], os.environ["GATEWAY_MODEL"]
SCHEMA = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": 20},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
    },
    "required": ["reason", "score"],
    "additionalProperties": False,
}


def main() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
    judge = LocalModel(
        model=MODEL,
        base_url=URL,
        api_key="none",
        temperature=0,
        generation_kwargs={"response_format": form, "max_tokens": 200},
    )
    for is_async in (False, True):
        metric = GEval(
            name="Right",
            evaluation_steps=["Compare the answer with the question."],
            evaluation_params=[SingleTurnParams.INPUT, SingleTurnParams.ACTUAL_OUTPUT],
            model=judge,
            async_mode=is_async,
        )
        metric.measure(LLMTestCase(input="1 + 1?", actual_output="2"), _show_indicator=False)
        assert metric.score is not None and 0 <= metric.score <= 1, metric
        assert isinstance(metric.reason, str)
    print("ok: a metric whose judge answers by a schema")


if __name__ == "__main__":
    main()
