"""The fenced blocks of README and docs, run as they stand against a server.

The port is replaced, and a running request is given the id that the docs use. Blocks that do not
run here are listed with the reason.
"""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator

import pytest
import requests
from support.live_server import LAUNCHER, PATIENCE_S, ROOT, LiveServer, live_server, wait_until

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not shutil.which("curl"), reason="the blocks call curl"),
]

PAGES = ["README.md", *(f"docs/{name}.md" for name in ("serve", "watch", "tune", "layers"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:30000"

# What is in the output of each command of a block, by the block's first line.
EXPECTED = {
    "curl http://127.0.0.1:30000/v1/chat/completions": ["42"],
    "from openai import OpenAI": ["42"],
    "import sglang as sgl": ["42 c-a-t"],
    "from sgl_pipeline import Engine": ["42 c-a-t\nd"],
    "curl http://127.0.0.1:30000/pipeline/explain/my-request": ['"state"'],
    "curl http://127.0.0.1:30000/pipeline/throttle": [
        '"prefill_spread_steps"',
        '"prefill_spread_steps"',
    ],
    "curl http://127.0.0.1:30000/pipeline/plan": ['"epoch"', '"preview"', '"total_ms"'],
}
BY_HAND = "takes minutes; run by hand on 2026-11-23"
NOT_RUN = {
    "make serve ARGS=": "starts a server of the reader's model; the other tests start servers",
    "make serve": "installs, and starts a server until Ctrl-C; test_makefile.py reads its commands",
    "make setup TORCH_INDEX=": "installs from an index that the reader names",
    "pip install": "installs several GB; the CPU set was, and served, by hand on 2026-11-23",
    "HTTP server + TokenizerManager": "a drawing",
    "curl http://127.0.0.1:30000/pipeline/tune": "searches for up to a minute; in test_steering.py",
    "python -m sgl_pipeline.simulator run": f"{BY_HAND}, except `tune` and `figures`",
    ".venv/bin/python -m sgl_pipeline.launch_server --model-path Qwen": "needs a published model",
    "sgl-pipeline fit --model DIR --pp 2": "takes minutes; test/capacity and test_capacity.py",
    "python -m sgl_pipeline plan": f"{BY_HAND} with the demo model, except `fit`",
}


def blocks() -> list[tuple[str, str, str]]:
    """(page, language, text) of every fenced block."""
    return [(page, *found) for page in PAGES for found in FENCED.findall((ROOT / page).read_text())]


def key_of(text: str, keys: Iterable[str]) -> str | None:
    """The longest of `keys` that the block begins with."""
    return max((key for key in keys if text.startswith(key)), key=len, default=None)


def commands_of(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


RUN = [block for block in blocks() if key_of(block[2], {**EXPECTED, **NOT_RUN}) in EXPECTED]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Four stages, as `make serve` starts them, whose layers may move."""
    flags = ["--pp-layer-partition", "5,4,4,3", "--migration", "manual"]
    with live_server("--pp", "4", "--dtype", "float32", *flags, launcher=LAUNCHER) as server:
        # Previews are predicted from served steps.
        sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
        assert server.generate(text=["What is"] * 4, sampling_params=sampling).ok
        yield server


@pytest.fixture
def running_request(server: LiveServer) -> Iterator[None]:
    """The request `my-request` of the docs, which runs until the test has ended."""
    sampling = {"max_new_tokens": 1900, "ignore_eos": True}
    body = {"text": "Spell the word cat.", "rid": "my-request", "sampling_params": sampling}
    thread = threading.Thread(target=server.generate, kwargs=body)
    thread.start()
    wait_until(lambda: server.facts()["num_running_requests"] == 1)
    yield
    requests.post(f"{server.url}/abort_request", json={"rid": "my-request"}, timeout=30)
    thread.join(PATIENCE_S)


def test_every_block_is_run_or_listed_with_the_reason() -> None:
    keys = {**EXPECTED, **NOT_RUN}
    found = [key_of(text, keys) for _, _, text in blocks()]
    assert [text for _, _, text in blocks() if key_of(text, keys) is None] == []
    assert set(found) == set(keys)


@pytest.mark.parametrize(
    "text", [text for _, language, text in RUN if not language], ids=lambda text: text[:70]
)
def test_the_requests_of_a_block_are_answered(
    text: str, server: LiveServer, running_request: None
) -> None:
    commands = commands_of(text.replace(URL, server.url))
    for command, part in zip(commands, EXPECTED[key_of(text, EXPECTED)], strict=True):
        assert command.startswith("curl ")
        report = "curl --no-progress-meter -w '\\n%{http_code}' "
        done = subprocess.run(
            ["bash", "-c", report + command.removeprefix("curl ")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        answer, _, status = done.stdout.rpartition("\n")
        assert (done.returncode, status) == (0, "200"), f"{done.stdout}\n{done.stderr}"
        assert part in answer


@pytest.mark.parametrize(
    "text", [text for _, language, text in RUN if language], ids=lambda text: text[:20]
)
def test_a_program_prints_what_it_should(
    text: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported SGLang and its clients already."""
    exec(compile(text.replace(URL, server.url), "docs", "exec"), {"__name__": "docs"})
    assert EXPECTED[key_of(text, EXPECTED)][0] in capsys.readouterr().out
