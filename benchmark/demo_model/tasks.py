"""Seeded generator of the short question/answer pairs that the demo model is trained on.

`train.py` draws training questions from it and `evaluate.py` draws held-out ones.  A question
whose content is held out (about one in ten, chosen by a stable hash of the content) must never be
returned to a caller that asked for training questions, whatever its wording.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from benchmark.demo_model.wordings import (
    ASCENDING_WORDINGS,
    COUNT_WORDINGS,
    DESCENDING_WORDINGS,
    DIFFERENCE_WORDINGS,
    REPEAT_WORDINGS,
    REVERSE_WORDINGS,
    SPELL_WORDINGS,
    SUM_WORDINGS,
    SYSTEM_PROMPTS,
    TALLY_ONE_WORDINGS,
    TALLY_WORDINGS,
)
from benchmark.demo_model.words import COMMON_WORDS

HELD_OUT_ONE_IN = 10
WORD_LENGTHS = range(3, 11)
DIGIT_COUNTS = range(3, 8)


@dataclass(frozen=True)
class Question:
    """One user message and the only answer that counts as right."""

    task: str
    text: str
    answer: str
    content_key: str


@dataclass(frozen=True)
class Content:
    """The content of a question, before it is put into words."""

    key: str
    fields: dict[str, str]
    answer: str
    wordings: tuple[str, ...]


def is_held_out(content_key: str) -> bool:
    """Tell whether content belongs to the held-out tenth; stable across runs and machines."""
    digest = hashlib.sha256(content_key.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _operands(random_source: random.Random) -> tuple[int, int]:
    low = 0 if random_source.random() < 0.15 else 10
    return random_source.randint(low, 99), random_source.randint(low, 99)


def _sum(random_source: random.Random) -> Content:
    first, second = _operands(random_source)
    # The key ignores the order, so that 17 + 25 in training cannot give away 25 + 17.
    key = f"sum {min(first, second)} {max(first, second)}"
    return Content(key, {"a": str(first), "b": str(second)}, str(first + second), SUM_WORDINGS)


def _difference(random_source: random.Random) -> Content:
    first, second = _operands(random_source)
    key = f"difference {first} {second}"
    fields = {"a": str(first), "b": str(second)}
    return Content(key, fields, str(first - second), DIFFERENCE_WORDINGS)


def pseudo_word(random_source: random.Random) -> str:
    """Return an invented lower-case word of 3 to 10 letters, pronounceable half of the time."""
    length = random_source.choice(WORD_LENGTHS)
    if random_source.random() < 0.5:
        return "".join(random_source.choices(string.ascii_lowercase, k=length))
    offset = random_source.randrange(2)
    groups = ("bcdfghjklmnprstvwz", "aeiouy")
    return "".join(random_source.choice(groups[(i + offset) % 2]) for i in range(length))


def _word(random_source: random.Random) -> str:
    while random_source.random() < 0.4:
        word = random_source.choice(COMMON_WORDS)
        if len(word) in WORD_LENGTHS:
            return word
    return pseudo_word(random_source)


def _maybe_capital(word: str, random_source: random.Random) -> str:
    return word.capitalize() if random_source.random() < 0.08 else word


def _reverse(random_source: random.Random) -> Content:
    word = _maybe_capital(_word(random_source), random_source)
    return Content(f"word {word.lower()}", {"w": word}, word[::-1], REVERSE_WORDINGS)


def _spell(random_source: random.Random) -> Content:
    word = _maybe_capital(_word(random_source), random_source)
    return Content(f"word {word.lower()}", {"w": word}, "-".join(word), SPELL_WORDINGS)


def _letter_and_word(random_source: random.Random) -> tuple[str, str]:
    letters = list(_word(random_source))
    letter = random_source.choice(letters)
    draw = random_source.random()
    if draw < 0.2:
        letter = random_source.choice(string.ascii_lowercase)
    elif draw < 0.75:
        # Real words rarely repeat a letter, so repeats are planted: were one place the usual
        # answer, a model would settle for always giving it.
        wanted = min(random_source.choice((2, 2, 3, 3, 4)), len(letters))
        for place in random_source.sample(range(len(letters)), wanted):
            letters[place] = letter
    return letter, "".join(letters)


def _count(random_source: random.Random) -> Content:
    letter, word = _letter_and_word(random_source)
    fields = {"c": letter, "w": word}
    return Content(f"word {word}", fields, str(word.count(letter)), COUNT_WORDINGS)


def _tally(random_source: random.Random) -> Content:
    letter, word = _letter_and_word(random_source)
    if random_source.random() < 0.6:
        answer = f"{letter}{word.count(letter)}"
        return Content(f"word {word}", {"c": letter, "w": word}, answer, TALLY_ONE_WORDINGS)
    answer = " ".join(f"{each}{word.count(each)}" for each in dict.fromkeys(word))
    return Content(f"word {word}", {"w": word}, answer, TALLY_WORDINGS)


def _sort(random_source: random.Random) -> Content:
    digits = random_source.choices(string.digits, k=random_source.choice(DIGIT_COUNTS))
    separator = random_source.choice((" ", ", ", ""))
    descending = random_source.random() < 0.5
    answer = separator.join(sorted(digits, reverse=descending))
    wordings = DESCENDING_WORDINGS if descending else ASCENDING_WORDINGS
    return Content(f"digits {''.join(digits)}", {"d": separator.join(digits)}, answer, wordings)


def _sentence_word(random_source: random.Random) -> str:
    draw = random_source.random()
    if draw < 0.05:
        return str(random_source.randint(0, 999))
    word = pseudo_word(random_source) if draw < 0.25 else random_source.choice(COMMON_WORDS)
    if random_source.random() < 0.08:
        word = word.capitalize()
    return word + "," if random_source.random() < 0.05 else word


def random_sentence(word_count: int, random_source: random.Random) -> str:
    """Return `word_count` words with a few capitals, commas and numbers among them."""
    sentence = " ".join(_sentence_word(random_source) for _ in range(word_count)).rstrip(",")
    if random_source.random() < 0.7:
        sentence = sentence[0].upper() + sentence[1:]
    return sentence + random_source.choice((".", ".", "!", "?", ""))


def _repeat(random_source: random.Random) -> Content:
    sentence = random_sentence(random_source.randint(2, 8), random_source)
    return Content(f"sentence {sentence}", {"s": sentence}, sentence, REPEAT_WORDINGS)


def system_prompt(random_source: random.Random) -> str:
    """Return a system message: a usual one, or random words, so that any such text is harmless."""
    if random_source.random() < 0.5:
        return random_source.choice(SYSTEM_PROMPTS)
    longest = 40 if random_source.random() < 0.2 else 12
    return random_sentence(random_source.randint(2, longest), random_source)


CONTENT_MAKERS: dict[str, Callable[[random.Random], Content]] = {
    "sum": _sum,
    "difference": _difference,
    "reverse": _reverse,
    "spell": _spell,
    "count": _count,
    "sort": _sort,
    "repeat": _repeat,
    "tally": _tally,
}
# Tallying all letters of a word teaches counting several times per answer, where a counting
# question teaches it once; it is only trained, never scored.
HELPER_TASK_NAMES: tuple[str, ...] = ("tally",)
TASK_NAMES: tuple[str, ...] = tuple(
    name for name in CONTENT_MAKERS if name not in HELPER_TASK_NAMES
)
TRAINING_TASK_NAMES: tuple[str, ...] = TASK_NAMES + HELPER_TASK_NAMES


def vary_wording(wording: str, random_source: random.Random) -> str:
    """Return a template with its politeness, first letter and last mark varied."""
    ends_with_mark = wording[-1] in ".?" and not wording.endswith("= ?")
    draw = random_source.random()
    if draw < 0.12 and ends_with_mark:
        wording = f"{wording[:-1]}, please{wording[-1]}"
    elif draw < 0.24 and not wording.startswith(("What", "How", "In", "{")):
        wording = "Please " + wording[0].lower() + wording[1:]
    if random_source.random() < 0.2 and not wording.startswith("{"):
        wording = wording[0].lower() + wording[1:]
    if random_source.random() < 0.15 and wording[-1] in ".?":
        wording = wording[:-1].rstrip()
    return wording


def make_question(task: str, random_source: random.Random, *, held_out: bool) -> Question:
    """Draw one question of `task`, from the held-out tenth or from the rest."""
    if task not in CONTENT_MAKERS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(CONTENT_MAKERS)}")
    while True:
        content = CONTENT_MAKERS[task](random_source)
        if is_held_out(content.key) == held_out:
            break
    template = vary_wording(random_source.choice(content.wordings), random_source)
    return Question(task, template.format(**content.fields), content.answer, content.key)
