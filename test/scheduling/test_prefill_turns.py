"""Prefills of several tenants go on in the order of their ranks, each once in a step."""

from hypothesis import example, given
from hypothesis import strategies as st
from support.pipelines import make_request

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.fair_order import Rank
from sgl_pipeline.scheduling.prefill_turns import PrefillTurns
from sgl_pipeline.scheduling.running_requests import RunningRequests

TENANTS = "abc"
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.sampled_from(TENANTS)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("readmit"), st.integers(0, 9)),
        st.tuples(st.just("rise"), st.sampled_from(TENANTS)),
        st.tuples(st.just("fall"), st.sampled_from(TENANTS)),
        st.tuples(st.just("step"), st.integers(0, 9)),
    ),
    max_size=60,
)


# The rank of the first request falls while it is not prefilled.
FALLS_WHILE_AWAY: list[tuple[str, object]] = [
    *(("admit", "a"), ("admit", "b"), ("step", 0), ("rise", "a"), ("step", 1)),
    *(("fall", "a"), ("drop", 0), ("step", 0), ("readmit", 0), ("step", 1)),
]


@given(OPERATIONS)
@example(FALLS_WHILE_AWAY)
def test_the_lowest_rank_goes_on_first(operations: list[tuple[str, object]]) -> None:
    levels = dict.fromkeys(TENANTS, 0.0)
    running, dropped = RunningRequests(), list[Request]()

    def rank(request: Request) -> Rank:
        return (-request.priority, levels[request.tenant], 0, request.tenant, request.order)

    turns = PrefillTurns(running, rank)
    for number, (operation, subject) in enumerate(operations):
        if operation == "admit":
            running.admit(make_request(str(number), [1] * 9, tenant=str(subject)))
        elif operation == "rise":
            levels[str(subject)] += 1.0 + number
        elif operation == "fall":
            levels[str(subject)] -= 1.0 + number
            turns.fell(str(subject))
        elif operation == "drop" and running.prefilling:
            assert isinstance(subject, int)
            members = list(running.prefilling)
            dropped.append(members[subject % len(members)])
            running.drop(dropped[-1])
        elif operation == "readmit" and dropped:
            assert isinstance(subject, int)
            running.admit(dropped.pop(subject % len(dropped)))
        elif operation == "step":
            assert isinstance(subject, int)
            turns.begin_step()
            left = list(running.prefilling)
            for _ in range(subject):
                first = turns.first()
                assert first is min(left, key=rank, default=None)
                if first is None:
                    break
                left.remove(first)
                turns.went_on(first)
                levels[first.tenant] += 1.0


def test_ended_prefills_are_forgotten() -> None:
    running = RunningRequests()
    turns = PrefillTurns(running, lambda one: (0, 0.0, 0, one.tenant, one.order))
    for number in range(1000):
        request = make_request(str(number), [1] * 9)
        running.admit(request)
        turns.begin_step()
        running.drop(request)
    assert len(turns._least) == 1


def test_all_ranks_may_fall() -> None:
    levels = {"a": 5.0, "b": 6.0}
    running = RunningRequests()
    turns = PrefillTurns(running, lambda one: (0, levels[one.tenant], 0, one.tenant, one.order))
    first, second = (make_request(name, [1] * 9, tenant=name) for name in "ab")
    running.admit(first)
    running.admit(second)
    turns.begin_step()
    assert turns.first() is first
    levels["b"] = 1.0
    turns.begin_anew()
    turns.begin_step()
    assert turns.first() is second
