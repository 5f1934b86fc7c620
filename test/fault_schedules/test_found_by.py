"""Each seed that is known to find what is broken is one of a case that there is."""

from importlib import import_module
from pathlib import Path

from support.mutations import known_seeds

TESTS = Path(__file__).parents[1]


def test_each_line_names_a_mutation_that_is_still_made() -> None:
    for case in known_seeds():
        file, _, rest = case.removesuffix("]").partition("[")
        (path,) = TESTS.glob(f"*/{file}.py")
        mutations = import_module(f"{path.parent.name}.{file}").MUTATIONS
        names = {one if isinstance(one, str) else one.__name__ for one in mutations}
        assert rest.partition("-")[0] in names, case
