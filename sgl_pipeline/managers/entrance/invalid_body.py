"""Answers requests whose bodies, queries or headers upstream refuses: in a line for people, where
upstream writes each fault twice, with files and lines of the server.

A field of several types is refused by each of them: faults of one field are joined, and where a
`role` or `type` says which of several models is meant, faults by the others are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi.exceptions import RequestValidationError
from sglang.srt.entrypoints.http_server import validation_exception_handler
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sgl_pipeline.managers.entrance.ollama_routes import is_ollama, ollama_refusal

# Upstream's own answers of these show no files, and have forms of their own.
_UPSTREAMS_OWN = ("/v1/messages", "/v1/systemone")
_KINDS = ("role", "type")
_KIND_FAULTS = ("literal_error", "value_error", "enum")
_MOST_CHARACTERS = 60
_MOST_FIELDS = 5


@dataclass(frozen=True, slots=True)
class _Fault:
    """A fault at `path` in the body, or of the header or parameter of this name. The types that
    might have been meant are named in `branches`, each by the path of the value and its label, the
    outermost first."""

    path: tuple[object, ...]
    words: str
    got: str
    branches: tuple[tuple[tuple[object, ...], object], ...]
    is_about_kind: bool

    @classmethod
    def of(cls, error: Mapping[str, Any], body: Any) -> "_Fault":
        """The fault of one of pydantic's `errors()`."""
        path: list[object] = []
        branches = []
        value, kind = body, error["type"]
        place_of_fault, *parts = error["loc"]
        if place_of_fault != "body":
            path, parts = parts, []
        for place, part in enumerate(parts):
            is_last_missing = kind == "missing" and place == len(parts) - 1
            if _holds(value, part):
                value = value[part]
            elif not is_last_missing:
                branches.append((tuple(path), part))
                continue
            path.append(part)
        words = str(error["msg"]).removeprefix("Value error, ")
        is_about_kind = kind in _KIND_FAULTS and bool(path) and path[-1] in _KINDS
        got = repr(error["input"]) if kind != "missing" and "input" in error else ""
        return cls(tuple(path), words, got, tuple(branches), is_about_kind)


def _holds(value: Any, part: object) -> bool:
    """True if `part` is a name or a place in `value`."""
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def explain(errors: Sequence[Mapping[str, Any]], body: Any) -> str:
    """The first faults of pydantic's `errors()` in one line: field, fault and value.

    Args:
        body: decoded; None where it is not JSON.
    """
    (first, *_) = errors
    if first["type"] == "json_invalid":
        place = first["loc"][-1]
        return f"the body is not JSON: {first['ctx']['error']} at character {place}"
    if tuple(first["loc"]) == ("body",) and first["type"] == "missing":
        return "the body is empty; send a JSON object"
    words: dict[tuple[object, ...], list[str]] = {}
    got: dict[tuple[object, ...], str] = {}
    for fault in _likely([_Fault.of(error, body) for error in errors]):
        known = words.setdefault(fault.path, [])
        if fault.words not in known:
            known.append(fault.words)
        got[fault.path] = fault.got
    fields = [
        f"{_name(path)}: {', or '.join(found)}{_shown(got[path])}"
        for path, found in islice(words.items(), _MOST_FIELDS)
    ]
    if len(words) > len(fields):
        fields.append(f"and {len(words) - len(fields)} more")
    return "; ".join(fields)


def _likely(faults: list[_Fault]) -> list[_Fault]:
    """The faults by models that `role` or `type` does not exclude; if it excludes all, its own."""
    excluded = {fault.branches[0] for fault in faults if fault.is_about_kind and fault.branches}
    fitting = {
        fault.branches[0][0]
        for fault in faults
        if fault.branches and fault.branches[0] not in excluded
    }
    excluding = {path for path, _ in excluded}

    def is_likely(fault: _Fault) -> bool:
        if not fault.branches or fault.branches[0][0] not in excluding:
            return True
        if fault.branches[0][0] in fitting:
            return fault.branches[0] not in excluded
        return fault.is_about_kind

    return [fault for fault in faults if is_likely(fault)]


def _name(path: tuple[object, ...]) -> str:
    return _cut(".".join(map(str, path))) if path else "the body"


def _shown(value: str) -> str:
    return f" (got {_cut(value)})" if value else ""


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


async def answer_invalid(request: Request, error: RequestValidationError) -> Response:
    """In the place of upstream's `validation_exception_handler`, in the form of the route."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    if path.startswith(_UPSTREAMS_OWN):
        response: Response = await validation_exception_handler(request, error)
        return response
    message = explain(error.errors(), error.body)
    if is_ollama(path):
        return ollama_refusal(message)
    status = HTTPStatus.BAD_REQUEST
    fields = {"message": message, "type": status.phrase, "param": None, "code": status.value}
    is_nested = path.startswith("/v1/responses")
    return JSONResponse({"error": fields} if is_nested else {"object": "error", **fields}, status)
