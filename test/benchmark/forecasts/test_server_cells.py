"""The cells of a measured server: its step times, and loads drawn from seeds."""

import pytest

from benchmark.forecasts.server_cells import MEASURED, ServerCell, measured_costs, server_cells
from benchmark.serving.against_peers import USUAL_LOADS
from benchmark.support.dated_result import read_record
from sgl_pipeline.simulator.summary import summarize


def test_the_fit_gives_back_the_time_of_the_stages_in_each_run() -> None:
    """Runs of one policy differ by some percent themselves."""
    assert max(measured_costs().errors) < 0.08


def test_a_load_at_a_rate_takes_as_long_in_simulation_as_on_the_server() -> None:
    """Its arrivals decide how long; other seeds draw other ones."""
    runs = read_record(MEASURED)["runs"]["online"]
    (measured,) = [run["duration_s"] for run in runs if run["engine"] == "throttle"]
    durations_s = [
        summarize(cell.served("throttle", "exact", cell.workload())).duration_s
        for cell in (ServerCell("online", seed) for seed in range(3))
    ]
    assert sum(durations_s) / 3 == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("cell", list(server_cells()), ids=lambda cell: cell.load)
def test_seeds_draw_the_same_load_in_other_orders(cell: ServerCell) -> None:
    first, again, other = cell.workload(), cell.workload(), ServerCell(cell.load, 1).workload()
    assert first == again != other
    assert len(first) == len(other)
    is_at_once = USUAL_LOADS[cell.load].requests_per_s == float("inf")
    assert (first[-1].arrival_s == 0.0) == is_at_once
