"""The live page opened in a real browser, on a server under load, and what is read off it."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
from support.browser import Watched
from support.live_server import LiveServer

KEY = "page-key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
SECRET = "zebra"
LIVE = "document.getElementById('status').dataset.status === 'live'"


@contextmanager
def opened(
    chromium: Any,
    server: LiveServer,
    *,
    key: str | None = KEY,
    errors: tuple[str, ...] = (),
    is_attacked: bool = False,
    **options: Any,
) -> Iterator[Watched]:
    """The page in a fresh profile, which has the key already unless told otherwise.

    Fails at the end for a request to another host, for an error on the console that has none of
    the words in `errors`, and for a breach of the page's policy unless `is_attacked`.
    """
    context = chromium.new_context(**options)
    watched = Watched(context.new_page())
    if key is not None:
        watched.page.add_init_script(f"sessionStorage.setItem('sgl-pipeline-key', '{key}')")
    try:
        watched.page.goto(f"{server.url}/")
        yield watched
        unforeseen = [one for one in watched.errors if not any(word in one for word in errors)]
        assert unforeseen == [], unforeseen
        assert watched.hosts == {f"127.0.0.1:{server.port}"}, watched.hosts
        assert is_attacked or watched.breaches() == [], watched.breaches()
    finally:
        context.close()


@contextmanager
def load(server: LiveServer, num_clients: int = 8) -> Iterator[None]:
    """Clients whose prompts all have SECRET in them."""
    is_over = threading.Event()

    def ask(seed: int) -> None:
        words = random.Random(seed)
        while not is_over.is_set():
            text = " ".join(words.choice(["one", "cat", SECRET]) for _ in range(60))
            sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
            body = {"text": f"{text} {SECRET}", "sampling_params": sampling}
            requests.post(f"{server.url}/generate", json=body, headers=AUTHORIZED, timeout=120)

    clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join(120)


COUNT_COLORS = """() => {
  const canvas = document.getElementById("lanes");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const rgb = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    probe.remove();
    return found;
  };
  const count = (name) => {
    const [red, green, blue] = rgb(name);
    let found = 0;
    for (let i = 0; i < data.length; i += 4)
      found += data[i] === red && data[i + 1] === green && data[i + 2] === blue;
    return found;
  };
  const names = ["accent", "decode", "activations", "metadata", "slot", "rule-MinP", "good"];
  return Object.fromEntries(names.map((name) => [name, count(name)]));
}"""


FIND_CUT = """() => {
  const isCut = (one) => one.scrollWidth > one.clientWidth + 1
    && getComputedStyle(one).display !== "inline";
  const isOutside = (one) => one.getBoundingClientRect().right > innerWidth;
  return [...document.querySelectorAll(".card > *, .head > *, #tiles dd, .legend li")]
    .filter((one) => one.offsetParent && !one.matches(".scroll, .messages"))
    .filter((one) => isCut(one) || isOutside(one))
    .map((one) => `${one.className || one.id || one.tagName}: ${one.textContent.slice(0, 40)}`);
}"""
