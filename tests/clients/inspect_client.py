"""inspect_ai: an evaluation with ``--batch``, as users start it, and one with calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from inspect_ai.log import read_eval_log
from openai import OpenAI

URL, MODEL = os.environ["GATEWAY_URL"], os.environ["GATEWAY_MODEL"]
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def numbers():
    samples = [Sample(input=f"Say the number {n}.", target=str(n)) for n in range(6)]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


def evaluate(name: str, *flags: str) -> None:
    """Run ``inspect eval``; all samples have answers."""
    logs = Path(f"logs-{name}")
    command = [str(Path(sys.executable).with_name("inspect")), "eval", "numbers.py"]
    command += ["--model", f"openai/{MODEL}", "--model-base-url", URL, "--max-tokens", "16"]
    command += ["-M", "responses_api=false"]
    command += ["--display", "plain", "--log-dir", str(logs), *flags]
    environment = {**os.environ, "OPENAI_API_KEY": "none"}
    subprocess.run(command, check=True, env=environment)
    (path,) = logs.glob("*.eval")
    log = read_eval_log(str(path))
    assert log.status == "success" and log.samples and len(log.samples) == 6, log.status
    assert all(sample.output.choices and not sample.error for sample in log.samples)
    assert sum(used.output_tokens for used in log.stats.model_usage.values()) > 0


def main() -> None:
    Path("numbers.py").write_text(TASK)
    evaluate("batch", "--batch")
    with OpenAI(base_url=URL, api_key="none") as client:
        made = [batch for batch in client.batches.list() if batch.request_counts]
        (batch,) = [one for one in made if one.request_counts and one.request_counts.total == 6]
    assert batch.status == "completed"
    print("ok: an evaluation as a batch")
    evaluate("calls")
    print("ok: an evaluation by calls")


if __name__ == "__main__":
    main()
