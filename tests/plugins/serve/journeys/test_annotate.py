"""The loop in a real browser: annotate, train, let the model propose, accept, export."""

import re

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from gigamask.cli.main import main
from gigamask.plugins.serve import server
from gigamask.plugins.serve.edits import ImageEdits
from gigamask.plugins.serve.photographs import annotations_of
from gigamask.plugins.serve.project import Project, read_edits
from gigamask.serialization import read_json
from gigamask.synthetic.cells import compose_cells
from tests.browser import NARROW, opened
from tests.commands import invoke
from tests.plugins.serve.annotated import picture, save_untrained
from tests.plugins.serve.journeys.test_serve import ANY_MASKS, annotating, choose_file, served


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven pictures of a bright disc on noise."""
    folder = tmp_path_factory.mktemp("annotate") / "photos"
    folder.mkdir()
    ys, xs = np.mgrid[:60, :90]
    for i in range(7):
        pixels = picture(60, 90, i) // 3
        pixels[(ys - 30) ** 2 + (xs - 45) ** 2 < (8 + i) ** 2] += 140
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def address(photos):
    folder = photos.parent
    with annotating(folder, "--compare", save_untrained(folder), *ANY_MASKS) as address:
        yield address


def on_disk(folder, name):
    """Returns the edits of an image; none if there is no file."""
    path = annotations_of(folder / "project", name)
    return read_edits(path) if path.exists() else ImageEdits((0, 0))


def kinds(folder, name):
    return [edit.kind for edit in on_disk(folder, name).edits]


def at(page, across, down):
    """Returns where on the screen a point of the image is; it fills the stage up to bands."""
    box = page.locator("#a-marks").bounding_box()
    scale = min(box["width"] / 90, box["height"] / 60)
    x0 = box["x"] + (box["width"] - 90 * scale) / 2
    y0 = box["y"] + (box["height"] - 60 * scale) / 2
    return x0 + across * 90 * scale, y0 + down * 60 * scale


def tap(page, across, down, **more):
    page.mouse.click(*at(page, across, down), **more)


def move(page, across, down, **more):
    page.mouse.move(*at(page, across, down), **more)


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def see(page, *selectors):
    for selector in selectors:
        page.wait_for_selector(selector)


def saved(page):
    page.wait_for_selector("#a-state:has-text('all saved')")


def titled(page, name):
    """Waits until an image is shown."""
    page.wait_for_selector(f"#a-title:has-text('{name}')")
    saved(page)


def open_named(page, name):
    page.click(f"#a-images button[title^='{name}']")
    titled(page, name)


def objects(page, count):
    page.wait_for_function(
        "count => document.querySelectorAll('#a-objects li').length === count", arg=count
    )
    saved(page)


def draw(page, *places, button="left"):
    move(page, *places[0])
    page.mouse.down(button=button)
    for place in places:
        move(page, *place, steps=3)
    page.mouse.up(button=button)


def test_objects_are_made_changed_and_undone(browser, address, photos):
    with opened(browser, address) as page:
        saved(page)
        with page.expect_request("**/preview") as request:
            move(page, 0.505, 0.505)
        assert request.value.post_data_json["steps"] == [{"point": [45, 30]}]
        with page.expect_request("**/prompt") as request:
            tap(page, 0.505, 0.505)
        assert request.value.post_data_json["step"] == {"point": [45, 30], "foreground": True}
        objects(page, 1)
        tap(page, 0.1, 0.1, button="right")
        page.wait_for_function("() => document.getElementById('a-choose').disabled")
        saved(page)
        assert kinds(photos.parent, "0.png") == ["prompt", "prompt"]
        press(page, "Escape", "d")
        draw(page, (0.3, 0.3), (0.7, 0.3), (0.7, 0.7))
        objects(page, 2)
        press(page, "e")
        draw(page, (0.5, 0.1), (0.5, 0.9))
        page.wait_for_selector("#a-split:not([disabled])")
        saved(page)
        press(page, "s")
        objects(page, 3)
        press(page, "Escape", "g")
        for place in ((0.1, 0.1), (0.3, 0.1), (0.2, 0.4)):
            tap(page, *place)
        press(page, "Enter")
        objects(page, 4)
        press(page, "g")
        draw(page, (0.2, 0.4), (0.2, 0.8))  # drags a corner
        page.wait_for_timeout(100)
        saved(page)
        *others, last = kinds(photos.parent, "0.png")
        assert last == "polygon"
        page.fill("#a-new-category", "disc")
        page.click("#a-add-category button")
        page.wait_for_selector("#a-objects li:has-text('disc 4')")
        press(page, "Escape")
        press(page, *["z"] * (len(others) + 2))
        objects(page, 0)
        assert page.is_disabled("#a-undo")
        press(page, *["Shift+Z"] * (len(others) + 2))
        objects(page, 4)
        move(page, 0.505, 0.505)
        before = page.inner_text("#a-zoom")
        page.mouse.wheel(0, -300)
        page.wait_for_function(
            "b => document.getElementById('a-zoom').textContent !== b", arg=before
        )
        press(page, "?")
        page.wait_for_selector("#a-keys[open] dt")
        press(page, "Escape", "a")
        page.wait_for_selector("#a-accept-all[disabled]")


@pytest.mark.long
def test_what_is_drawn_across_two_images_is_on_none(browser, address, photos):
    with opened(browser, address) as page:
        open_named(page, "3.png")
        press(page, "d")
        move(page, 0.3, 0.3)
        page.mouse.down()
        press(page, "ArrowRight")
        page.wait_for_selector("text=the image was left before this was drawn")
        page.mouse.up()
        objects(page, 0)


@pytest.mark.long
def test_a_stale_tab_is_refused_and_loads_again(browser, address, photos):
    with opened(browser, address) as one, opened(browser, address) as other:
        for page in (one, other):
            open_named(page, "5.png")
        tap(one, 0.5, 0.5)
        objects(one, 1)
        tap(other, 0.2, 0.2)
        other.wait_for_selector("#a-stale")
        assert len(kinds(photos.parent, "5.png")) == 1
        other.click("#a-reload")
        objects(other, 1)
        press(other, "z")
        objects(other, 0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'
def test_the_loop_ends_with_an_export(browser, address, photos, tmp_path):
    with opened(browser, address, (1100, 560)) as page:
        saved(page)
        page.click("#a-train")
        page.wait_for_selector("#toast:has-text('one is held out')")
        for row in range(5):
            titled(page, f"{row}.png")
            press(page, "d")
            draw(page, (0.45, 0.5), (0.55, 0.5))
            page.wait_for_selector("#a-accept:not([disabled])")
            press(page, "Enter")
            page.wait_for_selector("#a-accept[disabled]")
            press(page, "n")
        see(
            page,
            "#a-progress:has-text('5 of 7 images done')",
            "#a-guide:has-text('Next: train the model')",
        )
        page.fill("#a-minutes", "0.02")
        page.click("#a-train")
        page.wait_for_selector("#a-result:has-text('Round 1:')", timeout=120_000)
        assert "clicks to an IoU of 0.9" in page.inner_text("#a-result")
        page.wait_for_function(
            "() => document.getElementById('a-result').getBoundingClientRect().bottom"
            " <= document.querySelector('.bar.foot').getBoundingClientRect().top"
        )
        page.select_option("#a-model", "0")
        page.wait_for_selector("#weights:has-text('round 1')")
        page.click("#a-propose")
        see(
            page,
            "#a-proposing:has-text('2 of 2 images proposed')",
            "#a-title:has-text('5.png')",
            "#a-objects li:has-text('proposed by the model')",
            "#a-guide:has-text('least certain first')",
        )
        page.select_option("#a-order", "uncertain")
        page.wait_for_selector("#a-images li:nth-child(1):has-text('certainty')")
        page.fill("#a-threshold", "0")
        page.click("#a-accept-certain")
        see(
            page,
            "#a-progress:has-text('7 of 7 images done')",
            "#a-guide:has-text('Next: export')",
            "#a-gain figure",
        )
        page.click("#a-everything")
        page.wait_for_selector("#a-both:has-text('filled')")
        page.click("#a-export")
        page.wait_for_selector("#a-exported:has-text('of 7 images')")
        with page.expect_download() as download:
            page.click("#a-exported button")
        download.value.save_as(tmp_path / "coco.json")
    coco = COCO(str(tmp_path / "coco.json"))
    assert len(coco.imgs) == 7
    assert all(coco.annToMask(each).sum() == each["area"] for each in coco.anns.values())
    names = {each["name"] for each in coco.cats.values()}
    assert names - {"disc"} == {"object"}  # another test adds discs, on the same worker or not
    told = tmp_path / "told.json"
    invoke(
        "index",
        photos.parent / "project/export/shards",
        "--out",
        tmp_path / "index",
        "--json",
        told,
    )
    assert read_json(told)["masks"] == len(coco.anns)


@pytest.mark.long
def test_the_page_is_usable_on_a_narrow_screen(browser, address):
    with opened(browser, address, NARROW, has_touch=True, is_mobile=True) as page:
        saved(page)
        page.click("#a-next")
        titled(page, "1.png")
        before = page.locator("#a-objects li").count()
        assert page.evaluate("scrollY") == 0, "the image stays in sight when another is opened"
        page.touchscreen.tap(*at(page, 0.5, 0.5))
        objects(page, before + 1)


@pytest.mark.long
def test_two_models_answer_side_by_side(browser, address, photos):
    with opened(browser, f"{address}#try") as page:
        choose_file(page, photos / "0.png", "#state:has-text('encoded')")
        page.click("#canvas")
        page.wait_for_selector("#compared-caption:has-text('little.safetensors, predicted IoU')")
        first, second = (page.locator(name).bounding_box() for name in ("#canvas", "#compared"))
        assert first["x"] + first["width"] <= second["x"]


@pytest.mark.long
def test_images_of_16_bits_are_shown_and_classes_are_named(
    browser,
    tmp_path,
    monkeypatch,
    capsys,
):
    """By the percentiles of an earlier start; the classes of masks, as categories of proposals."""
    (tmp_path / "cells").mkdir()
    for i in range(2):
        Image.fromarray(compose_cells(0, i, (96, 96), 16).pixels).save(tmp_path / f"cells/{i}.png")
    weights = save_untrained(tmp_path, class_names=("cell", "dirt"))
    words = ("--project", tmp_path / "project", "--images", tmp_path / "cells")

    def start_and_stop(*given):
        with monkeypatch.context() as changed:
            changed.setattr(server, "serve", lambda *_: None)
            assert main(["serve", *map(str, (*words, "--weights", weights, *given))]) == 0
        return capsys.readouterr().out

    assert "replaces" not in start_and_stop("--percentiles", 1, 99)
    with served(*words, "--weights", weights, *ANY_MASKS) as address:
        with opened(browser, address) as page:
            saved(page)
            page.wait_for_selector("#a-note:has-text('uint16, percentiles 1 99')")
            shown = page.evaluate(
                "() => { const {width, height} = document.getElementById('a-pixels');"
                " const {data} = document.getElementById('a-pixels').getContext('2d')"
                ".getImageData(width / 2 - 50, height / 2 - 50, 100, 100);"
                " return Array.from(data.filter((_, i) => i % 4 === 0)); }"
            )
            assert np.std(shown) > 20, "neither black nor white"
            page.click("#a-everything")
            page.wait_for_selector("#a-both:has-text('outlined in yellow: ')")
            for name in ("cell", "dirt"):
                page.fill("#a-new-category", name)
                page.click("#a-add-category button")
                page.wait_for_selector(f"#a-categories button:has-text('{name}')")
            page.click("#a-propose")
            page.wait_for_selector("#a-proposing:has-text('2 of 2 images proposed')")
        with opened(browser, f"{address}#try") as page:
            choose_file(page, tmp_path / "cells/0.png", "#state:has-text('uint16, percentiles')")
            page.click("#canvas")
            page.wait_for_function("() => document.querySelectorAll('#answers li').length === 3")
            assert re.match(r"(cell|dirt)\s0\.\d\d", page.inner_text("#answers li"))
    with Project.open(tmp_path / "project", tmp_path / "cells") as project:
        objects = [each for row in range(2) for each in project.read(row).objects.values()]
    assert {each.category for each in objects} <= {"cell", "dirt"}
    assert objects
    said = start_and_stop("--window", 0, 5000)
    assert re.search(r"^--window 0 5000 replaces --percentiles 1 99, .*\n", said, re.MULTILINE)
