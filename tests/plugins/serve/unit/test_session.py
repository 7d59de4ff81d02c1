"""Masks are those of the predictor, prompts are given one by one as in training, and wrong input is
refused.
"""

import io
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.init import build_model
from gigamask.pixels import PixelConfig
from gigamask.plugins.serve import open_images
from gigamask.plugins.serve import session as sessions
from gigamask.plugins.serve.open_images import NotFoundError
from gigamask.plugins.serve.prompt_steps import PromptStep
from gigamask.plugins.serve.session import Session, masks_to_json
from tests.errors import error_line
from tests.little import SPEC
from tests.plugins.serve.annotated import click_at, picture

CLICK, POINT = click_at(20.0, 10.0), (np.array([[20.0, 10.0]]), np.array([1]))
ANY_MASKS = AutomaticMaskConfig(points_per_side=2, pred_iou_thresh=0.0, stability_score_thresh=0.0)


def encode(pixels, kind="PNG", **options) -> bytes:
    raw = io.BytesIO()
    np.save(raw, pixels) if kind == "npy" else Image.fromarray(pixels).save(raw, kind, **options)
    return raw.getvalue()


def key_of(session, *given, **named):
    """Opens a picture and returns its key."""
    return session.open(encode(picture(*given, **named)), "a")["id"]


@pytest.fixture
def key(session):
    """Of an open picture."""
    return key_of(session)


@pytest.fixture
def predictor(model):
    """Has the same picture."""
    found = SamPredictor(model)
    found.set_image(picture())
    return found


def masks_of(answers):
    shown = [each["segmentation"] for each in answers]
    return [RLEMasks.from_coco([rle["counts"]], tuple(rle["size"])).to_dense()[0] for rle in shown]


def test_three_masks_of_a_prompt_are_the_predictors_best_first(session, key, predictor):
    found = session.predict(key, [CLICK])
    masks, iou, _ = predictor.predict(*POINT)
    order = np.argsort(-iou, kind="stable")
    assert [each["number"] for each in found] == order.tolist()
    assert [each["predicted_iou"] for each in found] == pytest.approx(iou[order].tolist(), abs=1e-4)
    for mine, each, number in zip(masks_of(found), found, order, strict=True):
        assert (mine == masks[number]).all()
        assert each["area"] == masks[number].sum()


def test_further_prompt_uses_the_chosen_mask(session, key, predictor):
    points, labels = np.array([[20.0, 10.0], [50.0, 30.0]]), np.array([1, 0])
    _, iou, low = predictor.predict(points[:1], labels[:1])
    steps = [CLICK, click_at(50.0, 30.0, foreground=False)]
    for chosen, fed in ((None, int(iou.argmax())), (0, 0), (2, 2)):
        [found] = session.predict(key, [replace(steps[0], chosen=chosen), steps[1]])
        masks, score, _ = predictor.predict(
            points, labels, mask_input=low[fed][None], multimask_output=False
        )
        assert found["predicted_iou"] == pytest.approx(float(score[0]), abs=1e-4)
        assert (masks_of([found])[0] == masks[0]).all()


def test_box_is_combined_with_points_and_the_last_box_counts(session, key, predictor):
    boxes = [(5.0, 5.0, 20.0, 20.0), (10.0, 8.0, 50.0, 36.0)]
    _, iou, low = predictor.predict(box=np.array(boxes[0]), refine=1)
    first, second = (PromptStep(box=box) for box in boxes)
    found = session.predict(key, [first, second], multimask_output=None)
    fed = low[int(iou.argmax())][None]
    masks, _, _ = predictor.predict(
        box=np.array(boxes[1]), mask_input=fed, multimask_output=False, refine=1
    )
    assert len(found) == 1
    assert (masks_of(found)[0] == masks[0]).all()
    steps = [first, click_at(12.0, 12.0)]
    assert len(session.predict(key, steps, multimask_output=True)) == 3


def test_repeated_prompts_are_cached(session, key, monkeypatch):
    steps = [click_at(float(x), 10.0) for x in range(5)]
    first = session.predict(key, steps)
    asked, predict = [], session.model.predict
    monkeypatch.setattr(session.model, "predict", lambda *given: asked.append(1) or predict(*given))
    assert session.predict(key, steps) == first
    assert not asked
    session.predict(key, steps[:3])
    assert not asked
    session.predict(key, [*steps, click_at(9.0, 9.0)])
    assert len(asked) == 1


