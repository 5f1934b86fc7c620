"""A real browser, headless, for the tests of the live page; `make setup-browser` installs it."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.live_server import PATIENCE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Its path. Skips the test, with a reason that names what is missing."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: run `make setup-browser`")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium: run `make setup-browser`")
    return path


@contextmanager
def browser() -> Iterator[Any]:
    """A playwright browser; contexts of it are fresh profiles."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    # Its sandbox needs what root in a container lacks, and everything here is our own.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=arguments)
        yield found
        found.close()


class Watched:
    """A page whose console, errors, requests and breaches of its policy are kept."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.set_default_timeout(1e3 * PATIENCE_S)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.add_init_script(
            "window.breaches = [];"
            "document.addEventListener('securitypolicyviolation',"
            " (event) => window.breaches.push(event.violatedDirective));"
        )

    def breaches(self) -> list[str]:
        """The rules of the page's policy that something tried to break."""
        return list(self.page.evaluate("window.breaches"))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, expression: str, timeout_s: float = PATIENCE_S) -> None:
        """Waits until a JavaScript expression is true, looking often: without `eval`, which the
        page's policy forbids."""
        import time

        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {expression}"
            time.sleep(0.05)

    def wait_for_frames(self) -> None:
        """Returns when what has happened to the page is drawn."""
        self.page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)
