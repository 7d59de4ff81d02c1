"""`gigamask report` as a user types it: of trainings, pre-trainings, groundings, stages, one or
several; and where there is nothing to report.
"""

import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest

from gigamask.serialization import read_json
from gigamask.synthetic import scenes as synthetic
from tests.browser import opened
from tests.commands import LITTLE, invoke, refusal
from tests.html import Page
from tests.unit.report.test_history import record, written

SECTIONS = (
    "overview curves evaluations scores pictures configuration throughput recovered-faults "
    "checkpoints origin"
).split()


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    synthetic.write(str(folder), 2, seed=11, long_side=(96, 128))
    return folder


@pytest.fixture(scope="module")
def runs(scenes, held_out, tmp_path_factory) -> Path:
    """Two runs: one that went through, and one that was stopped, whose last checkpoint was damaged,
    and that went on."""
    folder = tmp_path_factory.mktemp("runs")
    watched = f"--evaluation.data {held_out} --evaluation.interval 2"
    invoke(f"train {LITTLE} --data {scenes} --out {folder}/whole", watched)
    invoke(f"train {LITTLE} --data {scenes} --out {folder}/again --optimizer.lr 0.01", watched)
    newest = folder / "again" / "checkpoints" / "step_00000004" / "model.safetensors"
    raw = newest.read_bytes()
    newest.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with open(folder / "again" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # it is said, and no error
        invoke(f"train --resume {folder}/again")
    return folder


def sections(page: Page) -> list[str]:
    return [told["id"] for tag, told in page.tags if tag == "h2"]


@pytest.mark.long
def test_of_one_run(runs, tmp_path, capsys):
    invoke(f"report {runs}/again --verify --trust --json {tmp_path}/told.json")
    assert capsys.readouterr().out.endswith(f"\n{runs / 'again' / 'report.html'}\n")
    page = Page((runs / "again" / "report.html").read_text())
    assert sections(page) == SECTIONS
    assert page.row("optimizer.lr") == ["optimizer.lr", "0.001", "0.01"]
    assert page.row("step_00000004")[5] == "size and crc32 as written"
    assert page.count("img") == 2
    assert {"step_00000004 was damaged; training resumed from step 2", "1 of metrics.jsonl"} <= set(
        page.text
    )
    assert any(line.endswith("at least 2 steps trained again") for line in page.text)
    told = read_json(tmp_path / "told.json")["runs"]["again"]
    assert told["records"]["step"] == [1, 2, 3, 4]
    assert [each["step"] for each in told["evaluations"]] == [2, 4]
    assert [each["step"] for each in told["starts"]] == [0, 2]
    best = f"{told['best']['scores']['1 click']:.3f}"
    assert best in page.text
    assert told["from_recipe"]["optimizer.lr"] == ["0.001", "0.01"]
    (run,) = page.data["runs"]
    assert run["records"]["loss"] == pytest.approx(told["records"]["loss"], rel=1e-5)
    assert run["resumed"] == [2]
    charts = {told["id"] for _, told in page.tags if told.get("class") == "charts"}
    assert charts == {"curve-charts", "score-charts"}


@pytest.mark.long
def test_of_several_side_by_side(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke(f"report {runs} --json told.json")
    page = Page((tmp_path / "report.html").read_text())
    assert sections(page) == SECTIONS
    assert page.row("optimizer.lr") == ["optimizer.lr", "0.001", "0.01"]
    assert not any(row[0] == "steps" for row in page.rows if len(row) == 3), "only what differs"
    assert [run["name"] for run in page.data["runs"]] == ["whole", "again"]
    for run in page.data["runs"]:
        assert run["records"]["step"] == [1, 2, 3, 4]
        assert {"loss", "iou", "lr", "waiting", "images_per_s"} <= run["records"].keys()
        assert [each["step"] for each in run["evaluations"]] == [2, 4]
    told = read_json(tmp_path / "told.json")
    assert list(told["runs"]) == ["whole", "again"]
    assert told["differences"] == {"optimizer.lr": ["0.001", "0.01"]}


@pytest.mark.long
def test_pictures_are_kept_by_evaluations(runs):
    kept = sorted(path.name for path in (runs / "whole" / "pictures").iterdir())
    assert kept == ["step_00000002.jpg", "step_00000004.jpg"]


@pytest.mark.long
def test_pictures_are_enlarged_with_their_legend(browser, runs, tmp_path):
    invoke(f"report {runs}/whole --out {tmp_path}/report.html")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        picture = page.locator(".figures img").first
        small = picture.bounding_box()["width"]
        picture.click()
        assert page.locator("dialog img").bounding_box()["width"] > small
        assert re.match(r"step \d+\. Yellow outline: ", page.inner_text("dialog p"))
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")


def test_of_a_run_that_is_still_written_to(runs, tmp_path):
    """Half a line, no checkpoint yet, a recipe that is not here any more."""
    run = tmp_path / "run"
    left_out = shutil.ignore_patterns("checkpoints", "pictures", "origin.jsonl")
    shutil.copytree(runs / "whole", run, ignore=left_out)
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-20])
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace(LITTLE, "gone.py:little")
    )
    invoke(f"report {run}")
    page = Page((run / "report.html").read_text())
    assert sections(page) == [name for name in SECTIONS if name not in ("pictures", "checkpoints")]
    assert any("gone.py:little" in line for line in page.text)


