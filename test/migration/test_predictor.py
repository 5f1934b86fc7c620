"""The predictor against formulas written out, and its file against what it must refuse."""

from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.malformed_data import JSON
from support.microbatches import microbatch_of
from support.pipelines import make_request
from support.served_steps import flat_costs
from support.step_records import step_record

from benchmark.forecasts.predictor_error import made_up_record
from sgl_pipeline.costs.step_costs import (
    CostFile,
    LayerCost,
    RowCost,
    StepCosts,
    cost_file_name,
    decode_costs,
    encode_costs,
)
from sgl_pipeline.costs.windows import windowed_work
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.migration.cost_model import predicted_costs
from sgl_pipeline.migration.predictor import SlowestStage, StepPredictor
from sgl_pipeline.step_work import StepWork

COSTS = StepCosts(
    layer=LayerCost(RowCost((4.0, 8.0), (1.0, 3.0), 0.25), 0.5, 0.01, 0.001),
    embedding=RowCost((1.0,), (0.1,), 0.01),
    tail=RowCost((2.0,), (5.0,), 1.0),
    layer_weights=(1.0, 2.0, 1.0, 0.5),
)


@pytest.mark.parametrize(
    ("tokens", "expected_ms"), [(1, 1.0), (4, 1.0), (5, 1.5), (8, 3.0), (12, 4.0)]
)
def test_rows_cost_the_first_time_then_straight_lines_then_the_last_slope(
    tokens: int, expected_ms: float
) -> None:
    parts = StepPredictor(COSTS).parts_ms(StepWork(tokens, 0, 0, 0, 0))
    assert parts.layer_ms == pytest.approx(expected_ms)


def test_each_kind_of_work_has_its_price() -> None:
    parts = StepPredictor(COSTS).parts_ms(StepWork(12, 4, 100, 2000, 5))
    assert parts.layer_ms == pytest.approx(4.0 + 4 * 0.5 + 100 * 0.01 + 2000 * 0.001)
    assert parts.embedding_ms == pytest.approx(0.1 + 11 * 0.01)
    assert parts.tail_ms == pytest.approx(5.0 + 3 * 1.0)


def test_a_step_that_samples_nothing_has_no_tail() -> None:
    assert StepPredictor(COSTS).parts_ms(StepWork(12, 0, 0, 0, 0)).tail_ms == 0.0


def test_stages_have_the_weights_of_their_layers_and_the_ends_their_parts() -> None:
    predictor = StepPredictor(COSTS)
    parts = predictor.parts_ms(StepWork(4, 0, 0, 0, 2))
    assert predictor.stage_times_ms(parts, (1, 2, 1)) == pytest.approx((1.13, 3.0, 5.5))
    assert predictor.stage_times_ms(parts, (1, 2, 1), (1.0, 2.0, 3.0)) == pytest.approx(
        (1.13, 6.0, 16.5)
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 50), st.booleans(), st.booleans()), min_size=1
    )
)
def test_a_record_says_the_same_of_a_step_as_its_microbatch(
    drawn: list[tuple[int, int, bool, bool]],
) -> None:
    chunks = tuple(
        Chunk(make_request("r", [1]), start, 1 if decode else length, decode, decode or samples)
        for start, length, decode, samples in drawn
    )
    work = microbatch_of(0, chunks).work
    pairs = [
        (chunk.is_decode, sum(range(chunk.start + 1, chunk.end + 1)))  # a row attends to itself too
        for chunk in chunks
    ]
    assert work.decode_attended_tokens == sum(count for decode, count in pairs if decode)
    assert work.prefill_attended_tokens == sum(count for decode, count in pairs if not decode)
    assert work.tokens == sum(chunk.length for chunk in chunks)
    assert made_up_record(work, [1.0]).work == work


def test_a_real_steps_record_keeps_what_decodes_attend_to() -> None:
    # Five tokens of a prompt, and a decode of one token.
    assert step_record(3).work == StepWork(6, 1, 1, 15, 2)


NAMES = {"model": "m", "dtype": "bfloat16", "device": "cpu", "threads": 2}
FILE = CostFile(**NAMES, machine="an x86", date="2026-01-01", costs=COSTS)


