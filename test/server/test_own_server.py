"""A server that is started for a measurement, and ends with it."""

from pathlib import Path

import pytest
import requests

from sgl_pipeline.capacity.own_server import own_server
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def test_it_answers_within_the_block_and_not_after_it(directory: Path) -> None:
    with own_server(["--model-path", str(DEMO_MODEL), "--pp", "1", "--dtype", "float32"]) as url:
        assert requests.get(f"{url}/health", timeout=30).ok
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=5)


def test_the_reason_of_a_start_that_failed_is_shown(directory: Path) -> None:
    words = ["--model-path", str(DEMO_MODEL), "--pp", "1", "--policy", "greed"]
    with pytest.raises(ConfigurationError, match=r"(?s)the server ended.*greed"), own_server(words):
        pass
