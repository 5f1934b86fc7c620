"""The command lines of the peers, with programs and copies of the model that are empty files."""

from pathlib import Path

import pytest

from benchmark.support import peer_engines
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine
from benchmark.support.peer_engines import bind_threads
from sgl_pipeline.errors import ConfigurationError

MODEL = Path("model")
KINDS = ("ours", "llama")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, beside peers that look installed."""
    for name in (
        "VLLM_DIRECTORY",
        "ZENTORCH_DIRECTORY",
        "LLAMA_CPP_DIRECTORY",
        "OPENVINO_DIRECTORY",
    ):
        monkeypatch.setattr(peer_engines, name, tmp_path / name)
    monkeypatch.setattr(
        peer_engines, "vllm_environment", lambda directory: {"PRELOADED": directory.name}
    )
    (tmp_path / "LLAMA_CPP_DIRECTORY" / "bin").mkdir(parents=True)
    (tmp_path / "LLAMA_CPP_DIRECTORY" / "bin" / "llama-server").touch()
    packages = tmp_path / "OPENVINO_DIRECTORY" / "lib" / "python3.11" / "site-packages"
    (packages / "openvino_genai").mkdir(parents=True)
    return tmp_path


def parsed(text: str, folder: Path, prefix_cache: bool = False) -> Engine:
    model = folder / "0.27b"
    return parse_engine(text, model, 31000, folder, [0, 1], prefix_cache=prefix_cache)


def value_of(flag: str, engine: Engine) -> str:
    return engine.command[engine.command.index(flag) + 1]


def test_vllm_answers_to_the_name_of_the_model_whatever_the_format(installed: Path) -> None:
    (installed / "0.27b-int-quantized").mkdir()
    engine = parsed("vllm --pp 2 --weights int-quantized --max-num-seqs 8", installed)
    assert engine.command[2] == str(installed / "0.27b-int-quantized")
    assert value_of("--served-model-name", engine) == str(installed / "0.27b")
    assert engine.command[-2:] == ("--max-num-seqs", "8")
    assert engine.environment == {
        "PRELOADED": "VLLM_DIRECTORY",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    assert parsed("vllm --pp 1", installed).command[2] == str(installed / "0.27b")


def test_zentorch_is_vllm_from_an_environment_of_its_own(installed: Path) -> None:
    plain, zen = (
        parsed(f"{kind} --pp 1 --max-num-seqs 8", installed) for kind in ("vllm", "zentorch")
    )
    assert zen.command[0] == str(installed / "ZENTORCH_DIRECTORY" / "bin" / "vllm")
    assert zen.command[1:] == plain.command[1:]
    assert zen.environment == plain.environment | {"PRELOADED": "ZENTORCH_DIRECTORY"}
    assert zen.client_backend == plain.client_backend


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("llama --pp 1", "0.27b-bf16.gguf"),
        ("llama --pp 1 --weights q8_0", "0.27b-q8_0.gguf"),
        ("openvino --pp 1", "0.27b-openvino-fp16"),
        ("openvino --pp 1 --weights int4", "0.27b-openvino-int4"),
    ],
)
def test_a_peer_with_a_form_of_its_own_says_how_its_copy_is_written(
    text: str, copy: str, installed: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"{copy} is missing; run python -m benchmark"):
        parsed(text, installed)
    (installed / copy).touch()
    engine = parsed(text, installed)
    assert str(installed / copy) in engine.command
    assert value_of("--threads", engine) == "2"
    assert value_of("--port", engine) == "31000"


@pytest.mark.parametrize("weights", ["bf16", "q8_0"])
def test_ours_and_llama_serve_the_same_file(weights: str, installed: Path) -> None:
    (installed / f"0.27b-{weights}.gguf").touch()
    ours, llama = (parsed(f"{kind} --pp 1 --weights {weights}", installed) for kind in KINDS)
    file = str(installed / f"0.27b-{weights}.gguf")
    assert (value_of("--model-path", ours), value_of("--model", llama)) == (file, file)


def test_every_slot_of_llama_holds_a_request_of_the_loads_of_clients(installed: Path) -> None:
    (installed / "0.27b-q8_0.gguf").touch()
    engine = parsed("llama --pp 1 --weights q8_0 --ubatch-size 256", installed)
    num_slots, num_tokens = int(value_of("--parallel", engine)), int(value_of("--ctx-size", engine))
    assert num_slots >= 64 and num_tokens // num_slots >= 256 + 64
    assert "--no-kv-unified" in engine.command and "--no-context-shift" in engine.command
    assert engine.client_backend == "llama-server"
    assert engine.command[-2:] == ("--ubatch-size", "256")


def test_openvino_runs_in_its_environment_from_our_tree(installed: Path) -> None:
    (installed / "0.27b-openvino-int8").mkdir()
    engine = parsed("openvino --pp 1 --weights int8", installed)
    assert engine.command[0] == str(installed / "OPENVINO_DIRECTORY" / "bin" / "python")
    folder = Path(engine.environment["PYTHONPATH"])
    assert (folder / "benchmark" / "peers" / "openvino_serve.py").exists()


@pytest.mark.parametrize(
    ("kind", "copy", "cache_flags"),
    [
        ("vllm --pp 1", "0.27b", ["--no-enable-prefix-caching"]),
        ("llama --pp 1", "0.27b-bf16.gguf", ["--no-cache-prompt", "--cache-ram", "0"]),
        ("openvino --pp 1", "0.27b-openvino-fp16", ["--disable-prefix-cache"]),
    ],
)
def test_the_prefix_cache_is_on_only_where_it_is_wanted(
    kind: str, copy: str, cache_flags: list[str], installed: Path
) -> None:
    (installed / copy).touch()
    off, on = parsed(kind, installed).command, parsed(kind, installed, prefix_cache=True).command
    start = off.index(cache_flags[0])
    assert list(off[start : start + len(cache_flags)]) == cache_flags
    assert off[:start] + off[start + len(cache_flags) :] == on


@pytest.mark.parametrize("kind", ["llama", "openvino", "transformers"])
def test_engines_of_one_process_have_one_stage(kind: str, installed: Path) -> None:
    with pytest.raises(ConfigurationError, match="--pp 1"):
        parsed(f"{kind} --pp 2", installed)


@pytest.mark.parametrize(
    ("kind", "command"), [("llama", "install_llama_cpp"), ("openvino", "install_openvino")]
)
def test_a_machine_without_a_peer_is_told_how_to_install_it(
    kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLAMA_CPP_DIRECTORY", "OPENVINO_DIRECTORY"):
        monkeypatch.setattr(peer_engines, name, tmp_path / "missing")
    for copy in ("0.27b-bf16.gguf", "0.27b-openvino-fp16"):
        (tmp_path / copy).touch()
    with pytest.raises(ConfigurationError, match=f"run python -m benchmark.peers.{command}"):
        parsed(f"{kind} --pp 1", tmp_path)


def test_the_sglang_peer_binds_a_core_to_each_stage(tmp_path: Path) -> None:
    engine = parse_engine("sglang", MODEL, 31000, tmp_path, [0, 1])
    assert engine.environment == {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    assert "--disable-radix-cache" in engine.command


def test_transformers_batches_in_one_process(tmp_path: Path) -> None:
    engine = parse_engine("transformers --pp 1", MODEL, 31000, tmp_path, [0, 1])
    assert engine.command[engine.command.index("--threads") + 1] == "2"


@pytest.mark.parametrize(
    ("cores", "num_stages", "text"),
    [([0, 1], 1, "0-1"), ([0, 1], 2, "0|1"), ([0, 1, 2, 3, 4], 2, "0-1|2-4")],
)
def test_cores_are_split_over_the_stages(cores: list[int], num_stages: int, text: str) -> None:
    assert bind_threads(cores, num_stages) == text


def test_more_stages_than_cores_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 and the 2"):
        bind_threads([0, 1], 3)
