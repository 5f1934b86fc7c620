"""The order of hosts and the split, against every order and every split there is."""

import random
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from support.splits import all_splits

from sgl_pipeline.costs.stage_costs import StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration import host_order
from sgl_pipeline.migration.host_order import Hop, Route, RouteSearch

NUM_LAYERS = 9


def anything_fits(host: int, start: int, end: int) -> bool:
    return True


def symmetric_hops(count: int, hop: Sequence[Hop]) -> list[list[Hop]]:
    """`hop` holds those of the pairs (0, 1), (0, 2), .., (1, 2), .. in that order."""
    hops = [[Hop()] * count for _ in range(count)]
    for (one, other), joint in zip(combinations(range(count), 2), hop, strict=True):
        hops[one][other] = hops[other][one] = joint
    return hops


def random_hop(rng: random.Random) -> Hop:
    busy_ms, delay_ms = rng.choice([0.1, 1.0, 6.0]), rng.choice([0.01, 0.5, 5.0])
    return Hop(busy_ms, busy_ms + delay_ms, delay_ms)


def period_ms(
    order: Sequence[int],
    counts: Sequence[int],
    costs: Sequence[StageCosts],
    stages: Sequence[int],
    hops: Sequence[Sequence[Hop]],
    in_flight: int,
) -> float:
    """Written out, stage by stage."""
    hosts = [host for host in order for _ in range(stages[host])]
    start, stage_ms, link_ms, busy_ms = 0, [], 0.0, [0.0]
    for stage, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        time_ms = sum(costs[host].layers_ms[start : start + count])
        time_ms += costs[host].embedding_ms if stage == 0 else 0.0
        time_ms += costs[host].head_ms if stage == len(hosts) - 1 else 0.0
        stage_ms.append(time_ms)
        start += count
        if stage and hosts[stage - 1] != host:
            hop = hops[hosts[stage - 1]][host]
            link_ms += hop.transfer_ms
            busy_ms.append(hop.busy_ms)
    round_ms = sum(stage_ms) + link_ms + hops[hosts[-1]][hosts[0]].delay_ms
    return max(*stage_ms, *busy_ms, round_ms / in_flight)


@pytest.mark.parametrize("seed", range(60))
def test_no_order_and_no_split_has_a_shorter_period(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.choice([(1, 1), (2, 1, 1), (1, 1, 1, 1), (1, 2, 2), (3, 1)])
    hops = symmetric_hops(
        len(stages), [random_hop(rng) for _ in combinations(range(len(stages)), 2)]
    )
    layers_ms = tuple(rng.choice([1.0, 1.0, 2.5]) for _ in range(NUM_LAYERS))
    typical = StageCosts(layers_ms, rng.random(), 3 * rng.random())
    costs = [typical.scaled(rng.choice([1.0, 1.0, 2.0, 0.5])) for _ in stages]
    most = [rng.choice([NUM_LAYERS, 4]) for _ in stages]

    def fits(host: int, start: int, end: int) -> bool:
        return end - start <= most[host]

    in_flight = sum(stages) + rng.choice([0, 4])
    search = RouteSearch(costs, stages, hops, fits, in_flight)
    periods = []
    for others in permutations(range(1, len(stages))):
        order = (0, *others)
        hosts = [host for host in order for _ in range(stages[host])]
        periods += [
            period_ms(order, counts, costs, stages, hops, in_flight)
            for counts in all_splits(NUM_LAYERS, sum(stages))
            if all(count <= most[host] for count, host in zip(counts, hosts, strict=True))
        ]
    if not periods:
        with pytest.raises(ConfigurationError, match="memory"):
            search.best()
        return
    found = search.best()
    assert found.period_ms == pytest.approx(min(periods))
    assert found.period_ms == pytest.approx(
        period_ms(found.order, found.layer_counts, costs, stages, hops, in_flight)
    )


def route(delay_ms: float, slow: float, in_flight: int = 2) -> Route:
    """Two hosts, the second `slow` times as slow."""
    costs = StageCosts((1.0,) * NUM_LAYERS, 0.0, 0.0)
    hops = symmetric_hops(2, [Hop(0.0, delay_ms, delay_ms)])
    both = [costs, costs.scaled(slow)]
    return RouteSearch(both, (1, 1), hops, anything_fits, in_flight).best()


def test_equal_hosts_share_equally_and_a_far_slow_one_gets_less_than_it_could_compute() -> None:
    assert route(delay_ms=0.0, slow=1.0).layer_counts in ((5, 4), (4, 5))
    assert route(delay_ms=100.0, slow=1.0).layer_counts in ((5, 4), (4, 5))
    near, far = route(delay_ms=0.0, slow=2.0), route(delay_ms=100.0, slow=2.0)
    assert near.layer_counts == (6, 3)
    assert far.layer_counts == (8, 1)
    assert far.period_ms == (8 + 2 + 200) / 2
    # With enough steps in flight a long way costs nothing, and the split is that of near hosts.
    assert route(delay_ms=100.0, slow=2.0, in_flight=99).layer_counts == (6, 3)


def test_the_head_is_first_and_hosts_in_a_chain_are_found_in_their_order() -> None:
    near, far = Hop(0.1, 0.2, 0.1), Hop(0.1, 50.0, 49.9)
    chain = [0, 3, 1, 4, 2]
    pairs = [
        near if abs(chain.index(one) - chain.index(other)) == 1 else far
        for one, other in combinations(range(5), 2)
    ]
    costs = [StageCosts((1.0,) * NUM_LAYERS, 0.0, 0.0)] * 5
    found = RouteSearch(costs, (1,) * 5, symmetric_hops(5, pairs), anything_fits, 5).best()
    assert found.order == tuple(chain)


def test_more_hosts_than_are_weighed_are_ordered_by_exchanges() -> None:
    """Hosts on a circle, where the shortest way round is known: exchanges find it, too."""
    count = 12
    places = [0, *random.Random(1).sample(range(1, count), count - 1)]

    def hop(one: int, other: int) -> Hop:
        apart = abs(places[one] - places[other])
        delay_ms = float(min(apart, count - apart))
        return Hop(0.0, delay_ms, delay_ms)

    hops = symmetric_hops(count, [hop(*pair) for pair in combinations(range(count), 2)])
    costs = [StageCosts((1.0,) * count, 0.0, 0.0)] * count
    search = RouteSearch(costs, (1,) * count, hops, anything_fits, count)
    found = search.best()
    assert found.round_ms == pytest.approx(count + count)
    assert found.order[0] == 0


def test_exchanges_are_hardly_worse_than_weighing_all_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, gains_ms = 7, []
    for seed in range(8):
        rng = random.Random(seed)
        hops = symmetric_hops(
            count,
            [Hop(0.0, ms, ms) for ms in [rng.uniform(1, 9) for _ in range(count * 3)]],
        )
        costs = [StageCosts((1.0,) * NUM_LAYERS, 0.0, 0.0)] * count
        search = RouteSearch(costs, (1,) * count, hops, anything_fits, count)
        monkeypatch.setattr(host_order, "MOST_HOSTS_WEIGHED", 8)
        least_ms = search.best().round_ms
        monkeypatch.setattr(host_order, "MOST_HOSTS_WEIGHED", 4)
        found = search.best()
        assert least_ms <= found.round_ms + 1e-6 <= 1.25 * least_ms
        nearest = search.along(search._nearest_next())
        assert nearest is not None
        gains_ms.append(nearest.round_ms - found.round_ms)
    assert min(gains_ms) >= -1e-6
    assert sum(gains_ms) > 5.0
