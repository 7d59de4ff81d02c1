"""What people do to the page: other screens, fast hands, held keys, other keyboards."""

import io
import time

import numpy as np
import pytest
from PIL import Image

from tests.browser import opened
from tests.plugins.serve.journeys.test_annotate import (
    objects,
    on_disk,
    open_named,
    press,
    saved,
    titled,
)
from tests.plugins.serve.journeys.test_serve import annotating, click

pytestmark = pytest.mark.long
MARKS = "#a-marks"
COLORS = {"0": (200, 30, 30), "1": (30, 160, 30), "2": (30, 30, 200), "3": (200, 200, 30)}
MARK_XY = (1700, 1100)
SHARPNESS = """() => {
  const canvas = document.getElementById("a-pixels");
  return canvas.width / canvas.clientWidth;
}"""
FRAME = """() => {
  for (const id of ["a-pixels", "a-marks"]) {
    Object.assign(document.getElementById(id).style, {border: "7px solid", padding: "5px 9px"});
  }
}"""
FITS = """() => document.documentElement.scrollHeight <= innerHeight
  && [...document.querySelectorAll(".work .bar")].every((bar) => bar.clientHeight < 45)"""
MIDDLE = """() => {
  const canvas = document.getElementById("a-pixels"), at = [canvas.width / 2, canvas.height / 2];
  return Array.from(canvas.getContext("2d").getImageData(...at, 1, 1).data.slice(0, 3));
}"""


def paint(path, color):
    Image.new("RGB", (120, 80), color).save(path, quality=95)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Address and project folder of a page with a marked picture, and plain ones for each scale."""
    folder = tmp_path_factory.mktemp("hands")
    for scale in (1, 1.5):
        (folder / "photos" / f"at {scale}").mkdir(parents=True)
        for name, color in COLORS.items():
            paint(folder / "photos" / f"at {scale}" / f"{name}.jpg", color)
    pixels = np.full((1200, 1800, 3), 40, np.uint8)
    x, y = MARK_XY
    pixels[y - 4 : y + 5, x - 4 : x + 5] = (255, 0, 255)
    Image.fromarray(pixels).save(folder / "photos" / "marked.png")
    with annotating(folder) as address:
        yield address, folder


def seen(page):
    """Returns where the mark is seen on the page, in CSS pixels."""
    shot = np.array(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(int)
    ys, xs = np.nonzero((shot[..., 0] - shot[..., 1] > 120) & (shot[..., 2] - shot[..., 1] > 120))
    assert len(xs)
    per = shot.shape[1] / page.evaluate("innerWidth")
    return (xs.mean() + 0.5) / per, (ys.mean() + 0.5) / per


def test_a_click_is_the_pixel_that_is_seen_there_on_every_screen(browser, place):
    address, _ = place
    clicks = []

    def answer(route):
        clicks.append(route.request.post_data_json["step"]["point"])
        route.fulfill(status=422, json={"error": "not now"})

    with opened(browser, address) as page:
        saved(page)
        open_named(page, "marked.png")
        page.route("**/prompt", answer)
        screen = page.context.new_cdp_session(page)

        def check(at, what):
            page.mouse.click(*at)
            page.wait_for_selector("#toast:not([hidden])")
            page.wait_for_function("() => !document.getElementById('a-state').matches('.busy')")
            across, down = np.subtract(clicks.pop(), MARK_XY)
            assert max(abs(across), abs(down)) <= 1.5, (what, across, down)
            page.evaluate("document.getElementById('toast').hidden = true")
            page.mouse.move(5, 5)
            page.wait_for_timeout(150)

        at = seen(page)
        check(at, "fitted")
        for scale in (1.25, 1.5, 2, 3, 1):
            screen.send(
                "Emulation.setDeviceMetricsOverride",
                {"width": 1366, "height": 800, "deviceScaleFactor": scale, "mobile": False},
            )
            page.wait_for_function("scale => devicePixelRatio === scale", arg=scale)
            check(at, f"moved to a screen of scale {scale}")
            assert page.evaluate(SHARPNESS) == pytest.approx(scale, abs=0.01)
        page.mouse.move(*seen(page))
        page.mouse.wheel(0, -500)
        page.mouse.down(button="middle")
        page.mouse.move(600, 300)
        page.mouse.up(button="middle")
        page.mouse.move(5, 5)
        page.wait_for_timeout(150)
        check(seen(page), "zoomed and panned")
        page.evaluate(FRAME)
        page.click("#a-fit")
        page.mouse.move(5, 5)
        check(seen(page), "with borders and padding")


def test_nothing_is_lost_or_done_twice_however_fast_it_is_typed(browser, place):
    address, folder = place
    for scale in (1, 1.5):
        with opened(browser, address, device_scale_factor=scale) as page:
            hands(page, folder, f"at {scale}")
            keyboards(page)


def thumbnail(page):
    """Returns the color at the middle of the first object's thumbnail."""
    return page.evaluate(
        "() => Array.from(document.querySelector('#a-objects canvas').getContext('2d')"
        ".getImageData(18, 18, 1, 1).data.slice(0, 3))"
    )


