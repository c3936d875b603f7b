"""The report of a batch as one HTML file. It loads nothing and runs nothing."""

from __future__ import annotations

import base64
import hashlib

from batchkv_producer.report.facts import Facts
from batchkv_producer.report.sections import all_sections
from batchkv_producer.report.style import REPORT_CSS
from batchkv_producer.report.words import safe, utc


def document(facts: Facts, version: str, texts: str = "") -> str:
    """The report. ``version`` is that of batchkv here; ``texts`` are the rows (``texts.section``).

    The policy in its head allows its own style sheet alone: no script, no request, no form.
    """
    status = facts.status
    name = status.name or status.batch_id
    digest = base64.b64encode(hashlib.sha256(REPORT_CSS.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    made = utc(status.read_at)
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{safe(name)} - report of batchkv</title><style>{REPORT_CSS}</style></head>",
            f'<body><header><h1>Report of <bdi>{safe(name)}</bdi></h1><p class="facts">batch ',
            f"{safe(status.batch_id)}, model <bdi>{safe(status.model)}</bdi></p>{_times(facts)}",
            f"{_state(facts)}</header><main>",
            *all_sections(facts),
            texts,
            f"</main><footer>Written by batchkv {safe(version)} at {_time(made)}. All times are in "
            "UTC.</footer></body></html>\n",
        ]
    )


def _times(facts: Facts) -> str:
    parts = [f"submitted {_time(utc(facts.status.created))}"]
    if facts.started_at is not None and facts.ended_at is not None:
        parts.append(f"first row began {_time(utc(facts.started_at))}")
        parts.append(f"last row ended {_time(utc(facts.ended_at))}")
    return f'<p class="facts">{", ".join(parts)}</p>'


def _state(facts: Facts) -> str:
    status = facts.status
    if status.is_done:
        return '<p class="facts">All rows have ended.</p>'
    num_open = status.total - status.num_ended
    return (
        f'<p class="open" role="status">This batch is under way: {num_open:,} of {status.total:,} '
        f"rows are open. The report shows it as it was at {_time(utc(status.read_at))}.</p>"
    )


def _time(text: str) -> str:
    return f'<time datetime="{text}">{text}</time>' if text[:1].isdigit() else text
