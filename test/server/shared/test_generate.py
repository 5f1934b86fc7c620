"""SGLang's own /generate, and the small routes around it."""

import json
import shutil
import subprocess

import pytest
import requests
from transformers import AutoConfig, AutoTokenizer

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = pytest.mark.multiproc
SUM = "<|user|>What is 17 + 25?<|end|><|assistant|>"
SPELL = "<|user|>Spell the word cat.<|end|><|assistant|>"
GREEDY = {"temperature": 0, "max_new_tokens": 16}
END_ID = 2


def generate(server, text=SUM, sampling=None, **fields):
    body = {"text": text, "sampling_params": GREEDY | (sampling or {})} | fields
    response = server.generate(**body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(server, text, sampling=None, **fields):
    """The events of a stream, but for the last, which says that it is done."""
    body = {"text": text, "sampling_params": GREEDY | (sampling or {}), "stream": True} | fields
    *events, done = [line for line in server.generate(**body).text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(demo_server):
    body = json.dumps({"text": SUM, "sampling_params": GREEDY})
    command = ["curl", "-s", f"{demo_server.url}/generate", "-H", "Content-Type: application/json"]
    answer = json.loads(subprocess.check_output([*command, "-d", body], timeout=60))
    assert answer["text"] == "42"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_ID}


def test_stop_strings_end_and_trim_the_text(demo_server):
    answer = generate(demo_server, SPELL, {"stop": ["a-t"]})
    assert answer["text"] == "c-"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "a-t"}
    untrimmed = generate(demo_server, SPELL, {"stop": ["a-t"], "no_stop_trim": True})
    assert untrimmed["text"] == "c-a-t"


def test_ignored_ends_and_a_minimum(demo_server):
    endless = generate(demo_server, SUM, {"ignore_eos": True})
    assert endless["meta_info"]["completion_tokens"] == 16
    assert endless["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    longer = generate(demo_server, SUM, {"min_new_tokens": 9})
    assert longer["meta_info"]["completion_tokens"] > 9
    assert END_ID not in longer["output_ids"][:9]


def test_special_tokens_are_skipped_or_shown(demo_server):
    shown = {"skip_special_tokens": False, "no_stop_trim": True}
    assert generate(demo_server, SUM, shown)["text"] == "42<|end|>"
    assert generate(demo_server, SUM, {"no_stop_trim": True})["text"] == "42"
    # A byte-level tokenizer has no spaces of its own to leave out.
    assert generate(demo_server, SUM, {"spaces_between_special_tokens": False})["text"] == "42"


def test_parameters_for_each_prompt_of_a_batch(demo_server):
    several = [GREEDY | {"max_new_tokens": 1}, GREEDY | {"stop": "-a"}, GREEDY]
    body = {"text": [SUM, SPELL, SUM], "sampling_params": several, "rid": ["a", "b", "c"]}
    answers = demo_server.generate(**body).json()
    assert [answer["text"] for answer in answers] == ["4", "c", "42"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]


def test_samples_with_a_seed_differ_from_each_other_and_never_from_themselves(demo_server):
    wild = {"temperature": 1.9, "n": 4, "sampling_seed": 11}
    first, second = (generate(demo_server, "Once", wild) for _ in range(2))
    texts = [answer["text"] for answer in first]
    assert len(set(texts)) > 1
    assert [answer["text"] for answer in second] == texts


@pytest.mark.parametrize(
    ("interval", "due"), [(1, {1, 2, 3, 4, 5, 6}), (2, {1, 3, 5, 6}), (100, {1, 6})]
)
def test_a_stream_comes_in_steps_of_its_interval(demo_server, interval, due):
    """The first token at once, the last ones when they end it.

    SGLang's front joins events that wait for it, so a busy machine may skip some of those that are
    due in a stream; each comes in one of several streams.
    """
    seen = set()
    for _ in range(20):
        events = events_of(demo_server, SPELL, {"stream_interval": interval})
        assert events[-1]["text"] == "c-a-t"
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts == sorted(set(counts)) and counts[-1] == 6
        assert set(counts) <= due
        seen.update(counts)
        if seen == due:
            return
    pytest.fail(f"{due - seen} never came as events of their own")


def test_token_ids_of_prompt_and_output(demo_server):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    answer = generate(demo_server, return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == tokenizer.encode(SUM)
    assert tokenizer.decode(answer["output_ids"]) == "42<|end|>"


def test_a_request_id_is_kept_and_used_once_at_a_time(demo_server):
    assert generate(demo_server, rid="mine")["meta_info"]["id"] == "mine"
    assert generate(demo_server, rid="mine")["meta_info"]["id"] == "mine"
    twice = demo_server.generate(text=[SUM, SUM], rid=["one", "one"], sampling_params=GREEDY)
    assert twice.status_code == 400 and "one" in twice.text


def test_a_shared_prefix_is_computed_once(demo_server):
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    prefix = [100 + index % 90 for index in range(1008)]
    before = demo_server.facts()["prefill_tokens"]

    def cached_tokens(*tail):
        answer = demo_server.generate(
            input_ids=[*prefix, *tail], sampling_params={"max_new_tokens": 1}
        )
        return answer.json()["meta_info"]["cached_tokens"]

    assert cached_tokens(7, 8, 9) == 0
    assert cached_tokens(9, 8, 7) == 1008
    assert demo_server.facts()["prefill_tokens"] - before == 1011 + 3


def test_a_salt_keeps_prefixes_apart(demo_server):
    text = "The quick brown fox jumps over the lazy dog, again and again."

    def cached_tokens(**salt):
        return generate(demo_server, text, **salt)["meta_info"]["cached_tokens"]

    cached_tokens(cache_salt="mine")
    assert cached_tokens(cache_salt="mine") > 0
    assert cached_tokens(cache_salt="yours") == 0
    assert cached_tokens(extra_key="mine") == 0


def test_tokens_there_and_back(demo_server):
    def post(route, **body):
        url = f"{demo_server.url}{route}"
        return requests.post(url, json={"model": "m"} | body, timeout=30)

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for route in ("/tokenize", "/v1/tokenize"):
        tokens = post(route, prompt=SUM).json()
        assert tokens["tokens"] == tokenizer.encode(SUM)
        assert tokens["count"] == len(tokens["tokens"])
    for route in ("/detokenize", "/v1/detokenize"):
        asked = {"tokens": tokenizer.encode(SUM), "skip_special_tokens": False}
        assert post(route, **asked).json()["text"] == SUM


def test_health_and_server_info_tell_of_the_pipeline(demo_server):
    assert requests.get(f"{demo_server.url}/health", timeout=30).status_code == 200
    assert requests.get(f"{demo_server.url}/health_generate", timeout=30).status_code == 200
    facts = demo_server.facts()
    assert facts["num_stages"] == 2
    # Which split it is depends on how fast the machine was in the second when it was measured.
    num_layers = AutoConfig.from_pretrained(DEMO_MODEL).num_hidden_layers
    assert len(facts["layer_partition"]) == 2 and sum(facts["layer_partition"]) == num_layers
    assert facts["total_pages"] == min(facts["page_capacity_of_stages"])


def test_server_info_tells_the_sizes_that_are_in_force(demo_server):
    """Clients compute expected cache hits from them, as upstream's `cache_hit_kit` does."""
    info = requests.get(f"{demo_server.url}/server_info", timeout=30).json()
    sizes = {name: info[name] for name in ("page_size", "pp_size", "chunked_prefill_size")}
    assert sizes == {"page_size": 16, "pp_size": 2, "chunked_prefill_size": 2048}
