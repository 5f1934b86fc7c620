"""Who waits for which compile, and what becomes of them. The compiler is scripted."""

from typing import Any

import pytest
from support.front_model import VOCAB_SIZE, byte_tokenizer
from support.grammars import LIMITS, setup, vocabulary
from support.pipelines import make_request

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.grammars.cache import GrammarCache
from sgl_pipeline.managers.grammars.channel import CompileJob, FailedJob, FromCompiler
from sgl_pipeline.managers.grammars.compilation import Compilation
from sgl_pipeline.managers.grammars.constraint import GrammarConstraint
from sgl_pipeline.managers.grammars.queue import GrammarQueue, NoGrammars
from sgl_pipeline.managers.grammars.reasoning import AfterReasoning
from sgl_pipeline.managers.grammars.spec import ConstrainedRequest, GrammarSpec
from sgl_pipeline.managers.grammars.vocabulary import NoGrammarsError, read_vocabulary


class ScriptedCompiler:
    """Answers a job when the test says so."""

    def __init__(self) -> None:
        self._compilation = Compilation(setup())
        self.jobs: dict[int, CompileJob] = {}
        self.num_jobs = 0
        self._answers: list[FromCompiler] = []

    def start(self) -> None: ...

    def compile(self, kind: str, text: str) -> int:
        self.num_jobs += 1
        self.jobs[self.num_jobs] = CompileJob(self.num_jobs, kind, text)
        return self.num_jobs

    def cancel(self, job_id: int) -> None:
        del self.jobs[job_id]

    def finish(self, job_id: int) -> None:
        self._answers.append(self._compilation.run(self.jobs.pop(job_id)))

    def fail(self, job_id: int, *, is_final: bool) -> None:
        del self.jobs[job_id]
        self._answers.append(FailedJob(job_id, "no good", is_final))

    def poll(self) -> list[FromCompiler]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None: ...


@pytest.fixture
def compiler() -> ScriptedCompiler:
    return ScriptedCompiler()


def queue_of(compiler: ScriptedCompiler, **options: Any) -> GrammarQueue:
    return GrammarQueue(compiler, vocabulary(), 20.0, **options)


def constrained(name: str, text: str = "a+", **fields: Any) -> ConstrainedRequest:
    return ConstrainedRequest(make_request(name, [1, 2]), GrammarSpec("regex", text, **fields))


def polled(queue: GrammarQueue) -> dict[str, str | None]:
    return {request.request_id: error and str(error) for request, error in queue.poll()}


def test_equal_grammars_compile_once_and_later_ones_do_not_wait(compiler) -> None:
    queue = queue_of(compiler)
    first, second, other = constrained("a"), constrained("b"), constrained("c", "b+")
    assert [queue.add(one) for one in (first, second, other)] == [False, False, False]
    assert (compiler.num_jobs, len(queue)) == (2, 3)
    compiler.finish(1)
    assert polled(queue) == {"a": None, "b": None}
    assert isinstance(first.request.constraint, GrammarConstraint)
    assert first.request.constraint is not second.request.constraint
    late = constrained("d")
    assert queue.is_known(late.grammar)
    assert queue.add(late)
    assert late.request.constraint is not None
    assert len(queue) == 1


def test_a_wrong_grammar_refuses_all_and_is_remembered_one_that_failed_otherwise_not(
    compiler,
) -> None:
    queue = queue_of(compiler)
    queue.add(constrained("a"))
    queue.add(constrained("b"))
    compiler.fail(1, is_final=False)
    assert polled(queue) == {"a": "no good", "b": "no good"}
    assert not queue.add(constrained("c"))
    compiler.fail(2, is_final=True)
    assert polled(queue) == {"c": "no good"}
    with pytest.raises(RequestError, match="no good"):
        queue.add(constrained("d"))
    queue.clear_cache()
    assert not queue.add(constrained("e"))


def test_a_grammar_that_cannot_be_used_ends_its_requests_and_nothing_else(
    compiler, monkeypatch
) -> None:
    queue = queue_of(compiler)
    queue.add(constrained("a"))
    queue.add(constrained("b", "b+"))

    def fails(*arguments: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr("sgl_pipeline.managers.grammars.queue.GrammarConstraint", fails)
        compiler.finish(1)
        assert polled(queue) == {"a": "the compiled grammar cannot be used: no room"}
    compiler.finish(2)
    assert polled(queue) == {"b": None}


def test_a_compile_ends_with_the_last_who_waits_for_it(compiler) -> None:
    queue = queue_of(compiler)
    first, second = constrained("a"), constrained("b")
    queue.add(first)
    queue.add(second)
    queue.discard(first.request)
    assert list(compiler.jobs) == [1]
    queue.discard(first.request)
    queue.discard(second.request)
    assert (compiler.jobs, len(queue)) == ({}, 0)


def test_who_waits_too_long_is_taken_out(compiler) -> None:
    queue = queue_of(compiler, waiting_timeout_s=5.0)
    old, new = constrained("old"), constrained("new")
    new.request.arrival_s = 3.0
    queue.add(old)
    queue.add(new)
    assert queue.take_overdue(5.0) == []
    assert queue.take_overdue(6.0) == [old.request]
    assert (len(queue), list(compiler.jobs)) == (1, [1])
    assert queue_of(compiler).take_overdue(1e9) == []


def test_a_model_that_thinks_first_is_constrained_afterwards(compiler) -> None:
    thinking = read_vocabulary(byte_tokenizer(), LIMITS, "qwen3")
    assert thinking.think_end_ids == tuple(byte_tokenizer().encode("</think>"))
    queue = GrammarQueue(compiler, thinking, 20.0)
    first, second = constrained("a", after_reasoning=True), constrained("b")
    queue.add(first)
    queue.add(second)
    compiler.finish(1)
    assert polled(queue) == {"a": None, "b": None}
    assert isinstance(first.request.constraint, AfterReasoning)
    assert isinstance(second.request.constraint, GrammarConstraint)


def test_the_cache_forgets_the_least_recently_used_and_keeps_its_bound() -> None:
    cache = GrammarCache(max_bytes=4 * (3 * 100 + 3))
    for name in "abc":
        cache.put(("regex", name), "e" * 100)
    assert cache.get(("regex", "a")) is not None
    cache.put(("regex", "d"), "e" * 100)
    assert [cache.get(("regex", name)) is not None for name in "abcd"] == [True, False, True, True]
    cache.put(("regex", "large"), "e" * 1000)
    assert len(cache) == 0


def test_without_a_backend_every_grammar_is_refused_with_the_reason() -> None:
    with pytest.raises(RequestError, match="--grammar-backend none"):
        NoGrammars("off: --grammar-backend none").add(constrained("a"))


@pytest.mark.parametrize(
    ("limits", "parser"),
    [(ModelLimits(256, VOCAB_SIZE, frozenset()), None), (LIMITS, "inkling")],
    ids=["no EOS", "an answer frame"],
)
def test_a_model_that_grammars_cannot_be_used_with_says_why(limits, parser) -> None:
    with pytest.raises(NoGrammarsError, match="structured output"):
        read_vocabulary(byte_tokenizer(), limits, parser)
