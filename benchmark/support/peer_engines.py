"""The command lines of other engines on a CPU machine, each from an environment of its own.

A peer gets the cores that ours gets, a thread on each, 16-bit keys and values, and what `--weights`
names: for vLLM, SGLang and transformers a format of `quantize_model`, for llama.cpp a type of
`make_gguf`, for OpenVINO one of `make_openvino`.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.models.make_gguf import SIXTEEN_BITS
from benchmark.peers.install_llama_cpp import llama_program
from benchmark.peers.install_openvino import openvino_python
from benchmark.peers.install_vllm_cpu import vllm_environment
from benchmark.support.engine import Builder, Engine, Served
from benchmark.support.paths import (
    LLAMA_CPP_DIRECTORY,
    OPENVINO_DIRECTORY,
    ROOT,
    VLLM_DIRECTORY,
    ZENTORCH_DIRECTORY,
)
from sgl_pipeline.errors import ConfigurationError

_LLAMA_SLOTS = 64
_LLAMA_SLOT_TOKENS = 384  # prompt and answer


def bind_threads(cores: Sequence[int], num_stages: int) -> str:
    """The cores of each stage as vLLM and SGLang write it: `0-1|2-3` for two stages on four."""
    if not 1 <= num_stages <= len(cores):
        raise ConfigurationError(
            f"--pp {num_stages} of a peer must be between 1 and the {len(cores)} usable cores"
        )
    ends = [len(cores) * stage // num_stages for stage in range(num_stages + 1)]
    groups = [cores[start:end] for start, end in itertools.pairwise(ends)]
    return "|".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def vllm_command(directory: Path, checkpoint: Path, model: Path, num_stages: int) -> list[str]:
    """The vLLM of `directory` serves `checkpoint` by the name of `model`, which clients ask for
    whatever the format."""
    command = [str(directory / "bin" / "vllm"), "serve", str(checkpoint)]
    command += ["--served-model-name", str(model), "--pipeline-parallel-size", str(num_stages)]
    return [*command, "--dtype", "bfloat16", "--max-model-len", "4096"]


def _vllm(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    return _vllm_of(VLLM_DIRECTORY, served, cores)


def _zentorch(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    """vLLM as it multiplies on an EPYC where it finds AMD's zentorch."""
    return _vllm_of(ZENTORCH_DIRECTORY, served, cores)


def _vllm_of(directory: Path, served: Served, cores: Sequence[int]) -> Engine:
    command = vllm_command(directory, served.checkpoint, served.model, served.num_stages)
    command += [*served.address_flags, *served.cache_flags("--no-enable-prefix-caching")]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": bind_threads(cores, served.num_stages)}
    return Engine(
        label=served.label,
        client_backend="vllm",
        base_url=served.base_url,
        command=(*command, *served.flags),
        environment=vllm_environment(directory) | threads,
    )


def _sglang(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    command = [sys.executable, "-m", "benchmark.peers.sglang_cpu", "--model-path"]
    command += [str(served.checkpoint), "--pp-size", str(served.num_stages)]
    command += [*served.address_flags, "--device", "cpu", "--dtype", "bfloat16"]
    command += ["--attention-backend", "torch_native"]
    command += ["--max-total-tokens", "32768", "--skip-server-warmup"]
    command += served.cache_flags("--disable-radix-cache")
    return Engine(
        label=served.label,
        client_backend="sglang",
        base_url=served.base_url,
        command=(*command, *served.flags),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": bind_threads(cores, served.num_stages)},
    )


def _transformers(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    _require_one_stage(served)
    command = [sys.executable, "-m", "benchmark.peers.transformers_serve", "--model-path"]
    command += [str(served.checkpoint), *served.address_flags, "--threads", str(len(cores))]
    return Engine(
        label=served.label,
        client_backend="sglang",
        base_url=served.base_url,
        command=(*command, *served.cache_flags("--disable-prefix-cache"), *served.flags),
    )


def _llama(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    """Slots have pages of their own: a step attends to the tokens of its own request alone, which
    is faster than one pool for all (`--kv-unified`), and bounds a request's tokens."""
    _require_one_stage(served)
    checkpoint = served.gguf_file(served.weights or SIXTEEN_BITS)
    command = [str(llama_program(LLAMA_CPP_DIRECTORY, "llama-server")), "--model", str(checkpoint)]
    command += [*served.address_flags, "--threads", str(len(cores))]
    command += ["--parallel", str(_LLAMA_SLOTS), "--no-kv-unified", "--no-context-shift"]
    command += ["--ctx-size", str(_LLAMA_SLOTS * _LLAMA_SLOT_TOKENS), "--no-webui"]
    if not served.prefix_cache:
        # Of a slot, and of the prompts that left their slot.
        command += ["--no-cache-prompt", "--cache-ram", "0"]
    return Engine(
        label=served.label,
        client_backend="llama-server",
        base_url=served.base_url,
        command=(*command, *served.flags),
    )


def _openvino(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    _require_one_stage(served)
    weights = served.weights or "fp16"
    checkpoint = served.copy(f"openvino-{weights}", "make_openvino", f"--weights {weights}")
    command = [str(openvino_python(OPENVINO_DIRECTORY)), "-m", "benchmark.peers.openvino_serve"]
    command += ["--model-path", str(checkpoint), *served.address_flags]
    command += ["--threads", str(len(cores)), *served.cache_flags("--disable-prefix-cache")]
    return Engine(
        label=served.label,
        client_backend="sglang",
        base_url=served.base_url,
        command=(*command, *served.flags),
        environment={"PYTHONPATH": str(ROOT)},
    )


def _require_one_stage(served: Served) -> None:
    if served.num_stages != 1:
        raise ConfigurationError(f"{served.label}: this peer batches in one process: --pp 1")


PEERS: dict[str, Builder] = {
    "vllm": _vllm,
    "zentorch": _zentorch,
    "sglang": _sglang,
    "transformers": _transformers,
    "llama": _llama,
    "openvino": _openvino,
}
