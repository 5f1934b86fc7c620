"""Packs questions and answers into token sequences of one fixed length.

`train.py` takes its training batches and its held-out progress questions from here.  The token
sequence must be exactly what the chat template in `tokenizer.py` renders, so that a served model
sees prompts of the kind it was trained on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark.demo_model.tasks import TRAINING_TASK_NAMES, Question, make_question, system_prompt
from benchmark.demo_model.tokenizer import (
    ASSISTANT_ID,
    END_ID,
    SYSTEM_ID,
    USER_ID,
    build_tokenizer,
)

IGNORED_LABEL = -100
SYSTEM_PROMPT_SHARE = 0.3


@dataclass(frozen=True)
class Batch:
    """Token ids and next-token labels, both [rows, length]; labels hold `IGNORED_LABEL`."""

    token_ids: Tensor
    labels: Tensor


class ConversationMaker:
    """Turns seeded random draws into batches of multi-turn conversations."""

    def __init__(self) -> None:
        tokenizer = build_tokenizer()
        # All generated text is ASCII, so a table is enough and far faster than the tokenizer.
        self._id_by_byte = [tokenizer.encode(chr(code)).ids[0] for code in range(128)]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ASCII `text`."""
        return [self._id_by_byte[byte] for byte in text.encode("ascii")]

    def turn(self, question: Question) -> tuple[list[int], list[bool]]:
        """Return ids of one user and assistant turn, and which of them the model must produce."""
        prompt = [USER_ID, *self.encode(question.text), END_ID, ASSISTANT_ID]
        reply = [*self.encode(question.answer), END_ID]
        return prompt + reply, [False] * len(prompt) + [True] * len(reply)

    def conversation(
        self, length: int, task_weights: list[float], random_source: random.Random
    ) -> tuple[list[int], list[int]]:
        """Return `length` input ids and as many labels of one packed training conversation."""
        token_ids: list[int] = []
        supervised: list[bool] = []
        if random_source.random() < SYSTEM_PROMPT_SHARE:
            prompt = self.encode(system_prompt(random_source))
            token_ids = [SYSTEM_ID, *prompt, END_ID]
            supervised = [False] * len(token_ids)
        # One token more than `length`, because labels are the inputs shifted by one.
        while len(token_ids) <= length:
            task = random_source.choices(TRAINING_TASK_NAMES, weights=task_weights)[0]
            ids, flags = self.turn(make_question(task, random_source, held_out=False))
            token_ids += ids
            supervised += flags
        labels = [
            token if flag else IGNORED_LABEL
            for token, flag in zip(token_ids[1 : length + 1], supervised[1:], strict=False)
        ]
        return token_ids[:length], labels

    def batch(
        self, rows: int, length: int, task_weights: list[float], random_source: random.Random
    ) -> Batch:
        """Return a training batch of `rows` conversations of `length` tokens."""
        pairs = [self.conversation(length, task_weights, random_source) for _ in range(rows)]
        inputs, labels = zip(*pairs, strict=True)
        return Batch(torch.tensor(inputs), torch.tensor(labels))

    def question_batch(self, questions: list[Question]) -> Batch:
        """Return one row per single-turn question, padded on the right to the longest."""
        turns = [self.turn(question) for question in questions]
        length = max(len(ids) for ids, _ in turns) - 1
        token_ids = torch.zeros(len(turns), length, dtype=torch.long)
        labels = torch.full((len(turns), length), IGNORED_LABEL)
        for row, (ids, flags) in enumerate(turns):
            token_ids[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            targets = [
                token if flag else IGNORED_LABEL for token, flag in zip(ids, flags, strict=True)
            ]
            labels[row, : len(ids) - 1] = torch.tensor(targets[1:])
        return Batch(token_ids, labels)
