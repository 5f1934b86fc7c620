"""Which host this is, of how many: known before SGLang is imported, from flags or a file."""

from pathlib import Path

import pytest

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.early_options import read_early_options

ARGV = "--pp 4 --nnodes 2 --node-rank 1 --dist-init-addr head:5000 --model-path m".split()
CLUSTER = ClusterArgs(num_hosts=2, rank=1, head_address="head:5000")


def test_the_flags_of_sglang_are_read_among_others() -> None:
    options = read_early_options([*ARGV, "--policy", "sarathi", "--enable-metrics"])
    assert options is not None
    assert (options.cluster, options.num_stages, options.model) == (CLUSTER, 4, "m")
    alone = read_early_options([])
    assert alone is not None and alone.cluster == ClusterArgs() and alone.num_stages == 1


@pytest.mark.parametrize(
    ("arguments", "num_stages"),
    [
        ("--pp 2 --port 31000", 2),
        ("--pp-size 5", 5),
        ("--pipeline-parallel-size=3 --log-level debug", 3),
        ("--pp 0", 0),
        ("--pp two", None),
        ("--pp", None),
    ],
)
def test_the_number_of_stages_has_three_names(arguments: str, num_stages: int | None) -> None:
    options = read_early_options(arguments.split())
    assert (options and options.num_stages) == num_stages


def test_weights_are_those_of_files_unless_they_are_made_up() -> None:
    formats = {}
    for more in ("", "--load-format auto", "--load-format safetensors", "--load-format dummy"):
        options = read_early_options([*ARGV, *more.split()])
        assert options is not None
        formats[more] = options.load_format
    assert [*formats.values()] == ["safetensors", "safetensors", "safetensors", "dummy"]


def test_a_config_file_says_the_same_and_flags_come_first(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "pp-size: 4\nnnodes: 2\nnode-rank: 0\nnccl-init-addr: head:5000\nmodel: m\nport: 1\n"
    )
    options = read_early_options(["--config", str(file), "--node-rank", "1"])
    assert options is not None
    assert (options.cluster, options.num_stages, options.model) == (CLUSTER, 4, "m")
    with pytest.raises(ConfigurationError, match="--config nowhere"):
        read_early_options(["--config", "nowhere"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nnodes 2", "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ("--nnodes 2 --node-rank 2 --dist-init-addr h:1", "must be between 0 and 1"),
        ("--nnodes 0", "--nnodes 0 must be at least 1"),
        ("--host-silence-s 0.1", "--host-silence-s 0.1 must be"),
    ],
)
def test_what_does_not_go_together_is_refused(argv: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_early_options(argv.split())


def test_what_makes_no_sense_is_left_to_the_parser_that_explains_it() -> None:
    assert read_early_options(["--nnodes", "many"]) is None
