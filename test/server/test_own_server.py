"""A server that is started for a measurement, and ends with it."""

from pathlib import Path

import pytest
import requests

from sgl_pipeline.capacity.own_server import own_server
from sgl_pipeline.capacity.processor_use import ProcessorMeter
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def test_it_answers_within_the_block_and_not_after_it(directory: Path) -> None:
    with own_server(["--model-path", str(DEMO_MODEL), "--pp", "1", "--dtype", "float32"]) as server:
        assert requests.get(f"{server.url}/health", timeout=30).ok
        used = ProcessorMeter(server.pid).used()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)
    # Each kind is found by what its process is called.
    assert {"front", "scheduler", "detokenizer", "stages", "clients"} <= set(used.seconds)


def test_the_reason_of_a_start_that_failed_is_shown(directory: Path) -> None:
    words = ["--model-path", str(DEMO_MODEL), "--pp", "1", "--policy", "greed"]
    with pytest.raises(ConfigurationError, match=r"(?s)the server ended.*greed"), own_server(words):
        pass