def test_a_picture_is_embedded_once_and_the_same_bytes_are_the_same_picture(session):
    told = session.open(encode(picture()), "a")
    facts = {"name": "a", "height": 40, "width": 60, "masks": None, "note": ""}
    assert told == facts | {"id": told["id"]}
    assert session.embed(told["id"])["cached"] is False
    assert session.embed(told["id"])["cached"] is True
    assert session.open(encode(picture()), "b")["id"] == told["id"]
    assert key_of(session, seed=1) != told["id"]


def test_embeddings_and_predictions_count_in_the_limit(session, monkeypatch):
    keys = [key_of(session, seed=seed) for seed in range(3)]
    pixel_bytes = 40 * 60 * 3
    monkeypatch.setattr(open_images, "MAX_CACHED_BYTES", 3 * pixel_bytes)
    opened = session.images.get(keys[2])
    assert opened.cached_bytes == pixel_bytes
    session.embed(keys[2])
    assert opened.cached_bytes == pixel_bytes + opened.predictor.features.nbytes
    with pytest.raises(NotFoundError, match="no longer cached"):
        session.jpeg(keys[0])
    key_of(session, seed=3)
    with pytest.raises(NotFoundError, match="no longer cached"):
        session.jpeg(keys[1])
    before = opened.cached_bytes
    session.predict(keys[2], [click_at(5.0, 5.0)])
    side = session.model.config.mask_size
    [answer] = opened.predictions.values()
    assert opened.cached_bytes == before + 4 * 3 * side * side + sum(
        len(each["segmentation"]["counts"]) for each in answer.shown.values()
    )


def test_one_upload_is_decoded_at_a_time(session, monkeypatch):
    """Files of 100 KB may hold 33 megapixels each."""
    decode, running, most = sessions.image.read_stored, [], []

    def slow(raw, name, **options):
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        return decode(raw, name, **options)

    monkeypatch.setattr(sessions.image, "read_stored", slow)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: key_of(session, seed=seed), range(8)))
    assert most == [1] * 8


def test_images_of_16_bits_are_opened_by_the_models_window(model):
    own = deepcopy(model).set_window((0.0, 2550.0))
    deep = np.random.default_rng(0).integers(0, 2551, (40, 60), dtype=np.uint16)
    shown = np.repeat(np.rint(deep / 10).astype(np.uint8)[..., None], 3, 2)
    predictor = SamPredictor(own)
    predictor.set_image(shown)
    session, files = Session(own), [encode(deep, kind) for kind in ("PNG", "TIFF", "npy")]
    [key] = {session.open(file, "a")["id"] for file in files}  # the same pixels
    decoded = np.array(Image.open(io.BytesIO(session.jpeg(key))))
    assert np.abs(decoded.astype(int) - shown).mean() < 6
    [best, *_] = session.predict(key, [CLICK])
    masks, _, _ = predictor.predict(*POINT)
    assert (masks_of([best])[0] == masks[best["number"]]).all()
    assert session.open(files[0], "a")["note"] == "uint16, window 0 2550"


def test_images_of_16_bits_are_opened_by_percentiles_without_a_window(session):
    deep = np.random.default_rng(0).integers(3000, 5001, (40, 60), dtype=np.uint16)
    told = session.open(encode(deep), "a")
    assert told["note"] == "uint16, percentiles 0.5 99.5 of each image"
    seen = session.images.get(told["id"]).pixels
    assert (seen == PixelConfig(percentiles=(0.5, 99.5)).to_uint8(deep[..., None], "a")).all()
    assert seen.std() > 60


def test_pictures_are_shown_and_prompts_answered_while_another_is_embedded(session, key):
    session.embed(key)
    with session._embed_lock:
        assert session.predict(key, [CLICK], best_only=True)
        assert session.jpeg(key)
        other = key_of(session, seed=1)
    with session._search_lock:
        assert session.predict(other, [CLICK])


def test_a_picture_with_masks_of_its_own_stays_as_it_is_stored(session):
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = encode(picture(16, 32), exif=exif)
    own = RLEMasks.from_dense(np.eye(16, 32, dtype=bool)[None])
    told = session.open(raw, "tar:a", own)
    assert (told["height"], told["width"], told["masks"]) == (16, 32, 1)
    assert session.open(raw, "a")["height"] == 32


def test_everything_is_segmented_from_a_point_grid(model):
    session = Session(model, mask_settings=ANY_MASKS)
    key = key_of(session)
    found = session.all_masks(key)
    assert found
    assert session.all_masks(key) == found
    assert {"predicted_iou", "stability"} <= found[0].keys()
    own = RLEMasks.from_dense(np.eye(40, 60, dtype=bool)[None])
    annotated = session.open(encode(picture()), "tar:a", own)["id"]
    assert session.all_masks(annotated) == found, "the model's masks, not the annotations"


