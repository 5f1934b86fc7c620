"""The transformers peer answers as `sglang.bench_serving` reads it, with transformers' tokens."""

import argparse
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fastapi.testclient import TestClient
from support.generate_stream import stream_answer
from support.parrot_model import parrot_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark.peers.generate_route import make_app
from benchmark.peers.transformers_serve import TransformersBatching

PROMPTS = {"one": 12, "two words": 5, "a longer prompt of more words": 9}


@pytest.fixture(scope="module")
def client():
    options = argparse.Namespace(
        model_path=str(parrot_model()),
        pool_tokens=1024,
        page_size=16,
        max_batch_tokens=64,
        disable_prefix_cache=True,
    )
    app = make_app(options.model_path, lambda: TransformersBatching(options))
    with TestClient(app) as client:
        yield client


def test_requests_beside_each_other_get_all_of_their_tokens(client: TestClient) -> None:
    tokenizer = AutoTokenizer.from_pretrained(parrot_model())
    model = AutoModelForCausalLM.from_pretrained(parrot_model(), dtype=torch.bfloat16)
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        asked = PROMPTS.items()
        answers = list(clients.map(lambda one: stream_answer(client, *one), asked))
    for (prompt, num_tokens), events in zip(PROMPTS.items(), answers, strict=True):
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        # As the load wants it: the end-of-sequence token is a token like others.
        expected = model.generate(
            ids, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=None, eos_token_id=-1
        )[0, ids.shape[1] :]
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] == num_tokens
        assert events[-1]["meta_info"]["prompt_tokens"] == ids.shape[1]
        assert events[-1]["text"] == tokenizer.decode(expected)


def test_the_served_model_is_named(client: TestClient) -> None:
    assert client.get("/v1/models").json() == {"data": [{"id": str(parrot_model())}]}
