"""What is drawn or typed is kept, and never changed in silence: corners, polygons, names, order."""

import json
import time

import numpy as np
import pytest
from PIL import Image

from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.project import Project
from tests.browser import opened
from tests.plugins.serve.journeys.test_annotate import at, objects, open_named, saved
from tests.plugins.serve.journeys.test_serve import annotating, late

pytestmark = pytest.mark.long
SQUARE = ((0.2, 0.2), (0.6, 0.2), (0.6, 0.6), (0.2, 0.6))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Address and folder of a page with ten photographs; no two tests annotate the same."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "photos").mkdir()
    for i in range(10):
        picture(folder, i, 25 * i)
    [dot] = RLEMasks.from_dense(np.eye(60, 90, dtype=bool)[None]).to_coco()
    one = MaskObject(dot.decode(), "x", by_model=True, predicted_iou=0.95, stability=0.95, model=-1)
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


def dot(page):
    """Draws a dot, which is the only object."""
    page.keyboard.press("d")
    page.mouse.click(*at(page, 0.5, 0.5))
    objects(page, 1)


def drag(page, start, end, button="left", steps=4):
    page.mouse.move(*start)
    page.mouse.down(button=button)
    page.mouse.move(*end, steps=steps)
    page.mouse.up(button=button)


def mask(folder, name):
    return on_disk(folder, name)[1]["1"]["mask"]


def test_corners_are_those_of_the_mask_that_is_saved(page, folder):
    polygon(page, SQUARE)
    page.keyboard.press("Enter")
    objects(page, 1)
    page.wait_for_timeout(300)  # the corners come
    square = mask(folder, "0")
    drag(page, at(page, 0.6, 0.6), at(page, 0.8, 0.8))
    settled(page)
    assert mask(folder, "0") != square
    page.mouse.click(*at(page, 0.2, 0.2))  # a corner, which stays where it is
    for _ in range(2):
        settled(page)
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


def test_a_polygon_that_is_left_is_kept(page, folder):
    for leave in ("b", "ArrowRight"):
        open_named(page, "1.png")
        page.keyboard.press("Escape")  # no object, whose corners would be moved
        saved(page)
        polygon(page, SQUARE[:3])
        page.keyboard.press(leave)
        settled(page)
    assert on_disk(folder, "1")[0] == ["polygon", "polygon"]


def test_a_name_is_kept_while_it_is_typed(page, folder):
    open_named(page, "2.png")
    dot(page)
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


def test_the_next_image_is_not_one_that_is_done_and_a_replaced_one_is_said(page, folder):
    page.select_option("#a-order", "open")
    open_named(page, "4.png")
    dot(page)
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


def test_a_change_whose_answer_is_lost_is_saved_and_one_that_never_came_is_not(page, folder):
    def lose(route):
        route.abort("connectionreset")

    open_named(page, "3.png")
    page.keyboard.press("d")
    page.route("**/stroke", lambda route: (route.fetch(), lose(route)))
    page.route("**/images/3", lose)  # nor can the page ask
    page.mouse.click(*at(page, 0.3, 0.5))
    page.wait_for_selector("#a-state:has-text('the last change is not saved')")
    page.unroute_all()
    objects(page, 1)
    page.route("**/stroke", lose)
    page.mouse.click(*at(page, 0.5, 0.5))
    page.wait_for_timeout(500)
    assert page.inner_text("#a-state") == "the last change is not saved"
    page.unroute_all()
    page.mouse.click(*at(page, 0.7, 0.5))
    settled(page)
    assert on_disk(folder, "3")[0] == ["stroke", "stroke"]


