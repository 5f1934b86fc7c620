"""A message of upstream's with a value for every field that has no default, and no other."""

from enum import Enum
from typing import Any

import msgspec

_SIMPLE_VALUES: dict[type, Any] = {
    msgspec.inspect.StrType: "x",
    msgspec.inspect.IntType: 1,
    msgspec.inspect.FloatType: 1.0,
    msgspec.inspect.BoolType: True,
    msgspec.inspect.ListType: [],
    msgspec.inspect.DictType: {},
    msgspec.inspect.UnionType: None,
}


def minimal_fields(kind: type) -> dict[str, Any]:
    return {
        field.name: _value(field.type) for field in msgspec.structs.fields(kind) if field.required
    }


def _value(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation))
    return _SIMPLE_VALUES[type(msgspec.inspect.type_info(annotation))]
