"""The live page in a real browser, on a real server under load."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from support.browser import Watched, browser
from support.live_page import AUTHORIZED, COUNT_COLORS, FIND_CUT, KEY, LIVE, SECRET, load, opened
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    LiveServer,
    live_server,
    start_server,
    wait_until,
    wait_until_ready,
)
from support.moves import movable_core
from support.step_records import rooms_state, tier_state

from sgl_pipeline.managers.channels.live_channel import LiveTick
from sgl_pipeline.managers.reports.live_events import describe_tick
from sgl_pipeline.pipeline.draft_state import DraftState
from sgl_pipeline.pipeline.pipeline_state import RoomsState
from sgl_pipeline.simulator.propose import KnobProposal, Prediction
from sgl_pipeline.simulator.summary import Distribution

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

FLAGS = ("--pp", "2", "--dtype", "float32", "--api-key", KEY, "--migration", "manual")
FEW_RUN = ("--max-running-requests", "3", "--pp-layer-partition", "8,8")
LOST = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET")
REFUSED = ("Content Security Policy", "'Trusted")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(chromium: Any) -> Iterator[LiveServer]:
    with live_server(*FLAGS, *FEW_RUN) as server:
        yield server


def test_it_draws_what_the_stages_do_and_says_why_requests_wait(
    chromium: Any, server: LiveServer
) -> None:
    with opened(chromium, server) as watched, load(server):
        page = watched.page
        assert page.url == f"{server.url}/ui/"
        watched.wait_for(LIVE)
        watched.wait_for("Number(document.getElementById('lanes').dataset.steps) > 20")
        watched.wait_for("document.querySelector('#queue tbody').innerText.includes('running-l')")
        queue = watched.text("#queue tbody")
        assert "the limit is --max-running-requests" in queue and "order" in queue
        watched.wait_for(f"Math.min(({COUNT_COLORS})().accent, ({COUNT_COLORS})().decode) > 100")
        watched.wait_for(
            "(({ activations, metadata, slot }) => activations + metadata + slot > 100)"
            f"(({COUNT_COLORS})())"
        )
        watched.wait_for("!document.getElementById('tiles').innerText.includes('–')")
        assert watched.text("#inputs tbody").count("\n") >= 5
        counts = page.evaluate(
            "[...document.querySelectorAll('#pages-legend b')]"
            ".map((one) => Number(one.textContent.replace(',', '')))"
        )
        assert sum(counts) == 2048 and counts[0] > 0, "held, cached and free are all pages"
        cells = "[...document.querySelectorAll('#plan td:nth-child(2)')]"
        assert page.evaluate(f"{cells}.map((one) => one.innerText)") == ["8", "8"]
        # The step curve has its own once step times are known.
        charts = "document.querySelectorAll('.chart:not(#curve-chart) .uplot canvas').length"
        assert page.evaluate(charts) == 5
        assert SECRET not in page.content()


def test_a_layer_move_is_marked(chromium: Any, server: LiveServer) -> None:
    with opened(chromium, server) as watched, load(server, 2):
        watched.wait_for("Number(document.getElementById('lanes').dataset.steps) > 5")
        before = watched.page.evaluate(COUNT_COLORS)["good"]
        reply = requests.post(
            f"{server.url}/pipeline/plan",
            json={"layer_counts": [7, 9]},
            headers=AUTHORIZED,
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        watched.wait_for(f"({COUNT_COLORS})().good > {before}")
        watched.wait_for("document.getElementById('moves').innerText.includes('8, 8 → 7, 9')")
        watched.wait_for("document.getElementById('epoch').innerText === 'plan 1'")


SHOW_TENANTS = """async (ticks) => {
    const { Tenants } = await import('./tenants.js');
    const card = new Tenants();
    ticks.forEach((tenants, place) => card.update({ now: 1e6 * place, tenants }));
    const shown = document.getElementById('tenants-card');
    return shown.hidden ? null : shown.innerText;
}"""

SHOW_CARD = """async ([name, facts]) => {
    const { Model } = await import('./model.js'), { Panels } = await import('./panels.js');
    const model = new Model();
    const pages = { free_pages: 1, unused_pages: 1, total_pages: 1 };
    model.tick = { waiting: 0, layers: [], ...pages, [name]: facts };
    new Panels(model).update();
    const card = document.getElementById(`${name}-card`);
    return card.hidden ? null : card.innerText;
}"""


def test_a_store_has_its_panel_while_one_is_attached(chromium: Any, server: LiveServer) -> None:
    """The server has none: the panel is drawn from a tick of the test's."""
    state = msgspec.structs.replace(movable_core(2, 2).state(1.0), tier=tier_state())
    tick = LiveTick(state=state, queue=None, followed=(), carried=(), missed_ticks=0)
    with opened(chromium, server) as watched:
        watched.wait_for(LIVE)
        assert watched.page.evaluate(SHOW_CARD, ["store", None]) is None
        text = watched.page.evaluate(SHOW_CARD, ["store", describe_tick(tick, 1)["store"]])
    assert "file · 6 of 8 lookups found pages · 2 pages were broken" in text
    assert "to load in 250 ms" in text and "to compute" in text
    assert "loaded\t4\t800\t2,000\tdeadline 60, slower than compute 40" in text
    assert "saved\t5\t700\t250\tpressure 50, failed 6" in text


