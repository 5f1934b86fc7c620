"""Splits over devices of unequal memory and speed, against every split there is."""

import random

import msgspec
import pytest
from support.splits import all_splits

from sgl_pipeline.costs.stage_costs import PartSizes, StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.planning.devices import StageDevice, parse_devices
from sgl_pipeline.managers.planning.split_report import ROOM_SHARE, SplitPlanner

GIB = 2**30
SIZES = PartSizes((100,) * 16, embedding_bytes=50, head_bytes=60, page_layer_bytes=2, page_size=16)
COSTS = StageCosts((1.0,) * 16, 0.5, 2.0)


def devices(*memory_and_speed: tuple[int, float]) -> tuple[StageDevice, ...]:
    return tuple(StageDevice("d", *one) for one in memory_and_speed)


def test_a_forecast_is_arithmetic() -> None:
    split = SplitPlanner(COSTS, SIZES, devices((2000, 1.0), (1000, 0.5))).forecast((9, 7))
    first, last = split.stages
    assert (first.layers, last.layers) == (range(9), range(9, 16))
    assert (first.time_ms, last.time_ms) == (9.5, 18.0)
    assert (first.weight_bytes, last.weight_bytes) == (950, 760)
    assert (first.num_pages, last.num_pages) == (1050 // 18, 240 // 14)
    assert split.num_pages == 17
    assert split.num_tokens == 17 * 16
    assert split.slowest_ms == 18.0


def test_states_take_memory_and_no_pages() -> None:
    sizes = msgspec.structs.replace(SIZES, state_layers=(0, 1, 2, 9), state_bytes=20)
    split = SplitPlanner(COSTS, sizes, devices((2000, 1.0), (1000, 0.5))).forecast((9, 7))
    assert [one.num_pages for one in split.stages] == [(1050 - 60) // 12, (240 - 20) // 12]


def test_a_split_that_does_not_fit_is_shown_without_pages() -> None:
    split = SplitPlanner(COSTS, SIZES, devices((500, 1.0), (9000, 1.0))).forecast((9, 7))
    assert split.num_pages < 0
    assert split.num_tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_that_fits_is_faster_and_roomier_ones_are_hardly_slower(seed: int) -> None:
    rng = random.Random(seed)
    own = devices(
        *((rng.randint(500, 1500), rng.choice([1.0, 0.5, rng.uniform(0.3, 2.0)])) for _ in range(3))
    )
    planner = SplitPlanner(COSTS, SIZES, own)
    num_tokens = rng.choice([0, 16, 400])
    forecasts = [planner.forecast(split) for split in all_splits(16, 3)]
    fitting = [one for one in forecasts if one.num_tokens >= max(1, num_tokens)]
    if not fitting:
        with pytest.raises(ConfigurationError, match="do not fit"):
            planner.fastest(num_tokens)
        return
    best = planner.fastest(num_tokens)
    least_ms = min(one.slowest_ms for one in fitting)
    assert best.slowest_ms == pytest.approx(least_ms)
    assert best.num_tokens >= max(1, num_tokens)
    roomy = planner.roomiest(num_tokens)
    near = [one for one in fitting if one.slowest_ms <= least_ms * (1 + ROOM_SHARE) + 1e-9]
    assert roomy in near
    # A search by halves of what memory could hold at most: as good to within its steps.
    assert (
        roomy.num_pages
        >= max(one.num_pages for one in near)
        - sum(device.memory_bytes for device in own) // SIZES.page_layer_bytes / 2**10
    )


def test_cpus_share_this_machines_memory_and_sizes_are_as_named() -> None:
    found = parse_devices("cpu,cpu:0.5,80GiB,500MB:2", 4, 10 * GIB, 0.5)
    assert found == (
        StageDevice("cpu", 5 * GIB, 1.0),
        StageDevice("cpu", 5 * GIB, 0.5),
        StageDevice("80GiB", 40 * GIB, 1.0),
        StageDevice("500MB", 250_000_000, 2.0),
    )
    assert parse_devices(None, 2, 10 * GIB, 0.5) == (StageDevice("cpu", 5 * GIB, 1.0),) * 2


@pytest.mark.parametrize("text", ["gpu,cpu", "80,cpu", "cpu:0,cpu", "cpu:x,cpu", "cpu:inf,cpu"])
def test_what_is_no_device_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--devices: .*80GiB"):
        parse_devices(text, 2, GIB, 0.5)


def test_as_many_devices_as_stages() -> None:
    with pytest.raises(ConfigurationError, match=r"1 devices, --pp.* 2"):
        parse_devices("cpu", 2, GIB, 0.5)


def test_memory_that_state_slots_take_is_named_where_no_split_fits() -> None:
    with_slots = msgspec.structs.replace(SIZES, state_layers=(*range(12),), state_bytes=900)
    room = devices(*((1000, 1.0),) * 3)
    SplitPlanner(COSTS, SIZES, room).fastest()
    with pytest.raises(ConfigurationError, match="--max-mamba-cache-size"):
        SplitPlanner(COSTS, with_slots, room).fastest()
