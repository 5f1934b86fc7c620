"""The signatures of the C functions, read from exports.h.

The library is cached by a hash that covers this header, and the compiler holds the definitions to
it, so a signature always fits the library that was loaded.
"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "sglp_"
_DECLARATION = re.compile(rf"(\w+) {PREFIX}(\w+)\(([^)]*)\);")
_OR_NULL = "SGLP_OR_NULL"
_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}


@dataclass(frozen=True, slots=True)
class Signature:
    """A C function: the ctypes type of its result, None for void, and of each parameter, by name
    and in order. `optional` has the pointers that may be null."""

    result: Any
    parameters: dict[str, Any]
    optional: frozenset[str]

    def size_place(self) -> tuple[str, int]:
        """The parameter that is the length of a step, which every kernel has, and its position."""
        return next(
            (name, place)
            for place, name in enumerate(self.parameters)
            if name in ("num_rows", "num_chunks")
        )


def read_signatures(header: Path) -> dict[str, Signature]:
    """The functions that a header declares, by name without the prefix.

    Raises KeyError for a type that is neither a pointer nor in `_TYPES`.
    """
    return {
        name: _signature(result, parameters)
        for result, name, parameters in _DECLARATION.findall(header.read_text())
    }


def _signature(result: str, parameters: str) -> Signature:
    types, optional = {}, set()
    for parameter in filter(None, parameters.split(",")):
        *words, name = parameter.split()
        if words[-1] == _OR_NULL:
            words.pop()
            optional.add(name)
        types[name] = ctypes.c_void_p if words[-1].endswith("*") else _TYPES[" ".join(words)]
    return Signature(_TYPES[result], types, frozenset(optional))