def test_tenants_have_a_card_where_they_share_the_server(chromium: Any, server: LiveServer) -> None:
    """The server has one tenant: the panel is drawn from two ticks of the test's."""
    before = [["alice", 3.0, "ms", 1000.0, 0.0, 2, 1, 40], ["bob", 1.0, "ms", 900.0, 7.0, 0, 1, 8]]
    after = [["alice", 3.0, "ms", 1300.0, 0.0, 2, 1, 40], ["bob", 1.0, "ms", 1000.0, 7.0, 0, 1, 8]]
    with opened(chromium, server) as watched:
        watched.wait_for(LIVE)
        assert watched.page.evaluate(SHOW_TENANTS, [None]) is None
        text = watched.page.evaluate(SHOW_TENANTS, [before, after])
    assert "service of the last 30 s, by predicted time" in text
    assert "alice\t3\t75 %\t2\t1\t40\t0.0 ms" in text
    assert "bob\t1\t25 %\t0\t1\t8\t7.0 ms" in text


def test_drafts_have_their_panel_where_there_are_any(chromium: Any, server: LiveServer) -> None:
    """The server has none: the panel is drawn from a tick of the test's."""
    drafts = DraftState(most_each=11, steps=40, drafted_tokens=200, accepted_tokens=50)

    def shown(watched: Watched, **changed: Any) -> str:
        told = msgspec.structs.replace(drafts, **changed)
        state = msgspec.structs.replace(movable_core(2, 2).state(1.0), drafts=told)
        tick = LiveTick(state=state, queue=None, followed=(), carried=(), missed_ticks=0)
        facts = describe_tick(tick, 1)["drafts"]
        return str(watched.page.evaluate(SHOW_CARD, ["drafts", facts]))

    with opened(chromium, server) as watched:
        watched.wait_for(LIVE)
        assert watched.page.evaluate(SHOW_CARD, ["drafts", None]) is None
        text = shown(watched)
        none_now = shown(watched, rule="time", reason="rows are dear")
    assert "at most 11 tokens each" in text and "none now: rows are dear" in none_now
    assert "since the start\t200\t50\t25 %\t2.25" in text


