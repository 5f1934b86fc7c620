"""The questions of a soak's clients, and the rules for an answer.

Drawn by `soak.py` from a seed, so that a run can be asked again. Knows the wire formats of
`/generate` and of OpenAI's two completions, and nothing of how requests are sent.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
# Answered before the load begins and again under it, greedily: the answers must be the same.
PROBES = (
    "What is 17 + 25?",
    "Spell the word cat.",
    "Please repeat this sentence: the dog ran home.",
    "Sort the digits 4 1 3.",
)
# What a server may not have yet; each is used where it is answered with 200.
OPTIONAL_FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "log-probabilities": (GENERATE, {"return_logprob": True, "top_logprobs_num": 2}),
    "grammars": (GENERATE, {"sampling_params": {"regex": "[a-z]{1,20}"}}),
}

Departure = Literal["stays", "leaves", "aborts"]
DEPARTURES: tuple[Departure, ...] = ("leaves", "leaves", "leaves", "aborts")
_WORDS = "the dog ran home and a small bird sang in one old tree near my green house".split()
_NUM_SHARED_PREFIXES = 12
_LONGEST_WAIT_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. A client that `leaves` closes the connection after `departs_after_s`, one that
    `aborts` then names the request's id to the server. `expected_text` is set for a probe."""

    path: str
    body: dict[str, Any]
    num_answers: int = 1
    departure: Departure = "stays"
    departs_after_s: float = 0.0
    expected_text: str | None = None


def probe(question: str) -> Ask:
    """A greedy question over OpenAI's chat route."""
    message = {"role": "user", "content": question}
    body = {"model": "soak", "messages": [message], "temperature": 0, "max_tokens": 48}
    return Ask(path=CHAT, body=body)


class RequestMix:
    """Draws requests: every route, streamed or not, one answer or several, odd lengths, shared and
    private prefixes, stops, priorities, penalties, biases; some that the client gives up.

    Args:
        known_answers: to each of PROBES.
        departing_share: of the requests, how many the client leaves before the end.
        features: those of OPTIONAL_FEATURES that the server has.
        departures: how those who depart do it, each as likely as another.
    """

    def __init__(
        self,
        seed: int,
        known_answers: Mapping[str, str],
        departing_share: float,
        features: Iterable[str] = (),
        departures: Sequence[Departure] = DEPARTURES,
    ) -> None:
        self._random = random.Random(seed)
        self._known_answers = dict(known_answers)
        self._departing_share = departing_share
        self._features = tuple(features)
        self._departures = departures
        self._prefixes = [self._words(length) for length in range(1, _NUM_SHARED_PREFIXES * 9, 9)]
        self._num_drawn = 0

    def draw(self) -> Ask:
        """The next request."""
        chance = self._random
        self._num_drawn += 1
        if self._known_answers and chance.random() < 0.1:
            question, answer = chance.choice(list(self._known_answers.items()))
            asked = probe(question)
            return Ask(path=asked.path, body=asked.body, expected_text=answer)
        path = chance.choice((GENERATE, GENERATE, CHAT, COMPLETIONS))
        num_answers = chance.choice((1, 1, 1, 1, 2, 3))
        departure: Departure = "stays"
        if chance.random() < self._departing_share:
            departure = chance.choice(self._departures)
        body = self._generate_body(num_answers) if path == GENERATE else self._openai_body(path)
        if path != GENERATE:
            body["n"] = num_answers
        if departure == "aborts" and num_answers > 1:
            departure = "leaves"
        if departure == "aborts":
            body["rid"] = f"soak-{self._num_drawn}"
        body["stream"] = chance.random() < 0.5
        return Ask(
            path=path,
            body=body,
            num_answers=num_answers,
            departure=departure,
            departs_after_s=chance.choice((0.0, 1.0)) * chance.uniform(0, _LONGEST_WAIT_S),
        )

    def _generate_body(self, num_answers: int) -> dict[str, Any]:
        chance = self._random
        sampling = self._sampling() | {"max_new_tokens": chance.randint(1, 160), "n": num_answers}
        if chance.random() < 0.1:
            sampling["min_new_tokens"] = min(8, sampling["max_new_tokens"])
        if chance.random() < 0.1:
            sampling["stop_token_ids"] = [chance.randrange(3, 300)]
        body: dict[str, Any] = {"text": self._prompt(), "sampling_params": sampling}
        if chance.random() < 0.2:
            body["priority"] = chance.randrange(5)
        if "log-probabilities" in self._features and chance.random() < 0.15:
            body |= {"return_logprob": True, "top_logprobs_num": chance.randrange(3)}
        if "grammars" in self._features and chance.random() < 0.1:
            sampling["regex"] = "[a-z]{1,20}"
        return body

    def _openai_body(self, path: str) -> dict[str, Any]:
        chance = self._random
        body = self._sampling() | {"model": "soak", "max_tokens": chance.randint(1, 160)}
        if chance.random() < 0.1:
            body["logit_bias"] = {str(chance.randrange(300)): chance.uniform(-20, 5)}
        if chance.random() < 0.3:
            body["seed"] = chance.randrange(1000)
        if path == COMPLETIONS:
            return body | {"prompt": self._prompt()}
        return body | {"messages": [{"role": "user", "content": self._prompt()}]}

    def _sampling(self) -> dict[str, Any]:
        chance = self._random
        options = {
            "top_p": 0.9,
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "stop": chance.choice((["e"], ["the ", "\n"])),
        }
        chosen = {name: value for name, value in options.items() if chance.random() < 0.15}
        return {"temperature": chance.choice((0, 0.7, 1.5)), **chosen}

    def _prompt(self) -> str:
        """Shared by some and continued, or private; most short, a few of a thousand tokens."""
        longest = self._random.choice((3, 20, 20, 60, 250))
        own = self._words(self._random.randint(1, longest))
        return (
            f"{self._random.choice(self._prefixes)} {own}" if self._random.random() < 0.5 else own
        )

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=count))


