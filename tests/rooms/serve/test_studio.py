"""A model that is asked about pictures: answers are the predictor's, steps are played as in training, and what is wrong is said."""

import io
from dataclasses import replace

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from gigamask.faults import BadSample, Fault
from gigamask.geometry.runs import Runs
from gigamask.grounding.inference import GroundingPredictor, GroundingResult
from gigamask.predict.predictor import Predictor
from gigamask.predict.settings import Settings
from gigamask.serve import studio as studios
from gigamask.serve.studio import Step, Studio, Unknown, described, upright


def picture(height=40, width=60, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels) -> bytes:
    raw = io.BytesIO()
    Image.fromarray(pixels).save(raw, "PNG")
    return raw.getvalue()


def masks_of(answers):
    return [Runs.from_coco([each["segmentation"]["counts"]], tuple(each["segmentation"]["size"])).to_dense()[0] for each in answers]


def test_three_answers_to_one_prompt_are_the_predictors_best_first(studio, model):
    pixels = picture()
    key = studio.show(png(pixels), "a")["id"]
    found = studio.ask(key, [Step(point=(20.0, 10.0))])
    predictor = Predictor(model)
    predictor.set_image(pixels)
    masks, iou, _ = predictor.predict(np.array([[20.0, 10.0]]), np.array([1]))
    order = np.argsort(-iou, kind="stable")
    assert [each["number"] for each in found] == order.tolist()
    assert [each["predicted_iou"] for each in found] == pytest.approx(iou[order].tolist(), abs=1e-4)
    for mine, each, number in zip(masks_of(found), found, order, strict=True):
        assert (mine == masks[number]).all()
        assert each["area"] == masks[number].sum()


def test_a_further_prompt_sees_the_answer_that_was_chosen(studio, model):
    pixels = picture()
    key = studio.show(png(pixels), "a")["id"]
    predictor = Predictor(model)
    predictor.set_image(pixels)
    points, labels = np.array([[20.0, 10.0], [50.0, 30.0]]), np.array([1, 0])
    _, iou, low = predictor.predict(points[:1], labels[:1])
    steps = [Step(point=(20.0, 10.0)), Step(point=(50.0, 30.0), foreground=False)]
    for chosen, fed in ((None, int(iou.argmax())), (0, 0), (2, 2)):
        [found] = studio.ask(key, [replace(steps[0], chosen=chosen), steps[1]])
        masks, score, _ = predictor.predict(points, labels, mask_input=low[fed][None], multimask_output=False)
        assert found["predicted_iou"] == pytest.approx(float(score[0]), abs=1e-4)
        assert (masks_of([found])[0] == masks[0]).all()


def test_a_box_is_asked_with_the_points_and_the_last_box_counts(studio, model):
    pixels = picture()
    key = studio.show(png(pixels), "a")["id"]
    predictor = Predictor(model)
    predictor.set_image(pixels)
    boxes = [(5.0, 5.0, 20.0, 20.0), (10.0, 8.0, 50.0, 36.0)]
    _, iou, low = predictor.predict(box=np.array(boxes[0]))
    found = studio.ask(key, [Step(box=boxes[0]), Step(box=boxes[1])], several=None)
    masks, _, _ = predictor.predict(box=np.array(boxes[1]), mask_input=low[int(iou.argmax())][None], multimask_output=False)
    assert len(found) == 1
    assert (masks_of(found)[0] == masks[0]).all()
    assert len(studio.ask(key, [Step(box=boxes[0]), Step(point=(12.0, 12.0))], several=True)) == 3


def test_what_was_asked_before_is_not_asked_again(studio, monkeypatch):
    key = studio.show(png(picture()), "a")["id"]
    steps = [Step(point=(float(x), 10.0)) for x in range(5)]
    first = studio.ask(key, steps)
    asked, decode = [], studio.model.decode
    monkeypatch.setattr(studio.model, "decode", lambda *given: asked.append(1) or decode(*given))
    assert studio.ask(key, steps) == first
    assert not asked
    studio.ask(key, steps[:3])
    assert not asked
    studio.ask(key, [*steps, Step(point=(9.0, 9.0))])
    assert len(asked) == 1


def test_a_picture_is_embedded_once_and_the_same_bytes_are_the_same_picture(studio):
    told = studio.show(png(picture()), "a")
    assert told == {"id": told["id"], "name": "a", "height": 40, "width": 60, "masks": None}
    assert studio.embed(told["id"])["held"] is False
    assert studio.embed(told["id"])["held"] is True
    assert studio.show(png(picture()), "b")["id"] == told["id"]
    assert studio.show(png(picture(seed=1)), "a")["id"] != told["id"]


def test_the_oldest_pictures_are_let_go(studio, monkeypatch):
    monkeypatch.setattr(studios, "HELD_BYTES", 3 * 40 * 60 * 3)
    keys = [studio.show(png(picture(seed=seed)), "a")["id"] for seed in range(4)]
    studio.jpeg(keys[3])
    with pytest.raises(Unknown, match="no longer held"):
        studio.jpeg(keys[0])


def test_pictures_are_shown_while_the_model_is_at_work(studio):
    key = studio.show(png(picture()), "a")["id"]
    with studio._at_work:
        assert studio.jpeg(key)
        assert studio.show(png(picture(seed=1)), "b")["id"] != key


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_shown_upright(orientation):
    pixels = picture(16, 32)
    raw, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(raw, "PNG", exif=exif)
    turned = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels, 2).transpose(1, 0, 2),
        8: np.rot90(pixels),
    }
    assert (upright(pixels, raw.getvalue()) == turned[orientation]).all()


