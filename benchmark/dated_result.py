"""Writes a dated result: what was measured, and all that is needed to measure it again.

Used by the benchmarks in this folder; the format is that of `results/README.md`.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.machine import describe_machine, describe_software

RESULTS = Path(__file__).resolve().parent / "results"


def save_result(
    module: str,
    name: str,
    facts: Mapping[str, Mapping[str, str]],
    record: Mapping[str, Any],
    texts: Sequence[str],
    folder: Path = RESULTS,
) -> Path:
    """Writes `<date>_<name>.json` and `.md`; returns the path without its suffix.

    Args:
        module: the benchmark, `benchmark.<module>`, whose command line is recorded.
        facts: groups of facts that both files show.
        record: goes to the JSON file alone.
        texts: go to the Markdown file alone.
    """
    now = datetime.datetime.now(datetime.UTC)
    date = now.isoformat(timespec="seconds")
    command = shlex.join(["python", "-m", f"benchmark.{module}", *sys.argv[1:]])
    groups = {"machine": describe_machine(), "software": describe_software(), **facts}
    stem = folder / f"{now:%Y-%m-%d_%H%M}_{name}"
    whole = {"date": date, "command": command, **groups, **record}
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    lines = [f"# {name}, {date}", "", "```", command, "```", ""]
    for group, values in groups.items():
        lines.append(f"{group}: " + "; ".join(f"{key} {value}" for key, value in values.items()))
        lines[-1] += "  "
    text = "\n".join(lines) + "\n\n" + "\n\n".join(filter(None, texts)) + "\n"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    return stem


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
