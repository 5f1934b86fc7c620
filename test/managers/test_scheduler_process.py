"""The scheduler process closes what it has opened, in one order, wherever it fails."""

from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.pipelines import new_scheduler

from sgl_pipeline.args import HOST_BACKEND, PipelineArgs, SchedulingArgs, StageArgs, TierArgs
from sgl_pipeline.kv_store.open_store import open_pages
from sgl_pipeline.kv_store.store_client import StoreClient
from sgl_pipeline.managers import scheduler_process
from sgl_pipeline.managers.tiers.open_tier import OpenTier
from sgl_pipeline.wire.store_orders import StorePlace, UseStore

# As they are closed: first those that answer somebody, then what the answers leave through. Last
# the compiler, which is forked before this process has threads.
CLOSED = (
    "rooms",
    "store",
    "front",
    "operators",
    "live",
    "loads",
    "launcher",
    "traces",
    "context",
    "grammars",
)


class Parts:
    """Stands for everything that `_serve` builds; building `broken` fails."""

    def __init__(self, patch: pytest.MonkeyPatch, broken: str | None) -> None:
        self.closed: list[str] = []
        self.was_ready = False
        self.broken = broken
        self._patch = patch
        core: Any = SimpleNamespace(scheduler=None)
        named: dict[str, Any] = {
            "_read_model": SimpleNamespace(spec=None, limits=None, tokenizer=None),
            "saved_predictor": None,
            "_open_traces": (),
            "_log_start": {},
            "build_core": core,
            "loads_path": "",
            "operator_address": "",
            "OperatorSocket": None,
            "_ready_message": None,
            "postpone_full_collections": None,
            "recovery_actions": None,
            "store_opener": None,
            "Reports": None,
        }
        for name, value in named.items():
            patch.setattr(scheduler_process, name, lambda *_, value=value: value)
        launcher = self._part("launcher", close="stop")
        launcher.roster = SimpleNamespace(incarnation=0)
        launcher.start = lambda: self._built("capacity", None)
        grammars = self._part("grammars")
        grammars.start = lambda: self._built("compiler", None)
        self._makes("_grammars", "grammars", grammars)
        self._makes("_launcher", "launcher", launcher)
        for function, name in (
            ("TraceFiles", "traces"),
            ("LoadReport", "loads"),
            ("_live_report", "live"),
            ("OperatorReplies", "operators"),
            ("_front", "front"),
            ("_tier_driver", "store"),
            ("open_rooms", "rooms"),
        ):
            self._makes(function, name, self._part(name))
        self._makes("_open_metrics", "metrics", None)
        self._makes("PipelineScheduler", "loop", SimpleNamespace(run=lambda: None))
        context = self._part("context", close="destroy")
        patch.setattr(scheduler_process.zmq, "Context", lambda: self._built("context", context))

    def serve(self) -> None:
        def ready(message: object) -> None:
            self.was_ready = True

        args: Any = SimpleNamespace(
            run_directory="",
            scheduling=None,
            disaggregation=SimpleNamespace(mode="null"),
            grammars=SimpleNamespace(compile_seconds=1.0),
            migration=SimpleNamespace(mode="off"),
            tiers=SimpleNamespace(backend=None),
        )
        pipe: Any = SimpleNamespace(send=ready)
        server_args = SimpleNamespace(port=1)
        scheduler_process._serve(args, list, None, server_args, None, pipe)  # type: ignore[arg-type]

    def _makes(self, function: str, name: str, part: Any) -> None:
        self._patch.setattr(scheduler_process, function, lambda *_: self._built(name, part))

    def _built(self, name: str, part: Any) -> Any:
        if name == self.broken:
            raise RuntimeError(name)
        return part

    def _part(self, name: str, close: str = "close") -> Any:
        return SimpleNamespace(**{close: lambda **_: self.closed.append(name)})


def test_all_is_closed_in_one_order_when_the_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch, broken=None)
    parts.serve()
    assert parts.was_ready and parts.closed == [*CLOSED]


@pytest.mark.parametrize(
    ("broken", "first_closed", "was_ready"),
    [
        ("traces", "context", False),
        ("launcher", "traces", False),
        ("capacity", "launcher", False),
        ("loads", "launcher", False),
        ("live", "loads", False),
        ("metrics", "live", False),
        ("operators", "live", False),
        ("front", "operators", False),
        ("compiler", "front", True),
        ("store", "front", True),
        ("rooms", "store", True),
        ("loop", "rooms", True),
    ],
)
def test_a_step_that_fails_closes_what_was_opened_before_it(
    monkeypatch: pytest.MonkeyPatch, broken: str, first_closed: str, was_ready: bool
) -> None:
    parts = Parts(monkeypatch, broken)
    with pytest.raises(RuntimeError, match=broken):
        parts.serve()
    assert parts.closed == [*CLOSED[CLOSED.index(first_closed) :]]
    assert parts.was_ready is was_ready


def test_the_ready_message_says_what_upstream_was_not_told() -> None:
    """Its arguments name neither tiers nor a pipeline, and a layout of objects must be there."""
    args = PipelineArgs(
        stages=StageArgs(model_path="", dtype="float32", num_stages=2),
        tiers=TierArgs(enabled=True, backend="file"),
    )
    limits = SimpleNamespace(context_length=100)
    capacity = SimpleNamespace(num_pages=4, num_state_slots=0)
    message = scheduler_process._ready_message(args, limits, capacity)  # type: ignore[arg-type]
    assert (message["pp_size"], message["max_req_input_len"]) == (2, 63)
    assert message["enable_hierarchical_cache"] is True
    layout = message["hicache_object_layout"]
    assert (layout["enabled"], layout["backend"], layout["page_size"]) == (False, "file", 16)
    assert (message["max_mamba_cache_size"], message["mamba_track_interval"]) == (None, 0)


def test_the_ready_message_has_the_slots_that_there_are_and_the_interval() -> None:
    scheduling = SchedulingArgs(num_state_slots=9, track_interval=64)
    args = PipelineArgs(stages=StageArgs(model_path="", dtype="float32"), scheduling=scheduling)
    limits = SimpleNamespace(context_length=100)
    capacity = SimpleNamespace(num_pages=4, num_state_slots=8)
    message = scheduler_process._ready_message(args, limits, capacity)  # type: ignore[arg-type]
    assert (message["max_mamba_cache_size"], message["mamba_track_interval"]) == (8, 64)


def test_host_memory_is_opened_with_the_driver() -> None:
    stages = StageArgs(model_path="", dtype="float32", device="cuda")
    tiers = TierArgs(enabled=True, backend=HOST_BACKEND, pool_is_on_gpu=True)
    steps = new_scheduler(num_pages=8, num_stages=1)
    place = StorePlace(
        backend=HOST_BACKEND, address="", digest="d", save_bytes_per_s=1, host_pages=16
    )

    def open_store(args: TierArgs) -> OpenTier:
        assert args is tiers
        return OpenTier(place, StoreClient(open_pages(place, 1)))

    driver = scheduler_process._tier_driver(
        PipelineArgs(stages=stages, tiers=tiers), steps, open_store, None, zmq.Poller()
    )
    assert driver is not None
    orders = steps.tier.next_orders(0.0, None, may_transfer=True)
    assert [*orders] == [UseStore(place)]
    driver.close()
