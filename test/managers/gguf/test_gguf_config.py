"""What metadata say becomes config.json, and what is not known is refused by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.tiny_models import tiny_model

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError
from sgl_pipeline.managers.gguf.gguf_config import config_of
from sgl_pipeline.managers.gguf.gguf_file import read_gguf_file
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.pp_runner.model.rope_spec import Llama3Scaling, RopeSpec


def config_with(tmp_path: Path, metadata: dict[str, Any], **tensors: Any) -> dict[str, Any]:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), path, metadata=metadata, **tensors)
    return config_of(read_gguf_file(path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale = 0\.5"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"llama.attention.value_length": 32}, "value_length says 32 for head_dim"),
        ({"llama.rope.dimension_count": 8}, "dimension_count says 8 for head_dim"),
        ({"llama.vocab_size": 319}, "vocab_size says 319"),
        ({"general.architecture": "mamba"}, "the architecture 'mamba'; known in GGUF are llama"),
        ({"llama.attention.head_count_kv": [2] * 6}, "not one number"),
        ({"llama.rope.freq_base": "high"}, "not one number"),
        ({"general.type": "adapter"}, "a part of one: adapter"),
        ({"split.count": 3}, "one of 3 parts .* `llama-gguf-split --merge`"),
    ],
)
def test_what_is_not_known_is_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_with(tmp_path, metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.sliding_window": 16}, "sliding_window = 16"),
        ({"llama.rope.scaling.type": "su"}, "rope type 'su'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_as_from_config_json(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec(config_with(tmp_path, metadata))


def test_what_changes_nothing_is_passed_over(tmp_path: Path) -> None:
    plain = config_with(tmp_path, {})
    more = {"llama.expert_count": 0, "llama.rope.scaling.type": "none", "llama.logit_scale": 0.0}
    changed = config_with(tmp_path, more | {"llama.tensor_data_layout": "Meta AI original pth"})
    assert model_spec(changed) == model_spec(plain)


def test_more_layers_than_tensors_are_refused_before_they_are_counted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="block_count = 4000000000, and holds 57 tensors"):
        config_with(tmp_path, {"llama.block_count": 4_000_000_000})


def test_any_end_of_a_text_or_turn_ends_an_answer(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{kind}_token_id": 7 + place
            for place, kind in enumerate(("eos", "eot", "eom"))}  # fmt: skip
    assert model_spec(config_with(tmp_path, ends)).eos_token_ids == {7, 8, 9}


def llama3_factors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """As llama.cpp's converter writes them for Llama 3.1 (`convert_hf_to_gguf.py`)."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_factors_of_llama_3_are_its_rule(tmp_path: Path) -> None:
    factors = llama3_factors(32.0, 16, 500_000.0)
    assert len({*factors.tolist()}) > 2  # a frequency between the two ends, too
    config = config_with(
        tmp_path, {"llama.rope.freq_base": 500_000.0}, tensors={"rope_freqs.weight": factors}
    )
    expected = RopeSpec(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert model_spec(config).rope == expected


def test_other_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_factors(32.0, 16, 500_000.0)
    factors[2] *= 1.01
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight scales .* otherwise"):
        config_with(
            tmp_path, {"llama.rope.freq_base": 500_000.0}, tensors={"rope_freqs.weight": factors}
        )
