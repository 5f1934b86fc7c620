"""Each seed that is known to find what is broken is one of a case that there is."""

from importlib import import_module

from support.mutations import known_seeds


def test_each_line_names_a_mutation_that_is_still_made() -> None:
    for case in known_seeds():
        file, _, rest = case.removesuffix("]").partition("[")
        mutations = import_module(f"fault_schedules.{file}").MUTATIONS
        names = {one if isinstance(one, str) else one.__name__ for one in mutations}
        assert rest.partition("-")[0] in names, case
