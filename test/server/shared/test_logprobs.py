"""Log-probabilities as users ask for them, against a live server; transformers is the judge."""

import json
from functools import cache

import numpy as np
import openai
import pytest
import requests
import torch
from support.greedy_oracle import reference_model
from support.live_server import LiveServer
from transformers import AutoTokenizer

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

pytestmark = pytest.mark.multiproc
PROMPT = "<|user|>What is 17 + 25?<|end|><|assistant|>"
MODEL = "sgl-pipeline-demo"
TOLERANCE = 1e-4


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@cache
@torch.inference_mode()
def reference(token_ids: tuple[int, ...]) -> np.ndarray:
    """[N, V]: row p tells of the token at p + 1."""
    logits = reference_model(DEMO_MODEL)(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(dim=-1).numpy()


def assert_tokens(entries: list, token_ids: list[int], start: int) -> None:
    """`entries` tell of `token_ids[start:]`, each with its id and text."""
    assert [entry[1] for entry in entries] == token_ids[start:]
    assert [entry[2] for entry in entries] == [tokenizer().decode([t]) for t in token_ids[start:]]
    rows = reference(tuple(token_ids))
    expected = [rows[p - 1, token_ids[p]] for p in range(start + 1, len(token_ids))]
    np.testing.assert_allclose([entry[0] for entry in entries[1:]], expected, atol=TOLERANCE)


def assert_candidates(rows: list, token_ids: list[int], start: int, ids: list[int] | None) -> None:
    """`rows` tell of the positions from `start` on: of `ids`, or of the three likeliest."""
    for position, row in enumerate(rows, start):
        expected = reference(tuple(token_ids))[position - 1]
        assert [entry[1] for entry in row] == (ids or expected.argsort()[::-1][:3].tolist())
        np.testing.assert_allclose(
            [entry[0] for entry in row], expected[[entry[1] for entry in row]], atol=TOLERANCE
        )


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("start", [0, 7])
def test_generate_tells_all_that_is_asked(demo_server, start, samples):
    """Asked twice: the second time the prompt is cached."""
    for _ in range(2):
        answer = demo_server.generate(
            text=PROMPT,
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=3,
            token_ids_logprob=[5, 2],
            return_text_in_logprobs=True,
            sampling_params={"temperature": 0, "max_new_tokens": 16, "n": samples},
        ).json()
        for one in answer if samples > 1 else [answer]:
            meta = one["meta_info"]
            prompt_ids = tokenizer().encode(PROMPT)
            end, tokens = len(prompt_ids), prompt_ids + one["output_ids"]
            assert_tokens(
                meta["input_token_logprobs"] + meta["output_token_logprobs"], tokens, start
            )
            assert len(meta["input_token_logprobs"]) == end - start
            for kind, ids in (("top", None), ("token_ids", [5, 2])):
                field = f"{kind}_logprobs"
                assert meta[f"input_{field}"][0] is None
                assert_candidates(meta[f"input_{field}"][1:], tokens, start + 1, ids)
                assert_candidates(meta[f"output_{field}"], tokens, end, ids)
                assert len(meta[f"input_{field}"]) == end - start
                assert len(meta[f"output_{field}"]) == len(one["output_ids"])


def test_openai_chat_gives_each_token_its_logprob_and_the_likeliest_ones(demo_server):
    client = openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none")
    question = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**question).choices[0].logprobs.content
    assert [entry.token for entry in whole] == ["4", "2", "<|end|>"]
    tokens = tokenizer().encode(PROMPT) + [tokenizer().encode(e.token)[0] for e in whole]
    rows = reference(tuple(tokens))
    for entry, position in zip(whole, range(len(tokens) - 3, len(tokens)), strict=True):
        assert entry.logprob == pytest.approx(rows[position - 1, tokens[position]], abs=TOLERANCE)
        top = np.sort(rows[position - 1])[::-1][:2]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(top, abs=TOLERANCE)
    chunks = client.chat.completions.create(stream=True, **question)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    streamed = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    # Upstream hangs them on pieces of text, of which the end of the turn has none.
    assert streamed in (whole, whole[:2])