def test_a_server_with_a_role_shows_its_rooms(chromium: Any, server: LiveServer) -> None:
    """The server has none: the panel is drawn from ticks of the test's."""

    def shown(watched: Watched, rooms: RoomsState) -> str:
        state = msgspec.structs.replace(movable_core(2, 2).state(1.0), rooms=rooms)
        tick = LiveTick(state=state, queue=None, followed=(), carried=(), missed_ticks=0)
        facts = describe_tick(tick, 1)["rooms"]
        return str(watched.page.evaluate(SHOW_CARD, ["rooms", facts]))

    with opened(chromium, server) as watched:
        watched.wait_for(LIVE)
        assert watched.page.evaluate(SHOW_CARD, ["rooms", None]) is None
        decode = shown(watched, rooms_state())
        held = rooms_state(mode="prefill", num_peers=1, held_pages=70, computed_here=0)
        prefill = shown(watched, held)
    assert "decode server · 2 prefill servers connected" in decode
    assert "prompt not ready\t3\t–" in decode
    assert "being loaded\t4\t25\t10 more pages wait for room" in decode
    assert "loaded\t8\t160\t250 ms each" in decode
    assert "failed\t3\t–\t2 before the prompt was ready, 1 afterwards, 1 computed here" in decode
    assert "prefill server · 1 decode server connected" in prefill
    assert "not asked for\t3\t–" in prefill and "held to be read\t4\t70" in prefill
    assert "read\t8\t–\t250 ms each" in prefill
    assert "failed\t3\t–\t2 before the prompt was ready, 1 afterwards" in prefill


SHARE = "async (args) => (await import('./goodput.js')).goodput(...args)"


def test_goodput_is_the_share_of_recent_requests_within_what_is_typed(
    chromium: Any, server: LiveServer
) -> None:
    with opened(chromium, server) as watched:
        watched.wait_for(LIVE)
        page = watched.page
        one_token = {"firstMs": 90, "tpotMs": None}
        ended = [one_token, {"firstMs": 100, "tpotMs": 10}, {"firstMs": 300, "tpotMs": 30}]
        for limits, share in (
            ((100, None), 2 / 3),
            ((None, 20), 2 / 3),
            ((95, 20), 1 / 3),
            ((None, None), None),
        ):
            assert page.evaluate(SHARE, [ended, *limits]) == share
        assert page.evaluate(SHARE, [[], 100, 10]) is None
        page.fill("#goodput-ttft", "1e9")
        with load(server, 2):
            watched.wait_for("document.getElementById('goodput').innerText === '100 %'")
            page.fill("#goodput-tpot", "0.001")
            watched.wait_for("document.getElementById('goodput').innerText === '0 %'")
        page.reload()
        watched.wait_for("document.getElementById('goodput-tpot').value === '0.001'")


SHOW_CURVE = """async ([curve, decoding, layers]) => {
    const { StepCurve } = await import('./step_curve.js');
    const shown = new StepCurve({ curve, tick: { decoding, layers } });
    shown.update();
    const card = document.getElementById('curve-card');
    const canvases = card.querySelectorAll('.uplot canvas').length;
    shown.clear();
    return card.hidden ? null : [canvases > 0, document.getElementById('curve-text').innerText];
}"""


def test_the_step_curve_says_what_sharing_decodes_out_gains(
    chromium: Any, server: LiveServer
) -> None:
    """Drawn from ticks of the test's: 12 decodes on two stages, six a step, between 4 and 8."""
    curve = [[1, 2, 4, 8, 16], [10.0, 10.0, 12.0, 16.0, 32.0]]
    with opened(chromium, server) as watched:
        watched.wait_for(LIVE)
        assert watched.page.evaluate(SHOW_CURVE, [None, 12, [8, 8]]) is None
        is_drawn, text = watched.page.evaluate(SHOW_CURVE, [curve, 12, [8, 8]])
        assert is_drawn and text.startswith("12 decode, 6 a step: 14 ms.")
        assert "All in one step would take 24 ms, 71 % longer" in text
        assert watched.page.evaluate(SHOW_CURVE, [curve, 0, [8, 8]])[1] == "No request decodes."
        assert (
            watched.page.evaluate(SHOW_CURVE, [curve, 4, [16]])[1] == "4 decode, 4 a step: 12 ms."
        )


