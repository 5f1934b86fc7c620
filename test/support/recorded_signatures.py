"""The signatures that libraries have of what we call, recorded from versions that need not be
installed here: FlashInfer's of the CUDA set, and torch's of each machine that we know.

    PYTHONPATH=test:. python -m support.recorded_signatures torch
    PYTHONPATH=test:.:.venv/contract python -m support.recorded_signatures flashinfer

adds the installed version's to `recorded_signatures.json`.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from support.our_calls import Uses, uses_of

FILE = Path(__file__).with_suffix(".json")
SOURCES = Path(__file__).parents[2] / "sgl_pipeline" / "pp_runner"
# Called on objects that torch made.
TORCH_METHODS = {
    "capture_begin": "torch.cuda.CUDAGraph.capture_begin",
    "capture_end": "torch.cuda.CUDAGraph.capture_end",
    "elapsed_time": "torch.cuda.Event.elapsed_time",
    "wait_stream": "torch.cuda.Stream.wait_stream",
    "record_stream": "torch.Tensor.record_stream",
}
_READ = {"torch.cuda.CUDAGraph.replay", "torch.cuda.MemPool.id"}
_EVENT = {f"torch.cuda.Event.{name}" for name in ("query", "record", "synchronize")}
_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
# `test_flashinfer_contract.py` makes our calls of these.
FLASHINFER_NAMES = (
    *("rmsnorm", "fused_add_rmsnorm", "silu_and_mul"),
    *("apply_rope_with_cos_sin_cache", "append_paged_kv_cache"),
    *(f"{wrapper}.{name}" for wrapper in _WRAPPERS for name in ("__init__", "plan", "run")),
    f"{_WRAPPERS[0]}._plan_impl",
)

Signatures = dict[str, list[str]]  # of each name; none for what has none


def torch_uses() -> Uses:
    """Of the stage workers, which are all that runs on a GPU, but for the generic backend, which
    does not."""
    uses = uses_of("torch", SOURCES, TORCH_METHODS, left_out="model/generic")
    return Uses(uses.names | _READ | _EVENT, uses.calls)


def recorded() -> dict[str, Signatures]:
    """The signatures of each library and version, such as `torch 2.11.0`."""
    signatures: dict[str, Signatures] = json.loads(FILE.read_text(encoding="utf-8"))
    return signatures


def installed(library: str) -> str:
    """The library and its version, as `recorded` names them."""
    version: str = importlib.import_module(library).__version__
    return f"{library} {version.partition('+')[0]}"


def read_signatures(library: str, names: Iterable[str]) -> Signatures:
    """Those of the installed library; what it lacks is left out."""
    module = importlib.import_module(library)
    found = {}
    for name in sorted(names):
        try:
            texts = _signatures(module, name.removeprefix(f"{library}."))
            found[name] = sorted({*texts})  # overloads may differ in dtypes alone
        except AttributeError:
            continue
    return found


def signature_of(text: str) -> inspect.Signature:
    """That of a recorded line, without annotations; a default that is no literal is `...`."""
    return inspect.signature(eval(f"lambda {text[1:-1]}: None", {"__builtins__": {}}))


def _signatures(module: Any, path: str) -> Iterator[str]:
    owner, found = None, module
    for part in path.split("."):
        owner, found = found, getattr(found, part)
    if not callable(found):
        return
    is_method = inspect.isclass(owner)
    if schemas := _schemas(found, path):
        for schema in schemas:
            yield from _of_schema(schema, is_method)
        return
    if documented := _pybind_parameters(found):
        yield from map(_without_annotations, documented)
        return
    try:
        signature = inspect.signature(inspect.unwrap(found))
    except ValueError:
        return  # written in C, without one
    parameters = list(signature.parameters.values())[is_method:]
    yield _text(parameters)


def _text(parameters: Iterable[inspect.Parameter]) -> str:
    """The parameters without annotations, with the defaults that are literals."""
    plain = [
        each.replace(annotation=each.empty, default=_Default.of(each.default))
        if each.default is not each.empty
        else each.replace(annotation=each.empty)
        for each in parameters
    ]
    return str(inspect.Signature(plain))


class _Default:
    """A default by its literal."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of(cls, value: object) -> "_Default":
        is_literal = value is None or isinstance(value, bool | int | float | str)
        return cls(repr(value) if is_literal or value == () else "...")

    def __repr__(self) -> str:
        return self._text


def _schemas(found: Any, path: str) -> list[Any]:
    """Those of an operator that has no Python function of its own, one for each overload."""
    import torch

    name = getattr(found, "_qualified_op_name", None)
    if (name is None and inspect.isbuiltin(found)) or inspect.ismethoddescriptor(found):
        name = f"aten::{path.rpartition('.')[2]}"
    return torch._C._jit_get_schemas_for_operator(name) if name else []


def _of_schema(schema: Any, is_method: bool) -> Iterator[str]:
    """As torch's argument parser takes it: what begins with a size may have it spread."""
    parameters = [
        inspect.Parameter(
            "input" if argument.name == "self" else argument.name,
            inspect.Parameter.KEYWORD_ONLY
            if argument.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value
            if argument.has_default_value()
            else inspect.Parameter.empty,
        )
        for argument in schema.arguments[is_method:]
    ]
    yield _text(parameters)
    if [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY] == ["size"]:
        spread = inspect.Parameter("size", inspect.Parameter.VAR_POSITIONAL)
        yield _text((spread, *parameters[1:]))


def _pybind_parameters(found: Any) -> list[str]:
    """Those of the constructors that pybind11 documents, with annotations."""
    documented = getattr(getattr(found, "__init__", None), "__doc__", None) or ""
    return re.findall(r"\b__init__\(self: [\w.]+(?:, )?(.*)\) -> None", documented)


def _without_annotations(parameters: str) -> str:
    """`(a, b=1)` of `a: int, b: int = 1`; what pybind11 cannot spell stands in angle brackets."""
    source = re.sub(r"= *<[^>]*>", "= ...", parameters)
    made = ast.parse(f"def f({source}): ...").body[0]
    assert isinstance(made, ast.FunctionDef)
    defaults = [None] * (len(made.args.args) - len(made.args.defaults)) + made.args.defaults
    texts = []
    for argument, default in zip(made.args.args, defaults, strict=True):
        is_literal = isinstance(default, ast.Constant)
        value = ast.unparse(default) if is_literal and default else "..."
        texts.append(argument.arg if default is None else f"{argument.arg}={value}")
    return f"({', '.join(texts)})"


def main(library: str) -> None:
    names = torch_uses().names if library == "torch" else FLASHINFER_NAMES
    signatures = recorded() if FILE.exists() else {}
    signatures[installed(library)] = read_signatures(library, names)
    entries = json.dumps(dict(sorted(signatures.items())), indent=1)
    FILE.write_text(f"{entries}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
