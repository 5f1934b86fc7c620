"""Grids of measured points: exact on them, linear between, and what lies outside."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.simulator.interpolation import Grid

PLANE = Grid.of(((float(x), float(y)), 3.0 * x + 2.0 * y) for x, y in product((1, 4, 9), (0, 5)))


@given(st.floats(1, 50), st.floats(0, 50))
def test_a_plane_is_reproduced_between_its_points_and_beyond_the_last(x: float, y: float) -> None:
    assert PLANE.at(x, y) == pytest.approx(3.0 * x + 2.0 * y)


def test_beyond_the_last_point_the_slope_of_the_upper_half_holds() -> None:
    """A line through 1000 and 2000, whatever the last two points say."""
    grid = Grid.of([((0.0,), 0.0), ((1000.0,), 10.0), ((1990.0,), 19.99), ((2000.0,), 20.0)])
    assert grid.at(1995.0) == pytest.approx(19.995)
    assert grid.at(4000.0) == pytest.approx(40.0)


def test_below_the_first_point_the_first_value_holds() -> None:
    assert PLANE.at(0.1, -3.0) == PLANE.at(1.0, 0.0)


def test_an_axis_with_one_point_is_constant_along_it() -> None:
    grid = Grid.of([((1.0, 7.0), 2.0), ((3.0, 7.0), 4.0)])
    assert grid.at(2.0, 100.0) == 3.0


def test_a_grid_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 points .* first \(2.0, 2.0\)"):
        Grid.of([((1.0, 1.0), 0.0), ((1.0, 2.0), 0.0), ((2.0, 1.0), 0.0)])
