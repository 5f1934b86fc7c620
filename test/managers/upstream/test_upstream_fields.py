import msgspec
from sglang.srt.server_args import ServerArgs

from sgl_pipeline.managers.upstream.upstream_fields import (
    FRONT,
    HELP,
    HONORED,
    NOTED,
    REFUSED_FIELDS,
    REFUSED_NAMESPACES,
    UPSTREAM_VALUES,
    refusal,
)

FIELDS = [field.name for field in msgspec.structs.fields(ServerArgs)]


def is_classified_once(name: str) -> bool:
    """A namespace refuses what it holds; only the three accepting sets may take a field out of it.
    Where a note takes some values only, there is a reason against the others."""
    namespace = ServerArgs._NS_BY_FIELD[name]
    is_noted, has_values = name in NOTED, name in NOTED and NOTED[name].values is not None
    accepted = (name in HONORED) + (name in FRONT) + is_noted
    refused = (name in REFUSED_FIELDS) + (namespace in REFUSED_NAMESPACES)
    if has_values:
        return accepted == 1 and refused >= 1 and refusal(name, namespace) is not None
    if accepted:
        return accepted == 1 and name not in REFUSED_FIELDS and refusal(name, namespace) is None
    return refused == 1 and refusal(name, namespace) is not None


def test_every_upstream_field_is_classified_exactly_once() -> None:
    assert len(FIELDS) > 500
    assert [name for name in FIELDS if not is_classified_once(name)] == []


def test_the_table_names_no_field_that_upstream_does_not_have() -> None:
    ours = HONORED | FRONT | set(NOTED) | set(REFUSED_FIELDS) | set(UPSTREAM_VALUES) | set(HELP)
    assert ours <= set(FIELDS)
    assert set(REFUSED_NAMESPACES) <= set(ServerArgs._NS_BY_FIELD.values())
