from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.scheduling.least_first import LeastFirst

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "change", "discard"]), st.integers(0, 6), st.integers(0, 9))
)


@given(OPERATIONS, st.booleans())
def test_the_first_has_the_least_key_whatever_rose_or_fell(
    operations: list[tuple[str, int, int]], asks_often: bool
) -> None:
    keys = dict.fromkeys(range(7), 0)
    members: set[int] = set()
    least: LeastFirst[int] = LeastFirst(lambda one: (float(keys[one]),))

    def check() -> None:
        first = least.first()
        if not members:
            assert first is None
        else:
            assert first in members and keys[first] == min(keys[one] for one in members)

    for operation, member, key in operations:
        if operation == "discard":
            members.discard(member)
            least.discard(member)
            continue
        fell = key < keys[member]
        keys[member] = key
        if operation == "add":
            members.add(member)
            least.add(member)
        elif fell:
            least.fell(member)
        assert set(least) == members and len(least) == len(members)
        if asks_often:
            check()
    check()


def test_what_changes_often_leaves_no_trail() -> None:
    keys = {"a": 0.0, "b": 0.5}
    least: LeastFirst[str] = LeastFirst(lambda one: (keys[one],))
    least.add("a")
    least.add("b")
    for number in range(10_000):
        keys["a"] = 1.0 - 1.0 / (number + 1)
        least.first()
        keys["a"] = -float(number)
        least.fell("a")
    assert len(least._heap) < 100
    assert least.first() == "a"


def test_rising_keys_cost_nothing_until_they_are_first() -> None:
    asked: list[str] = []
    keys = {"a": 0.0, "b": 1.0, "c": 2.0}

    def key(one: str) -> tuple[float]:
        asked.append(one)
        return (keys[one],)

    least: LeastFirst[str] = LeastFirst(key)
    for one in keys:
        least.add(one)
    asked.clear()
    keys["c"], keys["b"] = 9.0, 5.0
    assert least.first() == "a" and asked == ["a"]
    keys["a"] = 7.0
    assert least.first() == "b"
