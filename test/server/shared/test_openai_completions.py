"""`completions` and `models` of the openai client."""

import openai
import pytest
from transformers import AutoTokenizer

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = pytest.mark.multiproc
MODEL = "sgl-pipeline-demo"


def turn(question):
    return f"<|user|>{question}<|end|><|assistant|>"


SUM, SPELL = turn("What is 17 + 25?"), turn("Spell the word cat.")


def complete(client, prompt=SUM, **options):
    options = {"temperature": 0, "max_tokens": 16} | options
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def texts(reply):
    return [choice.text for choice in reply.choices]


def test_a_list_of_prompts_is_answered_in_order(client):
    reply = complete(client, [SUM, SPELL])
    assert texts(reply) == ["42", "c-a-t"]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.completion_tokens == 3 + 6


def test_prompts_of_token_ids(client):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert texts(complete(client, tokenizer.encode(SUM))) == ["42"]
    several = [tokenizer.encode(SPELL), tokenizer.encode(SUM)]
    assert texts(complete(client, several)) == ["c-a-t", "42"]


def test_samples_of_several_prompts_keep_their_places(client):
    reply = complete(client, [SUM, SPELL], n=2)
    assert texts(reply) == ["42", "42", "c-a-t", "c-a-t"]
    assert reply.usage.prompt_tokens == complete(client, [SUM, SPELL]).usage.prompt_tokens
    seeded = complete(client, ["Once", "Twice"], n=2, seed=4, temperature=1.8)
    alone = [
        complete(client, prompt, seed=seed, temperature=1.8).choices[0].text
        for prompt in ("Once", "Twice")
        for seed in (4, 5)
    ]
    assert texts(seeded) == alone


def test_echo_puts_the_prompt_before_the_text(client):
    assert texts(complete(client, "ab", max_tokens=1, echo=True))[0].startswith("ab")
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL).encode("ab")
    both = texts(complete(client, [ids, ids], max_tokens=1, echo=True))
    assert [text[:2] for text in both] == ["ab", "ab"]
    stream = complete(client, "ab", max_tokens=2, echo=True, stream=True)
    assert next(iter(stream)).choices[0].text.startswith("ab")


def test_a_stream_of_several_prompts_is_told_apart_and_ends_with_usage(client):
    stream = complete(client, [SUM, SPELL], stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    parts = ["", ""]
    for chunk in chunks:
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == ["42", "c-a-t"]
    assert last.usage.completion_tokens == 9


def test_best_of_as_many_as_there_are_choices_is_no_choice(client):
    assert texts(complete(client, best_of=1)) == ["42"]
    assert texts(complete(client, best_of=2, n=2)) == ["42", "42"]


def test_penalties_biases_and_a_minimum_reach_the_sampler(client):
    assert complete(client, max_tokens=1).choices[0].text == "4"
    forced, *rest = (
        complete(client, max_tokens=n, logit_bias={"70": 100}).choices[0].text for n in (1, 5)
    )
    assert [forced * 5] == rest
    longer = complete(client, extra_body={"min_tokens": 9})
    assert longer.usage.completion_tokens > 9
    assert longer.choices[0].text.startswith("42")
    endless = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    repetitive = complete(client, **endless).choices[0].text
    assert complete(client, **endless, frequency_penalty=2.0).choices[0].text != repetitive


def test_a_seed_gives_the_same_sample_again(client):
    def sample(seed):
        return complete(client, "Once", temperature=1.5, seed=seed, max_tokens=24).choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(5)}) > 1


def test_the_request_id_is_the_callers(client):
    assert complete(client, extra_body={"rid": "mine"}).id == "mine"


def test_models_are_listed_and_found_by_name(client):
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")
