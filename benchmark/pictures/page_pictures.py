"""Takes the pictures of the live page that README.md shows, in the machine's Chromium.

    python -m benchmark.pictures.page_pictures

Run by hand after `make setup-browser`, when the page has changed; half a minute. The demo model
serves clients on four stages, layers move, and the chat asks a question.
"""

import json
import random
import shutil
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image

from benchmark.support.command import Command, Options
from benchmark.support.engine import Engine
from benchmark.support.engines import running
from benchmark.support.paths import DOCS, SCRATCH
from sgl_pipeline.args import require
from sgl_pipeline.errors import ConfigurationError

FLAGS = ("--pp", "4", "--pp-layer-partition", "even", "--migration", "manual")
LIMITS = ("--max-running-requests", "24")
CLIENTS = 32
WORDS = ("one", "two", "house", "cat", "green", "seven")
WARM_UP_S = 12.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLORS = 256  # of a picture's palette


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31940, saves=False)
    command.add("--folder", type=Path, default=DOCS, help="of the pictures")
    return command.run(_take_all, argv)


def _take_all(options: Options) -> None:
    port, folder = options.port, options.folder
    folder.mkdir(exist_ok=True)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ConfigurationError("playwright is missing; run `make setup-browser`") from None
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    require(browser is not None, "no Chromium on PATH; run `make setup-browser`")
    command = (sys.executable, "-m", "sgl_pipeline.launch_server", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    engine = Engine(
        label="ours", client_backend="sglang", base_url=url, command=(*command, *FLAGS, *LIMITS)
    )
    is_over = threading.Event()
    clients = [threading.Thread(target=_ask, args=(url, n, is_over)) for n in range(CLIENTS)]
    with running(engine, SCRATCH / "page_pictures.log"), sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for client in clients:
            client.start()
        try:
            _take(chromium, url, folder)
        finally:
            is_over.set()
            for client in clients:
                client.join()
            chromium.close()


def _take(chromium: Any, url: str, folder: Path) -> None:
    page = chromium.new_page(viewport={"width": 1360, "height": 900}, color_scheme="light")
    page.goto(f"{url}/ui/")
    time.sleep(WARM_UP_S)
    page.keyboard.press("+")
    page.fill("#prompt", "What is 17 + 25?")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".travel button", timeout=60_000)
    _post(f"{url}/pipeline/plan", {"layer_counts": [5, 3, 4, 4]})
    time.sleep(0.55)
    page.click("#pause")
    _save(page, folder / "ui_light.png", full_page=True)
    page.keyboard.press("End")
    page.click("#theme")
    page.click("#theme")
    page.keyboard.press("+")
    page.click(".travel button")
    page.evaluate("document.activeElement.blur()")
    time.sleep(0.6)
    _save(page, folder / "ui_dark.png", full_page=True)
    page.keyboard.press("End")
    page.click("#theme")
    page.set_viewport_size({"width": 390, "height": 1240})
    page.evaluate("scrollTo(0, 0)")
    time.sleep(0.8)
    _save(page, folder / "ui_phone.png", full_page=False)


def _save(page: Any, path: Path, *, full_page: bool) -> None:
    page.screenshot(path=path, full_page=full_page)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(
            COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(path, optimize=True)
    print(f"Written: {path} ({path.stat().st_size / 1024:.0f} KiB)")


def _ask(url: str, number: int, is_over: threading.Event) -> None:
    """One client: a request after the other, of mixed lengths."""
    draw = random.Random(number)
    while not is_over.is_set():
        words = " ".join(draw.choice(WORDS) for _ in range(draw.choice([8, 40, 90])))
        sampling = {"temperature": 0, "ignore_eos": True}
        sampling["max_new_tokens"] = draw.choice([20, 60, 120])
        text = f"Repeat after me {number % 4}: {words}"
        _post(f"{url}/generate", {"text": text, "sampling_params": sampling})


def _post(url: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


if __name__ == "__main__":
    sys.exit(main())
