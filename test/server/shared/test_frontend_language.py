"""SGLang's frontend language against a live server: everything but `select`
(`test_logprobs.py`) and grammars."""

import asyncio
from collections.abc import Iterator

import pytest
import requests
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import (
    ChatTemplate,
    chat_template_registry,
    register_chat_template,
)
from sglang.lang.global_config import global_config
from sglang.test import test_programs as upstream_programs

QUESTION, WORD = "What is 17 + 25?", "Spell the word cat."


@pytest.fixture(scope="module")
def backend(demo_server) -> Iterator[RuntimeEndpoint]:
    """The demo server as the default backend, with the demo model's chat template."""
    name = "sgl-pipeline-demo"
    ends = {role: (f"<|{role}|>", "<|end|>") for role in ("system", "user", "assistant")}
    register_chat_template(ChatTemplate(name, None, ends, stop_str=("<|end|>",)))
    endpoint = sgl.RuntimeEndpoint(demo_server.url, chat_template_name=name)
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)
    del chat_template_registry[name]


pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("backend")]


@sgl.function
def ask(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))


def test_two_gens_and_the_text_between_them():
    @sgl.function
    def two_questions(s):
        s += f"<|user|>{QUESTION}<|end|><|assistant|>"
        s += sgl.gen("sum", max_tokens=16, temperature=0)
        s += f"<|end|><|user|>{WORD}<|end|><|assistant|>"
        s += sgl.gen("letters", max_tokens=16, temperature=0)

    state = two_questions.run()
    assert (state["sum"], state["letters"]) == ("42", "c-a-t")
    assert state.text().endswith(f"42<|end|><|user|>{WORD}<|end|><|assistant|>c-a-t")


def test_roles_build_the_conversation_and_remember_it():
    @sgl.function
    def conversation(s):
        s += sgl.system("You are terse.")
        s += sgl.user(QUESTION)
        s += sgl.assistant(sgl.gen("sum", max_tokens=16, temperature=0))
        with s.user():
            s += WORD
        with s.assistant():
            s += sgl.gen("letters", max_tokens=16, temperature=0)

    state = conversation.run()
    assert (state["sum"], state["letters"]) == ("42", "c-a-t")
    roles = [(message["role"], message["content"]) for message in state.messages()]
    assert roles == [
        ("system", "You are terse."),
        ("user", QUESTION),
        ("assistant", "42"),
        ("user", WORD),
        ("assistant", "c-a-t"),
    ]


def test_a_gens_options_win_over_the_runs():
    @sgl.function
    def spell(s, **options):
        s += sgl.user(WORD)
        s += sgl.assistant(sgl.gen("answer", **options))

    greedy = {"temperature": 0}
    assert spell.run(max_tokens=1, **greedy, max_new_tokens=16)["answer"] == "c"
    assert spell.run(stop="-t", **greedy)["answer"] == "c-a"
    assert spell.run(stop=["-", "t"], **greedy)["answer"] == "c"
    assert spell.run(stop_token_ids=[51], **greedy)["answer"] in ("c-a-t", "c")
    longer = spell.run(min_tokens=12, max_tokens=12, **greedy)
    assert longer.get_meta_info("answer")["completion_tokens"] == 12
    forced = spell.run(top_k=1, temperature=1.0)
    assert forced["answer"] == "c-a-t"


def test_meta_info_tells_of_each_gen():
    state = ask.run(question=QUESTION)
    meta = state.get_meta_info("answer")
    assert meta["completion_tokens"] == 3
    assert meta["finish_reason"]["type"] == "stop"


def test_forks_share_the_prefix_and_join_their_variables(demo_server):
    @sgl.function
    def spellings(s, words):
        s += sgl.system("You spell words, and you do so letter by letter. " * 4)
        forks = s.fork(len(words))
        for fork, word in zip(forks, words, strict=True):
            fork += sgl.user(f"Spell the word {word}.")
            fork += sgl.assistant(sgl.gen("letters", max_tokens=16, temperature=0))
        forks.join()

    words = ["cat", "dog", "sun"]
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    before = demo_server.facts()["prefill_tokens"]
    state = spellings.run(words=words)
    assert state["letters"] == ["c-a-t", "d-o-g", "s-u-n"]
    # The 200 tokens in front are computed once; three times would be 600.
    assert demo_server.facts()["prefill_tokens"] - before < 400


def test_a_copy_goes_its_own_way():
    @sgl.function
    def two_ways(s):
        s += sgl.user(WORD)
        with s.copy() as other:
            other += sgl.assistant(sgl.gen("answer", max_tokens=1, temperature=0))
            s["short"] = other["answer"]
        s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))

    state = two_ways.run()
    assert (state["short"], state["answer"]) == ("c", "c-a-t")