def test_the_chat_answers_and_shows_its_way_through_the_stages(
    chromium: Any, server: LiveServer
) -> None:
    with opened(chromium, server) as watched:
        page = watched.page
        watched.wait_for(LIVE)
        page.keyboard.press("/")
        page.keyboard.type("What is 17 + 25?")
        page.keyboard.press("Enter")
        watched.wait_for("document.querySelector('.message.model')?.textContent === '42'")
        watched.wait_for("document.querySelector('.travel button') !== null")
        travel = watched.text(".travel")
        assert "queue" in travel and "prompt" in travel and "tokens" in travel
        page.click(".travel button")
        assert "carries your request" in watched.text("#readout")
        # The conversation goes on, and remembers.
        page.fill("#prompt", "And 20 + 22?")
        page.click("#send")
        watched.wait_for("document.querySelectorAll('.travel button').length === 2")
        assert watched.page.evaluate("document.querySelectorAll('.message.error').length") == 0


def picture_of(watched: Watched) -> str:
    """The lanes as they are drawn."""
    watched.wait_for_frames()
    return str(watched.page.evaluate("document.getElementById('lanes').toDataURL()"))


def test_it_obeys_the_keyboard_and_stands_still_when_paused(
    chromium: Any, server: LiveServer
) -> None:
    with opened(chromium, server) as watched, load(server, 2):
        page = watched.page
        watched.wait_for("Number(document.getElementById('lanes').dataset.steps) > 20")
        width = watched.text("#zoom-value")
        page.keyboard.press("+")
        assert watched.text("#zoom-value") != width
        page.keyboard.press("-")
        assert watched.text("#zoom-value") == width
        page.keyboard.press(" ")
        assert watched.text("#pause") == "Live"
        picture = picture_of(watched)
        page.wait_for_timeout(700)
        # There and back draws it anew.
        page.keyboard.press("+")
        page.keyboard.press("-")
        assert picture_of(watched) == picture
        page.keyboard.press("[")
        first = watched.text("#readout")
        page.keyboard.press("[")
        second = watched.text("#readout")
        assert first.startswith("Step ") and second.startswith("Step ") and first != second
        assert picture_of(watched) != picture
        page.keyboard.press("End")
        assert watched.text("#pause") == "Pause"
        page.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(14):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id"))
        assert {"theme", "pause", "zoom-in", "zoom-out", "lanes", "prompt", "send"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_nothing_is_cut_at_any_width(
    chromium: Any, server: LiveServer, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 800}
    with opened(chromium, server, viewport=size, color_scheme=scheme) as watched, load(server, 5):
        watched.wait_for("document.querySelectorAll('#queue tbody tr').length > 0")
        page = watched.page
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(FIND_CUT) == []


def test_without_the_key_it_asks_and_shows_nothing(chromium: Any, server: LiveServer) -> None:
    with opened(chromium, server, key=None, errors=("401",)) as watched:
        page = watched.page
        watched.wait_for("document.getElementById('key-dialog').open")
        assert watched.text("#tiles") == "" and watched.text("#what") == ""
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        watched.wait_for("document.getElementById('key-text').innerText.includes('not take')")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        watched.wait_for(LIVE)
        assert "sgl-pipeline-demo" in watched.text("#what")


def test_the_ninth_page_says_that_there_is_no_place(chromium: Any, server: LiveServer) -> None:
    streams: list[requests.Response] = []

    def holds_all_places() -> bool:
        """A page of another test may not have left yet."""
        url = f"{server.url}/pipeline/events"
        reply = requests.get(url, stream=True, headers=AUTHORIZED, timeout=ANSWER_S)
        if reply.status_code == 200:
            streams.append(reply)
        return len(streams) == 8

    try:
        wait_until(holds_all_places)
        with opened(chromium, server, errors=("503",)) as watched:
            watched.wait_for("document.getElementById('status').dataset.status === 'lost'")
            assert "8 pages" in watched.text("#status")
            streams.pop().close()
            watched.wait_for(LIVE)
    finally:
        for stream in streams:
            stream.close()


def test_a_waiting_request_is_explained(chromium: Any, server: LiveServer) -> None:
    with opened(chromium, server, errors=("404",)) as watched, load(server):
        watched.wait_for("document.querySelectorAll('#queue tbody tr').length > 2")
        page = watched.page
        # Whoever waits may have begun to run before the question arrives: any may be asked.
        watched.wait_for(
            "(document.querySelector('#queue button.id')?.click(),"
            " document.getElementById('explanation').innerText.includes('rule '))"
        )
        page.fill("#explain-id", "no-such-request")
        page.press("#explain-id", "Enter")
        watched.wait_for(
            "document.getElementById('explanation').innerText.includes('no-such-request')"
        )


def in_use(server: LiveServer, knob: str = "prefill_spread_steps") -> Any:
    reply = requests.get(f"{server.url}/pipeline/throttle", headers=AUTHORIZED, timeout=30)
    return reply.json()[knob]


def test_a_knob_is_changed_refused_and_undone(chromium: Any, server: LiveServer) -> None:
    with opened(chromium, server, errors=("400",)) as watched, load(server, 2):
        page, before = watched.page, in_use(server)
        watched.wait_for("document.getElementById('knob-prefill_spread_steps') !== null")
        page.fill("#knob-prefill_spread_steps", "3")
        page.click("text=Apply")
        watched.wait_for("document.getElementById('knobs-note').innerText.includes('Applied')")
        assert in_use(server) == 3 != before
        page.fill("#knob-prefill_spread_steps", "0")
        page.click("text=Apply")
        watched.wait_for("document.getElementById('knobs-note').classList.contains('bad')")
        assert in_use(server) == 3
        page.click("#undo")
        watched.wait_for("document.getElementById('knobs-note').innerText.includes('undone')")
        assert in_use(server) == before
        page.select_option("#knob-dynamic_chunking", "on")
        page.click("text=Apply")
        watched.wait_for(
            "document.getElementById('knobs-note').innerText.includes('dynamic_chunking on')"
        )
        assert in_use(server, "dynamic_chunking") is True
        page.click("#undo")
        watched.wait_for("document.getElementById('knob-dynamic_chunking').value === 'off'")
        assert in_use(server, "dynamic_chunking") is False


def test_choices_come_from_the_server_and_knobs_that_a_policy_ignores_are_dimmed(
    chromium: Any, server: LiveServer
) -> None:
    with opened(chromium, server) as watched:
        page = watched.page
        watched.wait_for("document.getElementById('knob-policy') !== null")
        offered = {
            name: page.locator(f"#knob-{name} option").all_inner_texts()
            for name in ("policy", "accounting", "dynamic_chunking")
        }
        assert offered == {
            "policy": in_use(server, "ranges")["policy"],
            "accounting": in_use(server, "ranges")["accounting"],
            "dynamic_chunking": ["off", "on"],
        }
        for policy, knobs in in_use(server, "policy_knobs").items():
            page.select_option("#knob-policy", policy)
            dimmed = page.locator("#knobs label.unread").evaluate_all(
                "labels => labels.map((one) => one.htmlFor.replace('knob-', ''))"
            )
            assert set(dimmed) == set(in_use(server, "ranges")) - set(knobs)


def proposal(knobs: dict[str, Any]) -> dict[str, Any]:
    """What the route answers, as far as it comes from the simulator."""
    latency = Distribution(80.0, 75.0, 100.0, 120.0)
    now = Prediction(
        target_share=0.25, lateness=2.0, ttft_ms=latency, tpot_ms=latency, output_tokens_per_s=50.0
    )
    told = KnobProposal(
        knobs=knobs,
        now=now,
        proposed=msgspec.structs.replace(now, target_share=0.75) if knobs else None,
        num_requests=30,
        num_steps=300,
        num_trials=20,
        is_complete=True,
        is_extrapolated=False,
        step_time_errors=(0.1, 0.1),
        slowdown=1.0,
        seconds=1.0,
    )
    return dict(msgspec.to_builtins(told))


def test_what_tuning_proposes_fills_the_fields_and_is_set_when_asked(
    chromium: Any, server: LiveServer
) -> None:
    replies = [(200, proposal({"prefill_spread_steps": 5})), (200, proposal({}))]
    replies.append((503, {"error": {"message": "tuning needs 200 steps"}}))
    asked = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        status, body = replies.pop(0)
        route.fulfill(status=status, json=body)

    with opened(chromium, server, errors=("503",)) as watched:
        page, before = watched.page, in_use(server)

        def propose(words: str) -> None:
            page.click("#propose")
            watched.wait_for(f"document.getElementById('tune-note').innerText.includes('{words}')")

        page.route("**/pipeline/tune", answer)
        watched.wait_for("document.getElementById('knob-prefill_spread_steps') !== null")
        page.fill("#ttft", "800")
        page.fill("#tpot", "40")
        propose("Proposed: prefill_spread_steps 5.")
        assert asked == [{"ttft_ms": 800, "tpot_ms": 40}]
        assert "75 % in time" in watched.text("#tune-note")
        assert "now 25 % in time" in watched.text("#tune-note")
        assert page.input_value("#knob-prefill_spread_steps") == "5"
        assert in_use(server) == before != 5
        page.click("text=Apply")
        watched.wait_for("document.getElementById('knobs-note').innerText.includes('Applied')")
        assert in_use(server) == 5
        page.click("#undo")
        watched.wait_for("document.getElementById('knobs-note').innerText.includes('undone')")
        assert in_use(server) == before
        propose("Nothing better was found")
        propose("tuning needs 200 steps")
        assert page.is_enabled("#propose")


def test_the_policy_holds_against_what_gets_into_the_page(
    chromium: Any, server: LiveServer
) -> None:
    with opened(chromium, server, errors=REFUSED, is_attacked=True) as watched:
        watched.wait_for(LIVE)
        tried = watched.page.evaluate(
            """async () => {
              const tried = {};
              const attempt = async (name, act) => {
                try { await act(); } catch (error) { tried[name] = error.name; }
              };
              await attempt("script", () => {
                const script = document.createElement("script");
                script.append("window.inline = 1");
                document.body.append(script);
              });
              await attempt("markup", () => { document.body.innerHTML += "<b>x</b>"; });
              await attempt("elsewhere", () => fetch("http://localhost:9/"));
              const style = document.createElement("style");
              style.append("body { display: none }");
              document.head.append(style);
              tried.inline = window.inline ?? null;
              tried.display = getComputedStyle(document.body).display;
              return tried;
            }"""
        )
        assert tried["inline"] is None and tried["display"] == "block"
        assert tried["markup"] == tried["elsewhere"] == "TypeError"
        watched.wait_for("window.breaches.length >= 4")
        broken = {breach.split("-elem")[0] for breach in watched.breaches()}
        assert {"style-src", "connect-src", "require-trusted-types-for"} <= broken


def test_it_finds_the_server_again_after_a_restart(chromium: Any, server: LiveServer) -> None:
    """Last: it ends the server of the others."""
    # A question asked as the server ends is answered with 503 or, in its last seconds, with 504.
    ending = (*LOST, "status of 503", "status of 504")
    with opened(chromium, server, errors=ending) as watched:
        watched.wait_for(LIVE)
        server.process.terminate()
        server.process.wait(PATIENCE_S)
        watched.wait_for("document.getElementById('status').dataset.status === 'lost'")
        again = start_server(*FLAGS, *FEW_RUN, port=server.reserved_port)
        try:
            wait_until_ready(again)
            watched.wait_for(LIVE)
            watched.page.fill("#prompt", "What is 17 + 25?")
            watched.page.click("#send")
            watched.wait_for("document.querySelector('.message.model')?.textContent === '42'")
            watched.wait_for("document.querySelector('.travel button') !== null")
        finally:
            again.process.terminate()
            assert again.process.wait(PATIENCE_S) == 0
