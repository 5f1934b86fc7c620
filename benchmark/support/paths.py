"""Folders of the work tree that benchmarks read and write."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmark" / "results"
DEMO_MODEL = ROOT / "sgl_pipeline" / "demo_model"
DOCS = ROOT / "docs"
# Not kept: logs, traces and checkpoints that can be made again.
BUILD = ROOT / "build"
SCRATCH = BUILD / "bench"
VLLM_DIRECTORY = BUILD / "peers" / "vllm"
ZENTORCH_DIRECTORY = BUILD / "peers" / "vllm_zentorch"
LLAMA_CPP_DIRECTORY = BUILD / "peers" / "llama_cpp"
LLAMA_CPP_VERSION = LLAMA_CPP_DIRECTORY / "version"
OPENVINO_DIRECTORY = BUILD / "peers" / "openvino"
