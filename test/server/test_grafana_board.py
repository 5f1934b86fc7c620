"""The Grafana board asks for nothing that a running server does not tell."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support.live_server import LiveServer, live_server, wait_until

from test.server.test_metrics_and_drain import Samples

pytestmark = pytest.mark.multiproc
BOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "sgl_pipeline.json"
METRIC = re.compile(r"\b(?:sglang:|sgl_pipeline_)\w+")
SELECTOR = re.compile(r"((?:sglang:|sgl_pipeline_)\w+)(\{[^}]*\})?")
LABEL = re.compile(r"(\w+)\s*=~?\s*\"")
GROUPS = re.compile(r"\bby \(([^)]+)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return dict(json.loads(BOARD.read_text()))


@pytest.fixture(scope="module")
def samples() -> Iterator[Samples]:
    flags = ["--migration", "manual", "--pp-layer-partition", "8,8", "--enable-metrics"]
    with live_server("--pp", "2", *flags) as server:
        exercise(server)
        yield Samples(server)


def exercise(server: LiveServer) -> None:
    """Something of all that the board shows: requests, a change of a knob, a move."""
    for _ in range(2):
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        reply = server.generate(text="Spell the word house.", sampling_params=sampling, stream=True)
        assert reply.status_code == 200
    knobs = {"prefill_spread_steps": 4}
    assert requests.patch(f"{server.url}/pipeline/throttle", json=knobs, timeout=30).ok
    layers = {"layer_counts": [7, 9]}
    assert requests.post(f"{server.url}/pipeline/plan", json=layers, timeout=120).ok
    wait_until(lambda: Samples(server).value("sgl_pipeline_plan_epoch") == 1)
    steps = server.facts()["num_steps"]
    wait_until(lambda: Samples(server).value("sgl_pipeline_steps_total") >= steps)


def targets(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in board["panels"] for target in panel.get("targets", ())]


def test_every_metric_of_the_board_is_there(board: dict[str, Any], samples: Samples) -> None:
    asked = set(METRIC.findall(json.dumps(board)))
    assert len(asked) > 25
    assert sorted(asked - samples.names) == []


def test_every_label_of_the_board_is_there(board: dict[str, Any], samples: Samples) -> None:
    for target in targets(board):
        for name, selector in SELECTOR.findall(target["expr"]):
            wanted = set(LABEL.findall(selector))
            assert wanted <= samples.labels(name), (target["expr"], wanted)
        names = [name for name, _ in SELECTOR.findall(target["expr"])]
        grouped = {
            label for labels in GROUPS.findall(target["expr"]) for label in labels.split(",")
        }
        assert {label.strip() for label in grouped} <= samples.labels(names[0]), target["expr"]
        legend = set(LEGEND.findall(target["legendFormat"]))
        assert legend <= samples.labels(names[0]), (target["legendFormat"], names[0])


def test_every_metric_of_ours_is_on_the_board(board: dict[str, Any], samples: Samples) -> None:
    """But for those that only go with others: sums and counts, sizes of moves, the epoch."""
    asked = set(METRIC.findall(json.dumps(board)))
    ours = {name for name in samples.names if name.startswith("sgl_pipeline_")}
    left_out = {name for name in ours - asked if "layer_move_" not in name}
    assert left_out <= {"sgl_pipeline_plan_epoch"}, left_out


def test_panels_do_not_overlap_and_have_ids_of_their_own(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