def test_masks_have_the_likeliest_class_and_its_probability():
    config = replace(SPEC, custom_init=True, class_names=("cat", "dog"))
    session = Session(build_model(config, 0).eval(), mask_settings=ANY_MASKS)
    key = key_of(session)
    predictor = SamPredictor(session.model)
    predictor.set_image(picture())
    predictor.predict(*POINT)
    scores = predictor.class_scores[0]
    for each in session.predict(key, [CLICK]):
        best = int(scores[each["number"]].argmax())
        assert (each["category_id"], each["category"]) == (best, ("cat", "dog")[best])
        assert each["class_score"] == pytest.approx(float(scores[each["number"], best]), abs=1e-5)
    assert {each["category"] for each in session.all_masks(key)} <= {"cat", "dog"}


@pytest.mark.slow
def test_large_pictures_are_answered_by_tiles_and_small_ones_are_not(model):
    tiles = {"tile": 32, "halo": 8}
    session = Session(model, mask_settings=replace(ANY_MASKS, **tiles))
    small, large = (key_of(session, *size) for size in ((20, 30), (40, 60)))
    assert not session.images.get(small).predictor.crop_decoders
    opened = session.images.get(large)
    session.embed(large)
    assert opened.cached_bytes == 40 * 60 * 3
    points, labels = np.array([[50.0, 30.0], [52.0, 31.0]]), np.array([1, 1])
    found = session.predict(large, [click_at(*point) for point in points.tolist()])
    assert opened.cached_bytes > 40 * 60 * 3 + opened.predictor.crop_decoders[0].nbytes
    predictor = SamPredictor(model, **tiles)
    predictor.set_image(opened.pixels)
    _, iou, low = predictor.predict(points[:1], labels[:1])
    fed = low[int(iou.argmax())][None]
    masks, _, _ = predictor.predict(points, labels, mask_input=fed, multimask_output=False)
    assert (masks_of(found)[0] == masks[0]).all()
    assert session.all_masks(large)
    assert opened.fraction == 5 / 6


def test_the_jpeg_of_a_picture_has_its_pixels_and_nothing_else(session):
    smooth = cv2.GaussianBlur(picture(64, 64), (31, 31), 0)
    raw = session.jpeg(session.open(encode(smooth), "a")["id"])
    assert np.abs(simplejpeg.decode_jpeg(raw).astype(int) - smooth).mean() < 2
    assert b"Exif" not in raw


@pytest.mark.parametrize(
    "steps, words",
    [
        ([], "0 prompts"),
        ([click_at(1.0, 1.0)] * 65, "65 prompts"),
        ([PromptStep()], "either a point or a box"),
        ([click_at(1.0, 1.0, box=(0.0, 0.0, 1.0, 1.0))], "either a point or a box"),
        ([click_at(61.0, 1.0)], "outside the image of 60 x 40"),
        ([click_at(float("nan"), 1.0)], "finite"),
        ([PromptStep(box=(-1.0, 0.0, 5.0, 5.0))], "outside"),
        (
            [click_at(1.0, 1.0, chosen=5), click_at(2.0, 2.0)],
            "mask 5 was chosen of 3",
        ),
    ],
)
def test_prompts_that_are_none_are_refused(session, key, steps, words):
    with error_line(words):
        session.predict(key, steps)


def test_pictures_that_are_too_large_or_none_are_refused(session, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_PIXELS", 100)
    with error_line("40 x 60 pixels, at most 100"):
        session.open(encode(picture()), "a")
    with pytest.raises(CorruptSampleError, match="not a valid JPEG"):
        session.open(b"<svg onload=alert(1)>", "a")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "16 bits", "npy"])