@dataclass(slots=True)
class Answer:
    """The answer to one request: `text` of the first answer, the reason why each ended."""

    text: str = ""
    finish_reasons: tuple[str, ...] = ()
    error: str = ""


def read_answer(path: str, payload: str, is_stream: bool) -> Answer:
    """Reads a whole body, or all events of a stream, as `path` writes them."""
    if not is_stream:
        whole = json.loads(payload)
        return _read_parts(path, whole if isinstance(whole, list) else [whole], is_stream)
    events = [line.removeprefix("data: ") for line in payload.splitlines() if line]
    if not events or events[-1] != "[DONE]":
        return Answer(error="the stream ended without [DONE]")
    return _read_parts(path, [json.loads(event) for event in events[:-1]], is_stream)


def _read_parts(path: str, parts: list[dict[str, Any]], is_stream: bool) -> Answer:
    answer = Answer()
    for part in parts:
        if "error" in part:
            answer.error = str(part["error"])
        elif path == GENERATE:
            answer.text = part["text"]
            reason = part["meta_info"]["finish_reason"]
            answer.finish_reasons += (reason["type"],) if reason else ()
        else:
            for choice in part["choices"]:
                piece = choice.get("delta" if is_stream else "message", choice)
                text = piece.get("content" if path == CHAT else "text") or ""
                answer.text += text if choice["index"] == 0 else ""
                reason = choice["finish_reason"]
                answer.finish_reasons += (reason,) if reason else ()
    return answer


def what_is_wrong(ask: Ask, answer: Answer) -> str:
    """Empty for an answer that is whole: all ended by themselves, and a probe's text is right."""
    if answer.error:
        return answer.error
    allowed = {"stop", "length"} | ({"abort"} if ask.departure == "aborts" else set())
    if len(answer.finish_reasons) != ask.num_answers or not allowed.issuperset(
        answer.finish_reasons
    ):
        return f"{ask.num_answers} answers were asked, they ended as {answer.finish_reasons}"
    if ask.expected_text is not None and answer.text != ask.expected_text:
        return f"answered {answer.text!r} where it answered {ask.expected_text!r} alone"
    return ""
