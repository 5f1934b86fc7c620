"""Processes are named by their command lines, or by the titles that they have instead."""

import pytest

from benchmark.support.process_kinds import process_kind

STAGE = ["sgl_pipeline.pp_runner.stage_process", "--address", "ipc:///x", "--worker", "1"]


@pytest.mark.parametrize(
    ("command_line", "kind"),
    [
        (["python", "-m", *STAGE], "stage 1"),
        ([" ".join(STAGE), ""], "stage 1"),
        (
            ["python", "-m", "sgl_pipeline.managers.stages.worker_nursery", "--socket", "9"],
            "nursery",
        ),
        (["sgl_pipeline.managers.grammars.compiler", "", ""], "grammar compiler"),
        (["sglang::router", ""], "router"),
        (["sgl_pipeline::scheduler", ""], "scheduler"),
        (["sglang::detokenizer"], "detokenizer"),
        (["python", "-m", "sgl_pipeline.launch_server", "--pp", "4"], "main"),
        (["cat"], "process 7"),
        ([], "process 7"),
    ],
)
def test_a_process_is_of_a_kind(command_line: list[str], kind: str) -> None:
    assert process_kind(command_line, 7) == kind