def test_images_above_the_limit_are_opened_at_half_their_size_if_asked(session, monkeypatch, kind):
    smooth = cv2.GaussianBlur(picture(41, 60), (9, 9), 0)
    raw = {
        "PNG": encode(smooth),
        "JPEG": encode(smooth, "JPEG", quality=95),
        "16 bits": encode(smooth[..., 0].astype(np.uint16) * 40),
        "npy": encode(smooth, "npy"),
    }[kind]
    monkeypatch.setattr(sessions, "MAX_PIXELS", 1000)
    told = session.open(raw, "a", halve=True)
    assert (told["height"], told["width"]) == (21, 30)
    assert "half of 60 x 41 pixels" in told["note"]
    pixels = session.images.get(told["id"]).pixels.astype(float)
    even = np.pad(smooth, ((0, 1), (0, 0), (0, 0)), "edge").astype(float)
    means = even.reshape(21, 2, 30, 2, 3).mean((1, 3))
    if kind == "16 bits":
        assert np.corrcoef(pixels[..., 0].ravel(), means[..., 0].ravel())[0, 1] > 0.99
    else:
        assert np.abs(pixels - means).mean() < 3
    [best, *_] = session.predict(told["id"], [CLICK])
    assert best["segmentation"]["size"] == [21, 30]
    monkeypatch.setattr(sessions, "MAX_PIXELS", 600)
    with error_line("41 x 60 pixels, at most 2,400"):
        session.open(raw, "a", halve=True)


@pytest.mark.long
def test_an_image_of_120_megapixels_takes_little_memory(tmp_path):
    """The process that opens it needs less than 1 GiB more."""
    gray = np.zeros((10_000, 12_000, 1), np.uint8)
    (tmp_path / "a.jpg").write_bytes(simplejpeg.encode_jpeg(gray, colorspace="GRAY"))
    script = """if True:
        import resource, sys
        from pathlib import Path
        from gigamask.models.init import build_model
        from gigamask.plugins.serve.prompt_steps import PromptStep
        from gigamask.plugins.serve.session import Session
        from tests.little import COMPACT
        session = Session(build_model(COMPACT, 0).eval())
        used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        before = used()
        key = session.open(Path(sys.argv[1]).read_bytes(), "a", halve=True)["id"]
        session.jpeg(key)
        session.predict(key, [PromptStep(point=(9.0, 9.0))])
        print(used() - before)
    """
    words = [sys.executable, "-c", script, str(tmp_path / "a.jpg")]
    assert float(subprocess.check_output(words, cwd=Path(__file__).parents[4])) < 1.0


@dataclass
class Asks:
    """Says that masks fit in the order of their areas, the first `num_matches` of them."""

    num_matches: int
    segmenter: None = None

    def check(self, text):
        if text == "!!!":
            raise GigamaskError("a text needs letters (got '!!!')")

    def predict(self, pixels, masks, texts):
        order = np.argsort(-masks.areas(), kind="stable")
        return [
            SimpleNamespace(
                order=order,
                confidence=np.linspace(0.9, 0.1, len(order)),
                num_matches=self.num_matches,
                note="a note",
            )
        ]


@pytest.mark.parametrize("num_matches, told", [(0, 3), (1, 3), (4, 4)])
def test_words_find_masks_of_the_picture(model, num_matches, told):
    dense = np.zeros((5, 40, 60), bool)
    for number in range(4):
        dense[number, : number + 1] = True
    session = Session(model, Asks(num_matches))
    key = session.open(encode(picture()), "a", RLEMasks.from_dense(dense))["id"]
    found = session.find(key, "the widest")
    assert (found["num_matches"], len(found["answers"])) == (num_matches, told)
    assert found["candidates"] == 4, "the empty one is none"
    assert [each["area"] for each in found["answers"]][:3] == [240, 180, 120]
    assert found["annotated"]
    assert found["note"] == "a note"
    assert found["answers"][0]["confidence"] == 0.9
    with error_line(r"letters.*'!!!'"):
        session.find(key, "!!!")


def test_words_are_refused_where_nobody_knows_them_or_there_is_nothing_to_choose(
    session, key, model
):
    with error_line("--grounding RUN"):
        session.find(key, "red")
    texts = Session(model, Asks(0))
    key = texts.open(encode(picture()), "a", RLEMasks.from_dense(np.zeros((1, 40, 60), bool)))["id"]
    with error_line("none to choose from"):
        texts.find(key, "red")


def test_described_masks_say_what_they_are():
    masks = RLEMasks.from_dense(np.ones((1, 2, 3), bool))
    assert masks_to_json(masks, {"stability": [0.123456]}) == [
        {
            "segmentation": {"size": [2, 3], "counts": "06"},
            "area": 6,
            "box": [0, 0, 2, 1],
            "stability": 0.1235,
        }
    ]


def test_empty_unstable_masks_of_an_untrained_model_have_scores(session, key, monkeypatch):
    monkeypatch.setattr(
        open_images,
        "calculate_stability_score",
        lambda logits, offset: logits.new_full((len(logits),), np.nan),
    )
    shown = session.predict(key, [CLICK])
    assert [each["stability"] for each in shown] == [0.0] * 3
