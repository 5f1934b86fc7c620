"""The longest command line of SGLang's pages on pipelines starts, and says what it leaves out."""

import re

import pytest
from support.documented_lines import LONGEST
from support.live_server import live_server

pytestmark = pytest.mark.multiproc


def test_the_longest_documented_line_serves_on_one_host() -> None:
    line = " ".join(LONGEST.flags())
    # The hosts have tests of their own; the port is that of the test.
    line = re.sub(r"--nnodes 2 --node-rank 0 --dist-init-addr \S+|--port \d+", "", line)
    variables = {**LONGEST.environment, "SGLANG_PP_COMM_OVERLAP": "1"}
    with live_server(*line.split(), environment=variables) as server:
        answer = server.generate(
            text="What is 17 + 25?", sampling_params={"max_new_tokens": 4, "temperature": 0}
        )
        assert answer.status_code == 200 and answer.json()["meta_info"]["completion_tokens"] > 0
        assert server.facts()["layer_partition"] == [7, 9]
        for said in (
            "--cuda-graph-max-bs-decode 8 has no effect here: the stages choose",
            "--watchdog-timeout 3600.0 has no effect here: a stage that dies or hangs is replaced",
            "--trust-remote-code has no effect here: code from a model repository is never run",
            "--moe-dense-tp-size 1 has no effect here",
            "--mem-fraction-static 0.8 has no effect on a CPU",
            "no effect here: SGLANG_PP_COMM_OVERLAP;",
        ):
            assert server.text.count(said) == 1, server.text
