"""`sgl_pipeline.Engine`: a program of its own with stages behind it, and no server."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from sglang.srt.entrypoints.engine import Engine as UpstreamEngine
from support.greedy_oracle import count_ties
from support.live_server import ROOT, START_TIMEOUT_S, wait_until
from transformers import AutoTokenizer

from sgl_pipeline import Engine
from sgl_pipeline.errors import ConfigurationError, EngineEnded, RequestError
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.upstream.refused_features import REFUSED_METHODS

pytestmark = pytest.mark.multiproc

SUM = "<|user|>What is 17 + 25?<|end|><|assistant|>"
SPELL = "<|user|>Spell the word cat.<|end|><|assistant|>"
GREEDY = {"temperature": 0, "max_new_tokens": 16}
ENDLESS = {"temperature": 0, "max_new_tokens": 30_000, "ignore_eos": True}
# Of upstream's, which is documented: a server's `/v1/score` has the first two.
NOT_OFFERED = {"score", "async_score", "freeze_gc", "get_all_child_pids"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(pp=2, dtype="float32", device="cpu") as engine:
        yield engine


def process_of(engine: Engine) -> psutil.Process:
    process = engine._client._process
    assert process is not None
    return psutil.Process(process.pid)


def processes_of(engine: Engine) -> list[psutil.Process]:
    main = process_of(engine)
    return [main, *main.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def num_running(engine: Engine) -> int:
    (facts,) = engine.get_server_info()["internal_states"]
    return int(facts["num_running_requests"])


def test_tokens_are_those_of_transformers(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = [tokenizer.encode(text) for text in (SUM, SPELL)]
    replies = engine.generate(input_ids=prompts, sampling_params=GREEDY | {"ignore_eos": True})
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply["output_ids"]) == 16
        count_ties(Path(DEMO_MODEL), prompt, reply["output_ids"])


def test_one_prompt_is_one_reply_and_a_list_is_a_list(engine: Engine) -> None:
    reply = engine.generate(SUM, GREEDY, return_logprob=True, top_logprobs_num=2, rid="mine")
    assert reply["text"] == "42"
    assert reply["meta_info"]["id"] == "mine"
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
    assert len(reply["meta_info"]["output_top_logprobs"][0]) == 2
    several = engine.generate([SUM, SPELL], [GREEDY, GREEDY | {"stop": "-t"}])
    assert [one["text"] for one in several] == ["42", "c-a"]


def test_a_stream_grows_to_the_text_of_the_reply(engine: Engine) -> None:
    whole = engine.generate(SPELL, GREEDY)
    texts = [chunk["text"] for chunk in engine.generate(SPELL, GREEDY, stream=True)]
    assert len(texts) > 1
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert texts[-1] == whole["text"] == "c-a-t"
    last: dict[int, str] = {}
    for chunk in engine.generate([SUM, SPELL], GREEDY, stream=True):
        last[chunk["index"]] = chunk["text"]
    assert last == {0: "42", 1: "c-a-t"}


def test_eight_at_once_in_an_event_loop(engine: Engine) -> None:
    async def ask() -> list[str]:
        calls = [engine.async_generate(SUM, GREEDY) for _ in range(7)]
        *replies, streamed = await asyncio.gather(*calls, read_stream())
        return [*(one["text"] for one in replies), streamed]

    async def read_stream() -> str:
        text = ""
        async for chunk in await engine.async_generate(SUM, GREEDY, stream=True):
            text = chunk["text"]
        return text

    assert asyncio.run(ask()) == ["42"] * 8


def test_replies_are_read_in_any_order(engine: Engine) -> None:
    first = engine.generate(SUM, GREEDY, stream=True)
    next(first)
    assert [chunk["text"] for chunk in engine.generate(SPELL, GREEDY, stream=True)][-1] == "c-a-t"
    assert [chunk["text"] for chunk in first][-1] == "42"

    async def read_last_first() -> list[str]:
        streams = [await engine.async_generate(one, GREEDY, stream=True) for one in (SUM, SPELL)]
        started = [await anext(stream) for stream in streams]
        assert len(started) == 2
        return [[chunk["text"] async for chunk in stream][-1] for stream in reversed(streams)]

    assert asyncio.run(read_last_first()) == ["c-a-t", "42"]


def test_a_call_may_block_a_running_event_loop_as_in_a_notebook(engine: Engine) -> None:
    async def cell() -> Any:
        return engine.generate(SUM, GREEDY)

    assert asyncio.run(cell())["text"] == "42"


def test_threads_share_an_engine(engine: Engine) -> None:
    with ThreadPoolExecutor(4) as pool:
        replies = pool.map(lambda prompt: engine.generate(prompt, GREEDY), [SUM, SPELL] * 4)
        assert [one["text"] for one in replies] == ["42", "c-a-t"] * 4


def test_whoever_stops_reading_aborts_the_request(engine: Engine) -> None:
    stream = engine.generate(SUM, ENDLESS, stream=True)
    next(stream)
    assert num_running(engine) == 1
    stream.close()
    wait_until(lambda: num_running(engine) == 0)

    async def give_up() -> None:
        async with asyncio.timeout(1):
            await engine.async_generate(SUM, ENDLESS)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    wait_until(lambda: num_running(engine) == 0)


@pytest.fixture
def restored_interrupts() -> Iterator[None]:
    """A shell that starts the tests in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_call_aborts_its_request(engine: Engine, restored_interrupts: None) -> None:
    def interrupt() -> None:
        wait_until(lambda: num_running(engine) == 1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(SUM, ENDLESS)
    thread.join()
    wait_until(lambda: num_running(engine) == 0)
    assert engine.generate(SUM, GREEDY)["text"] == "42"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": SUM, "image_data": "cat.png"}, "image, audio and video input: not supported"),
        ({"prompt": SUM, "lora_path": "x"}, "LoRA"),
        ({"prompt": SUM, "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"prompt": SUM, "sampling_params": {"temprature": 0}}, "temprature"),
        ({"prompt": SUM, "temperature": 0}, "has no argument 'temperature'"),
        ({}, "text, input_ids"),
        ({"input_ids": [1, 10**7]}, "10000000"),
    ],
)
def test_a_bad_request_is_an_error_with_the_servers_reason(
    engine: Engine, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate(**arguments)
    assert caught.value.status_code == 400


def test_a_value_that_has_no_json_is_the_callers_error(engine: Engine) -> None:
    with pytest.raises(TypeError):
        engine.generate(SUM, {"temperature": object()})
    assert engine.generate(SUM, GREEDY)["text"] == "42"


def test_refused_methods_say_what_is_missing(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"embeddings.*not supported by this server yet"):
        engine.encode("x")
    with pytest.raises(AttributeError, match="no attribute 'enkode'"):
        engine.enkode("x")


def test_every_method_of_sglangs_engine_is_offered_or_refused() -> None:
    upstreams = {name for name in dir(UpstreamEngine) if not name.startswith("_")}
    methods = {name for name in upstreams if callable(getattr(UpstreamEngine, name))}
    methods = {name for name in methods if not name.endswith(("_func", "_class"))}
    assert methods - set(dir(Engine)) - set(REFUSED_METHODS) == NOT_OFFERED
    assert not set(REFUSED_METHODS) & set(dir(Engine))


def test_what_a_servers_control_routes_do(engine: Engine) -> None:
    engine.generate(SUM, GREEDY)
    assert engine.generate(SUM, GREEDY)["meta_info"]["cached_tokens"] > 0
    assert engine.flush_cache().success
    assert engine.generate(SUM, GREEDY)["meta_info"]["cached_tokens"] == 0
    info = engine.get_server_info()
    assert (info["pp_size"], info["device"]) == (2, "cpu")
    assert engine.get_model_info()["is_generation"] is True


def test_a_fork_of_the_program_has_no_engine_and_leaves_its_parents_alone(engine: Engine) -> None:
    stream = engine.generate(SUM, ENDLESS, stream=True)
    next(stream)
    socket = engine._client._socket.fileno()
    with engine._client._lock:  # as another thread of the program might
        pid = os.fork()
    if pid == 0:
        os._exit(_errors_in_fork(engine, stream, socket))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    next(stream)
    stream.close()
    assert engine.generate(SUM, GREEDY)["text"] == "42"


def _errors_in_fork(engine: Engine, stream: Iterator[Any], socket: int) -> int:
    """The number of ways in which the engine is not this process's."""
    signal.alarm(60)  # ends the fork, and the test, where it would wait for ever
    num_errors = 0
    for use in (
        lambda: list(stream),
        lambda: engine.generate(SUM, GREEDY),
        lambda: os.fstat(socket),
    ):
        try:
            use()
        except (EngineEnded, OSError):
            num_errors += 1
    engine.shutdown()
    return num_errors


def test_a_second_engine_loses_a_stage_that_may_not_be_replaced(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(directory))
    with Engine(pp_size=2, device="cpu", stage_recovery="off") as other:
        assert other.generate(SUM, GREEDY)["text"] == "42"
        processes = processes_of(other)
        stage = next(one for one in processes if "--worker" in one.cmdline())
        stream = other.generate(SUM, ENDLESS, stream=True)
        next(stream)
        stage.kill()
        with pytest.raises((RequestError, EngineEnded), match=r"stage \d failed"):
            for _ in stream:
                pass
        wait_until(lambda: is_gone(processes[0]))
        with pytest.raises(EngineEnded, match=r"stage \d failed"):
            other.generate(SUM, GREEDY)
    wait_until(lambda: all(map(is_gone, processes)))
    wait_until(lambda: not list(directory.iterdir()))
    assert engine.generate(SUM, GREEDY)["text"] == "42"


def test_nothing_is_left_after_the_block_and_a_waiting_call_ends() -> None:
    with Engine(device="cpu") as engine:
        processes = processes_of(engine)
        assert len(processes) > 3
        stream = engine.generate(SUM, ENDLESS, stream=True)
        next(stream)
    assert all(map(is_gone, processes))
    with pytest.raises(EngineEnded, match="it was shut down"):
        for _ in stream:
            pass
    with pytest.raises(EngineEnded, match="it was shut down"):
        engine.generate(SUM, GREEDY)
    engine.shutdown()


PROGRAM = """
import sys
from sgl_pipeline import Engine
engine = Engine(pp=2, device="cpu")
print(engine._client._process.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_the_program_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("t")
    # Read from a pipe as by an interactive Python: without a file that children could run again.
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    main = psutil.Process(int(program.stdout.readline()))
    processes = [main, *main.children(recursive=True)]
    program.kill()
    program.wait()
    wait_until(lambda: all(map(is_gone, processes)))
    wait_until(lambda: not list(directory.iterdir()))
    program.communicate()


SCRIPT = """
from sgl_pipeline import Engine
with Engine(pp=2, device="cpu") as engine:
    reply = engine.generate("<|user|>What is 17 + 25?<|end|><|assistant|>", {"temperature": 0})
    print(reply["text"])
"""


def test_a_plain_script_is_served_whatever_lies_in_its_working_directory(tmp_path: Path) -> None:
    """Without a guard of its main module, and by a Python that looks for no module beside it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("queue", "torch", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('a module of the program')")
    done = subprocess.run(
        [sys.executable, "-P", "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert done.stdout == "42\n", done.stderr


def test_arguments_that_cannot_be_honored_are_named_and_leave_nothing() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigurationError, match="Engine has no argument 'stages'"):
        Engine(stages=2)
    with pytest.raises(ConfigurationError, match="--model-path /no/such/model does not exist"):
        Engine(model_path="/no/such/model", pp=2)
    assert set(psutil.Process().children(recursive=True)) <= before
