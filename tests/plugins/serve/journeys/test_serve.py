"""The page as a user opens it: invalid flags, required tokens, and a real browser that clicks,
draws, browses and watches.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask import config_files
from gigamask.cli.main import main
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.command import ServeCommand
from gigamask.serialization import read_json
from gigamask.training.trainer import train
from gigamask.workflows import demo
from tests.browser import NARROW, SLOW_S, WIDE, opened
from tests.commands import refusal
from tests.little import little
from tests.plugins.serve.annotated import save_untrained
from tests.plugins.serve.unit.test_runs_view import write_records

ANY_MASKS = "--points-per-side 2 --pred-iou-thresh 0 --stability-score-thresh 0".split()
LATE = """part => {
  const real = fetch;
  window.fetch = async (address, options) => {
    const found = await real(address, options);
    if (String(address).includes(part)) await new Promise((go) => setTimeout(go, 400));
    return found;
  };
}"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("weights"))


@contextmanager
def served(*words):
    """Starts the page on a free port and gives its address; it must stop with 0 when it is signaled
    to."""
    gigamask = Path(sys.executable).parent / "gigamask"
    command = [gigamask, "serve", "--progress", "none", "--port", "0", *map(str, words)]
    if "--host" not in words:
        command.append("--no-token")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), process.stderr.read()
        yield address
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SLOW_S)
        assert (process.returncode, said) == (0, "")
    finally:
        process.kill()
        process.communicate()


@contextmanager
def annotating(folder, *flags):
    """Starts the page with a project of `folder/photos`, and an untrained model."""
    places = ("--project", folder / "project", "--images", folder / "photos")
    with served(*places, "--weights", save_untrained(folder), *flags) as address:
        yield address


