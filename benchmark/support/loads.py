"""The loads that `sglang.bench_serving` can put on a server, as its own flags.

Clients ignore the end-of-sequence token, so the same load is the same work for every engine.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from benchmark.models.make_model import FIRST_FILLER
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

MIN_TOKENS = 2
# The text that a model's tokenizer makes of the simulator's ids, about a token for each.
Texts = Callable[[Sequence[int]], str]
# Ids that a seed may leave out before its first prompt, so that seeds begin at different places.
_LEFT_OUT = 100_000


class ClientLoad(Protocol):
    """The part of a load that `bench_serving.measure` needs."""

    @property
    def num_requests(self) -> int: ...
    def client_flags(self) -> list[str]:
        """The load as `sglang.bench_serving` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts of random ids, lengths drawn from [ratio * n, n].

    With `num_clients` the next request begins when one has been answered, so that at most that many
    are on the way; None for no bound.
    """

    num_requests: int = 64
    input_tokens: int = 256
    output_tokens: int = 64
    range_ratio: float = 0.25
    seed: int = 1
    requests_per_s: float = float("inf")
    num_clients: int | None = None

    def client_flags(self) -> list[str]:
        flags: dict[str, object] = {
            "--dataset-name": "random-ids",
            "--num-prompts": self.num_requests,
            "--random-input-len": self.input_tokens,
            "--random-output-len": self.output_tokens,
            "--random-range-ratio": self.range_ratio,
            "--seed": self.seed,
            "--request-rate": self.requests_per_s,
        }
        return _words(flags | _client_bound(self.num_clients))

    def requests(self) -> list[SimulatedRequest]:
        """As many requests, with lengths of the same distribution."""
        random, ids = Random(self.seed), TokenIds()
        ids.fresh(random.randrange(_LEFT_OUT))

        def length(longest: int) -> int:
            return random.randint(max(MIN_TOKENS, int(longest * self.range_ratio)), longest)

        return [
            SimulatedRequest(
                arrival_s=0.0,
                prompt=(ids.fresh(length(self.input_tokens)),),
                output=ids.fresh(length(self.output_tokens)),
            )
            for _ in range(self.num_requests)
        ]

    def written(self, path: Path, texts: Texts) -> "WrittenLoad":
        """The `requests`, with prompts of `texts`, as a file for the client."""
        write_workload(self.requests(), path, texts)
        return WrittenLoad(
            path=path,
            num_requests=self.num_requests,
            requests_per_s=self.requests_per_s,
            seed=self.seed,
            num_clients=self.num_clients,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenLoad:
    """The requests of a file that `write_workload` made, shuffled by `seed`; Poisson arrivals.

    `flush_cache` empties the server's prefix cache first: a repeated load is not answered from it.
    `num_clients` as in `Load`.
    """

    path: Path
    num_requests: int
    requests_per_s: float
    seed: int = 1
    flush_cache: bool = False
    num_clients: int | None = None

    def client_flags(self) -> list[str]:
        flags: dict[str, object] = {
            "--dataset-name": "custom",
            "--dataset-path": self.path,
            "--num-prompts": self.num_requests,
            "--seed": self.seed,
            "--request-rate": self.requests_per_s,
        } | _client_bound(self.num_clients)
        return [*_words(flags), *(["--flush-cache"] if self.flush_cache else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoad:
    """Requests of several sizes, shuffled: `groups` are (how many, tokens in, tokens out)."""

    groups: tuple[tuple[int, int, int], ...]
    requests_per_s: float = float("inf")

    def requests(self) -> list[SimulatedRequest]:
        """Group by group."""
        ids = TokenIds()
        return [
            SimulatedRequest(arrival_s=0.0, prompt=(ids.fresh(inputs),), output=ids.fresh(outputs))
            for count, inputs, outputs in self.groups
            for _ in range(count)
        ]

    def written(self, path: Path, texts: Texts) -> WrittenLoad:
        """The same as a file for the client."""
        requests = self.requests()
        write_workload(requests, path, texts)
        return WrittenLoad(
            path=path, num_requests=len(requests), requests_per_s=self.requests_per_s
        )


def scaled_trace(
    name: str, num_requests: int, scale: float, max_output_tokens: int
) -> list[SimulatedRequest]:
    """The first requests of a trace of the simulator, cut to what a CPU carries: all lengths times
    `scale`, answers of at most `max_output_tokens`, and nothing below `MIN_TOKENS`."""
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=0.0,
            prompt=(ids.fresh(max(MIN_TOKENS, round(request.input_tokens * scale))),),
            output=ids.fresh(
                max(MIN_TOKENS, min(round(request.output_tokens * scale), max_output_tokens))
            ),
        )
        for request in load_trace(name, num_requests)
    ]


def write_workload(requests: Sequence[SimulatedRequest], path: Path, texts: Texts) -> None:
    """Writes prompts as `texts` has them, and lengths as texts of so many tokens.

    Raises ValueError for a request of fewer than `MIN_TOKENS` in or out, which the client drops.
    """
    lines = []
    for request in requests:
        if min(request.input_tokens, request.output_tokens) < MIN_TOKENS:
            raise ValueError(f"the client wants {MIN_TOKENS} tokens at least in and out")
        prompt, answer = texts(request.prompt_ids()), texts(request.output.token_ids)
        lines.append(json.dumps({"conversations": [{"value": prompt}, {"value": answer}]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def filler_texts(vocab_size: int) -> Texts:
    """Texts for models of `make_model.py`, whose fillers are an id each: equal ids of the simulator
    become equal ids of the model."""
    num_fillers = vocab_size - FIRST_FILLER

    def text(token_ids: Sequence[int]) -> str:
        return "".join(f"<{FIRST_FILLER + token_id % num_fillers}>" for token_id in token_ids)

    return text


def _client_bound(num_clients: int | None) -> dict[str, object]:
    return {} if num_clients is None else {"--max-concurrency": num_clients}


def _words(flags: dict[str, object]) -> list[str]:
    return [word for flag, value in flags.items() for word in (flag, str(value))]
