"""Writes a dated result: what was measured, and all that is needed to measure it again.

Used by the benchmarks ; the format is that of `benchmark/results/README.md`.
"""

import datetime
import gzip
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.support.machine import describe_machine, describe_software
from benchmark.support.paths import RESULTS

# A record of more bytes is stored compressed.
MAX_RECORD_BYTES = 200_000


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Compact JSON with a line for each entry of `record`."""
    entries = (
        f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}"
        for key, value in record.items()
    )
    return ("{\n" + ",\n".join(entries) + "\n}\n").encode()


def file_of(stem: Path, suffix: str) -> Path:
    """A result's file. `Path.with_suffix` would cut a name such as kill_stages_0.27b."""
    return stem.with_name(stem.name + suffix)


def write_record(stem: Path, record: Mapping[str, Any]) -> Path:
    """Writes `<stem>.json`, or `<stem>.json.gz` where it has more than MAX_RECORD_BYTES.

    Removes the other of the two. A file that was there stays whole until its successor is.
    """
    whole = encode_record(record)
    is_large = len(whole) > MAX_RECORD_BYTES
    plain, packed = file_of(stem, ".json"), file_of(stem, ".json.gz")
    path, other = (packed, plain) if is_large else (plain, packed)
    _replace(path, gzip.compress(whole, mtime=0) if is_large else whole)
    other.unlink(missing_ok=True)
    return path


def read_record(path: Path) -> dict[str, Any]:
    """The record that `write_record` wrote to `path`."""
    content = path.read_bytes()
    return dict(json.loads(gzip.decompress(content) if path.suffix == ".gz" else content))


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_bytes(content)
    draft.replace(path)


class DatedResult:
    """The two files of one result, `<stem>.json` and `<stem>.md`, written again as often as it
    grows; `stem` is `<date>_<name>` in `folder`, and no other result's.

    Args:
        module: the benchmark, as `python -m` takes it; the command line is recorded.
    """

    def __init__(self, module: str, name: str, folder: Path = RESULTS) -> None:
        now = datetime.datetime.now(datetime.UTC)
        folder.mkdir(parents=True, exist_ok=True)
        self.stem = folder / f"{now:%Y-%m-%d_%H%M}_{name}"
        number = 1
        while file_of(self.stem, ".md").exists():
            number += 1
            self.stem = folder / f"{now:%Y-%m-%d_%H%M}_{number}_{name}"
        self._title = f"{name}, {now.isoformat(timespec='seconds')}"
        self._date = now.isoformat(timespec="seconds")
        self._command = shlex.join(["python", "-m", module, *sys.argv[1:]])
        self._groups = {"machine": describe_machine(), "software": describe_software()}

    def write(
        self,
        facts: Mapping[str, Mapping[str, str]],
        record: Mapping[str, Any],
        texts: Sequence[str],
    ) -> None:
        """Writes both files; one that was there stays whole until its successor is.

        Args:
            facts: groups of facts that both files show.
            record: goes to the JSON file alone.
            texts: go to the Markdown file alone.
        """
        groups = {**self._groups, **facts}
        whole = {"date": self._date, "command": self._command, **groups, **record}
        write_record(self.stem, whole)
        lines = [f"# {self._title}", "", "```", self._command, "```", ""]
        for group, values in groups.items():
            described = "; ".join(f"{key} {value}" for key, value in values.items())
            lines.append(f"{group}: {described}  ")
        text = "\n".join(lines) + "\n\n" + "\n\n".join(filter(None, texts)) + "\n"
        _replace(file_of(self.stem, ".md"), text.encode())


def save_result(
    module: str,
    name: str,
    facts: Mapping[str, Mapping[str, str]],
    record: Mapping[str, Any],
    texts: Sequence[str],
    folder: Path = RESULTS,
) -> Path:
    """Writes a result that is complete; see `DatedResult`. Returns the path without its suffix."""
    result = DatedResult(module, name, folder)
    result.write(facts, record, texts)
    return result.stem


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
