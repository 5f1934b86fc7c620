"""SGLang's own conformance kits for servers, as they are in its wheel, against this server.

`KITS` says of every test of every kit whether it is run, and if not why; a kit or a test that a new
wheel brings is missing here and fails. What asks for knowledge of the world is not applicable to
the demo model, which is never taught a kit's answers.
"""

import ast
import dataclasses
import json
import random
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.test import kits
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
from support.live_server import ROOT, LiveServer, live_server, wait_until_pages_are_back

from benchmark.models.make_model import PRESETS, make_model

pytestmark = pytest.mark.multiproc
DEMO_MODEL = ROOT / "sgl_pipeline" / "demo_model"

_KNOWLEDGE = "asks what the demo model was never taught"
_SPECULATION = "draft models are refused at start"
_GRAMMARS = "run by test_structured_output.py"
_HYBRID = "for caches of models with recurrent layers, which are refused at start"
_IMAGES = "images are refused"
_FIGURES = "measures speed and judges it by figures of a GPU"
_KERNELS = "tests kernels of SGLang's model runner, without a server"
_SESSIONS = "sessions are refused"

# Of kits that are run here: the tests that are not, by name.
NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "basic_decode_correctness_kit": {
        "test_capital_france": _KNOWLEDGE,
        "test_basic_math": _KNOWLEDGE,
        "test_color_completion": _KNOWLEDGE,
    },
    "basic_scheduler_stress_kit": {
        "test_streaming_response": _KNOWLEDGE,
        "test_concurrent_requests": _KNOWLEDGE,
        "test_long_prompt": "its 36,000 tokens (bytes, here) are above the demo model's context",
    },
    "cache_hit_kit": {},
    "radix_cache_server_kit": {},
}

# Kits of which nothing is run here.
ELSEWHERE: dict[str, str] = {
    "abort_timeout_kit": "run by test_lifecycle.py",
    "pause_generation_kit": "run by test_pause_and_profile.py",
    "anthropic_messages_kit": "run by test_other_apis.py",
    "attention_unittest": _KERNELS,
    "basic_api_contract_kit": "run by test_other_apis.py",
    "dsa_metadata_kit": _KERNELS,
    "ebnf_constrained_kit": _GRAMMARS,
    "eval_accuracy_kit": "downloads data sets and asks for knowledge",
    "fwd_occupancy_kit": _FIGURES,
    "json_constrained_kit": _GRAMMARS,
    "json_mode_kit": _GRAMMARS,
    "kl_divergence_kit": "downloads a data set; test_token_identity.py holds the cache to equality",
    "lm_eval_kit": "lm-eval itself is run by benchmark/clients",
    "matched_stop_kit": "run by test_matched_stop.py",
    "mmmu_vlm_kit": _IMAGES,
    "pd_parity_kit": "needs two servers; test_disaggregation.py compares them with one",
    "perf_bench_kit": _FIGURES,
    "prefix_cache_branching_kit": _HYBRID + "; a cache of pages hits a request earlier",
    "reasoning_kit": "run by test_reasoning.py",
    "regex_constrained_kit": _GRAMMARS,
    "spec_decoding_kit": _SPECULATION,
    "spec_server_kits": _SPECULATION,
    "streaming_session_kit": _SESSIONS,
    "unified_radix_cache": _HYBRID,
    "unified_radix_cache_kit": _HYBRID,
    "vlm_perf_kit": _IMAGES,
}


@pytest.fixture(scope="class")
def served_demo(request: pytest.FixtureRequest, demo_server: LiveServer) -> None:
    """Gives a mix-in the attributes that upstream's own server fixtures have."""
    assert request.cls is not None
    request.cls.base_url, request.cls.process = demo_server.url, demo_server.process


@pytest.fixture(scope="module")
def wide_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves random weights with a vocabulary of 32,000 ids, all of which a kit may send."""
    preset = dataclasses.replace(PRESETS["tiny"], vocab_size=32_000, num_hidden_layers=4)
    directory = tmp_path_factory.mktemp("models") / "wide"
    make_model(preset, directory)
    with live_server("--model-path", str(directory), "--pp", "2") as server:
        yield server


def run_of(kit: str, mixin: type) -> type[unittest.TestCase]:
    """A test case with all tests of `mixin` but those that are not applicable."""
    left_out: dict[str, Any] = dict.fromkeys(NOT_APPLICABLE[kit])
    case = type(mixin.__name__, (mixin, unittest.TestCase), left_out | {"__module__": __name__})
    return pytest.mark.usefixtures("served_demo")(case)


TestDecodeCorrectness = run_of("basic_decode_correctness_kit", BasicDecodeCorrectnessMixin)
TestSchedulerStress = run_of("basic_scheduler_stress_kit", BasicSchedulerStressMixin)


def test_cache_hit_kit(demo_server: LiveServer, tmp_path: Path) -> None:
    """Its prompts come from conversations in ShareGPT's format; ours are made up."""
    letters = random.Random(1)
    conversations = [
        {"conversations": [{"value": "".join(letters.choices("abcdefgh ", k=300))}] * 2}
        for _ in range(24)
    ]
    dataset = tmp_path / "conversations.json"
    dataset.write_text(json.dumps(conversations), encoding="utf-8")
    result = run_multiturn_cache_hit_test(
        demo_server.url, str(DEMO_MODEL), dataset_path=str(dataset)
    )
    assert result["rounds"]["round_0"]["cache_hit_rate"] == 0
    assert result["overall"]["cache_hit_rate"] > 0.5


def test_radix_cache_server_kit(wide_server: LiveServer) -> None:
    run_radix_attention_test(wide_server.url)
    wait_until_pages_are_back(wide_server)


def test_every_test_of_every_kit_is_run_or_has_a_reason_not_to_be() -> None:
    defined = defined_tests(Path(kits.__path__[0]))
    assert set(defined) == set(NOT_APPLICABLE) | set(ELSEWHERE)
    run = {
        "basic_decode_correctness_kit": collected(TestDecodeCorrectness),
        "basic_scheduler_stress_kit": collected(TestSchedulerStress),
        "cache_hit_kit": {"run_multiturn_cache_hit_test"},
        "radix_cache_server_kit": {"run_radix_attention_test"},
    }
    for kit, left_out in NOT_APPLICABLE.items():
        assert run[kit] | set(left_out) == defined[kit], kit
        assert not run[kit] & set(left_out), kit


def defined_tests(folder: Path) -> dict[str, set[str]]:
    """The names of the tests that each kit in `folder` defines, read from the source."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        kit = path.relative_to(folder).parts[0].removesuffix(".py")
        functions = (
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)
        )
        names = {
            f.name for f in functions if f.name.startswith("test_") or f.name.endswith("_test")
        }
        found.setdefault(kit, set()).update(names)
    return found


def collected(case: type[unittest.TestCase]) -> set[str]:
    return set(unittest.TestLoader().getTestCaseNames(case))
