"""Checks of the demo model's question generator and tokenizer.

Every answer is recomputed from the question's text alone, by code that shares nothing with the
generator.  The held-out split must never overlap training questions, and seeds must be stable.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmark.demo_model.conversation import IGNORED_LABEL, ConversationMaker
from benchmark.demo_model.evaluate import Reply, held_out_questions, score, server_answerer
from benchmark.demo_model.tasks import (
    TASK_NAMES,
    TRAINING_TASK_NAMES,
    Question,
    is_held_out,
    make_question,
)
from benchmark.demo_model.tokenizer import CHAT_TEMPLATE, build_tokenizer

QUESTIONS_PER_TASK = 400
FIRST_HELD_OUT_SUMS = ["sum 0 18", "sum 0 19", "sum 0 37"]
FRAME_TEXT = """
a add appear are around arrange ascending away back backwards by calculate compute copy count
descending digits do does exactly from give high how in is it largest letter letters low many me
minus much of order please plus put repeat reverse s say sentence smallest sort sorted spell
spelled spelling subtract sum take the there this times to turn what word write you
"""
FRAME_WORDS = set(FRAME_TEXT.split())


def draw(task: str, *, held_out: bool, seed: int = 7) -> list[Question]:
    source = random.Random(seed)
    return [make_question(task, source, held_out=held_out) for _ in range(QUESTIONS_PER_TASK)]


def subject_word(text: str) -> str:
    """Find the word a question is about by its place in the few sentence shapes there are."""
    quoted = re.findall(r'"([A-Za-z]+)"', text)
    if quoted:
        return str(quoted[-1])
    patterns = (
        r"this word: ([A-Za-z]+)",
        r"(?:the word|spelling of|appear in|are in|are there in|in the word) ([A-Za-z]+)",
        r"[Ii]s ([A-Za-z]+) spelled",
        r"[Ww]rite ([A-Za-z]+) backwards",
        r"[Cc]ount the letter [a-z] in ([A-Za-z]+)",
        r"(?:[Rr]everse|[Ss]pell|[Dd]o you spell) ([A-Za-z]+)",
    )
    cleaned = text.replace("there in the word", "the word").replace("in the word", "the word")
    for pattern in patterns:
        found = re.search(pattern, cleaned)
        if found:
            return found.group(1)
    raise AssertionError(f"no word found in {text!r}")


def solve_sum(text: str) -> str:
    first, second = map(int, re.findall(r"\d+", text))
    return f"{first + second}"


def solve_difference(text: str) -> str:
    first, second = map(int, re.findall(r"\d+", text))
    swapped = "ubtract" in text
    return f"{second - first}" if swapped or " away from " in text else f"{first - second}"


def solve_reverse(text: str) -> str:
    return "".join(reversed(subject_word(text)))


def solve_spell(text: str) -> str:
    return re.sub(r"(?<=.)(?=.)", "-", subject_word(text))


def solve_count(text: str) -> str:
    patterns = (
        r"[Hh]ow many ([a-z])(?:'s| are)",
        r"the letter ([a-z]) ",
        r'does "([a-z])" appear',
        r"the ([a-z])'s in",
        r"letters are ([a-z])",
    )
    letter = next(found.group(1) for p in patterns if (found := re.search(p, text)))
    total = 0
    for character in subject_word(text):
        total += character == letter
    return f"{total}"


def solve_sort(text: str) -> str:
    span = re.search(r"\d(?:[\d, ]*\d)?", text)
    assert span is not None
    shown = span.group()
    downwards = any(mark in text for mark in ("descending", "high to low", "largest to smallest"))
    counts = [shown.count(str(digit)) for digit in range(10)]
    ordered = "".join(str(digit) * counts[digit] for digit in range(10))
    separator = ", " if "," in shown else " " if " " in shown else ""
    return separator.join(ordered[::-1] if downwards else ordered)


def solve_repeat(text: str) -> str:
    quoted = re.search(r'"(.*)"', text)
    return quoted.group(1) if quoted else text.split(": ", 1)[1]


SOLVERS: dict[str, Callable[[str], str]] = {
    "sum": solve_sum,
    "difference": solve_difference,
    "reverse": solve_reverse,
    "spell": solve_spell,
    "count": solve_count,
    "sort": solve_sort,
    "repeat": solve_repeat,
}


@pytest.mark.parametrize("task", TASK_NAMES)
@pytest.mark.parametrize("held_out", [False, True])
def test_answers_agree_with_an_independent_solver(task: str, held_out: bool) -> None:
    for question in draw(task, held_out=held_out):
        assert question.answer == SOLVERS[task](question.text), question.text


def test_helper_answers_are_right() -> None:
    for question in draw("tally", held_out=False):
        word = question.content_key.removeprefix("word ")
        assert word in question.text
        pairs = re.findall(r"([a-z])(\d)", question.answer)
        assert " ".join(map("".join, pairs)) == question.answer
        assert all(len(word.split(letter)) - 1 == int(count) for letter, count in pairs)
        assert len(pairs) == 1 or {letter for letter, _ in pairs} == set(word)


@pytest.mark.parametrize("task", TRAINING_TASK_NAMES)
def test_held_out_content_is_disjoint_from_training(task: str) -> None:
    training = {question.content_key for question in draw(task, held_out=False)}
    held_out = {question.content_key for question in draw(task, held_out=True)}
    assert not training & held_out
    assert all(is_held_out(key) for key in held_out)
    assert not any(is_held_out(key) for key in training)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_same_seed_gives_same_questions_and_other_seed_gives_others(task: str) -> None:
    assert draw(task, held_out=False) == draw(task, held_out=False)
    assert draw(task, held_out=False) != draw(task, held_out=False, seed=8)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_every_task_has_at_least_five_wordings(task: str) -> None:
    """Masks what a question is about and counts the different frames that remain."""
    frames = set()
    for question in draw(task, held_out=False):
        words = re.findall(r"[a-z]+", question.text.lower().split(":")[0])
        frames.add(" ".join(word for word in words if word in FRAME_WORDS))
    assert len(frames) >= 5


def test_the_split_is_stable_across_machines() -> None:
    """Pins the split: were it to move, a shipped model would be scored on what it was taught."""
    keys = [f"sum {first} {second}" for first in range(100) for second in range(first, 100)]
    held_out = [key for key in keys if is_held_out(key)]
    assert 0.08 < len(held_out) / len(keys) < 0.12
    assert held_out[:3] == FIRST_HELD_OUT_SUMS


def test_negative_differences_occur() -> None:
    assert any(question.answer.startswith("-") for question in draw("difference", held_out=False))


def test_unknown_task_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="unknown task 'poem'"):
        make_question("poem", random.Random(0), held_out=False)


@pytest.mark.parametrize(
    "text", ["hello 42", "  two  spaces\n\ttab", "Žluťoučký 猫 🙂", "a-b-c", ""]
)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_letters_and_digits_are_single_tokens() -> None:
    assert len(build_tokenizer().encode("word 2026").ids) == len("word 2026")


def test_packed_conversation_is_what_the_chat_template_renders() -> None:
    jinja2 = pytest.importorskip("jinja2")
    maker = ConversationMaker()
    question = make_question("sum", random.Random(1), held_out=False)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": question.text}]},
        {"role": "assistant", "content": question.answer},
    ]
    rendered = jinja2.Template(CHAT_TEMPLATE).render(messages=messages)
    assert build_tokenizer().encode(rendered).ids == maker.turn(question)[0]


def test_only_the_assistant_is_supervised() -> None:
    maker = ConversationMaker()
    token_ids, labels = maker.conversation(256, [1.0] * len(TRAINING_TASK_NAMES), random.Random(3))
    assert len(token_ids) == len(labels) == 256
    for position, label in enumerate(labels[:-1]):
        assert label in (IGNORED_LABEL, token_ids[position + 1])
    assert 0.05 < sum(label != IGNORED_LABEL for label in labels) / 256 < 0.6


def test_score_needs_the_exact_text_and_a_stop() -> None:
    questions = held_out_questions(1, seed=0)
    replies = [Reply(question.answer, True) for question in questions]
    replies[0] = Reply(questions[0].answer, False)
    replies[1] = Reply(questions[1].answer + " ", True)
    scores = {row.task: row for row in score(questions, replies)}
    assert scores["all"].right == len(questions) - 2
    assert scores[questions[0].task].percent == 0.0
    assert scores["all"].stopped == len(questions) - 1


def test_server_scoring_keeps_the_order_of_questions() -> None:
    questions = held_out_questions(3, seed=1)
    answers = {question.text: question.answer for question in questions}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = answers[body["messages"][-1]["content"]]
            choice = {"message": {"content": text}, "finish_reason": "stop"}
            payload = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test output quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        replies = server_answerer(url, "demo", concurrency=4, timeout=10.0)(questions)
    finally:
        server.shutdown()
        server.server_close()
    assert score(questions, replies)[-1].right == len(questions)
