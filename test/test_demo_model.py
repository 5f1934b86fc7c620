"""The demo model is the quality yardstick: how it is served must not change a single answer."""

import gc
from functools import cache

import pytest
from support.local_pipeline import LocalPipeline
from transformers import AutoTokenizer

from benchmark.demo_model.evaluate import Reply, held_out_questions, score
from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.requests import GREEDY, Request, StopRules

pytestmark = pytest.mark.slow

QUESTIONS_PER_TASK = 25
END = 2
SPLITS = {1: (16,), 2: (9, 7), 4: (5, 4, 4, 3)}


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@cache
def questions():
    return held_out_questions(QUESTIONS_PER_TASK, seed=99)


@cache
def answers(num_stages: int, policy: str, every: int = 1) -> list[Reply]:
    """Greedy answers in fp32 to each `every`th question, all of which arrive at once."""
    pipeline = LocalPipeline(
        DEMO_MODEL,
        SPLITS[num_stages],
        num_pages=1024,
        throttle=ThrottleArgs(policy=policy, max_prefill_tokens=256),
        attention_backend="auto",
        layer_kernels="auto",
    )
    stops = StopRules(max_new_tokens=96, stop_token_ids=frozenset({END}))
    requests = [
        Request(str(index), prompt_ids(question.text), GREEDY, stops)
        for index, question in enumerate(questions()[::every])
    ]
    replies = [
        Reply(tokenizer().decode(ids, skip_special_tokens=True), ids[-1] == END)
        for ids in pipeline.run(requests)
    ]
    del pipeline
    gc.collect()  # it is in cycles, and holds 300 MB
    return replies


def prompt_ids(question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer().encode(text, add_special_tokens=False)


def test_at_least_95_percent_of_held_out_questions_are_answered_right():
    scores = score(questions(), answers(1, "throttle"))
    right = scores[-1].right  # the row of all tasks together
    print({one.task: one.percent for one in scores})
    assert right >= 0.95 * len(questions())


# A depth between those that meet all questions has some.
@pytest.mark.parametrize(("num_stages", "every"), [(2, 8), (4, 1)])
def test_answers_are_the_same_for_every_number_of_stages(num_stages, every):
    assert answers(num_stages, "throttle", every) == answers(1, "throttle")[::every]


# Policies at other depths are for test_token_identity.py.
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_answers_are_the_same_for_every_policy(policy):
    assert answers(4, policy, every=8) == answers(1, "throttle")[::8]


def test_the_files_are_small_enough_to_ship():
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 12e6
