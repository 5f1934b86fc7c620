"""`responses` of the openai client, with upstream's store of responses switched on."""

import openai
import pytest
from support.live_server import wait_until
from support.parrot_model import ANSWERS, THOUGHTS

pytestmark = pytest.mark.multiproc
WEATHER = {"type": "function", "name": "get_weather", "parameters": {}}


def ask(parrot, question="What is 1+3?", **options):
    options = {"temperature": 0} | options
    return parrot.responses.create(model="parrot", input=question, **options)


def reasoning_of(response):
    return [item.content[0].text for item in response.output if item.type == "reasoning"]


def test_a_response_has_its_text_its_thoughts_and_its_usage(parrot):
    response = ask(parrot, instructions="Be brief.", metadata={"a": "b"}, user="somebody")
    assert response.status == "completed"
    assert response.output_text == ANSWERS[""]
    assert reasoning_of(response) == [THOUGHTS[""]]
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_list_of_messages_is_an_input(parrot):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is 1+3?"}]},
    ]
    assert ask(parrot, messages).output_text == ANSWERS[""]


def test_a_limit_makes_the_response_incomplete(parrot):
    """Upstream takes two tokens off the limit: it is an upper bound."""
    response = ask(parrot, "[endless]", max_output_tokens=20)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 18


def test_effort_none_switches_thinking_off(parrot):
    response = ask(parrot, reasoning={"effort": "none"})
    assert (response.output_text, reasoning_of(response)) == (ANSWERS[""], [])


def test_a_stream_has_events_in_order_that_add_up(parrot):
    events = list(ask(parrot, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def text(kind):
        return "".join(event.delta for event in events if event.type == kind)

    assert text("response.output_text.delta") == ANSWERS[""]
    assert text("response.reasoning_text.delta") == THOUGHTS[""]
    assert events[-1].response.output_text == ANSWERS[""]
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_an_item_of_its_own(parrot, stream):
    reply = ask(parrot, "[weather]", tools=[WEATHER], stream=stream)
    response = list(reply)[-1].response if stream else reply
    (call,) = (item for item in response.output if item.type == "function_call")
    assert call.name == "get_weather"
    assert call.arguments == '{"city": "Paris", "days": 3}'
    answer = [
        {"role": "user", "content": "How is it in Paris?"},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"},
    ]
    assert ask(parrot, answer, tools=[WEATHER]).output_text == ANSWERS[""]


def test_a_stored_response_can_be_retrieved_and_followed(parrot):
    first = ask(parrot)
    assert parrot.responses.retrieve(first.id).output_text == first.output_text
    second = ask(parrot, "And again?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + len("And again?")


def test_what_was_not_stored_is_not_found(parrot):
    unstored = ask(parrot, store=False)
    with pytest.raises(openai.NotFoundError):
        parrot.responses.retrieve(unstored.id)
    with pytest.raises(openai.NotFoundError):
        ask(parrot, previous_response_id="resp_none")
    with pytest.raises(openai.NotFoundError, match="other"):
        parrot.responses.create(model="other", input="x")


def test_a_response_in_the_background_is_there_when_it_is_done(parrot):
    started = ask(parrot, background=True)
    assert started.status == "queued"
    wait_until(lambda: parrot.responses.retrieve(started.id).status == "completed")
    assert parrot.responses.retrieve(started.id).output_text == ANSWERS[""]


def test_a_response_in_the_background_can_be_cancelled(parrot, parrot_server):
    endless = {"stop": ["never said"], "max_output_tokens": 3000}
    started = ask(parrot, "[endless]", background=True, extra_body=endless)
    assert parrot.responses.cancel(started.id).status == "cancelled"
    assert parrot.responses.retrieve(started.id).status == "cancelled"
    wait_until(lambda: parrot_server.facts()["num_running_requests"] == 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools: only tools of type function"),
        ({"truncation": "auto"}, "truncation: "),
        ({"text": {"verbosity": "low"}}, "text: verbosity"),
        ({"conversation": "c"}, "conversation: "),
        ({"background": True, "store": False}, "store=true"),
    ],
)
def test_what_is_not_built_is_refused(parrot, options, words):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(parrot, **options)
    assert words in caught.value.message