@pytest.mark.parametrize("stream", [False, True])
def test_openai_completions_with_echo_tells_of_prompt_and_output(demo_server, stream):
    client = openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none")
    reply = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=2,
        logprobs=5,
        echo=True,
        stream=stream,
    )
    parts = [c.logprobs for r in (reply if stream else [reply]) for c in r.choices if c.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [number for part in parts for number in part.token_logprobs]
    ids = tokenizer().encode(PROMPT + "42")
    assert tokens == [tokenizer().decode([token]) for token in ids]
    assert logprobs[0] is None
    expected = [reference(tuple(ids))[p - 1, ids[p]] for p in range(1, len(ids))]
    assert logprobs[1:] == pytest.approx(expected, abs=TOLERANCE)
    top = [row for part in parts for row in part.top_logprobs]
    assert [len(row or ()) for row in top] == [0, *[5] * (len(ids) - 1)]


def test_score_gives_the_probabilities_of_the_next_token(demo_server):
    body = {"model": MODEL, "query": PROMPT, "items": ["", "4"], "label_token_ids": [25, 23]}
    reply = requests.post(f"{demo_server.url}/v1/score", json=body, timeout=60)
    for item, scores in zip(body["items"], reply.json()["scores"], strict=True):
        row = reference(tuple(tokenizer().encode(PROMPT + item)))[-1]
        assert scores == pytest.approx(np.exp(row[[25, 23]]), abs=TOLERANCE)


CHOICES = ["41", "42", "7", "c-a-t"]


def scored(server: LiveServer, token_ids: list[int], start: int) -> list:
    """Entries for `token_ids[start:]`, the first of which has no number."""
    answer = server.generate(
        input_ids=token_ids,
        return_logprob=True,
        logprob_start_len=start,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 0},
    ).json()
    assert answer["meta_info"]["output_token_logprobs"] == []
    return answer["meta_info"]["input_token_logprobs"]


@pytest.mark.parametrize(
    "method",
    ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"],
)
def test_the_frontends_choice_methods_decide_as_with_the_numbers_of_transformers(
    demo_server, method
):
    install_torchvision_shim()
    import sglang as sgl

    prompt_ids = tokenizer().encode(PROMPT)
    ours, theirs, ours_alone, theirs_alone = [], [], [], []
    for choice in CHOICES:
        choice_ids = tokenizer().encode(choice)
        whole = prompt_ids + choice_ids
        entries = scored(demo_server, whole, len(prompt_ids) - 1)
        assert_tokens(entries, whole, len(prompt_ids) - 1)
        rows, alone = reference(tuple(whole)), reference(tuple(choice_ids))
        # Without the prompt's last token, which has no number.
        ours.append(entries[1:])
        theirs.append([[rows[p - 1, whole[p]]] for p in range(len(prompt_ids), len(whole))])
        ours_alone.append(scored(demo_server, choice_ids, 0))
        assert_tokens(ours_alone[-1], choice_ids, 0)
        later = [[alone[p - 1, choice_ids[p]]] for p in range(1, len(choice_ids))]
        theirs_alone.append([[None], *later])

    def decide(conditional: list, unconditional: list) -> str:
        decision = getattr(sgl, method)(
            choices=CHOICES,
            normalized_prompt_logprobs=[np.mean([e[0] for e in one]) for one in conditional],
            input_token_logprobs=conditional,
            output_token_logprobs=[],
            unconditional_token_logprobs=unconditional,
        )
        return decision.decision

    assert decide(ours, ours_alone) == decide(theirs, theirs_alone)
    assert decide(ours, ours_alone) == "42" or method == "unconditional_likelihood_normalized"


def test_select_and_gen_with_choices_of_the_frontend(demo_server):
    install_torchvision_shim()
    import sglang as sgl

    @sgl.function
    def choose(s):
        s += PROMPT + sgl.select("answer", choices=CHOICES)
        s += "<|end|><|user|>Spell the word cat.<|end|><|assistant|>"
        s += sgl.gen("letters", choices=["d-o-g", "c-a-t"])

    state = choose.run(backend=sgl.RuntimeEndpoint(demo_server.url))
    assert (state["answer"], state["letters"]) == ("42", "c-a-t")
    numbers = state.get_meta_info("answer")["input_token_logprobs"]
    for choice, entries in zip(CHOICES, numbers, strict=True):
        # The frontend asks from two tokens before the prompt's end.
        assert_tokens(
            entries, tokenizer().encode(PROMPT + choice), len(tokenizer().encode(PROMPT)) - 2
        )


def test_a_stream_sends_each_number_once(demo_server):
    body = {
        "text": PROMPT,
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16},
    }
    lines = demo_server.generate(**body).text.split("data: ")
    metas = [json.loads(line)["meta_info"] for line in lines if line.startswith("{")]
    whole = demo_server.generate(**(body | {"stream": False})).json()["meta_info"]
    counts = [len(meta["output_token_logprobs"]) for meta in metas]
    assert counts == [meta["completion_tokens"] for meta in metas] == [1, 2, 3]
    for field in ("input_token_logprobs", "output_token_logprobs"):
        assert metas[-1][field] == whole[field]
