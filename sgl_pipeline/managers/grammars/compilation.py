"""One compile, as the child that `compiler.py` forks for it does it.

Compiles, tries the result out, and serializes it. May take long, allocate much or crash: the
process that forked limits all that. Imports xgrammar, never sglang.
"""

import re
import time
from collections.abc import Callable

import numpy as np
import xgrammar

from sgl_pipeline.managers.grammars.channel import (
    CompiledJob,
    CompileJob,
    CompilerSetup,
    FailedJob,
    FromCompiler,
)

# The scheduler process reads a serialized grammar in about 15 ms per MiB, between two steps.
MAX_SERIALISED_BYTES = 8 * 2**20
# The tokens of the rehearsal, and the CPU seconds that one of them may take.
REHEARSED_TOKENS = 32
MAX_REHEARSAL_STEP_S = 0.25
_MAX_MESSAGE_CHARACTERS = 500
# xgrammar's messages begin with a time and the place in its source.
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class Compilation:
    """Compiles grammars for one vocabulary."""

    def __init__(self, setup: CompilerSetup) -> None:
        vocabulary = xgrammar.TokenizerInfo.deserialize_json(setup.vocabulary)
        self._max_memory_mib = setup.max_memory_mib
        # One thread, for a process that forks; no cache, as every compile has a process of its own.
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        self._num_mask_words = -(-vocabulary.vocab_size // 32)
        self._token_lengths = np.array([len(token) for token in vocabulary.decoded_vocab])

        def json_schema(text: str) -> xgrammar.CompiledGrammar:
            return compiler.compile_json_schema(
                text,
                any_whitespace=setup.any_whitespace,
                max_whitespace_cnt=setup.max_whitespace_count,
            )

        self._compile: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json": json_schema,
            "any_json": lambda text: compiler.compile_builtin_json_grammar(),
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "structural_tag": compiler.compile_structural_tag,
        }

    def run(self, job: CompileJob) -> FromCompiler:
        """The compiled grammar, or the reason why there is none."""

        def failed(message: str, *, is_final: bool = True) -> FailedJob:
            return FailedJob(job.job_id, message, is_final)

        try:
            compiled = self._compile[job.kind](job.text)
            self.rehearse(compiled)
            serialized = compiled.serialize_json()
        except _TooSlowError as error:
            return failed(str(error))
        except (RuntimeError, ValueError, MemoryError) as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                return failed(
                    f"compiling the grammar needs more than {self._max_memory_mib} MiB; simplify "
                    "it or raise --grammar-compile-memory-mib",
                    is_final=False,
                )
            message = _SOURCE_PLACE.sub("", str(error)).strip()[:_MAX_MESSAGE_CHARACTERS]
            return failed(f"Failed to compile {job.kind} grammar: {message}")
        if len(serialized) > MAX_SERIALISED_BYTES:
            return failed(
                f"the compiled grammar has {len(serialized)} bytes, the limit "
                f"is {MAX_SERIALISED_BYTES}; simplify it"
            )
        return CompiledJob(job.job_id, serialized)

    def rehearse(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Matches a few tokens, always the longest that is allowed, as the scheduler would.

        An ambiguous grammar can need seconds for a token, which cannot be interrupted there. Raises
        _TooSlowError for such a grammar.
        """
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = np.zeros((1, self._num_mask_words), np.int32)
        for _ in range(REHEARSED_TOKENS):
            started_s = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            allowed = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
            lengths = self._token_lengths * allowed[: len(self._token_lengths)]
            token_id = int(lengths.argmax())
            is_over = not lengths[token_id] or not matcher.accept_token(token_id)
            step_s = time.thread_time() - started_s
            if step_s > MAX_REHEARSAL_STEP_S:
                raise _TooSlowError(
                    f"matching the grammar takes {step_s * 1e3:.0f} ms for a token, the "
                    f"limit is {MAX_REHEARSAL_STEP_S * 1e3:.0f} ms; make it less ambiguous"
                )
            if is_over or matcher.is_terminated():
                return


class _TooSlowError(Exception):
    """Raised when a compiled grammar is too slow to be matched between two steps."""
