"""A stage dies and no worker is available: fewer stages serve on, or the server says 503 and ends.

The oracle is the same server before anything was killed: fp32 and greedy.
"""

import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from support.live_server import ANSWER_S, PATIENCE_S, LiveServer, live_server, wait_until
from support.streams import FOR_MINUTES, PROMPTS, Stream, kill_stage, streams_of

pytestmark = [pytest.mark.alone, pytest.mark.multiproc]
SUPPORT = Path(__file__).resolve().parents[1] / "support"


def launcher(drought: Path) -> tuple[str, ...]:
    """Of a server that can start no further worker while `drought` exists."""
    return (str(SUPPORT / "server_without_workers.py"), str(drought))


def metric(server: LiveServer, name: str) -> float:
    lines = requests.get(f"{server.url}/metrics", timeout=ANSWER_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def wait_for_stages(server: LiveServer, number: int) -> dict[str, Any]:
    def are_there() -> bool:
        facts = server.facts()
        return facts["num_stages"] == number and not facts["is_recovering"]

    wait_until(are_there)
    return server.facts()


def test_one_stage_serves_on_for_two_and_two_again_when_a_worker_comes(
    directory: Path, tmp_path: Path
) -> None:
    drought = tmp_path / "drought"
    flags = ("--pp", "2", "--dtype", "float32", "--enable-metrics", "--stage-retry-s", "1")
    with live_server(*flags, launcher=launcher(drought)) as server:
        expected = [stream.join() for stream in streams_of(server)]
        drought.touch()
        for number, stage in enumerate((0, 1), 1):
            streams = streams_of(server)
            wait_until(lambda streams=streams: all(len(one.ids) > 20 for one in streams))
            before = server.facts()
            kill_stage(server, stage)
            facts = wait_for_stages(server, 1)
            assert requests.get(f"{server.url}/health", timeout=ANSWER_S).status_code == 200
            streams.append(Stream(server.url, PROMPTS[0]))
            for stream, alone in zip(streams, [*expected, expected[0]], strict=True):
                stream.join().assert_whole(alone)
            assert facts["configured_stages"] == 2
            assert facts["layer_partition"] == [sum(before["layer_partition"])]
            assert facts["total_pages"] == before["total_pages"]
            assert facts["stage_pids"] == [before["stage_pids"][1 - stage]]
            last = facts["recoveries"][-1]
            assert (last["stages"], last["num_stages"], last["stages_before"]) == ([stage], 1, 2)
            # While the streams go on, a worker comes.
            streams = streams_of(server)
            wait_until(lambda streams=streams: all(len(one.ids) > 20 for one in streams))
            drought.unlink()
            for stream, alone in zip(streams, expected, strict=True):
                stream.join().assert_whole(alone)
            facts = wait_for_stages(server, 2)
            assert facts["layer_partition"] == before["layer_partition"]
            assert facts["stage_pids"][0] == before["stage_pids"][1 - stage]
            assert len(facts["recoveries"]) == 2 * number
            Stream(server.url, PROMPTS[0]).join().assert_whole(expected[0])
            drought.touch()
        wait_until(lambda: metric(server, "sgl_pipeline_stage_changes_total") == 4.0)
        assert metric(server, "sgl_pipeline_num_stages") == 2.0
        assert len(server.stages()) == 2
    text = server.text
    assert "the layers go to the 1 of 2 stages that are left" in text
    assert text.count("1 stages serve, 2 did before") == 2
    assert text.count("2 stages serve, 1 did before") == 2
    assert "Traceback" not in text


def test_with_no_stage_left_the_server_says_503_and_ends(directory: Path, tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    drought = tmp_path / "drought"
    with live_server("--pp", "1", launcher=launcher(drought)) as server:
        processes = server.descendants()
        stream = Stream(server.url, PROMPTS[0], {"sampling_params": FOR_MINUTES})
        answers: list[requests.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                server.generate(text=PROMPTS[1], sampling_params=FOR_MINUTES)
            )
        )
        waiting.start()
        wait_until(lambda: len(stream.ids) > 5 and server.facts()["num_running_requests"] == 2)
        drought.touch()
        kill_stage(server, 0)
        stream.join()
        waiting.join(PATIENCE_S)
        (answer,) = answers
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        assert "no worker is available" in answer.text
        assert stream.errors or stream.last["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.process.wait(PATIENCE_S) not in (0, None)
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert alive == []
        wait_until(lambda: list(directory.iterdir()) == [])
    assert "--min-stages" in server.text and "killed by signal 9" in server.text
    assert set(os.listdir("/dev/shm")) <= shared_memory
