"""The real compiler process: what explodes, hangs or crashes in it ends its own job alone."""

import json
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import xgrammar
import zmq
from support.grammars import AMBIGUOUS, EXAMPLES, compiled, setup, vocabulary

from sgl_pipeline.managers.grammars.channel import (
    CompiledJob,
    CompileJob,
    FailedJob,
    FromCompiler,
)
from sgl_pipeline.managers.grammars.client import GrammarCompilerClient
from sgl_pipeline.managers.grammars.compilation import Compilation

pytestmark = pytest.mark.multiproc

MAX_SECONDS = 4.0
# Until memory runs out on a machine that is busy.
ENOUGH_SECONDS = 50.0
MAX_MEMORY_MIB = 128
# Every property may be missing: the grammar has a million transitions.
EXPLODING = json.dumps(
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
)
SIMPLE = ("regex", "[0-9]{3}")


class Waiter:
    """A client whose answers are waited for."""

    def __init__(self, max_seconds: float, max_memory_mib: int) -> None:
        self.poller = zmq.Poller()
        self.client = GrammarCompilerClient(
            setup(max_seconds=max_seconds, max_memory_mib=max_memory_mib), self.poller
        )
        self._answers: dict[int, FromCompiler] = {}

    def answer(self, job_id: int) -> FromCompiler:
        while job_id not in self._answers:
            assert self.poller.poll(60_000), "the compiler does not answer"
            self._answers |= {one.job_id: one for one in self.client.poll()}
        return self._answers.pop(job_id)

    def failure(self, kind: str, text: str) -> FailedJob:
        answer = self.answer(self.client.compile(kind, text))
        assert isinstance(answer, FailedJob), "it was compiled"
        return answer

    def process(self) -> psutil.Process:
        assert self.client._process is not None
        return psutil.Process(self.client._process.pid)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Waiter]:
    waiter = Waiter(MAX_SECONDS, MAX_MEMORY_MIB)
    yield waiter
    waiter.client.close()


@pytest.fixture(scope="module")
def patient_compiler() -> Iterator[Waiter]:
    waiter = Waiter(ENOUGH_SECONDS, MAX_MEMORY_MIB)
    yield waiter
    waiter.client.close()


def mask_after(grammar: xgrammar.CompiledGrammar, text: str) -> list[int]:
    matcher = xgrammar.GrammarMatcher(grammar)
    assert matcher.accept_string(text)
    mask = np.zeros((1, 10), np.int32)
    matcher.fill_next_token_bitmask(mask)
    return mask[0].tolist()


def test_what_comes_back_is_the_grammar_that_was_asked_for(compiler: Waiter) -> None:
    for name, prefix in (("regex", "(12"), ("ebnf", "1+("), ("json", '{"name": "a')):
        spec = EXAMPLES[name].spec
        answer = compiler.answer(compiler.client.compile(spec.kind, spec.text))
        assert isinstance(answer, CompiledJob)
        read = xgrammar.CompiledGrammar.deserialize_json(
            answer.grammar, vocabulary().tokenizer_info
        )
        assert mask_after(read, prefix) == mask_after(compiled(spec), prefix)


@pytest.mark.parametrize(
    ("kind", "text", "quoted"),
    [
        ("regex", "((", "The parenthesis is not closed"),
        ("ebnf", "root ::= x", 'Rule "x" is not defined'),
        ("json", '{"type": "string", "pattern": "a\\u0000b"}', "null characters"),
        ("structural_tag", '{"format": {"type": "nope"}}', "nope"),
    ],
)
def test_a_wrong_grammar_is_final_and_quotes_the_compiler(
    compiler: Waiter, kind: str, text: str, quoted: str
) -> None:
    failure = compiler.failure(kind, text)
    assert failure.is_final
    assert failure.message.startswith(f"Failed to compile {kind} grammar: ")
    assert quoted in failure.message
    assert ".cc:" not in failure.message


def test_a_grammar_that_takes_too_much_memory_names_the_limit_and_the_next_is_compiled(
    patient_compiler: Waiter,
) -> None:
    failure = patient_compiler.failure("json", EXPLODING)
    assert not failure.is_final
    assert f"{MAX_MEMORY_MIB} MiB" in failure.message
    assert "--grammar-compile-memory-mib" in failure.message
    simple = patient_compiler.client.compile(*SIMPLE)
    assert isinstance(patient_compiler.answer(simple), CompiledJob)


def test_one_that_hangs_is_killed_while_others_are_compiled(compiler: Waiter) -> None:
    """The hanging one is stopped by a signal, so that no machine is too fast or too slow for it."""
    hanging = stopped_job(compiler)
    for _ in range(3):
        assert isinstance(compiler.answer(compiler.client.compile(*SIMPLE)), CompiledJob)
    failure = compiler.answer(hanging)
    assert isinstance(failure, FailedJob)
    assert f"within {MAX_SECONDS:g} s" in failure.message
    assert "--grammar-compile-seconds" in failure.message


def test_one_that_crashes_is_answered(compiler: Waiter) -> None:
    job = stopped_job(compiler, lambda worker: worker.kill())
    failure = compiler.answer(job)
    assert isinstance(failure, FailedJob)
    assert not failure.is_final
    assert "crashed (signal 9)" in failure.message


def test_a_cancelled_job_ends_its_process_and_is_not_answered(compiler: Waiter) -> None:
    job = stopped_job(compiler)
    (worker,) = compiler.process().children()
    compiler.client.cancel(job)
    assert isinstance(compiler.answer(compiler.client.compile(*SIMPLE)), CompiledJob)
    assert not worker.is_running()
    assert job not in compiler._answers


def test_a_grammar_that_is_slow_to_match_is_refused_before_it_runs() -> None:
    """With tokens of several characters, as any real vocabulary has."""
    tokens = [b"</s>", *(b"a" * length for length in range(1, 9))]
    long_tokens = xgrammar.TokenizerInfo(tokens, stop_token_ids=[0])
    compilation = Compilation(setup(vocabulary=long_tokens.serialize_json()))
    refused = compilation.run(CompileJob(1, "ebnf", AMBIGUOUS))
    assert isinstance(refused, FailedJob)
    assert refused.is_final
    assert "make it less ambiguous" in refused.message
    plain = compilation.run(CompileJob(2, "ebnf", "root ::= [a-z]*"))
    assert isinstance(plain, CompiledJob)


def test_a_dead_compiler_process_fails_what_it_had_and_another_one_takes_over() -> None:
    waiter = Waiter(ENOUGH_SECONDS, MAX_MEMORY_MIB)
    lost = waiter.client.compile("json", EXPLODING)
    waiter.process().kill()
    failure = waiter.answer(lost)
    assert isinstance(failure, FailedJob)
    assert "try again" in failure.message
    assert isinstance(waiter.answer(waiter.client.compile(*SIMPLE)), CompiledJob)
    process = waiter.process()
    waiter.client.close()
    assert not process.is_running()


def stopped_job(
    compiler: Waiter, stop: Callable[[psutil.Process], None] = psutil.Process.suspend
) -> int:
    """A job of which the worker process was stopped before it could answer."""
    job = compiler.client.compile("json", EXPLODING)
    while not (workers := compiler.process().children()):
        pass
    stop(workers[0])
    return job
