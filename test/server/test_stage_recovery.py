"""`kill -9` of any stage under streaming requests: no request fails, and no token is another one.

The oracle is the same server before anything was killed: fp32 and greedy.
"""

import os
import signal
import threading
from typing import Any

import psutil
import pytest
import requests
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    LiveServer,
    live_server,
    wait_until,
    wait_until_pages_are_back,
)
from support.streams import (
    FOR_MINUTES,
    NUM_TOKENS,
    PROMPTS,
    Stream,
    kill_stage,
    streams_of,
)

from benchmark.recovery.faulty_server import WISH_VARIABLE, ask_for
from test.server.test_metrics_and_drain import Samples

pytestmark = [pytest.mark.alone, pytest.mark.multiproc]


def wait_until_recovered(server: LiveServer, number: int) -> list[dict[str, Any]]:
    """Until `number` recoveries are over."""
    wait_until(lambda: [one["is_over"] for one in server.facts()["recoveries"]] == [True] * number)
    return server.facts()["recoveries"]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_each_stage_is_killed_under_streams_and_nobody_notices_but_for_a_pause(directory):
    shared_memory = set(os.listdir("/dev/shm"))
    with live_server("--pp", "2", "--dtype", "float32", "--enable-metrics") as server:
        expected = [stream.join() for stream in streams_of(server)]
        for number, stage in enumerate((0, 1), 1):
            streams = streams_of(server)
            wait_until(lambda streams=streams: all(len(one.ids) > 20 for one in streams))
            kill_stage(server, stage)
            wait_until(lambda: server.facts()["is_recovering"])
            # A newcomer in the middle of it, and somebody who asks how the server is.
            streams.append(Stream(server.url, PROMPTS[0]))
            assert requests.get(f"{server.url}/health", timeout=ANSWER_S).status_code == 200
            for stream, alone in zip(streams, [*expected, expected[0]], strict=True):
                stream.join().assert_whole(alone)
            newest = wait_until_recovered(server, number)[-1]
            assert newest["stages"] == [stage]
            assert newest["reasons"] == ["its process ended, killed by signal 9"]
            assert newest["requests"] == len(PROMPTS)
            # Only the newcomer computes again.
            assert newest["tokens"] == 0 and newest["replay_tokens"] > 20 * len(PROMPTS)
            replayed = server.facts()["replayed_tokens_of_stages"]
            assert replayed[stage] >= newest["replay_tokens"]
            assert stage == 1 or replayed[1] == 0
        wait_until_pages_are_back(server)
        wait_until(
            lambda: (
                {"sgl_pipeline_recovery_seconds_count", "sgl_pipeline_replayed_tokens_total"}
                <= Samples(server).names
            )
        )
        processes = server.descendants()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == [] and list(directory.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    log = [line for line in server.text.splitlines() if "is lost" in line or "recovered" in line]
    assert len(log) == 4 and "Traceback" not in server.text


def test_each_stage_is_asked_to_leave_under_streams_and_hands_over_all_that_it_has(directory):
    # A loss would end the server.
    flags = ("--pp", "2", "--dtype", "float32", "--max-stage-restarts", "0", "--enable-metrics")
    with live_server(*flags) as server:
        expected = [stream.join() for stream in streams_of(server)]
        for number, stage in enumerate((0, 1), 1):
            streams = streams_of(server)
            wait_until(lambda streams=streams: all(len(one.ids) > 20 for one in streams))
            process = psutil.Process(server.facts()["stage_pids"][stage])
            process.terminate()
            for stream, alone in zip(streams, expected, strict=True):
                stream.join().assert_whole(alone)
            newest = wait_until_recovered(server, number)[-1]
            assert newest["stages"] == [stage] and newest["is_planned"]
            assert newest["tokens"] == newest["replay_tokens"] == 0
            assert server.facts()["stage_pids"][stage] != process.pid
            # Its parent reaps it later, if at all.
            wait_until(lambda process=process: has_ended(process))
            # The successor serves, from the pages that it was given too.
            for stream, alone in zip(streams_of(server), expected, strict=True):
                stream.join().assert_whole(alone)
        wait_until_pages_are_back(server)
        assert server.facts()["replayed_tokens_of_stages"] == [0, 0]
        wait_until(lambda: "sgl_pipeline_handover_seconds_count" in Samples(server).names)
    assert server.text.count("was asked to leave") == server.text.count("took over from") == 2
    assert "is lost" not in server.text and "Traceback" not in server.text


def test_both_stages_killed_at_once_with_a_spare_that_takes_one(directory):
    flags = ("--pp", "2", "--dtype", "float32", "--spare-workers", "1")
    with live_server(*flags) as server:
        expected = [stream.join() for stream in streams_of(server)]
        wait_until(lambda: len(server.stages()) == 3)
        streams = streams_of(server)
        wait_until(lambda: all(len(one.ids) > 20 for one in streams))
        for pid in server.facts()["stage_pids"]:
            psutil.Process(pid).kill()
        for stream, alone in zip(streams, expected, strict=True):
            stream.join().assert_whole(alone)
        assert sum(len(one["reasons"]) for one in wait_until_recovered(server, 1)) == 2
        # Another spare has come.
        wait_until(lambda: len(server.stages()) == 3)


def test_the_process_that_forks_stages_is_killed_and_takes_them_along(directory):
    with live_server("--pp", "2", "--dtype", "float32") as server:
        expected = [stream.join() for stream in streams_of(server)]
        streams = streams_of(server)
        wait_until(lambda: all(len(one.ids) > 20 for one in streams))
        first, second = (psutil.Process(pid) for pid in server.facts()["stage_pids"])
        nursery = first.parent()
        assert nursery is not None and second.ppid() == nursery.pid
        nursery.kill()
        for stream, alone in zip(streams, expected, strict=True):
            stream.join().assert_whole(alone)
        assert sum(len(one["reasons"]) for one in wait_until_recovered(server, 1)) == 2
        for stream, alone in zip(streams_of(server), expected, strict=True):
            stream.join().assert_whole(alone)
    assert "Traceback" not in server.text


def test_logprobs_and_a_grammar_survive_the_loss_of_a_stage(directory):
    with live_server("--pp", "2", "--dtype", "float32") as server:
        rows = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        letters = {"regex": "(a|b){400}", "temperature": 0, "max_new_tokens": NUM_TOKENS}
        options = [rows, {"sampling_params": letters}]
        expected = [Stream(server.url, PROMPTS[1], one).join() for one in options]
        streams = [Stream(server.url, PROMPTS[1], one) for one in options]
        wait_until(lambda: all(len(one.ids) > 20 for one in streams))
        kill_stage(server, 1)
        for stream, alone in zip(streams, expected, strict=True):
            stream.join().assert_whole(alone)
        found, wanted = streams[0].last["meta_info"], expected[0].last["meta_info"]
        for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
            assert found[name] == wanted[name]


def test_a_stage_killed_while_layers_move_costs_the_move(directory):
    flags = ("--pp", "2", "--dtype", "float32", "--migration", "manual")
    with live_server(*flags) as server:
        expected = [stream.join() for stream in streams_of(server)]
        streams = streams_of(server)
        wait_until(lambda: all(len(one.ids) > 20 for one in streams))
        pids = server.facts()["stage_pids"]
        psutil.Process(pids[1]).suspend()  # the target gets no further
        plan_url = f"{server.url}/pipeline/plan"
        first, last = requests.get(plan_url, timeout=ANSWER_S).json()["layer_counts"]
        answers: list[requests.Response] = []
        mover = threading.Thread(
            target=lambda: answers.append(
                requests.post(plan_url, json={"layer_counts": [first - 1, last + 1]}, timeout=60)
            )
        )
        mover.start()
        wait_until(
            lambda: requests.get(plan_url, timeout=ANSWER_S).json()["move_under_way"] is not None
        )
        psutil.Process(pids[0]).kill()
        psutil.Process(pids[1]).resume()
        mover.join(PATIENCE_S)
        assert answers[0].status_code == 503 and "was lost" in answers[0].text
        for stream, alone in zip(streams, expected, strict=True):
            stream.join().assert_whole(alone)
        wait_until_recovered(server, 1)
        again = requests.post(plan_url, json={"layer_counts": [first - 1, last + 1]}, timeout=60)
        assert again.status_code == 200
        Stream(server.url, PROMPTS[0]).join().assert_whole(expected[0])


def test_one_loss_too_many_ends_the_server_with_the_reason(directory):
    with live_server("--pp", "2", "--max-stage-restarts", "1") as server:
        processes = server.descendants()
        kill_stage(server, 0)
        wait_until_recovered(server, 1)
        stream = Stream(server.url, PROMPTS[0], {"sampling_params": FOR_MINUTES})
        wait_until(lambda: len(stream.ids) > 5)
        processes += [one for one in server.descendants() if one not in processes]
        kill_stage(server, 1)
        stream.join()
        finish = stream.last["meta_info"]["finish_reason"]
        assert stream.errors or finish["type"] == "abort", (stream.last, server.text[-3000:])
        assert server.process.wait(PATIENCE_S) not in (0, None)
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert alive == []
        wait_until(lambda: list(directory.iterdir()) == [])
    assert "--max-stage-restarts" in server.text and "killed by signal 9" in server.text


def test_orders_and_reports_that_are_spoiled_cost_their_stage_alone(directory, monkeypatch):
    wishes = directory / "wish"
    monkeypatch.setenv(WISH_VARIABLE, str(wishes))
    flags = ("--pp", "2", "--dtype", "float32", "--spare-workers", "1")
    with live_server(*flags, launcher=("-m", "benchmark.recovery.faulty_server")) as server:
        expected = [stream.join() for stream in streams_of(server)]
        faults = {"truncated order": "malformed", "another stage's report": "it fills stage"}
        for number, (fault, reason) in enumerate(faults.items(), 1):
            streams = streams_of(server)
            wait_until(lambda streams=streams: all(len(one.ids) > 20 for one in streams))
            ask_for(fault, number, wishes)
            for stream, alone in zip(streams, expected, strict=True):
                stream.join().assert_whole(alone)
            assert reason in wait_until_recovered(server, number)[-1]["reasons"][0]


def test_a_stage_that_hangs_says_where_and_is_replaced(directory):
    with live_server("--pp", "2", "--dtype", "float32", "--stage-silence-s", "2") as server:
        expected = [stream.join() for stream in streams_of(server)]
        pids = server.facts()["stage_pids"]
        # One that can still write is told by its stacks, and goes on.
        os.kill(pids[0], signal.SIGUSR1)
        wait_until(lambda: "most recent call first" in server.text)
        streams = streams_of(server)
        wait_until(lambda: all(len(one.ids) > 20 for one in streams))
        psutil.Process(pids[1]).suspend()
        for stream, alone in zip(streams, expected, strict=True):
            stream.join().assert_whole(alone)
        (recovery,) = wait_until_recovered(server, 1)
        assert recovery["stages"] == [1] and "silent for" in recovery["reasons"][0]
        assert "stage 1 (worker 1) hangs" in server.text and "T (stopped)" in server.text
        assert not psutil.pid_exists(pids[1]) or psutil.Process(pids[1]).status() == "zombie"
