"""Any stage finds its layers in the objects of any other split, byte for byte."""

from random import Random

import pytest

from sgl_pipeline.object_layers import (
    ObjectPart,
    are_cuts,
    cuts_of,
    object_layers,
    object_parts,
    written_runs,
)
from sgl_pipeline.stage_plan import StagePlan

SIZES = (3, 5, 2, 7)


def test_a_split_of_layers_is_cut_where_its_stages_begin() -> None:
    plan = StagePlan(0, (1, 2, 1))
    grouped = [written_runs(plan.layers_of(stage), is_grouped=True) for stage in range(3)]
    assert cuts_of(run for runs in grouped for run in runs) == (0, 1, 3)
    assert object_layers((0, 1, 3), 4) == (range(1), range(1, 3), range(3, 4))
    assert object_layers((0,), 4) == (range(4),)


def test_objects_of_one_layer_need_no_cuts() -> None:
    runs = [*written_runs(range(2), is_grouped=False), *written_runs(range(2, 3), is_grouped=True)]
    assert runs == [range(1), range(1, 2), range(2, 3)]
    assert cuts_of(runs) == ()
    assert object_layers((), 3) == tuple(runs)


def test_stages_that_group_and_stages_that_do_not_make_one_page() -> None:
    runs = (*written_runs(range(2), is_grouped=False), *written_runs(range(2, 4), is_grouped=True))
    assert cuts_of(runs) == (0, 1, 2)
    assert object_layers((0, 1, 2), 4) == runs


@pytest.mark.parametrize("cuts", [(), (0,), (0, 1, 3), (0, 1, 2, 3)])
def test_cuts_ascend_from_the_first_layer(cuts: tuple[int, ...]) -> None:
    assert are_cuts(cuts, 4)


@pytest.mark.parametrize("cuts", [(1,), (0, 0), (0, 2, 1), (0, 4), (0, 1, 5), (3, 0)])
def test_other_numbers_are_no_cuts(cuts: tuple[int, ...]) -> None:
    assert not are_cuts(cuts, 4)


def test_a_part_says_where_its_layers_are() -> None:
    assert [*object_parts((0, 1), SIZES, range(2, 4))] == [
        ObjectPart(range(1, 4), range(2, 4), offset=5, num_bytes=14)
    ]
    assert [*object_parts((0, 3), SIZES, range(1, 4))] == [
        ObjectPart(range(3), range(1, 3), offset=3, num_bytes=10),
        ObjectPart(range(3, 4), range(3, 4), offset=0, num_bytes=7),
    ]


@pytest.mark.parametrize("seed", range(50))
def test_parts_of_any_split_hold_the_bytes_of_the_layers(seed: int) -> None:
    random = Random(seed)
    num_layers = random.randrange(1, 9)
    layers = [random.randbytes(random.randrange(1, 9)) for _ in range(num_layers)]
    later = random.sample(range(1, num_layers), random.randrange(num_layers))
    cuts = (0, *sorted(later)) if random.random() < 0.8 else ()
    assert are_cuts(cuts, num_layers)
    objects = {
        whole: b"".join(layers[whole.start : whole.stop])
        for whole in object_layers(cuts, num_layers)
    }
    first = random.randrange(num_layers)
    wanted = range(first, random.randrange(first, num_layers) + 1)
    found, place = b"", first
    for part in object_parts(cuts, [*map(len, layers)], wanted):
        assert part.layers.start == place
        place = part.layers.stop
        content = objects[part.object_layers]
        assert len(content) == part.num_bytes
        length = sum(map(len, layers[part.layers.start : part.layers.stop]))
        found += content[part.offset : part.offset + length]
    assert found == b"".join(layers[wanted.start : wanted.stop])
