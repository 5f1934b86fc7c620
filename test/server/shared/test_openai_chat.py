"""`chat.completions` of the openai client: what is asked, and what usage says of it."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from transformers import AutoTokenizer

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = pytest.mark.multiproc
MODEL = "sgl-pipeline-demo"
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
SPELL = [{"role": "user", "content": "Spell the word cat."}]


def ask(client, messages, **options):
    options = {"temperature": 0, "max_tokens": 16} | options
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def test_chat_answers_and_stops_by_itself(client):
    reply = ask(client, SUM)
    assert reply.choices[0].message.content == "42"
    assert reply.choices[0].finish_reason == "stop"
    # Two digits and the end of the turn.
    assert reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "You are terse."}, *SUM],
        [{"role": "developer", "content": "You are terse."}, *SUM],
        [*SPELL, {"role": "assistant", "content": "c-a-t"}, *SUM],
        [{"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?"}]}],
    ],
)
def test_a_conversation_becomes_the_prompt_of_its_template(client, messages):
    reply = ask(client, messages, extra_body={"return_prompt_token_ids": True})
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert reply.choices[0].prompt_token_ids == tokenizer.encode(prompt)
    assert reply.usage.prompt_tokens == len(tokenizer.encode(prompt))
    assert reply.choices[0].message.content == "42"


def test_samples_differ_and_are_counted(client):
    reply = ask(client, SUM, n=4, temperature=1.9, seed=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) > 1
    assert reply.usage.prompt_tokens == ask(client, SUM).usage.prompt_tokens
    assert reply.usage.completion_tokens > 4
    # The first sample is that of the seed alone, the others of the seeds after it.
    alone = [ask(client, SUM, temperature=1.9, seed=3 + index) for index in range(4)]
    assert [one.choices[0].message.content for one in alone] == texts


def test_stop_strings_and_both_names_of_the_limit(client):
    assert ask(client, SPELL, stop="-t").choices[0].message.content == "c-a"
    assert ask(client, SPELL, stop=["x", "a"]).choices[0].message.content == "c-"
    short = {"max_tokens": openai.omit, "max_completion_tokens": 2}
    for limit in ({"max_tokens": 2}, short):
        choice = ask(client, SPELL, **limit).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("c-", "length")
    # The newer name wins.
    both = ask(client, SPELL, max_tokens=9, max_completion_tokens=2)
    assert both.choices[0].message.content == "c-"


def test_sampling_options_reach_the_sampler(client):
    wild = {"temperature": 2.0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}

    def sample(**options):
        merged = wild | options
        merged["extra_body"] = wild["extra_body"] | options.get("extra_body", {})
        return ask(client, SUM, **merged).choices[0].message.content

    assert sample(seed=7) == sample(seed=7)
    assert len({sample(seed=seed) for seed in range(4)}) > 1
    greedy = sample(temperature=0)
    # A nucleus of one token, or the one likeliest token, leaves nothing to chance.
    assert sample(top_p=1e-6) == sample(extra_body={"top_k": 1}) == greedy
    assert sample(temperature=0, frequency_penalty=2.0) != greedy
    # The model is too sure of itself for this one to change what it would say anyway.
    assert sample(seed=7, presence_penalty=-2.0) != sample(seed=7, presence_penalty=2.0)
    # Token 70 is a letter; nothing else can be drawn.
    forced = sample(logit_bias={"70": 100}, seed=1)
    assert len(set(forced)) == 1 and len(forced) == 24


def test_labels_and_hints_change_nothing(client):
    labels = {"user": "somebody", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    assert ask(client, SUM, **labels).choices[0].message.content == "42"


def test_a_stream_adds_up_to_the_answer_and_ends_with_usage(client):
    stream = ask(client, SPELL, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == "c-a-t" and len([piece for piece in pieces if piece]) > 2
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks)


def test_streams_without_usage_and_with_running_usage(client):
    assert all(chunk.usage is None for chunk in ask(client, SPELL, stream=True))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in ask(client, SPELL, stream=True, stream_options=options)
        if chunk.usage is not None
    ]
    assert counts == sorted(counts) and len(set(counts)) > 3 and counts[-1] == 6


def test_samples_of_a_stream_are_told_apart(client):
    texts = ["", "", ""]
    for chunk in ask(client, SUM, n=3, temperature=1.9, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = ask(client, SUM, n=3, temperature=1.9, seed=5)
    assert texts == [choice.message.content for choice in whole.choices]


def test_parallel_streams_do_not_mix(client):
    words = ["cat", "dog", "sun", "hat", "pen", "cup"]

    def spell(word):
        messages = [{"role": "user", "content": f"Spell the word {word}."}]
        return "".join(
            chunk.choices[0].delta.content or "" for chunk in ask(client, messages, stream=True)
        )

    with ThreadPoolExecutor(len(words)) as pool:
        assert list(pool.map(spell, words)) == ["-".join(word) for word in words]


def test_a_final_assistant_message_is_continued(client):
    begun = [*SPELL, {"role": "assistant", "content": "c-"}]
    reply = ask(client, begun, extra_body={"continue_final_message": True})
    assert reply.choices[0].message.content == "a-t"


def test_token_ids_come_with_the_reply(client):
    choice = ask(client, SUM, extra_body={"return_token_ids": True}).choices[0]
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert tokenizer.decode(choice.response_token_ids) == "42<|end|>"
    # They can be sent back in the place of the messages.
    again = ask(client, SUM, extra_body={"input_ids": choice.prompt_token_ids})
    assert again.choices[0].message.content == "42"


def test_usage_reports_cached_tokens_and_their_tier(client, demo_server):
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    question = [{"role": "user", "content": "Please repeat this sentence: the dog ran home."}]
    asked = {"extra_body": {"return_cached_tokens_details": True}}
    assert ask(client, question, **asked).usage.prompt_tokens_details.cached_tokens == 0
    second = ask(client, question, **asked)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= 32, "whole pages of 16 tokens"
    assert second.sglext["cached_tokens_details"] == {"device": cached, "host": 0}
