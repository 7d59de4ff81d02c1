"""A real browser for pages and reports."""

import re
import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SLOW_S = 30
"""No answer takes that long, also on a machine that does other work."""
WIDE, NARROW = (1366, 800), (390, 844)


@pytest.fixture(scope="module")
def browser():
    """A real Chromium without a window."""
    if CHROMIUM is None:
        pytest.skip(
            "no Chromium on this machine: install one (Debian: apt-get install chromium) to test "
            "the page"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def opened(browser, address, size=WIDE, **more):
    """Opens the page and gives it; nothing may go wrong in it that nobody sees."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **more)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda line: (
            wrong.append(line.text)
            if line.type == "error"
            and not re.search("status of (4|504)|net::ERR_CONNECTION_RESET", line.text)
            else None
        ),
    )
    page.set_default_timeout(1000 * SLOW_S)
    page.goto(address)
    yield page
    assert not wrong
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page is wider than the screen"
    )
    context.close()