@pytest.mark.parametrize("num_threads", [1, 4, "auto"])
def test_a_batch_is_answered_in_order(num_threads, capsys):
    words = ["cat", "dog", "sun", "hat", "pen"]
    states = ask.run_batch(
        [{"question": f"Spell the word {word}."} for word in words],
        num_threads=num_threads,
        progress_bar=True,
    )
    assert [state["answer"] for state in states] == ["-".join(word) for word in words]
    assert "5/5" in capsys.readouterr().err


def test_a_batch_can_be_read_as_it_comes():
    states = ask.run_batch([{"question": WORD}, {"question": QUESTION}], generator_style=True)
    assert [state["answer"] for state in states] == ["c-a-t", "42"]


def test_the_common_prefix_of_a_batch_is_found_by_tracing(backend):
    from sglang.lang.tracer import extract_prefix_by_tracing

    @sgl.function
    def prefixed(s, question):
        s += "The same beginning. "
        s += question
        s += sgl.gen("answer", max_tokens=1)

    assert extract_prefix_by_tracing(prefixed, backend) == "The same beginning. "
    prefixed.cache()
    traced = prefixed.trace(backend=backend)
    assert [type(node).__name__ for node in traced.nodes][-1] == "SglGen"


def test_a_stream_adds_up_to_the_text_and_to_the_variable():
    state = ask.run(question=WORD, stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() and len(pieces) > 2
    assert "".join(ask.run(question=WORD, stream=True).text_iter("answer")) == "c-a-t"


def test_a_stream_can_be_awaited():
    async def collect():
        state = ask.run(question=WORD, stream=True)
        return [piece async for piece in state.text_async_iter("answer", return_meta_data=True)]

    pieces = asyncio.run(collect())
    assert "".join(text for text, _ in pieces) == "c-a-t"
    counts = [meta["completion_tokens"] for _, meta in pieces]
    assert counts == sorted(counts)


def test_variables_scopes_and_nested_programs():
    def spell(s, word):
        """A part of a program is a plain function of its state."""
        s += sgl.user(f"Spell the word {word}.")
        s += sgl.assistant(sgl.gen(f"{word}_letters", max_tokens=16, temperature=0))

    @sgl.function
    def outer(s):
        s["kept"] = "by hand"
        with s.var_scope("first"):
            spell(s, "cat")
        s["other"] = ask.run(question=QUESTION)["answer"]
        spell(s, "dog")
        assert s["dog_letters"] == "d-o-g"
        assert "dog_letters" in s and "nothing" not in s

    state = outer.run()
    assert (state["cat_letters"], state["kept"], state["other"]) == ("c-a-t", "by hand", "42")
    assert state["first"] == "<|user|>Spell the word cat.<|end|><|assistant|>c-a-t<|end|>"


def test_arguments_can_be_bound_and_values_returned():
    @sgl.function
    def bound(s, question, extra):
        s += sgl.user(question + extra) + sgl.assistant(sgl.gen("a", max_tokens=8, temperature=0))
        return extra

    state = bound.bind(extra="").run(question=QUESTION)
    assert state["a"] == "42" and state.ret_value == ""


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_a_refusal_is_the_error_of_the_state():
    @sgl.function
    def refused(s):
        s += sgl.user(QUESTION)
        s += sgl.assistant(sgl.gen("answer", max_tokens=100_000))

    state = refused.run()
    state.sync()
    assert "100000" in str(state.error())
    with pytest.raises(KeyError):
        state["answer"]
    assert ask.run(question=QUESTION)["answer"] == "42"


def test_the_backend_tells_of_the_server_and_flushes(backend):

    def cached_tokens():
        return ask.run(question=QUESTION).get_meta_info("answer")["cached_tokens"]

    assert [cached_tokens(), cached_tokens()][1] > 0
    sgl.flush_cache()
    assert cached_tokens() == 0
    assert sgl.get_server_info()["internal_states"][0]["num_stages"] == 2
    assert backend.get_model_name().endswith("demo_model")


@pytest.mark.parametrize(
    "program",
    [
        upstream_programs.test_mt_bench,
        upstream_programs.test_parallel_decoding,
        upstream_programs.test_stream,
    ],
)
def test_upstreams_own_programs_run(program):
    """Those that look at the form and not at what a large model knows."""
    program()


def test_forks_can_be_appended_as_text(monkeypatch):
    """Upstream's other way asks for a route that its own server no longer has."""
    monkeypatch.setattr(global_config, "enable_parallel_encoding", False)
    upstream_programs.test_parallel_encoding(check_answer=False)
    upstream_programs.test_expert_answer(check_answer=False)
