"""A flag is written once, on its field: parser, sections, checks and the page of flags follow."""

import argparse
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from sgl_pipeline.args import SECTIONS, ClusterArgs, PipelineArgs, StageArgs
from sgl_pipeline.args.checks import at_least, between, require_not_negative, seconds_from
from sgl_pipeline.args.flags import (
    WHY_NO_FLAG,
    add_early_flags,
    add_flags,
    check_flags,
    flags_of,
    our_flag,
    read_section,
    upstream_flag,
    without_flag,
)
from sgl_pipeline.errors import ConfigurationError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
ALL_FLAGS = [pair for section in SECTIONS for pair in flags_of(section)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    size: int = our_flag(3, "--size", help="Of it.", check=at_least(1), same_as="--extent")
    mode: str = our_flag("on", "--mode", help="Whether.", choices=("on", "off"))
    limit_s: float | None = our_flag(None, "--limit-s", help="Most.", check=seconds_from(1))
    is_slow: bool = our_flag(False, "--slow", help="Slowly.")
    has_cache: bool = upstream_flag(True, "--disable-cache")
    depth: int = upstream_flag(2, "--depth", "--deep", check=between(1, 9))
    inside: int = without_flag(5, "nobody needs another")

    def __post_init__(self) -> None:
        check_flags(self)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disable-cache", action="store_true")
    parser.add_argument("--depth", "--deep", type=int)
    add_flags(parser, Section)
    return parser.parse_args(argv)


def test_a_section_without_options_has_the_defaults_of_its_fields() -> None:
    assert read_section(Section, parsed()) == Section()


def test_every_option_reaches_its_field_and_a_bool_turns_around() -> None:
    argv = "--size 4 --mode off --limit-s 2.5 --slow --disable-cache --deep 7"
    expected = Section(
        size=4, mode="off", limit_s=2.5, is_slow=True, has_cache=False, depth=7, inside=6
    )
    assert read_section(Section, parsed(*argv.split()), inside=6) == expected


def test_a_resolved_field_comes_before_its_option() -> None:
    assert read_section(Section, parsed("--size", "4"), size=8).size == 8


def test_help_shows_the_default_and_the_other_name() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Section)
    actions = {action.dest: action for action in parser._actions}
    assert actions["size"].help == "Of it. (default: 3; SGLang's: --extent)"
    assert actions["size"].default is None, "to see which of the two is given"
    assert (actions["mode"].default, actions["mode"].choices) == ("on", ("on", "off"))
    assert "has_cache" not in actions and "depth" not in actions


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("size", 0, "--size 0 must be at least 1"),
        ("mode", "half", "--mode 'half' is unknown; choose from on, off"),
        ("limit_s", 0.5, "--limit-s 0.5 must be a number of seconds, 1 or more"),
        ("limit_s", float("inf"), "--limit-s inf"),
        ("limit_s", float("nan"), "--limit-s nan"),
        ("depth", 10, "--depth 10 must be between 1 and 9"),
    ],
)
def test_a_value_outside_the_limit_of_its_flag_is_refused(
    field: str, value: object, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        Section(**{field: value})  # type: ignore[arg-type]


def test_minus_one_is_negative_and_zero_is_not() -> None:
    require_not_negative("--x", 0)
    with pytest.raises(ConfigurationError, match="--x -1"):
        require_not_negative("--x", -1)


def test_early_flags_have_all_names() -> None:
    parser = argparse.ArgumentParser()
    add_early_flags(parser, ClusterArgs)
    add_early_flags(parser, StageArgs, "num_stages")
    options = parser.parse_args("--nccl-init-addr h:1 --nnodes 2 --pp-size 3 --use-ray".split())
    assert options.pp_size == 3
    cluster = read_section(ClusterArgs, options)
    assert cluster == ClusterArgs(num_hosts=2, head_address="h:1", use_ray=True)
    assert not hasattr(options, "stage_link")


def test_every_field_has_a_flag_or_says_why_not() -> None:
    assert set(SECTIONS) == {
        *(field.type for field in fields(PipelineArgs) if is_dataclass(field.type)),
        PipelineArgs,
    }
    for section in SECTIONS:
        flagged = {field.name for field, _ in flags_of(section)}
        for field in fields(section):
            if not is_dataclass(field.type):
                assert (field.name in flagged) != bool(field.metadata.get(WHY_NO_FLAG)), field


def test_every_flag_of_ours_has_a_help_that_no_other_one_has() -> None:
    texts = [flag.help for _, flag in ALL_FLAGS if flag.name]
    assert all(texts) and len({*texts}) == len(texts)


def test_names_of_sglangs_flags_are_those_of_its_parser() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = {action.dest: {*action.option_strings} for action in parser._actions}
    for _, flag in ALL_FLAGS:
        assert names.get(flag.dest, set()) == {*flag.upstream}, flag
        assert flag.name not in names.get(flag.dest, set())


def test_the_page_of_flags_shows_the_defaults() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## SGLang's")[0]
    rows = {
        name: default.strip()
        for cell, default in re.findall(r"^\| (`--.*?) \|(.*?)\|", table, re.MULTILINE)
        for name in re.findall(r"--[a-z-]+", cell)
    }
    shown = 0
    for field, flag in ALL_FLAGS:
        default = rows.get(flag.name, "")
        if default and field.default not in (None, MISSING):
            value = "off" if field.default is False else field.default
            text = f"{value:g}" if isinstance(value, float) else str(value)
            assert text in re.findall(r"[\w.-]+", default), flag.name
            shown += 1
    assert shown >= 15
