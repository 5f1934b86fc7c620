"""Servers whose layers transformers computes, and servers whose layers it does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from support.front_model import VOCAB_SIZE, byte_tokenizer
from support.live_server import LiveServer, live_server
from support.multimodal_models import multimodal_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Olmo3Config,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.managers.command_line.model_choice import choose_model

pytestmark = pytest.mark.multiproc
_PROMPTS = [[(7 * place) % 250 + 3 for place in range(length)] for length in (1, 40)]


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 12,  # which the longer prompt exceeds
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def served(server: LiveServer, prompt: list[int], count: int) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return server.generate(input_ids=prompt, sampling_params=sampling).json()


@pytest.fixture(scope="module")
def olmo3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that our table does not have."""
    directory = tmp_path_factory.mktemp("olmo3")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Olmo3Config(**_SIZES), dtype=torch.float32)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_transformers_computes_the_layers_of_two_stages(olmo3_path: Path) -> None:
    flags = ["--model-path", str(olmo3_path), "--model-impl", "transformers", "--device", "cpu"]
    reference = AutoModelForCausalLM.from_pretrained(olmo3_path, dtype=torch.float32).eval()
    with live_server("--pp", "2", *flags) as server:
        assert "by transformers" in server.text
        assert server.facts()["model_impl"] == "transformers"
        for prompt in _PROMPTS:
            wanted = generated(reference, prompt, 24)
            assert served(server, prompt, 24)["output_ids"] == wanted
            again = served(server, prompt + wanted, 8)  # from cached pages
            assert again["output_ids"] == generated(reference, prompt + wanted, 8)
        assert again["meta_info"]["cached_tokens"] > 0


@pytest.fixture(scope="module")
def gemma3_server() -> Iterator[LiveServer]:
    flags = ["--model-path", str(multimodal_model("gemma3")), "--device", "cpu"]
    with live_server("--pp", "2", *flags) as server:
        yield server


def test_the_text_of_a_multimodal_model_is_served(gemma3_server: LiveServer) -> None:
    assert gemma3_server.facts()["model_impl"] == "transformers"
    path = multimodal_model("gemma3")
    reference = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    for prompt in _PROMPTS:
        wanted = generated(reference, prompt, 24)
        assert served(gemma3_server, prompt, 24)["output_ids"] == wanted
    text = {"type": "text", "text": "x"}
    body = {"messages": [{"role": "user", "content": [text]}], "max_tokens": 2}
    answer = requests.post(f"{gemma3_server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] >= 1
    info = requests.get(f"{gemma3_server.url}/get_model_info", timeout=30).json()
    assert info["has_image_understanding"] is False


_PICTURE = {"url": "data:image/png;base64,iVBORw0KGgo="}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": _PICTURE}]}
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 2,
                "messages": [{"role": "user", "content": [{"type": "image", "source": _SOURCE}]}],
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": _PICTURE["url"]}],
                    }
                ]
            },
        ),
        ("/generate", {"text": "x", "image_data": _PICTURE["url"]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aW1n"]}]}),
    ],
)
def test_a_request_with_an_image_is_refused(
    gemma3_server: LiveServer, route: str, body: dict
) -> None:
    named = {"model": str(multimodal_model("gemma3"))} | body
    answer = requests.post(f"{gemma3_server.url}{route}", json=named, timeout=30)
    assert answer.status_code == 400, answer.text
    assert "image" in answer.text and "support" in answer.text


def test_a_model_that_would_be_wrong_is_refused_by_the_probes(tmp_path: Path) -> None:
    """Qwen3.5 runs, but three of four layers keep a state that no page holds."""
    config = Qwen3_5TextConfig(num_hidden_layers=4, architectures=["Qwen3_5ForCausalLM"])
    config.save_pretrained(tmp_path)
    reason = r"transformers' code of this model cannot be served: .*linear_attention"
    with pytest.raises(UnsupportedModelError, match=reason):
        choose_model(str(tmp_path), None, "transformers")
