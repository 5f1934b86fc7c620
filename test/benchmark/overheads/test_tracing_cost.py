"""The measurement of what tracing costs, in a few steps: what it writes, not how long it takes."""

from benchmark.overheads.tracing_cost import (
    MOMENTS,
    REQUESTS,
    STAGES,
    WRITERS,
    _steps,
    cost_table,
    measure,
)


def test_all_kinds_are_measured_in_every_round():
    costs_us = measure(num_rounds=2, num_steps=20)
    assert set(costs_us) == {*WRITERS, MOMENTS}
    assert all(len(values) == 2 for values in costs_us.values())
    assert "1 % of a step of ms" in cost_table(costs_us)


def test_timed_steps_carry_an_even_share_of_the_decodes():
    steps = list(_steps(40))
    assert len(steps) == 40
    assert {step.microbatch.num_decodes for step in steps[-20:]} == {REQUESTS // STAGES}
