"""Masks follow prompts, strokes, polygons and splits, and every operation is one edit."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.masks.rle import RLEMasks
from gigamask.models.init import build_model
from gigamask.plugins.serve import project_export, proposals, session
from gigamask.plugins.serve.annotator import Annotator, Stroke, to_json
from gigamask.plugins.serve.categories import change_category
from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.open_images import NotFoundError
from gigamask.plugins.serve.project import ObjectCategory, Project
from gigamask.plugins.serve.project_export import export
from gigamask.plugins.serve.proposals import THREAD, Proposals, without_overlaps
from gigamask.plugins.serve.session import StoppedError
from gigamask.serialization import read_json
from tests.errors import error_line
from tests.little import SPEC
from tests.plugins.serve.annotated import click_at, picture, save_pictures

SIZE = (30, 40)
DOT, CLICK = Stroke(((10.0, 10.0),), 4.0), click_at(20.0, 10.0)
ANY = AutomaticMaskConfig(points_per_side=4, pred_iou_thresh=0.0, stability_score_thresh=0.0)


@pytest.fixture
def annotator(tmp_path, session):
    save_pictures(tmp_path / "photos", ("0.png", "1.png", "2.png"), SIZE)
    (tmp_path / "photos" / "bad.jpg").write_bytes(b"no image")
    with Project.open(tmp_path / "project", tmp_path / "photos") as project:
        yield Annotator(project, session)


def dense(found, key):
    return RLEMasks.from_coco([found.objects[key].mask], SIZE).to_dense()[0]


@pytest.mark.slow
def test_prompts_on_an_object_are_the_sessions_steps(annotator):
    second = click_at(5.0, 5.0, foreground=False)
    found = annotator.prompt(0, 0, "object", CLICK)
    found = annotator.prompt(0, 1, 1, second)
    key, size = annotator.with_key(0)
    assert size == SIZE
    best = annotator.session.predict(key, [CLICK, second])[0]
    assert found.objects[1].mask == best["segmentation"]["counts"]
    assert found.objects[1].steps == (CLICK, second)
    assert found.objects[1].predicted_iou == best["predicted_iou"]
    shown = annotator.open(0)
    assert shown["objects"][0]["segmentation"] == best["segmentation"]
    assert (shown["name"], shown["version"], shown["can_undo"]) == ("0.png", 2, True)


def test_prompts_after_a_stroke_continue_from_the_drawn_mask(annotator):
    found = annotator.stroke(0, 0, "object", Stroke(((10.0, 10.0), (30.0, 10.0)), 4.0))
    drawn = found.objects[1].mask
    found = annotator.prompt(0, 1, 1, CLICK)
    base = RLEMasks.from_coco([drawn], SIZE)
    key, _ = annotator.with_key(0)
    inside, *rest = found.objects[1].steps
    assert rest == [CLICK]
    assert base.to_dense()[0][int(inside.point[1]), int(inside.point[0])]
    with_base = annotator.session.predict(key, [inside, CLICK], base=base)
    assert len(with_base) == 1  # a correction, which is not ambiguous
    assert found.objects[1].mask == with_base[0]["segmentation"]["counts"]
    empty = RLEMasks.from_dense(np.zeros((1, *SIZE), bool))
    other = annotator.session.predict(key, [inside, CLICK], base=empty)
    assert other[0]["predicted_iou"] != with_base[0]["predicted_iou"]


def test_strokes_add_and_remove_pixels(annotator):
    found = annotator.stroke(0, 0, "object", Stroke(((5.0, 15.0), (35.0, 15.0)), 3.0))
    assert dense(found, 1)[12:18, 10:30].all()
    assert not dense(found, 1)[:10].any()
    found = annotator.stroke(0, 1, 1, Stroke(((20.0, 0.0), (20.0, 29.0)), 2.0, erase=True))
    assert not dense(found, 1)[:, 19:21].any()
    found = annotator.split(0, 2, 1)
    assert len(found.objects) == 2
    assert not (dense(found, 1) & dense(found, 2)).any()
    with error_line("in one piece"):
        annotator.split(0, 3, 1)
    with error_line("no object is selected"):
        annotator.stroke(0, 3, "object", Stroke(((9.0, 9.0),), 3.0, True))


def test_polygons_have_holes_and_come_back_as_corners(annotator):
    outer = [(5.0, 5.0), (35.0, 5.0), (35.0, 25.0), (5.0, 25.0)]
    rings = [outer, [(15.0, 10.0), (25.0, 10.0), (25.0, 20.0), (15.0, 20.0)]]
    found = annotator.polygon(0, 0, "object", rings)
    assert dense(found, 1)[6, 6]
    assert not dense(found, 1)[15, 20]
    mask = dense(annotator.stroke(0, 1, 1, Stroke(((2.0, 27.0), (37.0, 29.0)), 0.5)), 1)
    corners = annotator.corners(0, 1)
    assert len(corners) == 3
    again = dense(annotator.polygon(0, 2, 1, corners), 1)
    assert (again ^ mask).sum() <= 0.05 * mask.sum()
    assert not (again ^ mask)[27:].any()  # the fiber
    for ring, said in (([(1, 1), (2, 2)], "3 corners"), ([(0, -1), (2, 0), (2, 2)], "lie in the")):
        with error_line(said):
            annotator.polygon(0, 3, 1, [ring])


def test_objects_are_named_accepted_and_deleted(annotator):
    annotator.stroke(0, 0, "object", DOT)
    found = annotator.assign(0, 1, [1], {"accepted": True, "name": "left"})
    assert (found.objects[1].accepted, found.objects[1].name) == (True, "left")
    annotator.stroke(0, 2, 1, Stroke(((10.0, 10.0),), 30.0, erase=True))
    with error_line("object 1 is empty"):
        annotator.assign(0, 3, [1], {"accepted": True})
    assert annotator.assign(0, 3, [1], None).objects == {}
    with pytest.raises(NotFoundError):
        annotator.assign(0, 4, [1], None)
    with pytest.raises(NotFoundError, match="no image 9"):
        annotator.open(9)
    with error_line(r"bad\.jpg"):
        annotator.open(3)


def test_an_image_is_opened_again_when_it_was_dropped(annotator, model):
    before = annotator.prompt(0, 0, "object", CLICK).objects[1].mask
    annotator.session.use_model(model)
    assert annotator.prompt(0, 1, "object", CLICK).objects[2].mask == before


def propose(annotator):
    proposals = Proposals(annotator, ANY)
    proposals.start()
    proposals._thread.join()
    return proposals


@pytest.mark.slow
def test_remaining_images_get_proposals_and_the_certain_ones_are_accepted(annotator, monkeypatch):
    project = annotator.project
    annotator.stroke(0, 0, "object", DOT)
    proposals = propose(annotator)
    assert proposals.state["done"] == proposals.state["total"] == 3
    assert "bad.jpg" in proposals.state["fault"]
    rows = project.summary()
    assert [each["status"] for each in rows] == ["in progress", "proposed", "proposed", "not begun"]
    every = sorted(value for each in rows for value in each["open"])
    threshold = every[-1]
    expected = sum(value >= threshold for value in every)
    assert proposals.accept(threshold) == expected
    rows = project.summary()
    assert sum(each["accepted"] for each in rows) == expected
    assert proposals.accept(0.0) == len(every) - expected
    assert [each["status"] for each in project.summary()[1:3]] == ["done", "done"]
    found = project.read(1)
    annotator.assign(1, found.version, [*found.objects], None)
    monkeypatch.setattr(project, "summary", lambda: rows)  # somebody deletes them meanwhile
    assert proposals.accept(0.0) == 0
    assert project.read(1).status == "in progress", "nobody said that there is nothing in it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "named, category", [("cell", "cell"), ("dog", "object"), ("old", "newest")]
)
def test_proposals_get_the_category_of_their_class_if_there_is_one(annotator, named, category):
    names = ("cell", "dog", "old")
    model = build_model(replace(SPEC, custom_init=True, class_names=names), 0).eval()
    with torch.no_grad():
        model.mask_decoder.class_head.layers[-1].bias[names.index(named)] = 9.0
    annotator.session.use_model(model)
    given = tuple(ObjectCategory(name, "#112233") for name in ("object", "cell", "old"))
    annotator.project.update(categories=given)
    for old, new in (("old", "new"), ("new", "newest")):
        change_category(annotator.project, old, ObjectCategory(new, "#112233"))
    propose(annotator)
    objects = annotator.project.read(0).objects.values()
    assert {each.category for each in objects} == {category}


@pytest.mark.slow
def test_another_model_leaves_what_was_accepted(annotator):
    proposals = propose(annotator)
    certain = sorted(value for each in annotator.project.summary() for value in each["open"])
    proposals.accept(certain[-1])
    before = [annotator.project.read(row).objects for row in range(3)]
    annotator.project.update(model=7)
    propose(annotator)
    for row, objects in enumerate(before):
        found = annotator.project.read(row).objects
        assert all(found[key] == each for key, each in objects.items() if each.accepted)


def test_a_category_that_is_renamed_while_a_click_is_answered_gets_no_object(
    annotator, monkeypatch
):
    real = annotator.session.predict

    def renamed(*given, **named):
        change_category(annotator.project, "object", ObjectCategory("x", "#123456"))
        return real(*given, **named)

    monkeypatch.setattr(annotator.session, "predict", renamed)
    with error_line("there is no category object"):
        annotator.prompt(0, 0, "object", CLICK)


@pytest.mark.slow
def test_a_proposal_is_corrected_by_clicks(annotator):
    propose(annotator)
    found = annotator.project.read(1)
    target = next(iter(found.objects))
    before = found.objects[target]
    after = annotator.prompt(1, found.version, target, click_at(1.0, 1.0)).objects[target]
    assert after.base == before.mask
    assert after.steps == (*before.steps, click_at(1.0, 1.0))


def test_overlapping_proposals_are_left_out():
    masks = np.zeros((3, 10, 10), bool)
    masks[0, :, :6] = masks[1, :4, :4] = masks[2, :, 5:] = True
    ones = np.ones((3, 4), np.int64)
    scores = np.array([[0.7, 0.95, 0.8], [0.7, 0.6, 0.99]], np.float32)
    given = MaskProposals(RLEMasks.from_dense(masks), ones, *scores, np.zeros((3, 2)), ones)
    assert without_overlaps(given).predicted_iou.tolist() == pytest.approx([0.8, 0.95])


def test_objects_are_sent_without_what_the_page_does_not_need(annotator):
    edit = Edit("prompt", {1: MaskObject("0`U1", base="x")})  # all pixels
    [sent] = to_json(annotator.project.edit(0, 0, edit, SIZE))["objects"]
    assert (sent["area"], sent["accepted"], sent["by_model"]) == (1200, False, False)
    assert not {"base", "mask"} & set(sent)


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_images_annotated_at_half_their_size_are_exported_at_full_size(
    annotator, monkeypatch, orientation
):
    """Also those that EXIF turns."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    photos = Path(annotator.project.content.images)
    Image.fromarray(picture(*SIZE)).save(photos / "0.png", exif=exif)
    for module in (session, project_export):
        monkeypatch.setattr(module, "MAX_PIXELS", SIZE[0] * SIZE[1] // 2)
    half = (20, 15) if orientation == 6 else (15, 20)
    assert annotator.with_key(0)[1] == half
    found = annotator.polygon(0, 0, "object", [[(2, 3), (9, 3), (9, 8), (2, 8)]])
    annotator.assign(0, found.version, [1], {"accepted": True})
    out = annotator.project.folder / "out"
    assert export(annotator.project, out)["masks"] == 1
    content = read_json(out / "coco.json")
    [exported], [one] = content["images"], content["annotations"]
    assert (exported["height"], exported["width"]) == (2 * half[0], 2 * half[1])
    assert one["bbox"] == [4, 6, 16, 12]
    assert one["area"] == 16 * 12


def test_proposals_stop_within_an_image_and_are_waited_for(annotator, monkeypatch):
    generated, go_on = threading.Event(), threading.Event()

    def slowly(generator, pixels, progress):
        generated.set()
        go_on.wait(20)
        progress(0.5)
        raise AssertionError("it goes on after it was asked to stop")

    monkeypatch.setattr(SamAutomaticMaskGenerator, "generate_proposals", slowly)
    proposals = Proposals(annotator, ANY)
    proposals.start()
    assert generated.wait(20)
    proposals.stop()
    go_on.set()
    proposals.stop(wait=True)
    assert not [each for each in threading.enumerate() if each.name == THREAD]
    idle = {"running": False, "done": 0, "total": 4, "failed": 0, "fault": None}
    assert proposals.state == idle


@pytest.mark.slow
def test_images_without_proposals_are_counted_whatever_went_wrong(annotator, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(SamAutomaticMaskGenerator, "generate_proposals", fail)
    state = propose(annotator).state
    assert (state["running"], state["done"], state["failed"]) == (False, 4, 4)
    assert state["fault"]


@pytest.mark.slow
def test_another_of_three_masks_is_not_accepted_yet_and_states_its_model(annotator, monkeypatch):
    project = annotator.project
    annotator.prompt(0, 0, "object", CLICK)
    accepted = replace(project.read(0).objects[1], accepted=True, model=3)
    project.edit(0, 1, Edit("assign", {1: accepted}))
    masks = annotator.session.predict(annotator.with_key(0)[0], [CLICK])
    masks[1]["segmentation"] = masks[0]["segmentation"]  # each is reached nevertheless
    monkeypatch.setattr(annotator.session, "predict", lambda *_: masks)
    for version, i in enumerate((1, 2, 0), 2):
        now = annotator.choose(0, version, 1).objects[1]
        assert (now.accepted, now.model) == (False, project.content.model)
        assert now.steps[0].chosen == masks[i]["number"]


@pytest.mark.slow
def test_an_image_that_somebody_changes_does_not_end_the_accepting_of_all(annotator, monkeypatch):
    propose(annotator)
    real, threads = proposals.read_usable, []

    def read(project, row):
        found = real(project, row)
        drawn = row, found.version, "object", DOT
        threads.append(threading.Thread(target=annotator.stroke, args=drawn))
        threads[-1].start()
        return found

    monkeypatch.setattr(proposals, "read_usable", read)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the strokes are refused
    count = Proposals(annotator, ANY).accept(0.0)
    for each in threads:
        each.join()
    rows = annotator.project.summary()
    assert count == sum(each["accepted"] for each in rows) > 0
    assert not any(each["open"] for each in rows)


def test_a_session_that_stops_ends_what_it_generates(annotator, session):
    key, _ = annotator.with_key(0)
    session.stop()
    with pytest.raises(StoppedError):
        session.all_masks(key)


@pytest.mark.slow
def test_masks_remember_how_they_came_and_by_which_model(annotator):
    def came(found, key):
        return found.objects[key].came, found.objects[key].model, found.objects[key].is_truth

    proposals = propose(annotator)
    found = annotator.project.read(1)
    first, *others = found.objects
    assert came(found, first) == ("proposed", -1, False)
    found = annotator.assign(1, found.version, [first], {"accepted": True})
    assert came(found, first) == ("accepted", -1, False)
    found = annotator.stroke(1, found.version, first, DOT)
    found = annotator.assign(1, found.version, [first], {"accepted": True, "name": "x"})
    assert came(found, first) == ("corrected", -1, True)
    found = annotator.stroke(1, found.version, "object", DOT)
    assert came(found, found.next_id - 1) == ("drawn", None, False), "not accepted yet"
    found = annotator.prompt(1, found.version, "object", CLICK)
    key = found.next_id - 1
    found = annotator.assign(1, found.version, [key], {"accepted": True})
    assert came(found, key) == ("clicked", -1, True)
    annotator.stroke(1, found.version, first, DOT)
    assert proposals.accept(0.0) >= len(others)
    found = annotator.project.read(1)
    assert all(came(found, each)[0] == "accepted in bulk" for each in others)
    assert came(found, first) == ("corrected", -1, False), "a person has not accepted it yet"
