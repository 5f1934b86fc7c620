"""Times layers of a published model with random weights by llama.cpp's own `llama-batched-bench`.

Called by `published_layers.py`. It times a file with the layers and one with them twice, and takes
the difference: embedding, head and what a step costs besides its layers drop out. One thread, time
of the clock. Files are read into memory, in huge pages where the environment asks for them
(`turns.in_huge_pages`); mapped, as by default, they would have small pages. Keys and values have 16
bits; rows that meet MXFP4 are rounded to 8 bits, which is what llama.cpp computes with.
"""

import json
import subprocess
from pathlib import Path

from benchmark.kernels.llama_files import write_layers
from benchmark.kernels.published_models import STATE, PublishedLayers, Step
from benchmark.peers.install_llama_cpp import llama_program
from benchmark.support.paths import LLAMA_CPP_DIRECTORY
from sgl_pipeline.errors import ConfigurationError

# Steps of a decode that are timed at once, of which the one in the middle is the step asked for.
_STEPS_AT_ONCE = 16


class LlamaLayers:
    """The two files of `published` in `folder`, which may go when this has.

    Raises ConfigurationError where llama.cpp is missing.
    """

    def __init__(self, published: PublishedLayers, folder: Path) -> None:
        self._program = llama_program(LLAMA_CPP_DIRECTORY, "llama-batched-bench")
        self._published = published
        self._once, self._twice = folder / "once.gguf", folder / "twice.gguf"
        for path, times in ((self._once, 1), (self._twice, 2)):
            layer_types = (*published.layer_types * times, *published.others)
            write_layers(path, published.full_config(), layer_types)

    def step_ms(self, chunks: Step) -> float:
        """Milliseconds of the layers in a step of `chunks`, which are equal, measured once.

        Raises ConfigurationError where llama.cpp ends without a time.
        """
        once, twice = (self._file_ms(path, chunks) for path in (self._once, self._twice))
        return twice - once

    def _file_ms(self, path: Path, chunks: Step) -> float:
        flags = bench_flags(self._published, chunks)
        command: list[str | Path] = [self._program, "--model", path, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not rows:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            raise ConfigurationError(
                f"{self._program.name} ended with {done.returncode} and said last: {said[-1]}"
            )
        row = json.loads(rows[0])
        return 1e3 * (row["t_tg"] / row["tg"] if chunks[0][0] else row["t_pp"])


def bench_flags(published: PublishedLayers, chunks: Step) -> list[str]:
    """The flags by which `llama-batched-bench` runs a step of equal chunks, a prompt or decodes,
    and then a small one: it may end before its last line is written."""
    (start, length), count = chunks[0], len(chunks)
    if start:
        # A state is as large after any prompt.
        has_pages = {*published.layer_types} != {STATE}
        prompt = start - _STEPS_AT_ONCE // 2 if has_pages else 1
        prompts, decodes, counts = f"{prompt}", _STEPS_AT_ONCE, f"{count},1"
    else:
        prompt, decodes = length, 1
        prompts, counts = f"{prompt},1", "1"
    flags = ["-npp", prompts, "-ntg", str(decodes), "-npl", counts]
    flags += ["--ctx-size", str(count * (prompt + decodes)), "--load-mode", "none"]
    if STATE not in (*published.layer_types, *published.others):
        flags.append("-pps")  # one prompt is copied, which llama.cpp cannot do with states
    return [*flags, "--threads", "1", "--threads-batch", "1", "--output-format", "jsonl"]
