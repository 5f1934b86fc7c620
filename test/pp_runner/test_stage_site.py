"""Which weights a stage has for layers that may come, and what it does when they cannot be read."""

import threading
import time
from collections.abc import Sequence

import pytest
from support.local_pipeline import open_stage
from support.tiny_models import tiny_model

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.stage_site import StageSite
from sgl_pipeline.stage_plan import StagePlan


def stage_of_three(max_layers: int, resident: Sequence[int] = ()) -> tuple[StageRunner, StageSite]:
    """The second stage of a model with layers 0 to 5."""
    runner = open_stage(tiny_model("llama"), StagePlan(0, (3, 3)), 1, None)  # type: ignore[arg-type]
    return runner, StageSite(runner, resident, max_layers, lambda timeout_s: None)


def load(site: StageSite, layers: Sequence[int]) -> None:
    site.begin_loading(layers)
    deadline_s = time.monotonic() + 30.0
    while not site.has_loaded():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_layers_come_in_a_thread_and_are_held_when_they_are_there() -> None:
    runner, site = stage_of_three(max_layers=5)
    load(site, [2, 1])
    assert sorted(runner.held_layers.spare) == [1, 2]
    site.hold([1, 2])
    assert runner.held_layers.held == (1, 2, 3, 4, 5)
    assert runner.held_layers.spare == ()


def test_weights_of_layers_that_left_stay_while_there_is_room() -> None:
    runner, site = stage_of_three(max_layers=4)
    layers = runner.held_layers
    site.drop([3])
    assert (layers.held, layers.spare) == ((4, 5), (3,))
    site.drop([4])
    assert (layers.held, layers.spare) == ((5,), (3, 4))
    load(site, [2])  # with 5, 3 and 4 that makes four
    assert sorted(layers.spare) == [2, 3, 4]
    load(site, [1, 2])  # the oldest that is not needed goes
    assert sorted(layers.spare) == [1, 2, 4]
    read_before = layers.model.read_layer
    layers.model.read_layer = None  # type: ignore[assignment]
    load(site, [4])
    layers.model.read_layer = read_before  # type: ignore[method-assign]


def test_resident_weights_stay_for_ever() -> None:
    runner, site = stage_of_three(max_layers=3, resident=range(1, 6))
    for layer in (1, 2):
        runner.held_layers.keep_spare(runner.held_layers.model.read_layer(layer))
    site.drop([3, 4])
    assert sorted(runner.held_layers.spare) == [1, 2, 3, 4]


def test_a_layer_that_cannot_be_read_is_an_error_of_the_look() -> None:
    runner, site = stage_of_three(max_layers=5)

    def unreadable(layer: int, pause: object) -> None:
        raise CheckpointError(f"layer {layer} is unreadable")

    runner.held_layers.model.read_layer = unreadable  # type: ignore[assignment, method-assign]
    with pytest.raises(CheckpointError, match="layer 2 is unreadable"):
        load(site, [2, 1])
    site.drop([2, 1])
    assert (runner.held_layers.held, runner.held_layers.spare) == ((3, 4, 5), ())


def test_loading_that_is_given_up_leaves_nothing_and_no_thread() -> None:
    runner, site = stage_of_three(max_layers=6)
    site.begin_loading([0, 1, 2])
    site.close()
    assert "layer loading" not in {thread.name for thread in threading.enumerate()}
    site.drop([0, 1, 2])
    assert runner.held_layers.spare == ()
