"""promptfoo: an evaluation of two prompts, with the provider ``openai:chat:MODEL``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

URL, MODEL = os.environ["GATEWAY_URL"], os.environ["GATEWAY_MODEL"]
CONFIG = {
    "prompts": ["Say {{number}}.", "Write {{number}}."],
    "providers": [
        {
            "id": f"openai:chat:{MODEL}",
            "config": {"apiBaseUrl": URL, "apiKey": "none", "max_tokens": 8, "temperature": 0},
        }
    ],
    "tests": [
        {"vars": {"number": str(number)}, "assert": [{"type": "javascript", "value": "true"}]}
        for number in range(3)
    ],
}


def main() -> None:
    Path("promptfooconfig.json").write_text(json.dumps(CONFIG))
    command = [os.environ["TOOL_FOLDER"] + "/node_modules/.bin/promptfoo", "eval", "--no-cache"]
    command += ["-c", "promptfooconfig.json", "-o", "out.json", "--no-progress-bar", "--no-table"]
    environment = {
        **os.environ,
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
    }
    environment |= {"PROMPTFOO_CONFIG_DIR": str(Path.cwd() / "state")}
    subprocess.run(command, check=True, env=environment)
    found = json.loads(Path("out.json").read_text())["results"]
    assert found["stats"]["successes"] == 6, found["stats"]
    assert all(isinstance(one["response"]["output"], str) for one in found["results"])
    assert found["stats"]["tokenUsage"]["completion"] > 0, found["stats"]
    print("ok: an evaluation")


if __name__ == "__main__":
    main()