@pytest.mark.long
def test_of_a_pre_training_and_of_stages(scenes, tmp_path, monkeypatch):
    staged = "--stages mae,joint --mae-steps 2 --steps 2 --log-every 1 --loader.workers 0"
    invoke(
        f"train tiny --data {scenes} --out {tmp_path}/runs --batch-size 2 --micro-batch-size 2",
        staged,
    )
    invoke(f"report {tmp_path}/runs/mae")
    page = Page((tmp_path / "runs" / "mae" / "report.html").read_text())
    assert "mse" in page.data["runs"][0]["records"]
    assert "scores" not in sections(page)
    monkeypatch.chdir(tmp_path)
    invoke("report runs")
    rows = Page((tmp_path / "report.html").read_text()).rows
    assert [row[0] for row in rows[1:3]] == ["mae", "joint"]


HOSTILE = "</script><img src=x onerror=document.title='broken'>"
"""A name that would run code if it were taken for HTML, or ended the script that holds the data."""


def hostile(folder: Path, scale: float) -> None:
    """Writes a run of which every name is hostile, with numbers that are none or too large."""
    records = [
        record(
            step,
            scale / step,
            **{HOSTILE: step, "__proto__": step, "huge": 1e308, "none": float("nan")},
        )
        for step in range(1, 80)
    ]
    scored = [
        {
            "step": step,
            "evaluation": {"1 click": 0.1, "wrong image": 0.05, HOSTILE: 0.2},
            "warnings": [HOSTILE],
        }
        for step in (20, 79)
    ]
    written(
        folder, *records, *scored, config=f"recipe: {HOSTILE!r}\nsteps: '100'\nbatch-size: '4'\n"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_renders_the_report_and_executes_nothing_of_a_malicious_run(
    browser, tmp_path, scheme
):
    names = [HOSTILE.replace("/", "_"), "<b>two"]
    for number, name in enumerate(names):
        hostile(tmp_path / "runs" / name, number + 1)
    out = tmp_path / "report.html"
    for folder, scores, legend in (
        (tmp_path / "runs" / names[0], 2, ["as recorded", "smoothed"]),
        (tmp_path / "runs", 3, [f"{name} [0-9.]+" for name in map(re.escape, names)]),
    ):
        invoke("report", shlex.quote(str(folder)), f"--out {out}")
        Page(out.read_text())
        with opened(browser, out.as_uri(), color_scheme=scheme) as page:
            page.wait_for_selector("#curve-charts figure")
            assert page.locator("#score-charts figure").count() == scores
            titles = [
                text.splitlines()[0]
                for text in page.locator("#curve-charts figcaption").all_inner_texts()
            ]
            assert titles == ["Loss", HOSTILE, "proto", "Speed", "Waiting for data"]
            assert page.title().startswith("Report of ")
            assert page.locator("img").count() == 0
            loss = page.locator("#curve-charts figure").first
            before = loss.locator("polyline").last.get_attribute("points")
            assert "NaN" not in page.locator("#curve-charts").inner_html()
            found = loss.locator(".legend span").all_inner_texts()
            assert all(map(re.fullmatch, legend, found)), "with the last value of each of several"
            box = loss.locator("svg").first.bounding_box()
            page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
            assert re.match(r"step \d+\n", loss.locator(".tooltip").inner_text())
            page.locator("#smooth").fill("0")
            assert loss.locator("polyline").last.get_attribute("points") != before


def test_a_single_record_is_said_and_not_drawn(browser, tmp_path):
    written(tmp_path / "run", record(6, 1.5), config="recipe: tiny\nsteps: '6'\nbatch-size: '4'\n")
    invoke(f"report {tmp_path}/run")
    with opened(browser, (tmp_path / "run" / "report.html").as_uri()) as page:
        page.wait_for_selector("#curve-charts figure")
        charts = page.locator("#curve-charts")
        assert charts.locator("svg").count() == 0
        assert "step 6: 1.5; a curve needs a second one" in charts.inner_text()


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "RUN is required"),
        ("empty", "empty: has no records yet"),
        (
            "run --out missing/report.html",
            "--out missing/report.html: cannot be written",
        ),
        ("run --out bare", "--out bare: cannot be written"),
        ("run --out run/metrics.jsonl", "--out run/metrics.jsonl: is not a report"),
        ("run --out thesis.html", "--out thesis.html: is not a report"),
        ("run --json missing/told.json", "--json missing/told.json: cannot be written"),
    ],
)
def test_wrong_uses_are_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run", record(1))
    written(tmp_path / "empty")
    (tmp_path / "bare").mkdir()
    (tmp_path / "thesis.html").write_text("<!DOCTYPE html><p>Mine</p>")
    assert said in refusal(capsys, "report", words)
    assert not (tmp_path / "run" / "report.html").exists()


def test_what_has_no_records_yet_is_left_out_of_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run", record(1))
    written(tmp_path / "empty")
    for told in ("first.json", "second.json"):  # an old report is replaced
        invoke(f"report {tmp_path} --json {told}")
        assert list(read_json(tmp_path / told)["runs"]) == ["run"]
    assert "left out" in capsys.readouterr().err
