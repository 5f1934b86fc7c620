"""The arguments of `sgl_pipeline.Engine`: the server's flags, as keywords of a call.

A keyword is a flag without its dashes, or SGLang's name of the field that the flag sets. It is
turned into words of a command line and read by the server's own parser, so there is one table of
flags and one set of checks.
"""

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from sgl_pipeline.args.flags import option_name
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.server_args import LaunchPlan, launch_plan, make_parser
from sgl_pipeline.managers.upstream.upstream_fields import SERVER_ONLY


class _KeywordParser(argparse.ArgumentParser):
    """The server's parser, which raises ConfigurationError where argparse ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def parse_keywords(arguments: Mapping[str, Any]) -> LaunchPlan:
    """The launch that `Engine(**arguments)` asks for; the errors are those of
    `parse_command_line`."""
    parser = make_parser(_KeywordParser)
    return launch_plan(parser.parse_args(command_line_of(parser, arguments)))


def command_line_of(parser: argparse.ArgumentParser, arguments: Mapping[str, Any]) -> list[str]:
    """The words that set these arguments. None leaves a flag at its default.

    Raises ConfigurationError for a name that is not a flag, or is a server's alone, for two names
    of one flag, and for a value that cannot be written as words.
    """
    actions = _actions_by_name(parser._actions)
    words: list[str] = []
    given: dict[str, str] = {}
    for name, value in arguments.items():
        action = actions.get(name)
        if action is None:
            raise ConfigurationError(f"Engine has no argument {name!r}{_hint(name, actions)}")
        if action.dest in SERVER_ONLY:
            raise ConfigurationError(
                f"Engine takes no {name!r}: it is for a server (sgl-pipeline serve)"
            )
        if action.dest in given:
            raise ConfigurationError(f"{given[action.dest]!r} and {name!r} set the same thing")
        given[action.dest] = name
        if value is not None:
            words += _words(name, action, value)
    return words


def _actions_by_name(actions: Iterable[argparse.Action]) -> dict[str, argparse.Action]:
    """A flag's own names come before the names of the fields that flags set."""
    takers = [one for one in actions if one.dest not in ("help", argparse.SUPPRESS)]
    by_dest = {one.dest: one for one in reversed(takers)}
    names = {option_name(name): one for one in takers for name in one.option_strings}
    return by_dest | names


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; it takes the flags of `sgl-pipeline serve --help`, with underscores"


def _words(name: str, action: argparse.Action, value: Any) -> list[str]:
    flag = _flag(name) if _flag(name) in action.option_strings else action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [flag if _switch(name, value) else f"--no-{flag.removeprefix('--')}"]
    if action.nargs == 0:
        is_set = _switch(name, value) == action.const
        return [flag] if is_set else []
    if isinstance(value, list | tuple):
        if action.nargs is None:
            raise ConfigurationError(f"{name}: one value is needed, not a list")
        return [flag, *(_text(name, one) for one in value)]
    return [f"{flag}={_text(name, value)}"]


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {value!r}")
    return value


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"{name}: {value!r} is neither text nor a number")
    return str(value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
