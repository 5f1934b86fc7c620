import argparse
from typing import Any

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.keyword_arguments import (
    _actions_by_name,
    command_line_of,
    parse_keywords,
)
from sgl_pipeline.managers.command_line.server_args import make_parser, parse_command_line
from sgl_pipeline.managers.upstream.upstream_fields import SERVER_ONLY


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return make_parser()


def test_keywords_ask_for_what_the_command_line_asks_for() -> None:
    argv = ["--pp", "2", "--chunked-prefill-size", "64", "--disable-radix-cache"]
    argv += ["--dtype", "float32", "--device", "cpu", "--log-level", "error"]
    keywords = {"pp": 2, "chunked_prefill_size": 64, "disable_radix_cache": True}
    plan = parse_keywords(keywords | {"dtype": "float32", "device": "cpu", "log_level": "error"})
    assert plan.pipeline == parse_command_line(argv).pipeline
    assert plan.pipeline.stages.num_stages == 2
    assert plan.pipeline.throttle.prefill_limit == 64
    assert plan.upstream.log_level == "error"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pp_size": 2}, ["--pp-size=2"]),
        ({"pp": 2, "model_path": "-x"}, ["--pp=2", "--model-path=-x"]),
        ({"disable_radix_cache": False, "revision": None}, []),
        ({"disable_radix_cache": True}, ["--disable-radix-cache"]),
        ({"log_requests_target": ["a", "b"]}, ["--log-requests-target", "a", "b"]),
        ({"preferred_sampling_params": {"n": 2}}, ['--preferred-sampling-params={"n": 2}']),
        ({"pp_layer_partition": "5,4,4,3"}, ["--pp-layer-partition=5,4,4,3"]),
    ],
)
def test_a_keyword_is_words(
    parser: argparse.ArgumentParser, arguments: dict[str, Any], words: list[str]
) -> None:
    assert command_line_of(parser, arguments) == words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_stages": 2}, "Engine has no argument 'pipeline_stages'"),
        ({"polcy": "sarathi"}, "Engine has no argument 'polcy'; did you mean 'policy'"),
        ({"port": 30000}, "Engine takes no 'port': it is for a server"),
        ({"pp": 2, "pp_size": 3}, "'pp' and 'pp_size' set the same thing"),
        ({"disable_radix_cache": 1}, "disable_radix_cache must be True or False, got 1"),
        ({"model_path": ["a", "b"]}, "model_path: one value is needed, not a list"),
        ({"model_path": object()}, "model_path: <object object"),
    ],
)
def test_a_wrong_keyword_is_named(
    parser: argparse.ArgumentParser, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", "\\(")):
        command_line_of(parser, arguments)


def test_a_wrong_value_gets_the_command_lines_message() -> None:
    with pytest.raises(ConfigurationError, match=r"argument .*--pp.*invalid int value: 'two'"):
        parse_keywords({"pp": "two"})
    with pytest.raises(ConfigurationError, match="--tp-size 2 cannot be honored: the pipeline"):
        parse_keywords({"tp_size": 2})


def test_what_is_a_servers_alone_names_flags_that_there_are(
    parser: argparse.ArgumentParser,
) -> None:
    assert {action.dest for action in parser._actions} >= SERVER_ONLY


def test_every_flag_can_be_a_keyword(parser: argparse.ArgumentParser) -> None:
    for name, action in _actions_by_name(parser._actions).items():
        if action.dest in SERVER_ONLY:
            continue
        values = {"store_true": True, "store_false": False}
        kind = "store_true" if action.const is True else "store_false"
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        value = values[kind] if action.nargs == 0 and not is_switch else is_switch or "text"
        assert command_line_of(parser, {name: value}), name
