import logging
from collections.abc import Iterator

import pytest

from sgl_pipeline.managers.entrance import quiet_start


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    quiet_start.end()


def _log_everything(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=""):
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)
        logging.getLogger("sglang.srt.entrypoints.engine").info("arguments")
        logging.getLogger("sglang.srt.entrypoints.engine").warning("trouble")
        logging.getLogger("sglang.srt.utils.common").warning("Fail to set RLIMIT_NOFILE: no")
        logging.getLogger("sglang.srt.utils.common").warning("Fail to do more")
        logging.getLogger("uvicorn.error").info("started")
        logging.getLogger("uvicorn.error").error("failed")
        logging.getLogger("sgl_pipeline.managers").info("ours")
    return caplog.messages


def test_only_what_matters_is_shown_while_the_server_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet_start.begin()
    assert _log_everything(caplog) == ["trouble", "Fail to do more", "failed", "ours"]


def test_upstream_speaks_again_once_the_server_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    quiet_start.begin()
    quiet_start.end()
    assert _log_everything(caplog) == [
        "arguments",
        "trouble",
        "Fail to do more",
        "started",
        "failed",
        "ours",
    ]