def get(address, headers=None, body=None):
    """Returns status and body of a request."""
    request = urllib.request.Request(address, data=body, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=SLOW_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


@pytest.mark.parametrize(
    "words, told",
    [
        (".", "--images . --project FOLDER"),
        ("--weights none.pth", "none.pth"),
        ("--data none.tar", "none.tar: no such path"),
        ("--runs none", "--runs none: is not a folder"),
        ("--runs . --port 70000", "(got 70000)"),
        ("--runs . --port web", "--port"),
        ("--runs . --token short", "--token"),
        ("--runs . --points-per-side 0", "--points-per-side must be at least 1 (got 0)"),
        ("--runs . --pred-iou-thresh 7", "--pred-iou-thresh"),
    ],
)
def test_wrong_words_are_one_line(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told in refusal(capsys, "serve --port 0", words)


def test_without_its_packages_it_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'gigamask[web]'" in refusal(capsys, "serve", "--runs", tmp_path)


def test_who_looks_for_a_page_is_told_of_it(capsys):
    assert "perhaps you meant serve" in refusal(capsys, "gui")
    assert demo.next_commands("runs/demo")[0][0] == "gigamask serve --weights runs/demo"


def test_the_starter_is_shown_when_there_is_nothing_else():
    with ExitStack() as stack:
        state = ServeCommand()._state(stack)
    assert state.weights == "starter"
    assert state.session is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory, scenes):
    """A folder with a run that has ended, and two whose records are written by the test."""
    folder = tmp_path_factory.mktemp("runs")
    run = replace(little(), data=(str(scenes),), out=str(folder / "done"), steps=2)
    train(run, on_start=lambda: config_files.save_config(run))
    for name, steps in (("a", 40), ("b", 50)):
        config_files.save_config(replace(run, out=str(folder / name), steps=steps))
        write_records(folder / name, range(1, 20))
    return folder


@pytest.fixture(scope="module")
def address(weights, scenes, runs):
    """Where a page with all but texts is served."""
    with served("--weights", weights, "--data", scenes, "--runs", runs, *ANY_MASKS) as address:
        yield address


@pytest.mark.long
def test_on_other_addresses_the_token_grants_access_once(weights, tmp_path):
    told = tmp_path / "told.json"
    with served("--weights", weights, "--host", "0.0.0.0", "--json", told) as address:
        bare, token = re.fullmatch(r"http://[^:]+:(\d+)/\?token=(\w+)", address).groups()
        own = f"http://127.0.0.1:{bare}/"
        assert get(own)[0] == get(f"{own}api/about")[0] == 401
        assert get(f"{own}api/about", {"Cookie": f"gigamask_token_{bare}={token}"})[0] == 200
        opened = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert opened.open(f"{own}?token={token}", timeout=SLOW_S).status == 200
        assert json.loads(opened.open(f"{own}api/about", timeout=SLOW_S).read())["weights"] == str(
            weights
        )
    assert read_json(told) == {"address": address}


def choose_file(page, path, selector):
    """Chooses an image once the page asks for one, as it does not listen before, and waits."""
    page.wait_for_selector("#invite")
    page.set_input_files("#file", path)
    page.wait_for_selector(selector)


def late(page, part):
    """Makes answers to requests whose address has a part come later."""
    page.evaluate(LATE, part)


def spot(page, across, down, canvas="#canvas"):
    """Returns where on the screen a point of a canvas is."""
    box = page.locator(canvas).bounding_box()
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def click(page, across, down, canvas="#canvas", **more):
    page.mouse.click(*spot(page, across, down, canvas), **more)


def answers(page, count):
    """Waits until there are so many answers and returns their words."""
    page.wait_for_function(
        "count => document.querySelectorAll('#answers li').length === count", arg=count
    )
    return page.locator("#answers li").all_inner_texts()


def pixels(page):
    """Returns the canvas as the browser shows it."""
    return page.evaluate("document.getElementById('canvas').toDataURL()")


def test_what_is_no_picture_is_said_and_one_is_clicked_and_segmented(browser, address, tmp_path):
    Image.effect_noise((90, 60), 80).convert("RGB").save(tmp_path / "photo.png")
    (tmp_path / "photo.jpg").write_bytes(b"no picture")
    with opened(browser, address) as page:
        said = "#toast:has-text('photo.jpg: the 10 bytes are not a valid JPEG')"
        choose_file(page, tmp_path / "photo.jpg", said)
        choose_file(page, tmp_path / "photo.png", "#state:has-text('encoded in')")
        bare = pixels(page)
        with page.expect_request("**/predict") as request:
            click(page, 0.505, 0.505)
        assert request.value.post_data_json["steps"] == [{"point": [45, 30], "foreground": True}]
        first = answers(page, 3)
        assert all(
            re.match(r"-?\d\.\d{3}\s+predicted IoU", words.replace("\n", " ")) for words in first
        )
        marked = pixels(page)
        assert marked != bare
        click(page, 0.2, 0.3, button="right")
        answers(page, 1)
        page.click("#undo")
        assert answers(page, 3) == first
        page.wait_for_function(
            "before => document.getElementById('canvas').toDataURL() === before", arg=marked
        )
        page.keyboard.press("Escape")
        answers(page, 0)
        assert pixels(page) == bare
        page.mouse.move(*spot(page, 0.2, 0.2))
        page.mouse.down()
        page.mouse.move(*spot(page, 0.8, 0.7), steps=4)
        with page.expect_request("**/predict") as request:
            page.mouse.up()
        [step] = request.value.post_data_json["steps"]
        assert step["box"] == pytest.approx([18, 12, 72, 42], abs=1)
        assert all(type(pixel) is int for pixel in step["box"])
        answers(page, 3)
        page.evaluate("dispatchEvent(new KeyboardEvent('keydown', {key: 'é', code: 'Digit2'}))")
        assert page.get_attribute("#answers li:nth-child(2) button", "aria-pressed") == "true"
        page.hover("#answers li:nth-child(2) button")
        page.click("#answers li:nth-child(3) button")
        assert page.get_attribute("#answers li:nth-child(3) button", "aria-pressed") == "true"
        saved(page, tmp_path)
        late(page, "predict")
        for place in (0.3, 0.6):  # the second before there is an answer
            with page.expect_request("**/predict") as request:
                click(page, place, place)
        answers(page, 1)
        sent = request.value.post_data_json["steps"]
        assert ["chosen" in step for step in sent] == [True, False, False]


def saved(page, tmp_path):
    """Saves the chosen answer both ways and holds one against the other."""
    for button, name in (("#save-png", "a.png"), ("#save-rle", "a.json")):
        with page.expect_download() as download:
            page.click(button)
        download.value.save_as(tmp_path / name)
    told = read_json(tmp_path / "a.json")
    assert told["image"] == {"file_name": "photo.png", "height": 60, "width": 90}
    [mask] = told["annotations"]
    dense = RLEMasks.from_coco([mask["segmentation"]["counts"]], (60, 90)).to_dense()[0]
    assert (np.array(Image.open(tmp_path / "a.png").convert("L")) == 255 * dense).all()
    assert dense.sum() == mask["area"]


@pytest.mark.long
@pytest.mark.parametrize("size, scheme", [(WIDE, "dark"), (NARROW, "light")])
def test_data_and_samplers_can_be_browsed(browser, address, size, scheme):
    with opened(browser, f"{address}#data", size, color_scheme=scheme) as page:
        for part in ("#histograms figure", "#grid button", "#drawn button"):
            page.wait_for_selector(part)
        assert page.locator("#grid button").count() == 12 == page.locator("#drawn button").count()
        drawn = page.locator("#drawn button").all_inner_texts()
        page.select_option("#sampler", "curriculum")
        page.wait_for_function(
            "before => [...document.querySelectorAll('#drawn button')].map(b => "
            "b.innerText).join() !== before",
            arg=",".join(drawn),
        )
        page.fill("#epoch", "-1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#toast:has-text('epoch')")
        page.click("#grid button:nth-child(3)")
        page.wait_for_selector("dialog[open]")
        for by in ("area", "predicted_iou", "stability", "mask"):
            page.select_option("#colour", by)
        page.mouse.move(*spot(page, 0.5, 0.5, "#viewer-canvas"))
        page.click("#try-it")
        page.wait_for_selector("#state:has-text('encoded')")
        asked = []
        page.route("**/progress", lambda route: asked.append(route))
        page.route("**/all-masks", lambda route: (time.sleep(1.5), route.continue_()))
        page.click("#all-masks")
        page.wait_for_selector("#answers li")
        asked[0].fulfill(json={"fraction": 0.5})
        page.wait_for_timeout(300)
        assert page.inner_text("#state") == ""
        said = r"Everything the model finds: \d+ masks?"
        assert re.fullmatch(said, page.inner_text("#answers-title"))


@pytest.mark.long
def test_by_touch_a_mode_says_what_a_tap_is(browser, address):
    more = {"has_touch": True, "is_mobile": True}
    with opened(browser, f"{address}#annotate", NARROW, **more) as page:  # which has no project
        page.tap("#samples button:nth-child(2)")
        page.wait_for_selector("#state:has-text('encoded')")
        page.tap("#canvas")
        answers(page, 3)
        page.tap("[data-mode=remove]")
        page.tap("#canvas", position={"x": 20, "y": 20})
        answers(page, 1)
        page.tap("#undo")
        answers(page, 3)


@pytest.mark.long
def test_words_find_masks(browser, scenes, request, tmp_path):
    grounding = pytest.importorskip("tests.plugins.grounding.unit.test_inference")
    described = request.getfixturevalue("described")
    grounding.saved(grounding.run_in(tmp_path / "run", described))
    assert main(["serve", "--grounding", str(tmp_path / "none")]) == 2
    flags = "--data", scenes, "--grounding", tmp_path / "run", "--trust"
    with served(*flags) as address, opened(browser, address) as page:
        page.click("#samples button:nth-child(1)")
        page.wait_for_selector("#state:has-text('encoded')")
        page.fill("#text", "the red disc")
        page.keyboard.press("Enter")
        page.wait_for_selector("#answers li")
        assert re.search(
            r"(\d+|None) of \d+ annotated masks fit", page.inner_text("#answers-title")
        )
        assert "confidence" in page.inner_text("#answers li:nth-child(1)")


@pytest.mark.long
def test_trainings_are_displayed_side_by_side_and_their_checkpoints_verified(
    browser, address, runs
):
    ahead_s = time.time() + 3600  # so that it counts as live however long the browser takes
    os.utime(runs / "a" / "metrics.jsonl", (ahead_s, ahead_s))
    with opened(browser, f"{address}#runs") as page:
        page.wait_for_selector("#curves figure")
        page.select_option("#run-a", "a")
        page.select_option("#run-b", "b")
        page.wait_for_selector("#differences td:has-text('steps')")
        page.wait_for_selector("#live")
        write_records(runs / "a", range(20, 38))
        page.wait_for_selector("#run-facts:has-text('step 37 of 40')")
        skipped = {"skipped_sample": "x.tar:sa_1", "reason": "x.tar:sa_1: <b>cut short</b>"}
        with open(runs / "a" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 37, **skipped}) + "\n")
        page.wait_for_selector("#faults li:has-text('<b>cut short</b>')")
        page.select_option("#run-a", "done")
        page.click("#checkpoints button")
        page.wait_for_selector("#checkpoints .good")