def test_a_digit_is_for_the_object_that_is_active_in_its_turn(page, folder):
    open_named(page, "6.png")
    page.fill("#a-new-category", "dog")
    page.keyboard.press("Enter")
    page.keyboard.press("1")
    saved(page)
    for part in ("stroke", "assign"):
        late(page, part)
    page.keyboard.press("d")
    page.mouse.click(*at(page, 0.3, 0.5))
    page.keyboard.press("2")  # before the mask has come
    page.wait_for_selector("#a-objects li:has-text('dog')")
    saved(page)
    page.keyboard.press("Enter")
    page.keyboard.press("1")  # for the next one
    page.mouse.click(*at(page, 0.7, 0.5))
    objects(page, 2)
    found = [(each["category"], each["accepted"]) for each in on_disk(folder, "6")[1].values()]
    assert found == [("dog", True), ("object", False)]


def test_what_is_drawn_while_a_category_changes_has_the_new_one(page, folder):
    open_named(page, "7.png")
    page.fill("#a-new-category", "rat")
    page.keyboard.press("Enter")
    dot(page)
    late(page, "categories/change")
    page.click("#a-edit-category")
    page.fill("#a-new-category", "cat")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.mouse.move(*at(page, 0.8, 0.8))
    page.mouse.wheel(0, -200)
    page.mouse.click(*at(page, 0.8, 0.8))
    zoom = page.inner_text("#a-zoom")
    objects(page, 2)
    assert page.inner_text("#a-zoom") == zoom, "the image that is loaded again is not moved"
    assert [each["category"] for each in on_disk(folder, "7")[1].values()] == ["cat", "cat"]
    assert page.is_hidden("#a-stale")


def test_two_fingers_leave_a_polygon_as_it_was(page, folder):
    open_named(page, "8.png")
    polygon(page, SQUARE[:3])
    assert page.is_enabled("#a-undo")
    screen = page.context.new_cdp_session(page)
    places = [dict(zip("xy", at(page, *place), strict=True)) for place in ((0.8, 0.8), (0.3, 0.8))]
    for i in (1, 2, 0):
        kind = "touchStart" if i else "touchEnd"
        touched = [place | {"id": number} for number, place in enumerate(places[:i])]
        screen.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})
    with page.expect_request("**/polygon") as request:
        page.keyboard.press("Enter")
    assert len(request.value.post_data_json["rings"][0]) == 3
    saved(page)


def test_proposals_are_counted_while_they_are_judged_and_accepted_at_once_in_turn(page, folder):
    def left(count):
        page.wait_for_selector(f"#a-accept-certain:has-text('Accept {count} of {count}')")

    open_named(page, "9.png")
    left(24)
    page.click("#a-objects li:nth-child(2) button")
    page.keyboard.press("d")
    page.mouse.click(*at(page, 0.2, 0.8))
    left(23)
    assert "proposed" not in page.inner_text("#a-objects li:nth-child(2)")
    page.keyboard.press("a")
    page.wait_for_selector("#a-judged:has-text('you kept 23')", state="attached")
    page.keyboard.press("z")
    left(23)
    late(page, "loop/accept")
    page.click("#a-accept-certain")
    page.mouse.click(*at(page, 0.8, 0.2))
    objects(page, 25)
    kinds, found = on_disk(folder, "9")
    assert kinds == ["propose", "stroke", "accept all", "stroke"]
    assert not found["2"]["accepted"]


def test_the_loop_is_asked_again_once_it_has_answered_also_after_a_failed_list(page):
    state, held = page.evaluate("async () => (await fetch('api/project/loop')).json()"), []
    state["proposing"]["running"] = True
    page.route("**/project/loop", lambda route: route.fulfill(json=state))
    page.route("**/images?since*", lambda route: route.abort("connectionreset"))
    with page.expect_event("requestfailed"):
        page.evaluate("location.hash = '#try'; location.hash = '#annotate'")
    with page.expect_response("**/images?since*"):
        page.unroute("**/images?since*")
    page.unroute_all()
    page.route("**/project/loop", lambda route: held.append(route))
    page.wait_for_timeout(5000)
    [route] = held
    route.abort("connectionreset")
