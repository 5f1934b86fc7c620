from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.scheduling.least_first import LeastFirst

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "move", "discard"]), st.integers(0, 6), st.integers(0, 9))
)


@given(OPERATIONS)
def test_the_first_has_the_least_key_whatever_moved(
    operations: list[tuple[str, int, int]],
) -> None:
    keys = dict.fromkeys(range(7), 0)
    members: set[int] = set()
    least: LeastFirst[int] = LeastFirst(lambda one: (float(keys[one]),))
    for operation, member, key in operations:
        if operation == "discard":
            members.discard(member)
            least.discard(member)
            continue
        keys[member] = key
        if operation == "add":
            members.add(member)
            least.add(member)
        else:
            least.moved(member)
        assert set(least) == members and len(least) == len(members)
        first = least.first()
        if not members:
            assert first is None
        else:
            assert first in members and keys[first] == min(keys[one] for one in members)


def test_what_moves_often_leaves_no_trail() -> None:
    keys = {"a": 0.0, "b": 0.0}
    least: LeastFirst[str] = LeastFirst(lambda one: (keys[one],))
    least.add("a")
    least.add("b")
    for number in range(10_000):
        keys["a"] = float(number)
        least.moved("a")
    assert len(least._heap) < 100
    assert least.first() == "b"
