"""What is drawn or typed is kept, and never changed in silence: corners, polygons, names, order."""

import json
import time

import numpy as np
import pytest
from PIL import Image

from tests.browser import opened
from tests.plugins.serve.journeys.test_annotate import at, objects, open_named, saved
from tests.plugins.serve.journeys.test_serve import annotating

pytestmark = pytest.mark.long
SQUARE = ((0.2, 0.2), (0.6, 0.2), (0.6, 0.6), (0.2, 0.6))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Address and folder of a page with six photographs; no two tests annotate the same."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "photos").mkdir()
    for i in range(6):
        picture(folder, i, 40 * i)
    with annotating(folder) as address:
        yield address, folder


def picture(folder, number, shade):
    pixels = np.full((60, 90, 3), shade, np.uint8)
    Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")


def on_disk(folder, name):
    """Returns the kinds of the applied edits of an image, and its objects."""
    edits = json.loads((folder / "project" / "annotations" / f"{name}.png.json").read_text())
    applied, found = edits["edits"][: edits["applied"]], {}
    for edit in applied:
        found |= edit["changes"]
    return [edit["kind"] for edit in applied], found


def polygon(page, corners):
    page.keyboard.press("g")
    for corner in corners:
        page.mouse.click(*at(page, *corner))


def settled(page):
    page.wait_for_timeout(300)
    saved(page)


def drag(page, start, end, button="left", steps=4):
    page.mouse.move(*start)
    page.mouse.down(button=button)
    page.mouse.move(*end, steps=steps)
    page.mouse.up(button=button)


def mask(folder, name):
    return on_disk(folder, name)[1]["1"]["mask"]


def test_corners_are_those_of_the_mask_that_is_saved(browser, place):
    address, folder = place
    with opened(browser, address) as page:
        saved(page)
        polygon(page, SQUARE)
        page.keyboard.press("Enter")
        objects(page, 1)
        page.wait_for_timeout(300)  # the corners come
        square = mask(folder, "0")
        drag(page, at(page, 0.6, 0.6), at(page, 0.8, 0.8))
        settled(page)
        assert mask(folder, "0") != square
        page.keyboard.press("z")
        settled(page)
        assert mask(folder, "0") == square
        drag(page, at(page, 0.2, 0.2), at(page, 0.1, 0.1))
        settled(page)
        kinds, found = on_disk(folder, "0")
        assert kinds == ["polygon", "polygon"]
        x, y = at(page, 0.6, 0.2)
        drag(page, (x, y), (x + 2, y + 1), "right", 2)  # a hand that is not still
        settled(page)
        shapes = page.evaluate("async () => (await fetch('api/project/images/0/corners/1')).json()")
        assert np.allclose(sorted(shapes[0]), [[9, 6], [18, 36], [54, 36]], atol=1), found


def test_a_polygon_that_is_left_is_kept(browser, place):
    address, folder = place
    with opened(browser, address) as page:
        saved(page)
        for leave in ("b", "ArrowRight"):
            open_named(page, "1.png")
            page.keyboard.press("Escape")  # no object, whose corners would be moved
            saved(page)
            polygon(page, SQUARE[:3])
            page.keyboard.press(leave)
            settled(page)
        assert on_disk(folder, "1")[0] == ["polygon", "polygon"]


def test_a_name_is_kept_while_it_is_typed(browser, place):
    address, folder = place
    with opened(browser, address) as page:
        saved(page)
        open_named(page, "2.png")
        page.keyboard.press("d")
        page.mouse.click(*at(page, 0.5, 0.5))
        objects(page, 1)
        page.route("**/stroke", lambda route: (time.sleep(1), route.continue_()))
        page.keyboard.press("r")
        page.keyboard.type("cat")
        page.keyboard.press("Enter")
        page.mouse.click(*at(page, 0.3, 0.5))
        page.keyboard.press("r")  # before the stroke is saved
        page.keyboard.type("a")  # is no key
        page.wait_for_function("() => document.activeElement.id === 'a-name'")
        page.keyboard.type("s")
        page.keyboard.press("Escape")  # as it was
        saved(page)
        [found] = on_disk(folder, "2")[1].values()
        assert (found["name"], found["accepted"]) == ("cat", False)


def test_the_next_image_is_not_one_that_is_done_and_a_replaced_one_is_said(browser, place):
    address, folder = place
    with opened(browser, address) as page:
        saved(page)
        page.select_option("#a-order", "open")
        open_named(page, "4.png")
        page.keyboard.press("d")
        page.mouse.click(*at(page, 0.5, 0.5))
        objects(page, 1)
        page.keyboard.press("a")
        page.wait_for_selector("#a-accept-all[disabled]")
        page.keyboard.press("n")
        page.wait_for_selector("#a-title:has-text('5.png')")
        saved(page)
        picture(folder, 5, 250)
        page.keyboard.press("d")
        page.mouse.click(*at(page, 0.5, 0.5))
        page.wait_for_selector("#a-stale:has-text('is another picture than the one shown')")
        page.click("#a-reload")
        page.wait_for_selector("#a-stale", state="hidden")
        saved(page)
        page.mouse.click(*at(page, 0.5, 0.5))
        objects(page, 1)