def hands(page, folder, part):
    first, second, third, fourth = (f"{part}/{name}.jpg" for name in COLORS)
    saved(page)
    open_named(page, first)
    page.route("**/prompt", lambda route: (time.sleep(0.3), route.continue_()))
    click(page, 0.4, 0.5, MARKS)
    press(page, "Enter")
    click(page, 0.6, 0.5, MARKS)
    press(page, "Enter", "n", "n")  # before either mask has come
    titled(page, second)
    found = on_disk(folder, first)
    assert [(len(each.steps), each.accepted) for each in found.objects.values()] == [(1, True)] * 2
    assert found.done
    for _ in range(8):
        page.keyboard.down("n")  # held: all but the first are repeats
    page.keyboard.up("n")
    page.wait_for_timeout(200)
    assert page.inner_text("#a-title") == second
    assert not on_disk(folder, second).done
    press(page, "d")
    click(page, 0.5, 0.5, MARKS)
    objects(page, 1)
    assert page.is_hidden("#a-empty-done")
    press(page, "Enter")
    page.dblclick("#a-done")
    titled(page, third)
    page.wait_for_timeout(800)
    press(page, "n", "n")  # too soon for a second word
    page.wait_for_selector("#a-empty-done:not([hidden])")
    saved(page)
    assert [on_disk(folder, name).done for name in (second, third, fourth)] == [True, False, False]
    open_named(page, second)
    red, green, _ = thumbnail(page)
    assert green > red, "the thumbnail is of this image, not of the one before"
    page.reload()
    titled(page, second)
    assert max(thumbnail(page)) > 60, "not black after a reload"
    paint(folder / "photos" / fourth, (240,) * 3)
    page.reload()
    saved(page)
    open_named(page, fourth)
    assert min(page.evaluate(MIDDLE)) > 200, "a photograph that was edited is shown as it is"
    page.wait_for_timeout(800)  # a look
    page.click("#a-done")
    page.click("#a-done-empty")
    page.wait_for_selector("#a-done:has-text('Reopen')")
    saved(page)
    assert on_disk(folder, fourth).done


def keyboards(page):
    dispatch = (
        "([key, code, more]) => document.getElementById('a-marks').dispatchEvent("
        "new KeyboardEvent('keydown', {key, code, bubbles: true, cancelable: true, ...more}))"
    )
    chosen = "() => document.querySelector('#a-tools [aria-checked=true]').dataset.tool"
    for key, code, tool in (("и", "KeyB", "box"), ("з", "KeyP", "point"), ("d", "KeyD", "brush")):
        page.evaluate(dispatch, [key, code, {}])
        assert page.evaluate(chosen) == tool
    page.evaluate(dispatch, ["]", "Digit9", {"ctrlKey": True, "altKey": True}])  # AltGr of Germans
    assert page.input_value("#a-radius") == "10"
    page.evaluate(dispatch, ["b", "KeyB", {"ctrlKey": True}])  # the browser's own
    assert page.evaluate(chosen) == "brush"
    title = page.inner_text("#a-title")
    page.press("#a-categories button", "Enter")
    assert page.evaluate("document.activeElement.dataset.key") == "object"
    page.press("#a-contrast", "ArrowRight")
    assert page.input_value("#a-contrast") == "1.05"
    assert page.inner_text("#a-title") == title
    press(page, "p")
    assert page.evaluate(chosen) == "point"
    page.click("#a-hide")
    press(page, "Enter", "Shift+Tab")  # accepts, and does not press the button again
    assert page.get_attribute("#a-hide", "aria-pressed") == "true"
    assert page.evaluate("document.activeElement.id") == "a-help"
    for wide, high in ((1280, 600), (1024, 700)):
        page.set_viewport_size({"width": wide, "height": high})
        assert page.evaluate(FITS)