def test_a_picture_with_masks_of_its_own_stays_as_it_is_stored_and_they_are_all_of_it(studio):
    pixels, raw, exif = picture(16, 32), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(raw, "PNG", exif=exif)
    own = Runs.from_dense(np.eye(16, 32, dtype=bool)[None])
    told = studio.show(raw.getvalue(), "tar:a", own)
    assert (told["height"], told["width"], told["masks"]) == (16, 32, 1)
    [found] = studio.everything(told["id"])
    assert found["area"] == 16
    assert (masks_of([found])[0] == np.eye(16, 32, dtype=bool)).all()
    assert studio.show(raw.getvalue(), "a")["height"] == 32


def test_everything_is_found_by_asking_a_grid(model):
    studio = Studio(model, masks=Settings(points_per_side=3, pred_iou_thresh=0.0, stability_score_thresh=0.0))
    key = studio.show(png(picture()), "a")["id"]
    found = studio.everything(key)
    assert found
    assert studio.everything(key) == found


def test_the_jpeg_of_a_picture_has_its_pixels_and_nothing_else(studio):
    smooth = cv2.GaussianBlur(picture(64, 64), (31, 31), 0)
    raw = studio.jpeg(studio.show(png(smooth), "a")["id"])
    assert np.abs(simplejpeg.decode_jpeg(raw).astype(int) - smooth).mean() < 2
    assert b"Exif" not in raw


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "0 prompts"),
        ([Step(point=(1.0, 1.0))] * 65, "65 prompts"),
        ([Step()], "either a point or a box"),
        ([Step(point=(1.0, 1.0), box=(0.0, 0.0, 1.0, 1.0))], "either a point or a box"),
        ([Step(point=(61.0, 1.0))], "outside of the picture of 60 x 40"),
        ([Step(point=(float("nan"), 1.0))], "outside"),
        ([Step(box=(-1.0, 0.0, 5.0, 5.0))], "outside"),
        ([Step(point=(1.0, 1.0), chosen=5), Step(point=(2.0, 2.0))], "answer 5 was chosen of 3"),
    ],
)
def test_prompts_that_are_none_are_refused(studio, steps, words):
    key = studio.show(png(picture()), "a")["id"]
    with pytest.raises(Fault, match=words):
        studio.ask(key, steps)


def test_pictures_that_are_too_large_or_none_are_refused(studio, monkeypatch):
    monkeypatch.setattr(studios, "MOST_PIXELS", 100)
    with pytest.raises(Fault, match="40 x 60 pixels, at most 100"):
        studio.show(png(picture()), "a")
    with pytest.raises(BadSample, match="no JPEG"):
        studio.show(b"<svg onload=alert(1)>", "a")


class Asks(GroundingPredictor):
    """Says that masks fit in the order of their areas, the first `fitting` of them."""

    def __init__(self, fitting):
        self.fitting = fitting

    def predict(self, pixels, masks, texts):
        order = np.argsort(-masks.areas(), kind="stable")
        return [GroundingResult(texts[0], order, np.linspace(0.9, 0.1, len(order)), self.fitting)]


@pytest.mark.parametrize(("fitting", "told"), [(0, 3), (1, 3), (4, 4)])
def test_words_find_masks_of_the_picture(model, fitting, told):
    dense = np.zeros((5, 40, 60), bool)
    for number in range(4):
        dense[number, : number + 1] = True
    studio = Studio(model, Asks(fitting))
    key = studio.show(png(picture()), "a", Runs.from_dense(dense))["id"]
    found = studio.words(key, "the widest")
    assert (found["fitting"], found["candidates"], len(found["answers"])) == (fitting, 4, told)  # the empty one is none
    assert [each["area"] for each in found["answers"]][:3] == [240, 180, 120]
    assert found["answers"][0]["confidence"] == 0.9


def test_words_are_refused_where_nobody_knows_them_or_there_is_nothing_to_choose(studio, model):
    key = studio.show(png(picture()), "a")["id"]
    with pytest.raises(Fault, match="--words RUN"):
        studio.words(key, "red")
    asking = Studio(model, Asks(0))
    key = asking.show(png(picture()), "a", Runs.from_dense(np.zeros((1, 40, 60), bool)))["id"]
    with pytest.raises(Fault, match="none to choose from"):
        asking.words(key, "red")
    with pytest.raises(Fault, match="301 letters"):
        asking.words(key, "x" * 301)


def test_described_masks_say_what_they_are():
    masks = Runs.from_dense(np.ones((1, 2, 3), bool))
    assert described(masks, {"stability": [0.123456]}) == [
        {"segmentation": {"size": [2, 3], "counts": "06"}, "area": 6, "box": [0, 0, 2, 1], "stability": 0.1235}
    ]


def test_an_untrained_models_unstable_empty_answers_have_scores_all_the_same(studio, monkeypatch):
    monkeypatch.setattr(studios, "stability", lambda logits, offset: torch.full((len(logits),), float("nan")))
    key = studio.show(png(picture()), "a")["id"]
    assert [each["stability"] for each in studio.ask(key, [Step(point=(1.0, 1.0))])] == [0.0] * 3
