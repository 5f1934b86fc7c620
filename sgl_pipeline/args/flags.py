"""A flag is written once: as metadata of the field that it sets.

`our_flag` declares a field with a flag of ours, `upstream_flag` one that a flag of SGLang's sets;
`without_flag` says why a field has none. The other functions derive from that metadata a parser's
arguments, a section from parsed options, and the checks of single values. Must stay light: the
server imports this before it starts its workers.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, TypeVar, get_args

from sgl_pipeline.args.checks import require_choice

T = TypeVar("T")
Check = Callable[[str, Any], None]
_FLAG = "flag"
WHY_NO_FLAG = "why no flag"


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """The place of a field on the command line.

    `name` is the flag that we add to SGLang's (empty: none), with its `help`; `upstream` are the
    names that SGLang gives the same option. `check` takes the flag and a value other than None, and
    raises ConfigurationError. `same_as` is another option of SGLang's for the same value: without
    the flag the parser then gives None, so that `server_args.py` knows which of the two was given.
    """

    name: str = ""
    upstream: tuple[str, ...] = ()
    help: str = ""
    choices: tuple[str, ...] | None = None
    check: Check | None = None
    same_as: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names; messages use the first."""
        return (self.name, *self.upstream) if self.name else self.upstream

    @property
    def dest(self) -> str:
        """The attribute of the parsed options."""
        return option_name(self.upstream[0] if self.upstream else self.name)

    @property
    def metadata(self) -> dict[str, "Flag"]:
        """For `dataclasses.field`."""
        return {_FLAG: self}


def our_flag(
    default: T,
    name: str,
    *,
    help: str,
    choices: tuple[str, ...] | None = None,
    check: Check | None = None,
    upstream: tuple[str, ...] = (),
    same_as: str = "",
) -> T:
    """A field with a flag of ours. That of a bool takes no value and sets the opposite of
    `default`."""
    one = Flag(name, upstream, help, choices, check, same_as)
    return dataclasses.field(default=default, metadata=one.metadata)


def upstream_flag(default: T, *names: str, check: Check | None = None) -> T:
    """A field that a flag of SGLang's sets; its parser has the help and the choices."""
    return dataclasses.field(default=default, metadata=Flag(upstream=names, check=check).metadata)


def without_flag(default: T, why: str) -> T:
    """A field that no single flag sets."""
    return dataclasses.field(default=default, metadata={WHY_NO_FLAG: why})


def flags_of(section: Any) -> Iterator[tuple["dataclasses.Field[Any]", Flag]]:
    """The fields of a section, or of its class, that have a flag."""
    for field in dataclasses.fields(section):
        if _FLAG in field.metadata:
            yield field, field.metadata[_FLAG]


def add_flags(parser: "argparse._ActionsContainer", section: type) -> None:
    """Adds our own flags of `section` to SGLang's."""
    for field, one in flags_of(section):
        if not one.name:
            continue
        options = _kind_of(field)
        text = one.help
        if "type" in options:
            options["choices"] = one.choices
            if not one.upstream:  # else SGLang's action has the default
                options["default"] = None if one.same_as else field.default
                alias = f"; SGLang's: {one.same_as}" if one.same_as else ""
                text += f" (default: {field.default}{alias})"
        parser.add_argument(one.name, dest=one.dest, help=text, **options)


def add_early_flags(parser: "argparse._ActionsContainer", section: type, *names: str) -> None:
    """Adds the flags of the fields `names` (none given: of all), SGLang's too, under all names."""
    for field, one in flags_of(section):
        if not names or field.name in names:
            options = _kind_of(field)
            if "type" in options and field.default is not dataclasses.MISSING:
                options["default"] = field.default
            parser.add_argument(*one.names, dest=one.dest, **options)


def read_section(section: Callable[..., T], options: argparse.Namespace, **resolved: Any) -> T:
    """The section that `options` ask for. An option that is None has the field's default; fields in
    `resolved` have that value.

    Raises ConfigurationError for values that the section refuses.
    """
    values = dict(resolved)
    for field, one in flags_of(section):
        given = None if field.name in resolved else getattr(options, one.dest)
        if given is not None:
            values[field.name] = given != field.default if field.type is bool else given
    return section(**values)


def section_words(section: Any) -> list[str]:
    """The words on a command line that ask for `section`: flags of fields that differ from their
    defaults."""
    words: list[str] = []
    for field, one in flags_of(section):
        value = getattr(section, field.name)
        if value != field.default:
            words += [one.names[0]] if field.type is bool else [one.names[0], str(value)]
    return words


def check_flags(section: Any) -> None:
    """Raises ConfigurationError for the first field whose value its flag does not take."""
    for field, one in flags_of(section):
        value = getattr(section, field.name)
        if one.choices is not None:
            require_choice(one.names[0], value, one.choices)
        if one.check is not None and value is not None:
            one.check(one.names[0], value)


def option_name(name: str) -> str:
    """`--some-flag` as an attribute of parsed options, and as a key of a config file."""
    return name.removeprefix("--").replace("-", "_")


def _kind_of(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """The argparse arguments for the field's type."""
    kinds = [one for one in get_args(field.type) or [field.type] if one is not NoneType]
    return {"action": "store_true"} if kinds == [bool] else {"type": kinds[0]}
