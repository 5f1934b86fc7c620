"""Requests whose grammar is being compiled, and compiled grammars.

A constrained request comes here before it goes to the `StepScheduler`, where it would count as work
that is ready. Equal grammars are compiled once. Never waits, never compiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import xgrammar

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.grammars.cache import GrammarCache
from sgl_pipeline.managers.grammars.channel import CompiledJob, FromCompiler
from sgl_pipeline.managers.grammars.constraint import GrammarConstraint
from sgl_pipeline.managers.grammars.reasoning import AfterReasoning
from sgl_pipeline.managers.grammars.spec import ConstrainedRequest, GrammarSpec
from sgl_pipeline.managers.grammars.vocabulary import GrammarVocabulary
from sgl_pipeline.requests import Request, TokenConstraint

MAX_CACHE_BYTES = 256 * 2**20


class Compiler(Protocol):
    """The compiler (`client.GrammarCompilerClient`)."""

    def start(self) -> None: ...
    def compile(self, kind: str, text: str) -> int: ...
    def cancel(self, job_id: int) -> None: ...
    def poll(self) -> list[FromCompiler]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Compile:
    """A grammar that is being compiled, and the requests that wait for it, by id."""

    key: tuple[str, str]
    waiting: dict[str, ConstrainedRequest] = field(default_factory=dict)


class GrammarQueue:
    """The grammars of one server.

    Args:
        ms_per_token: see `GrammarConstraint`.
        waiting_timeout_s: after which a request that waits here is overdue; None: never.
    """

    def __init__(
        self,
        compiler: Compiler,
        vocabulary: GrammarVocabulary,
        ms_per_token: float,
        waiting_timeout_s: float | None = None,
    ) -> None:
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._ms_per_token = ms_per_token
        self._waiting_timeout_s = waiting_timeout_s
        self._cache = GrammarCache(MAX_CACHE_BYTES)
        self._compiles: dict[int, _Compile] = {}  # by job id

    def __len__(self) -> int:
        """Requests that wait for their grammar."""
        return sum(len(compile.waiting) for compile in self._compiles.values())

    def held(self, request_id: str) -> Request | None:
        """A request that waits here; looks at all."""
        for compile in self._compiles.values():
            if (constrained := compile.waiting.get(request_id)) is not None:
                return constrained.request
        return None

    def start(self) -> None:
        """Makes the compiler ready, so that the first request need not wait for it."""
        self._compiler.start()

    def is_known(self, grammar: GrammarSpec) -> bool:
        """True if a request for `grammar` need not wait."""
        return self._cache.get(grammar.key) is not None

    def add(self, constrained: ConstrainedRequest) -> bool:
        """True when the request has its constraint now, False when `poll` will give it back.

        Raises RequestError (400) when the grammar is known to be wrong.
        """
        key = constrained.grammar.key
        outcome = self._cache.get(key)
        if isinstance(outcome, str):
            raise RequestError(outcome)
        if outcome is not None:
            self._constrain(constrained, outcome)
            return True
        compile = next((one for one in self._compiles.values() if one.key == key), None)
        if compile is None:
            compile = _Compile(key)
            self._compiles[self._compiler.compile(*key)] = compile
        compile.waiting[constrained.request.request_id] = constrained
        return False

    def poll(self) -> Iterator[tuple[Request, RequestError | None]]:
        """The requests that need not wait any longer, each with a constraint or the error to refuse
        it with."""
        for answer in self._compiler.poll():
            compile = self._compiles.pop(answer.job_id)
            outcome = self._outcome(compile.key, answer)
            for constrained in compile.waiting.values():
                yield constrained.request, self._settled(constrained, outcome)

    def discard(self, request: Request) -> None:
        """Forgets a request, if it waits here; ends a compile that no other request waits for."""
        for job_id, compile in list(self._compiles.items()):
            compile.waiting.pop(request.request_id, None)
            if not compile.waiting:
                del self._compiles[job_id]
                self._compiler.cancel(job_id)

    def take_overdue(self, now_s: float) -> list[Request]:
        """Forgets and returns requests that have waited here for too long, by the clock of
        `arrival_s`."""
        if self._waiting_timeout_s is None:
            return []
        overdue = [
            constrained.request
            for compile in self._compiles.values()
            for constrained in compile.waiting.values()
            if now_s - constrained.request.arrival_s > self._waiting_timeout_s
        ]
        for request in overdue:
            self.discard(request)
        return overdue

    def clear_cache(self) -> None:
        self._cache.clear()

    def close(self) -> None:
        self._compiler.close()

    def _outcome(
        self, key: tuple[str, str], answer: FromCompiler
    ) -> xgrammar.CompiledGrammar | RequestError:
        if isinstance(answer, CompiledJob):
            try:
                grammar = xgrammar.CompiledGrammar.deserialize_json(
                    answer.grammar, self._vocabulary.tokenizer_info
                )
            except Exception as error:
                return RequestError(f"the compiled grammar cannot be read: {error}", 500)
            self._cache.put(key, grammar)
            return grammar
        if answer.is_final:
            self._cache.put(key, answer.message)
        return RequestError(answer.message)

    def _settled(
        self, constrained: ConstrainedRequest, outcome: xgrammar.CompiledGrammar | RequestError
    ) -> RequestError | None:
        """Gives a request its constraint; returns the error if there is none."""
        if isinstance(outcome, RequestError):
            return outcome
        try:
            self._constrain(constrained, outcome)
        except Exception as error:
            return RequestError(f"the compiled grammar cannot be used: {error}", 500)
        return None

    def _constrain(
        self, constrained: ConstrainedRequest, grammar: xgrammar.CompiledGrammar
    ) -> None:
        constraint: TokenConstraint = GrammarConstraint(
            grammar, self._vocabulary, self._ms_per_token
        )
        end_ids = self._vocabulary.think_end_ids
        if constrained.grammar.after_reasoning and end_ids:
            constraint = AfterReasoning(constraint, end_ids)
        constrained.request.constraint = constraint


class NoGrammars:
    """Replaces a `GrammarQueue` if no grammar can be used: refuses each with the `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __len__(self) -> int:
        return 0

    def held(self, request_id: str) -> Request | None:
        return None

    def start(self) -> None: ...

    def is_known(self, grammar: GrammarSpec) -> bool:
        return True

    def add(self, constrained: ConstrainedRequest) -> bool:
        raise RequestError(self._reason)

    def poll(self) -> Iterator[tuple[Request, RequestError | None]]:
        return iter(())

    def discard(self, request: Request) -> None: ...

    def take_overdue(self, now_s: float) -> list[Request]:
        return []

    def clear_cache(self) -> None: ...

    def close(self) -> None: ...
