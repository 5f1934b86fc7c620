"""Stage times add up, and what workers measured is freed of noise and of nothing else."""

import pytest

from sgl_pipeline.costs.stage_costs import StageCosts
from sgl_pipeline.migration.cost_model import agreed_costs, costs_by_host, stage_times_ms


def test_times_of_stages_add_up_embedding_layers_and_head() -> None:
    costs = [StageCosts((1.0, 2.0, 4.0), 0.5, 8.0), StageCosts((3.0, 6.0, 12.0), 1.5, 24.0)]
    assert stage_times_ms(costs, (1, 2)) == (1.5, 6.0 + 12.0 + 24.0)
    assert stage_times_ms(costs[:1], (3,)) == (0.5 + 7.0 + 8.0,)


def test_noise_makes_no_worker_slow_and_a_slow_core_does() -> None:
    noisy = [StageCosts((ms, ms), 0.1 * ms, 5 * head) for ms, head in ((1, 1), (1.1, 3), (0.9, 1))]
    assert agreed_costs(noisy, are_alike=False) == (StageCosts((1, 1), 0.1, 5),) * 3
    slow = [StageCosts((ms, ms), 0.1, 5) for ms in (1.0, 1.0, 1.5)]
    costs = agreed_costs(slow, are_alike=False)
    assert costs[2] == StageCosts((1.5, 1.5), pytest.approx(0.15), 7.5)
    assert costs[0] == slow[0]


def test_only_workers_of_one_host_are_alike() -> None:
    quick, slow, slower = (
        StageCosts((speed, speed), embedding_ms=0.0, head_ms=0.0) for speed in (1.0, 4.0, 6.0)
    )
    measured = [quick, quick, slow, slower]
    alike = costs_by_host(measured, ["a"] * 4, are_alike=True)
    assert len({costs.layers_ms for costs in alike}) == 1
    apart = costs_by_host(measured, ["a", "a", "b", "b"], are_alike=True)
    assert apart[0] == apart[1] and apart[2] == apart[3]
    assert apart[2].layers_ms[0] / apart[0].layers_ms[0] == pytest.approx(5.0)