def test_a_file_comes_back_as_it_was_saved() -> None:
    assert decode_costs(encode_costs(FILE), "f", num_layers=4, **NAMES) == FILE
    windowed = changed(layer_windows=(0, 0, 8, None))  # those of 0 keep a state
    found = decode_costs(windowed, "f", num_layers=4, **NAMES)
    assert found.costs.layer_windows == (0, 0, 8, None)
    assert FILE.file_name == cost_file_name("m", "bfloat16", "cpu", 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, "model m, this server runs other"),
        ({"dtype": "float32"}, "dtype bfloat16, this server runs float32"),
        ({"device": "cuda"}, "device cpu, this server runs cuda"),
        ({"threads": 4}, "threads 2, this server runs 4"),
        ({"num_layers": 5}, "4 layers, m has 5"),
    ],
)
def test_a_file_of_something_else_is_refused_by_name(change: dict[str, object], named: str) -> None:
    wanted = {"num_layers": 4, **NAMES, **change}
    with pytest.raises(ConfigurationError, match=named):
        decode_costs(encode_costs(FILE), "f", **wanted)


def changed(**parts: object) -> bytes:
    return encode_costs(
        msgspec.structs.replace(FILE, costs=msgspec.structs.replace(COSTS, **parts))
    )


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"not json",
        *JSON.values(),
        changed(tail=RowCost((2.0, 1.0), (1.0, 1.0), 0.0)),
        changed(tail=RowCost((), (), 0.0)),
        changed(embedding=RowCost((1.0,), (-1.0,), 0.0)),
        changed(layer=LayerCost(RowCost((1.0,), (1.0,), 0.0), 0.0, -1.0, 0.0)),
        changed(layer_weights=(1.0, 1.0, 1.0, -1.0)),
        changed(layer_windows=(None, 8)),
        changed(layer_windows=(None, 8, 8, -1)),
    ],
)
def test_a_file_that_holds_no_costs_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"^the-file"):
        decode_costs(content, "the-file", num_layers=4, **NAMES)


def test_flat_costs_are_flat() -> None:
    predictor = StepPredictor(flat_costs(4, tail_ms=3.0))
    for samples in (1, 50):
        assert predictor.parts_ms(StepWork(samples, 0, 0, 0, samples))[:3] == (1.0, 0.0, 3.0)


WINDOWED = StepCosts(
    COSTS.layer, COSTS.embedding, COSTS.tail, (1.0, 2.0, 1.0, 0.5), (64, None, 8, 64)
)


@given(
    st.lists(st.integers(1, 300), max_size=12),
    st.integers(0, 200),
    st.integers(0, 90),
    st.sampled_from([8, 64]),
)
def test_a_window_hides_what_lies_beyond_it(
    contexts: list[int], start: int, length: int, window: int
) -> None:
    rows = range(start + 1, start + length + 1)
    work = StepWork(len(contexts) + length, len(contexts), sum(contexts), sum(rows), len(contexts))
    seen = windowed_work(work, window)
    for own, whole in ((seen[2], contexts), (seen[3], rows)):
        exact = sum(min(one, window) for one in whole)
        assert exact <= own <= sum(whole)
        if all(one <= window for one in whole) or all(one >= window for one in whole):
            assert own == exact


@given(
    *(st.integers(0, 40) for _ in range(2)),
    *(st.integers(0, 5000) for _ in range(2)),
    st.sampled_from([(1, 3), (2, 2), (4,), (1, 1, 1, 1)]),
)
def test_a_windowed_stage_takes_the_sum_of_its_layers(
    decodes: int, prompt: int, by_decodes: int, by_prefill: int, counts: tuple[int, ...]
) -> None:
    work = StepWork(decodes + prompt, decodes, by_decodes, by_prefill, decodes)
    plain = StepPredictor(COSTS)
    layers = [
        weight * plain.parts_ms(work if window is None else windowed_work(work, window)).layer_ms
        for weight, window in zip(WINDOWED.layer_weights, WINDOWED.layer_windows, strict=True)
    ]
    predictor, speeds = StepPredictor(WINDOWED), [1.0 + 0.5 * stage for stage in range(len(counts))]
    parts = predictor.parts_ms(work)
    assert predicted_costs(predictor, work).layers_ms == pytest.approx(layers)
    ends = [0, *accumulate(counts)]
    expected = [sum(layers[start:end]) for start, end in pairwise(ends)]
    expected[0] += parts.embedding_ms
    expected[-1] += parts.tail_ms
    expected = [one * speed for one, speed in zip(expected, speeds, strict=True)]
    assert predictor.stage_times_ms(parts, counts, speeds) == pytest.approx(expected)
    slowest = SlowestStage(predictor, counts, speeds)
    assert slowest.step_ms(work) == pytest.approx(max(expected))
    more = work._replace(tokens=work.tokens + 1, prefill_attended_tokens=by_prefill + 70)
    assert slowest.step_ms(more) >= slowest.step_ms(work) - 1e-9
