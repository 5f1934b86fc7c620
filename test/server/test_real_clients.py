"""The clients that people use, unchanged, against a live server."""

import json
import shutil
import subprocess

import openai
import pytest
import requests
from support.live_server import LiveServer

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

pytestmark = pytest.mark.multiproc
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
MODEL = "sgl-pipeline-demo"


@pytest.fixture
def client(demo_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none")


def test_openai_chat_answers_and_stops_by_itself(client):
    reply = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, max_tokens=16)
    assert reply.choices[0].message.content == "42"
    assert reply.choices[0].finish_reason == "stop"
    # Two digits and the end of the turn.
    assert reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3


def test_openai_stream_adds_up_to_the_whole_answer_and_carries_usage(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Spell the word cat."}],
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "c-a-t"
    assert chunks[-1].usage.completion_tokens == 6


def test_openai_completions_with_two_samples(client):
    prompt = "<|user|>What is 17 + 25?<|end|><|assistant|>"
    reply = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=16, n=2)
    assert [choice.text for choice in reply.choices] == ["42", "42"]


def test_openai_penalties_biases_and_a_minimum_reach_the_sampler(client):
    def complete(**options) -> openai.types.Completion:
        prompt = "<|user|>What is 17 + 25?<|end|><|assistant|>"
        return client.completions.create(model=MODEL, prompt=prompt, temperature=0, **options)

    four = complete(max_tokens=1)
    assert four.choices[0].text == "4"
    forced, *rest = (complete(max_tokens=n, logit_bias={"70": 100}).choices[0].text for n in (1, 5))
    assert [forced * 5] == rest
    assert complete(max_tokens=16).usage.completion_tokens == 3
    longer = complete(max_tokens=16, extra_body={"min_tokens": 9})
    assert longer.usage.completion_tokens > 9
    assert longer.choices[0].text.startswith("42")
    endless = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    repetitive = complete(**endless).choices[0].text
    assert complete(**endless, frequency_penalty=2.0).choices[0].text != repetitive


def test_a_seed_gives_the_same_sample_again(client):
    def sample(seed: int) -> str:
        reply = client.completions.create(
            model=MODEL, prompt="Once", temperature=1.5, seed=seed, max_tokens=24
        )
        return reply.choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(5)}) > 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_on_generate(demo_server):
    body = {
        "text": "<|user|>What is 17 + 25?<|end|><|assistant|>",
        "sampling_params": {"temperature": 0, "max_new_tokens": 16},
    }
    command = ["curl", "-s", f"{demo_server.url}/generate", "-H", "Content-Type: application/json"]
    answer = json.loads(subprocess.check_output([*command, "-d", json.dumps(body)], timeout=60))
    assert answer["text"] == "42"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_stop_strings_end_and_trim_the_text(demo_server):
    answer = demo_server.generate(
        text="<|user|>Spell the word cat.<|end|><|assistant|>",
        sampling_params={"temperature": 0, "max_new_tokens": 16, "stop": ["a-t"]},
    ).json()
    assert answer["text"] == "c-"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "a-t"}


def test_an_sgl_function_with_two_gens(demo_server):
    install_torchvision_shim()
    import sglang as sgl

    @sgl.function
    def two_questions(s):
        s += "<|user|>What is 17 + 25?<|end|><|assistant|>"
        s += sgl.gen("sum", max_tokens=16, temperature=0)
        s += "<|end|><|user|>Spell the word cat.<|end|><|assistant|>"
        s += sgl.gen("letters", max_tokens=16, temperature=0)

    state = two_questions.run(backend=sgl.RuntimeEndpoint(demo_server.url))
    assert (state["sum"], state["letters"]) == ("42", "c-a-t")


def test_a_shared_prefix_is_computed_once(demo_server):
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    prefix = [100 + index % 90 for index in range(1008)]
    before = demo_server.facts()["prefill_tokens"]

    def cached_tokens(*tail: int) -> int:
        answer = demo_server.generate(
            input_ids=[*prefix, *tail], sampling_params={"max_new_tokens": 1}
        )
        return answer.json()["meta_info"]["cached_tokens"]

    assert cached_tokens(7, 8, 9) == 0
    assert cached_tokens(9, 8, 7) == 1008
    assert demo_server.facts()["prefill_tokens"] - before == 1011 + 3


def test_usage_reports_cached_tokens(client, demo_server):
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    question = [{"role": "user", "content": "Please repeat this sentence: the dog ran home."}]

    def cached_tokens() -> int:
        reply = client.chat.completions.create(model=MODEL, messages=question, max_tokens=4)
        return reply.usage.prompt_tokens_details.cached_tokens

    assert cached_tokens() == 0
    assert cached_tokens() >= 32, "whole pages of 16 tokens"


def test_health_and_server_info_tell_of_the_pipeline(demo_server):
    assert requests.get(f"{demo_server.url}/health", timeout=30).status_code == 200
    assert requests.get(f"{demo_server.url}/health_generate", timeout=30).status_code == 200
    facts = demo_server.facts()
    assert facts["num_stages"] == 2
    assert facts["layer_partition"] == [8, 8]
    assert facts["total_pages"] == min(facts["page_capacity_of_stages"])
