"""Writes the quickstart: 40 questions about one ledger, each with the answer it expects.

    PYTHONPATH=tools python -m demo_model.quickstart > producer/examples/quickstart.jsonl

The lines are OpenAI Batch requests. Their prompts share the ledger, two full cache blocks of it,
and differ in the question. ``metadata`` is ignored by the service; ``batchkv run`` compares
``metadata.expected`` with the answers when all is done.
"""

import json
import sys

from demo_model.ledger import make_ledger, prompt_messages

SEED = 2026
NUM_FACTS = 72
NUM_QUESTIONS = 40


def lines() -> list[str]:
    """The file, line by line."""
    ledger = make_ledger(SEED, NUM_FACTS)
    return [
        json.dumps(
            {
                "custom_id": f"question-{number:02d}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "demo",
                    "messages": prompt_messages(ledger, fact.key),
                    "max_tokens": 16,
                    "temperature": 0,
                    "metadata": {"expected": fact.code},
                },
            }
        )
        for number, fact in enumerate(
            ledger.facts[:: NUM_FACTS // NUM_QUESTIONS][:NUM_QUESTIONS], 1
        )
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
