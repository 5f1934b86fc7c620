"""Whose code computes a model's layers, by `--model-impl`, config and probes.

The probes are stand-ins, whose answers the tests write; test/server/test_model_impl.py has the real
ones.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.front_model import write_front_model
from support.tiny_models import tiny_model

from sgl_pipeline.args import StageArgs
from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.managers.command_line import model_choice
from sgl_pipeline.managers.command_line.model_choice import choose_model
from sgl_pipeline.pp_runner.attention.attention_backend import LayerAttention
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.rope_config import ContextLengths
from sgl_pipeline.pp_runner.stage_spec import stage_spec

pytestmark = pytest.mark.multiproc  # the stand-ins are processes
_ATTENTION = LayerAttention(
    num_query_heads=4, num_kv_heads=2, head_dim=16, value_dim=8, scale=0.25, window=12
)
_SPEC = GenericSpec(
    architecture="OlmoXForCausalLM",
    model_type="olmo_x",
    vocab_size=320,
    hidden_size=64,
    context_length=256,
    own_context_lengths=ContextLengths(256, 1024),
    attentions=(_ATTENTION, _ATTENTION),
    tied_embeddings=False,
    dtype="float32",
    eos_token_ids=frozenset({2}),
    kinds=(0, 0),
    expert_layers=frozenset(),
    head="lm_head",
    transformers_version="5.19.0",
)


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets what the probes print and their exit code; the words they were started with are in
    `asked.json`."""
    monkeypatch.setattr(model_choice, "PROBES", "stand_in_probes")
    others = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *others]))

    def answer(text: str, code: int = 0, to: str = "stdout") -> None:
        (tmp_path / "stand_in_probes.py").write_text(
            "import json, pathlib, sys\n"
            f"pathlib.Path({str(tmp_path / 'asked.json')!r}).write_text(json.dumps(sys.argv[1:]))\n"
            f"print({text!r}, file=sys.{to})\nsys.exit({code})\n"
        )

    answer("must not be asked", 9)
    return answer


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A model of a family that is not in our table."""
    (tmp_path / "other").mkdir()
    return str(write_front_model(tmp_path / "other", architectures=["OlmoXForCausalLM"]))


@pytest.mark.parametrize("model_impl", ["auto", "sglang"])
def test_a_family_of_our_table_is_ours_without_a_probe(probes, model_impl: str) -> None:
    chosen = choose_model(str(tiny_model("qwen3")), None, model_impl)
    assert isinstance(chosen.spec, DecoderSpec)
    assert chosen.generic_spec == ""


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_another_family_is_what_the_probes_saw(
    probes, other: str, model_impl: str, tmp_path: Path
) -> None:
    probes("a line of a library\n" + _SPEC.to_json())
    chosen = choose_model(other, "w8a8_int8", model_impl)
    assert chosen.spec == _SPEC
    assert json.loads((tmp_path / "asked.json").read_text()) == [
        other,
        "--quantization",
        "w8a8_int8",
    ]
    args = StageArgs(model_path=other, dtype="float32", generic_spec=chosen.generic_spec)
    assert args.is_generic
    assert args.precision == "float32-transformers"
    assert stage_spec(args) == _SPEC, "found where there is neither probe nor model"


def test_transformers_computes_a_family_of_ours_where_it_is_asked_to(probes) -> None:
    probes(_SPEC.to_json())
    assert choose_model(str(tiny_model("qwen3")), None, "transformers").spec == _SPEC


def test_a_config_that_our_decoder_does_not_compute_goes_to_transformers(
    probes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shutil.copytree(tiny_model("qwen3"), tmp_path / "scaled")
    config = json.loads((tmp_path / "scaled" / "config.json").read_text())
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(config | {"logit_scale": 2.0}))
    path = str(tmp_path / "scaled")
    with pytest.raises(UnsupportedModelError, match=r"logit_scale.*--model-impl transformers has"):
        choose_model(path, None, "sglang")
    probes(_SPEC.to_json())
    assert choose_model(path, None, "auto").spec == _SPEC
    assert "transformers computes the layers: config.json sets logit_scale" in caplog.text


def test_ours_alone_refuses_another_family(probes, other: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"OlmoXForCausalLM.*--model-impl transformers"):
        choose_model(other, None, "sglang")


def test_a_refusal_says_what_the_probes_saw_and_why_they_were_asked(probes, other: str) -> None:
    probes("8 of its 32 layers do not attend", model_choice.REFUSED)
    with pytest.raises(
        UnsupportedModelError, match=r"OlmoXForCausalLM.*cannot be served: 8 of its 32 layers"
    ):
        choose_model(other, None, "auto")
    with pytest.raises(UnsupportedModelError, match=r"^transformers' code .*: 8 of its 32 layers"):
        choose_model(other, None, "transformers")


def test_probes_that_fail_are_no_refusal_of_the_model(probes, other: str) -> None:
    probes("Traceback\n  line 3\nKeyError: 'x'", 1, to="stderr")
    with pytest.raises(ConfigurationError, match=r"could not be probed \(exit code 1\): KeyError"):
        choose_model(other, None, "auto")


def test_a_directory_that_is_not_there_is_no_matter_of_families(probes) -> None:
    with pytest.raises(ConfigurationError, match="no such directory"):
        choose_model("/no/such/model", None, "auto")


def test_a_family_that_no_test_compares_is_announced(
    probes, other: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probes(_SPEC.to_json())
    choose_model(other, None, "transformers")
    assert "no test compares the tokens of this family (olmo_x)" in caplog.text
    caplog.clear()
    monkeypatch.setattr(model_choice, "TESTED_MODEL_TYPES", frozenset({"olmo_x"}))
    choose_model(other, None, "transformers")
    assert not caplog.messages


def test_layers_of_transformers_are_for_cpus() -> None:
    with pytest.raises(ConfigurationError, match=r"--device cuda: .*built for CPUs only"):
        StageArgs(model_path="", dtype="bfloat16", device="cuda", generic_spec=_SPEC.to_json())
