"""What a running server tells of its pipeline, as the prediction beside it takes it."""

import json

import pytest
import requests

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.capacity.measured import MeasuredServer, ServerFacts

FACTS = {"num_stages": 2, "layer_partition": [2, 2], "page_size": 4, "total_pages": 9}


def facts_of(told: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> ServerFacts:
    reply = requests.Response()
    reply.status_code = 200
    reply._content = json.dumps({"internal_states": [FACTS | told]}).encode()
    monkeypatch.setattr(requests, "request", lambda *_, **__: reply)
    lengths = LengthRange(input_tokens=8, output_tokens=4, ratio=0.5)
    client = LoadClient("http://any", 200, None)
    load = CapacityLoad(source=lengths, num_requests=1)
    return MeasuredServer("http://any", client, load).facts()


@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("radix_cache", [True, False])
def test_the_slots_of_a_server_are_predicted_with_the_cache_that_was_asked_for(
    slots: int, radix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of({"state_slots": slots}, monkeypatch)
    scheduling = facts.in_force(SchedulingArgs(max_running_requests=8, radix_cache=radix_cache))
    assert (scheduling.num_state_slots, scheduling.radix_cache) == (slots, radix_cache)
    assert (scheduling.page_size, scheduling.most_running_requests) == (4, slots or 8)
