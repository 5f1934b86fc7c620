"""Stop expressions: `stop_regex`, matched in linear time by RE2.

Compiled twice: by `entrance/front_guard.py`, so that a bad one is a 400 before upstream reads it,
and by `sglang_requests.py` for the check that `stop_text.py` runs on every token. Nothing here
backtracks, and the work of one search is bounded by construction.
"""

import re
import warnings
from typing import Any

import re2
from sglang.srt.sampling.sampling_params import (
    MAX_STOP_REGEX_COUNT,
    MAX_STOP_REGEX_LEN,
    get_max_seq_length,
)

from sgl_pipeline.errors import RequestError

# Bounds RE2's program and caches; an expression that needs more is refused while it is compiled.
_MAX_MEMORY_BYTES = 2**18
# Instructions times characters, of one search with all expressions of a request: a few
# milliseconds for the worst expression, microseconds for an ordinary one.
_MAX_WORK = 2**19
# A match of unbounded length is looked for in at least this many characters.
_MIN_WINDOW_CHARACTERS = 1024
# RE2 reads these as plain text, Python (and hence SGLang) as a count.
_COUNT_WITHOUT_MINIMUM = re.compile(r"(?<!\\)\{,\d*\}")


class StopRegexes:
    """The stop expressions of one request.

    Args:
        patterns: `stop_regex` as asked for, one or several. In RE2's syntax as far as Python's `re`
            has the same; `\\w`, `\\d`, `\\s` and `\\b` know ASCII only.

    Raises RequestError (400) for what is too long or too many, malformed, not regular (look-around,
    back-references), or too costly to be searched for after every token.
    """

    def __init__(self, patterns: Any) -> None:
        self._patterns = _checked(patterns)
        self._compiled = [_compile(pattern) for pattern in self._patterns]
        # In characters: upstream counts a token for each (`get_max_seq_length`).
        longest = max((_longest_match(pattern) for pattern in self._patterns), default=0)
        work = sum(compiled.programsize for compiled in self._compiled)
        affordable = _MAX_WORK // max(1, work)
        if affordable < min(longest, _MIN_WINDOW_CHARACTERS):
            raise RequestError(
                "stop_regex: too costly to be searched for after every token "
                f"({work} instructions, at most {_MAX_WORK // _MIN_WINDOW_CHARACTERS}); "
                "use fewer or smaller counts"
            )
        # No match that spans more characters is found. One more is kept as context.
        self.window_characters = min(longest, affordable) + 1

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def first_match(self, text: str, start: int) -> str | None:
        """The first of the expressions, in the order asked for, that `text` holds from `start` on.

        `^` means the beginning of `text`, wherever `start` is, and `$` its end.
        """
        for pattern, compiled in zip(self._patterns, self._compiled, strict=True):
            if compiled.search(text, start) is not None:
                return pattern
        return None


def _checked(asked: Any) -> list[str]:
    patterns = [asked] if isinstance(asked, str) else asked
    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise RequestError("stop_regex must be a string or a list of strings")
    if len(patterns) > MAX_STOP_REGEX_COUNT:
        raise RequestError(f"at most {MAX_STOP_REGEX_COUNT} stop_regex, got {len(patterns)}")
    for pattern in patterns:
        if not pattern:
            raise RequestError("a stop_regex is empty; it would match anything")
        if len(pattern.encode("utf-8", "replace")) > MAX_STOP_REGEX_LEN:
            raise RequestError(f"a stop_regex may have {MAX_STOP_REGEX_LEN} bytes, not more")
    return patterns


def _compile(pattern: str) -> Any:
    if _COUNT_WITHOUT_MINIMUM.search(pattern):
        raise RequestError(f"stop_regex {pattern!r}: write {{0,n}} for {{,n}}")
    options = re2.Options()
    options.max_mem = _MAX_MEMORY_BYTES
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise RequestError(
            f"stop_regex {pattern!r}: {reason}. It is matched by RE2, in linear time: without "
            "look-around, back-references and counts above 1000"
        ) from None
    except UnicodeEncodeError:
        raise RequestError("stop_regex: not valid Unicode (a lone surrogate)") from None


def _longest_match(pattern: str) -> int:
    """Bound on the length of a match in characters. Upstream's front computes it too, with
    Python's parser: what that cannot read must be refused here."""
    try:
        # It also warns of what might be meant otherwise: of no use in a server's log.
        with warnings.catch_warnings(action="ignore"):
            return int(get_max_seq_length(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(f"stop_regex {pattern!r}: {error}") from None
