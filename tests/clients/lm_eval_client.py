"""lm-evaluation-harness: ``local-chat-completions`` and ``local-completions`` on a tiny task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = os.environ["GATEWAY_URL"], os.environ["GATEWAY_MODEL"]
TASK = """
task: numbers
dataset_path: json
dataset_kwargs:
  data_files:
    test: FOLDER/numbers.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
"""


def evaluate(model: str, path: str, *flags: str) -> None:
    """Run ``lm-eval``; each question has an answer."""
    place = f"base_url={URL}/{path},model={MODEL},num_concurrent=4,max_retries=3"
    place += ",tokenizer_backend=None"
    command = [str(Path(sys.executable).with_name("lm-eval")), "run", "--model", model]
    command += ["--model_args", place, "--tasks", "numbers", "--include_path", str(Path.cwd())]
    command += ["--output_path", f"out-{model}", "--log_samples", *flags]
    subprocess.run(command, check=True)
    (samples,) = Path(f"out-{model}").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == 4, found
    assert all(isinstance(one["resps"][0][0], str) for one in found), found
    print(f"ok: {model}")


def main() -> None:
    questions = [{"question": f"Say {n}", "answer": str(n)} for n in range(4)]
    Path("numbers.jsonl").write_text("\n".join(map(json.dumps, questions)))
    Path("numbers.yaml").write_text(TASK.replace("FOLDER", str(Path.cwd())))
    evaluate("local-chat-completions", "chat/completions", "--apply_chat_template")
    evaluate("local-completions", "completions", "--batch_size", "3")


if __name__ == "__main__":
    main()
