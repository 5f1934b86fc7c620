"""How llama.cpp's tool is asked, with a program in its place that only prints times."""

from pathlib import Path

import pytest

from benchmark.kernels import llama_layers, published_layers
from benchmark.kernels.llama_layers import LlamaLayers, bench_flags
from benchmark.kernels.published_models import PUBLISHED
from sgl_pipeline.errors import ConfigurationError

# A decode of 200 tokens' context takes 10 ms a layer here, a prompt 100, and all else 5.
TIMES = """
case "$*" in *twice.gguf*) layers=2 ;; *) layers=1 ;; esac
case "$*" in
  *"-ntg 16"*) echo "{\\"tg\\": 16, \\"t_pp\\": 9.0, \\"t_tg\\": 0.$(((layers * 10 + 5) * 16))}" ;;
  *) echo "{\\"tg\\": 1, \\"t_pp\\": 0.$((layers * 100 + 5)), \\"t_tg\\": 9.0}" ;;
esac
echo '{"tg": 1, "t_pp": 999.0, "t_tg": 999.0}'
"""


def layers_timed_by(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LlamaLayers, list[tuple[str, ...]]]:
    """The layers with one state, and the kinds of layers in the files that were written."""
    program = folder / "llama-batched-bench"
    program.write_text(f"#!/bin/sh\n{text}")
    program.chmod(0o755)
    written: list[tuple[str, ...]] = []
    monkeypatch.setattr(llama_layers, "llama_program", lambda directory, name: program)
    monkeypatch.setattr(
        llama_layers, "write_layers", lambda path, config, types: written.append(types)
    )
    return LlamaLayers(PUBLISHED[0], folder), written


def test_a_step_is_the_difference_of_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, written = layers_timed_by(TIMES, tmp_path, monkeypatch)
    assert written == [
        ("linear_attention", "full_attention"),
        ("linear_attention", "linear_attention", "full_attention"),
    ]
    assert layers.step_ms([(200, 1)] * 16) == pytest.approx(10)
    assert layers.step_ms([(0, 512)]) == pytest.approx(100)


def test_decodes_lie_around_their_context() -> None:
    state, attention, experts = (bench_flags(own, [(200, 1)] * 64) for own in PUBLISHED)
    for flags in (attention, experts):
        assert flags[:8] == ["-npp", "192", "-ntg", "16", "-npl", "64,1", "--ctx-size", "13312"]
    assert "-pps" in experts and "-pps" not in attention
    assert state[:8] == ["-npp", "1", "-ntg", "16", "-npl", "64,1", "--ctx-size", "1088"]
    for own in PUBLISHED:
        prompt = bench_flags(own, [(0, 512)])
        assert prompt[:8] == ["-npp", "512,1", "-ntg", "1", "-npl", "1", "--ctx-size", "513"]
        # A file that is mapped has small pages, and our weights huge ones.
        assert prompt[8:10] == ["--load-mode", "none"]


@pytest.mark.parametrize("text", ["echo no such architecture >&2; exit 1", "exit 0"])
def test_a_run_without_a_time_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, _ = layers_timed_by(text, tmp_path, monkeypatch)
    with pytest.raises(ConfigurationError, match=r"no such architecture|said last: nothing"):
        layers.step_ms([(200, 1)])


def test_one_round_has_no_quartiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        published_layers.main(["--llama-rounds", "1"])
    assert "must be 0 or at least 2" in capsys.readouterr().err
