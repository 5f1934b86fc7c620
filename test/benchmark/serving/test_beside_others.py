import itertools
import shlex
from argparse import Namespace

import pytest

from benchmark.serving.beside_others import ENGINES, copies, flags_of

OPTIONS = Namespace(
    rounds=2, port=4000, loads="clients-1", warm_up_requests=16, no_save=True, widths=[*ENGINES]
)


@pytest.mark.parametrize("width", ENGINES)
def test_each_engine_of_a_width_has_the_copy_that_it_serves(width: str) -> None:
    there = copies([width])
    model = next(path for path in there if path.name in ("0.27b", "smollm2-16-bits"))
    for engine in ENGINES[width]:
        words = shlex.split(engine)
        if "--weights" not in words:
            continue
        weights = words[words.index("--weights") + 1]
        kind = words[0]
        prefix, suffix = {"openvino": ("openvino-", ""), "llama": ("", ".gguf")}.get(kind, ("", ""))
        assert model.with_name(f"{model.name}-{prefix}{weights}{suffix}") in there


def test_flags_name_every_engine_as_one_word_each() -> None:
    flags = flags_of("text", OPTIONS)
    named = [after for flag, after in itertools.pairwise(flags) if flag == "--engine"]
    assert named == list(ENGINES["text"])
    assert flags[flags.index("--model") + 1] == "build/models/smollm2-16-bits"
    assert flags[-1] == "--no-save"
