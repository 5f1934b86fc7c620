"""Loads as the client reads them."""

import json
from pathlib import Path

import pytest
from support.workloads import fixed_lengths
from tokenizers import Tokenizer

from benchmark.models.make_model import write_tokenizer
from benchmark.support.loads import (
    MIN_TOKENS,
    Load,
    WrittenLoad,
    filler_texts,
    scaled_trace,
    write_workload,
)
from sgl_pipeline.simulator.traces import shared_prefixes
from sgl_pipeline.simulator.workload import SimulatedRequest

VOCAB_SIZE = 1000


def read_back(requests: list[SimulatedRequest], tmp_path: Path) -> list[tuple[list[int], int]]:
    path = tmp_path / "workload.jsonl"
    write_workload(requests, path, filler_texts(VOCAB_SIZE))
    return read_file(path)


def read_file(path: Path) -> list[tuple[list[int], int]]:
    """The ids of each prompt and the length of each answer, as the client tokenizes the file."""
    write_tokenizer(VOCAB_SIZE, path.parent)
    tokenizer = Tokenizer.from_file(str(path.parent / "tokenizer.json"))
    turns = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
    return [
        (tokenizer.encode(prompt["value"]).ids, len(tokenizer.encode(answer["value"]).ids))
        for prompt, answer in turns
    ]


def test_a_written_workload_keeps_every_length(tmp_path: Path) -> None:
    requests = scaled_trace("sharegpt", 30, scale=0.3, max_output_tokens=40)
    read = read_back(requests, tmp_path)
    assert [(len(ids), length) for ids, length in read] == [
        (request.input_tokens, request.output_tokens) for request in requests
    ]


def test_a_written_workload_shares_what_its_requests_share(tmp_path: Path) -> None:
    requests = shared_prefixes(fixed_lengths(4, 20, 5), hit_rate=0.6, group_size=2)
    ids = [prompt for prompt, _ in read_back(requests, tmp_path)]
    assert ids[0][:12] == ids[2][:12] != ids[1][:12] == ids[3][:12]
    assert len({tuple(prompt[12:]) for prompt in ids}) == 4


def test_a_request_that_the_client_would_drop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least"):
        write_workload(
            fixed_lengths(1, MIN_TOKENS - 1, 5), tmp_path / "workload", filler_texts(VOCAB_SIZE)
        )


def test_a_load_can_be_written_with_texts_of_the_model(tmp_path: Path) -> None:
    load = Load(num_requests=40, input_tokens=20, output_tokens=8, seed=3, num_clients=5)
    written = load.written(tmp_path / "load.jsonl", filler_texts(VOCAB_SIZE))
    read = read_file(written.path)
    assert {len(ids) for ids, _ in read} == set(range(5, 21))
    assert {length for _, length in read} == set(range(2, 9))
    flags = written.client_flags()
    assert flags[flags.index("--max-concurrency") + 1] == "5"
    assert flags[flags.index("--num-prompts") + 1] == str(len(read)) == "40"


def test_seeds_begin_at_different_places_of_the_text(tmp_path: Path) -> None:
    prompts = [
        read_file(Load(seed=seed).written(tmp_path / "load", filler_texts(VOCAB_SIZE)).path)[0][0]
        for seed in (1, 1, 7)
    ]
    assert prompts[0] == prompts[1] and prompts[0][0] != prompts[2][0]


def test_a_scaled_trace_has_nothing_the_client_would_drop() -> None:
    requests = scaled_trace("sharegpt", 500, scale=0.01, max_output_tokens=3)
    assert min(request.input_tokens for request in requests) == MIN_TOKENS
    assert {request.output_tokens for request in requests} == {2, 3}


def test_clients_are_bounded_only_where_it_is_asked_for() -> None:
    flags = Load(num_clients=4).client_flags()
    assert flags[flags.index("--max-concurrency") + 1] == "4"
    assert flags[: flags.index("--max-concurrency")] == Load().client_flags()


def test_the_cache_is_emptied_only_where_it_is_asked_for() -> None:
    load = WrittenLoad(path=Path("w"), num_requests=3, requests_per_s=2.0, flush_cache=True)
    assert " ".join(load.client_flags()) == (
        "--dataset-name custom --dataset-path w --num-prompts 3 --seed 1 --request-rate 2.0 "
        "--flush-cache"
    )
    plain = WrittenLoad(path=Path("w"), num_requests=3, requests_per_s=2.0)
    assert "--flush-cache" not in plain.client_flags()
