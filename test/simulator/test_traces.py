"""Workloads from shipped traces and from users' files."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from support.workloads import fixed_lengths

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.simulator.traces import (
    SHIPPED,
    load_trace,
    shared_prefixes,
    thinking,
)
from sgl_pipeline.simulator.workload import (
    poisson_arrivals,
    scaled_arrivals,
)


@pytest.mark.parametrize(
    ("name", "mean_input", "mean_output"), [("azure_conv", 1161.1, 257.5), ("sharegpt", 223, 154.6)]
)
def test_the_papers_workloads_have_the_papers_means(
    name: str, mean_input: float, mean_output: float
) -> None:
    requests = load_trace(name)
    count = len(requests)
    assert sum(one.input_tokens for one in requests) / count == pytest.approx(mean_input, abs=0.1)
    assert sum(one.output_tokens for one in requests) / count == pytest.approx(mean_output, abs=0.1)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_trace_loads(name: str) -> None:
    requests = load_trace(name, 200)
    assert 0 < len(requests) <= 200
    assert requests == sorted(requests, key=lambda one: one.arrival_s)


def test_a_turn_continues_the_prompt_and_the_answer_before_it() -> None:
    chains = [list(one.with_follow_ups()) for one in load_trace("sharegpt_multiturn", 300)]
    assert max(len(turns) for turns in chains) > 3
    for turns in chains:
        for before, after in pairwise(turns):
            history = before.prompt_ids() + list(before.output.token_ids)
            assert after.prompt_ids()[: len(history)] == history
            assert after.input_tokens > len(history)


def test_pauses_leave_the_conversation_as_it_is() -> None:
    chains = load_trace("sharegpt_multiturn", 300)
    paused = thinking(chains, 5.0, Random(1))
    for before, after in zip(chains, paused, strict=True):
        prompts = [turn.prompt for turn in before.with_follow_ups()]
        assert prompts == [turn.prompt for turn in after.with_follow_ups()]
        assert all(turn.think_s > 0 for turn in after.with_follow_ups())


def test_mooncake_blocks_are_shared_exactly_where_their_ids_are() -> None:
    with gzip.open(SHIPPED["mooncake_conversation"], "rt") as lines:
        rows = [json.loads(next(lines)) for _ in range(50)]
    requests = load_trace("mooncake_conversation", 50)
    for row, request in zip(rows, requests, strict=True):
        assert request.input_tokens == row["input_tokens"]
        parent = requests[row["parent"]] if row["parent"] >= 0 else None
        shared = row["shared_blocks"] * 512
        if parent is not None:
            ours, theirs = request.prompt_ids(), parent.prompt_ids()
            length = min(shared, len(theirs))
            assert ours[:length] == theirs[:length]
            assert ours[shared : shared + 512] != theirs[shared : shared + 512]


@pytest.mark.parametrize("hit_rate", [0.25, 0.9, 1.0])
def test_shared_prefixes_have_the_hit_rate_that_was_asked(hit_rate: float) -> None:
    requests = shared_prefixes(fixed_lengths(64, 100, 5), hit_rate, group_size=16)
    length = min(int(100 * hit_rate), 99)
    prefixes = Counter(tuple(one.prompt_ids()[:length]) for one in requests)
    assert list(prefixes.values()) == [16] * 4
    assert len({one.prompt_ids()[length] for one in requests}) == 64


def test_arrivals_are_drawn_or_scaled_to_the_rate() -> None:
    requests = fixed_lengths(4000, 1, 1)
    drawn = poisson_arrivals(requests, 5.0, Random(0))
    assert drawn[-1].arrival_s == pytest.approx(800, rel=0.05)
    assert {one.arrival_s for one in poisson_arrivals(requests, float("inf"), Random(0))} == {0.0}
    recorded = scaled_arrivals(load_trace("azure_conv", 100), 2.0)
    assert recorded[-1].arrival_s - recorded[0].arrival_s == pytest.approx(99 / 2.0)


def test_a_users_own_table_needs_three_columns(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("input_tokens,arrival_s,output_tokens,note\n10,0.5,3,x\n20,1.5,4,y\n")
    first, second = load_trace(str(path))
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.5, 10, 3)
    assert (second.arrival_s, second.input_tokens, second.output_tokens) == (1.5, 20, 4)
    assert not set(first.prompt_ids()) & set(second.prompt_ids())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column input_tokens and output_tokens"),
        ("input_tokens,output_tokens\n5,x\n", "line 2: 'x' "),
        ("input_tokens,output_tokens\n5,1\n0,1\n", "line 3: 0 is out of range"),
        ("input_tokens,output_tokens,arrival_s\n5,1,-1\n", "line 2: -1 is out of range"),
        ("input_tokens,output_tokens\n5\n", "line 2: None "),
        ("input_tokens,output_tokens\n", "holds no request"),
    ],
)
def test_a_bad_table_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load_trace(str(path))


def test_an_unknown_trace_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="azure_conv"):
        load_trace("nowhere")
