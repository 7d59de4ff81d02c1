"""What is drawn or typed is kept, and never changed in silence: corners, polygons, names, order."""

import time

import numpy as np
import pytest
from PIL import Image

from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.project import Project
from tests.browser import opened
from tests.plugins.serve.journeys.test_annotate import (
    at,
    draw,
    kinds,
    objects,
    on_disk,
    open_named,
    press,
    saved,
    tap,
    titled,
)
from tests.plugins.serve.journeys.test_serve import annotating, late

pytestmark = pytest.mark.long
SQUARE = ((0.2, 0.2), (0.6, 0.2), (0.6, 0.6), (0.2, 0.6))
DRAWN_TWICE = """async () => {
  const stage = await import("./page/stage.js"), real = OffscreenCanvas;
  const mask = { x: 0, y: 0, width: 1, height: 1, data: new Uint8Array([1]) };
  const [first, second] = document.querySelectorAll("#a-objects button");
  let made = 0, drawn = 0;
  second.click();
  await new Promise((done) => setTimeout(done, 500));
  globalThis.OffscreenCanvas = class extends real {
    constructor(...size) { super(...size); made += 1; }
  };
  stage.start((context) => {
    drawn += 1;
    for (let i = 0; i < 600; i += 1) {
      const object = { mask, segmentation: { counts: `${i}` } };
      stage.drawMask(context, object, [0, 0, 0], { alpha: 90, unit: 1 });
    }
  });
  for (let i = 0; i < 20; i += 1) {
    stage.draw();
    if (i % 10 === 9) await new Promise(requestAnimationFrame);
  }
  return first.isConnected && second.ariaPressed === "true" && drawn < 9 && made;
}"""
"""Selects an object, draws 600 masks in two frames, and gives how many pictures were made."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Address and folder of a page with ten photographs; no two tests annotate the same."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "photos").mkdir()
    for i in range(10):
        picture(folder, i, 25 * i)
    one = MaskObject("0hb0Pf4", "x", by_model=True, predicted_iou=0.95, stability=0.95, model=-1)
    with Project.open(folder / "project", folder / "photos") as project:
        project.edit(9, 0, Edit("propose", dict.fromkeys(range(1, 25), one)), (60, 90))
    with annotating(folder) as address:
        yield address, folder


@pytest.fixture
def folder(place):
    return place[1]


@pytest.fixture
def page(browser, place):
    with opened(browser, place[0], has_touch=True) as page:
        saved(page)
        yield page


def picture(folder, number, shade):
    Image.new("RGB", (90, 60), (shade,) * 3).save(folder / "photos" / f"{number}.png")


def polygon(page, corners):
    press(page, "g")
    for corner in corners:
        tap(page, *corner)


def settled(page):
    page.wait_for_timeout(300)
    saved(page)


def dot(page):
    """Draws a dot, which is the only object."""
    press(page, "d")
    tap(page, 0.5, 0.5)
    objects(page, 1)


def mask(folder):
    return on_disk(folder, "0.png").objects[1].mask


def test_corners_are_those_of_the_mask_that_is_saved(page, folder):
    polygon(page, SQUARE)
    press(page, "Enter")
    objects(page, 1)
    settled(page)  # the corners come
    square = mask(folder)
    draw(page, (0.6, 0.6), (0.8, 0.8))
    settled(page)
    assert mask(folder) != square
    tap(page, 0.2, 0.2)  # a corner, which stays where it is
    for _ in range(2):
        settled(page)
        press(page, "z")
    settled(page)
    assert mask(folder) == square
    draw(page, (0.2, 0.2), (0.1, 0.1))
    settled(page)
    assert kinds(folder, "0.png") == ["polygon", "polygon"]
    draw(page, (0.6, 0.2), (0.602, 0.202), button="right")  # a hand that is not still
    settled(page)
    shapes = page.evaluate("async () => (await fetch('api/project/images/0/corners/1')).json()")
    assert np.allclose(sorted(shapes[0]), [[9, 6], [18, 36], [54, 36]], atol=1), shapes


def test_a_polygon_that_is_left_is_kept(page, folder):
    for leave in ("b", "ArrowRight"):
        open_named(page, "1.png")
        press(page, "Escape")  # no object, whose corners would be moved
        saved(page)
        polygon(page, SQUARE[:3])
        press(page, leave)
        settled(page)
    assert kinds(folder, "1.png") == ["polygon", "polygon"]


def test_a_name_is_kept_while_it_is_typed(page, folder):
    open_named(page, "2.png")
    dot(page)
    page.route("**/stroke", lambda route: (time.sleep(1), route.continue_()))
    press(page, "r")
    page.keyboard.type("cat")
    press(page, "Enter")
    tap(page, 0.3, 0.5)
    press(page, "r")  # before the stroke is saved
    page.keyboard.type("a")  # is no key
    page.wait_for_function("() => document.activeElement.id === 'a-name'")
    page.keyboard.type("s")
    press(page, "Escape")  # as it was
    saved(page)
    [found] = on_disk(folder, "2.png").objects.values()
    assert (found.name, found.accepted) == ("cat", False)


def test_the_next_image_is_not_one_that_is_done_and_a_replaced_one_is_said(page, folder):
    page.select_option("#a-order", "open")
    open_named(page, "4.png")
    dot(page)
    press(page, "a")
    page.wait_for_selector("#a-accept-all[disabled]")
    press(page, "n")
    titled(page, "5.png")
    picture(folder, 5, 250)
    press(page, "d")
    tap(page, 0.5, 0.5)
    page.wait_for_selector("#a-stale:has-text('is another picture than the one shown')")
    page.click("#a-reload")
    page.wait_for_selector("#a-stale", state="hidden")
    saved(page)
    tap(page, 0.5, 0.5)
    objects(page, 1)


def lose(route):
    route.abort("connectionreset")


def test_a_change_whose_answer_is_lost_is_saved_and_one_that_never_came_is_not(page, folder):
    page.route("**/images/0", lose)
    page.reload()
    page.click("#a-everything")  # of no image
    open_named(page, "3.png")
    press(page, "d")
    page.route("**/stroke", lambda route: (route.fetch(), route.fulfill(status=504)))  # of a proxy
    page.route("**/images/3", lose)  # nor can the page ask
    tap(page, 0.3, 0.5)
    page.wait_for_selector("#a-state:has-text('the last change is not saved')")
    page.unroute_all()
    page.wait_for_selector("#toast:has-text('as it is saved')")
    objects(page, 1)
    page.route("**/stroke", lose)
    tap(page, 0.5, 0.5)
    page.wait_for_timeout(500)
    assert page.inner_text("#a-state") == "the last change is not saved"
    page.route("**/images/3", lambda route: route.fulfill(status=401))
    tap(page, 0.5, 0.5)
    page.wait_for_selector("#toast:has-text('Unauthorized')")
    page.unroute_all()
    tap(page, 0.7, 0.5)
    settled(page)
    assert kinds(folder, "3.png") == ["stroke", "stroke"]


def test_a_category_is_given_in_its_turn_also_while_it_is_renamed(page, folder):
    open_named(page, "6.png")
    page.fill("#a-new-category", "dog")
    press(page, "Enter", "1")
    late(page, "/project/")
    press(page, "d")
    tap(page, 0.3, 0.5)
    press(page, "2")  # before the mask has come
    saved(page)
    press(page, "Enter", "1")  # for the next one
    tap(page, 0.7, 0.5)
    objects(page, 2)
    page.click("#a-edit-category")
    page.fill("#a-new-category", "cat")
    press(page, "Enter", "Escape")
    page.hover("#a-marks")
    page.mouse.wheel(0, -200)
    tap(page, 0.7, 0.5)
    zoom = page.inner_text("#a-zoom")
    objects(page, 3)
    found = on_disk(folder, "6.png").objects.values()
    assert [each.category for each in found] == ["dog", "cat", "cat"]
    assert page.inner_text("#a-zoom") == zoom, "the image that is loaded again is not moved"
    older = page.evaluate_handle(
        """async () => {
        const take = (await import("./page/categories.js")).taker();
        const { categories } = await (await fetch("api/project/images")).json();
        return () => take(categories);
    }"""
    )
    page.fill("#a-new-category", "cow")
    press(page, "Enter")
    saved(page)
    older.evaluate("take => take()")  # its answer was late
    assert page.inner_text("#a-categories [aria-pressed=true]") == "cow"


def test_two_fingers_leave_a_polygon_as_it_was(page, folder):
    open_named(page, "8.png")
    polygon(page, SQUARE[:3])
    assert page.is_enabled("#a-undo")
    screen = page.context.new_cdp_session(page)
    x, y = at(page, 0.8, 0.8)
    fingers = [{"x": x - 90 * i, "y": y, "id": i} for i in (0, 1)]
    for kind, count in (("touchStart", 1), ("touchStart", 2), ("touchEnd", 0)):
        screen.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers[:count]})
    with page.expect_request("**/polygon") as request:
        press(page, "Enter")
    assert len(request.value.post_data_json["rings"][0]) == 3
    saved(page)


def test_proposals_are_counted_while_they_are_judged_and_accepted_at_once_in_turn(page, folder):
    def left(count):
        page.wait_for_selector(f"#a-accept-certain:has-text('Accept {count} of {count}')")

    open_named(page, "9.png")
    left(24)
    page.click("#a-objects li:nth-child(2) button")
    press(page, "d")
    tap(page, 0.2, 0.8)
    left(23)
    assert "proposed" not in page.inner_text("#a-objects li:nth-child(2)")
    press(page, "a")
    page.wait_for_selector("#a-judged:has-text('you kept 23')", state="attached")
    press(page, "z")
    left(23)
    page.evaluate("document.getElementById('a-images').style.maxHeight = '99px'")
    late(page, "loop/accept")
    page.click("#a-accept-certain")
    tap(page, 0.8, 0.2)
    objects(page, 25)
    assert kinds(folder, "9.png") == ["propose", "stroke", "accept all", "stroke"]
    assert not page.evaluate("document.getElementById('a-images').scrollTop")
    assert page.evaluate(DRAWN_TWICE) == 600


def test_the_loop_is_asked_again_once_it_has_answered_also_after_a_failed_list(page):
    state, held = page.evaluate("async () => (await fetch('api/project/loop')).json()"), []
    state["proposing"]["running"] = True
    page.route("**/project/loop", lambda route: route.fulfill(json=state))
    page.route("**/images?since*", lose)
    with page.expect_event("requestfailed"):
        page.evaluate("location.hash = '#try'; location.hash = '#annotate'")
    with page.expect_response("**/images?since*"):
        page.unroute("**/images?since*")
    page.unroute_all()
    page.route("**/project/loop", lambda route: held.append(route))
    page.wait_for_timeout(5000)
    [route] = held
    lose(route)
