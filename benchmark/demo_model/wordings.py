"""The ways in which the demo model's questions are put, and its usual system messages.

`tasks.py` fills the braces of one wording with the content of a question.  Wordings must never
hold content themselves, since only content is split into training and held-out parts.
"""

from __future__ import annotations

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a concise assistant.",
    "Answer briefly.",
    "Be short and exact.",
    "You answer small questions about numbers and words.",
    "Give only the answer.",
)
SUM_WORDINGS = (
    "What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.", "How much is {a} plus {b}?", "{a} plus {b}?", "What is {a}+{b}?",
    "Compute {a}+{b}.",
)  # fmt: skip
DIFFERENCE_WORDINGS = (
    "What is {a} - {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?", "How much is {a} minus {b}?",
    "Calculate {a} - {b}.", "Take {b} away from {a}.", "{a} minus {b}?", "What is {a}-{b}?",
    "Compute {a}-{b}.",
)  # fmt: skip
REVERSE_WORDINGS = (
    "Reverse the word {w}.", "Write {w} backwards.", "What is {w} spelled backwards?",
    "Reverse {w}.", 'Reverse the word "{w}".', "Turn the word {w} around.",
    "How do you write {w} backwards?", "Reverse this word: {w}",
)  # fmt: skip
SPELL_WORDINGS = (
    "Spell the word {w}.", "How do you spell {w}?", "Spell {w}.", 'Spell the word "{w}".',
    "Spell {w} letter by letter.", "Give me the spelling of {w}.", "Spell this word: {w}",
)  # fmt: skip
COUNT_WORDINGS = (
    "How many times does the letter {c} appear in {w}?", "How many {c}'s are in {w}?",
    "Count the letter {c} in {w}.", "How many {c} are there in the word {w}?",
    'How many times does "{c}" appear in "{w}"?', "Count the {c}'s in the word {w}.",
    "In the word {w}, how many letters are {c}?",
)  # fmt: skip
TALLY_WORDINGS = (
    "Count every letter in {w}.", "How often does each letter appear in {w}?",
    "Tally the letters of {w}.",
)  # fmt: skip
TALLY_ONE_WORDINGS = (
    "Tally the letter {c} in {w}.", "Tally {c} in the word {w}.", "How many {c} to tally in {w}?",
)  # fmt: skip
ASCENDING_WORDINGS = (
    "Sort {d}.", "Sort the digits {d}.", "Sort {d} in ascending order.",
    "Put {d} in order from smallest to largest.", "Arrange the digits {d} in ascending order.",
    "Order the digits {d} from low to high.", "What is {d} sorted in ascending order?",
)  # fmt: skip
DESCENDING_WORDINGS = (
    "Sort {d} from high to low.", "Sort the digits {d} in descending order.",
    "Sort {d} in descending order.", "Put {d} in order from largest to smallest.",
    "Arrange the digits {d} in descending order.", "Order the digits {d} from high to low.",
    "What is {d} sorted in descending order?",
)  # fmt: skip
REPEAT_WORDINGS = (
    "Repeat exactly: {s}", "Repeat this sentence: {s}", 'Say "{s}" back to me.',
    "Repeat after me: {s}", "Copy this sentence exactly: {s}", 'Repeat the sentence "{s}"',
    "Say this: {s}", "Write this sentence again: {s}",
)  # fmt: skip
