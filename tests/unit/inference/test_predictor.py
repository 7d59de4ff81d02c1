"""The predictor: its interface, shapes, batches, the cache, and its errors."""

import copy
import inspect
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.predictor import SamPredictor
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.init import build_model
from tests.errors import error_line
from tests.little import SPEC


@pytest.fixture
def predictor(model, pictures):
    """A predictor of the first picture."""
    made = SamPredictor(model)
    made.set_image(pictures[0])
    return made


def asked(predictor):
    return predictor.predict(
        np.array([[10, 20], [30, 5]]), np.array([1, 0]), box=np.array([3, 4, 35, 38])
    )


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_shapes_and_what_is_remembered(model, pictures):
    predictor = SamPredictor(model)
    assert (
        predictor.is_image_set,
        predictor.features,
        predictor.original_size,
        predictor.input_size,
    ) == (False, None, None, None)
    predictor.set_image(pictures[0])
    assert (predictor.is_image_set, predictor.original_size, predictor.input_size) == (
        True,
        (40, 90),
        (28, 64),
    )
    assert predictor.get_image_embedding().shape == (1, 16, 8, 8)
    embedding = predictor.get_image_embedding()
    assert predictor.features.equal(embedding)
    assert embedding.is_contiguous()  # as programs send it to others
    masks, scores, low = asked(predictor)
    assert (masks.shape, masks.dtype, scores.shape, low.shape, low.dtype) == (
        (3, 40, 90),
        bool,
        (3,),
        (3, 32, 32),
        np.float32,
    )
    one, score, low = predictor.predict(
        np.array([[10, 20]]),
        np.array([1]),
        mask_input=low[:1],
        multimask_output=False,
        return_logits=True,
    )
    assert (one.shape, one.dtype, score.shape, low.shape) == (
        (1, 40, 90),
        np.float32,
        (1,),
        (1, 32, 32),
    )
    predictor.reset_image()
    assert not predictor.is_image_set
    assert predictor.device == torch.device("cpu")


def test_many_prompts_at_once_are_the_same_as_one_by_one_also_of_one_mask(model, pictures):
    predictor = SamPredictor(model)
    predictor.set_image(pictures[2])
    points, boxes = (
        torch.tensor([[[5.0, 9.0]], [[20.0, 60.0]]]),
        torch.tensor([[1.0, 2.0, 30.0, 40.0], [0.0, 0.0, 20.0, 20.0]]),
    )
    labels = torch.ones(2, 1, dtype=torch.int32)
    fed = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    for masks in (fed, fed[:1]):
        together = predictor.predict_torch(points, labels, boxes, masks, False, True)
        for i in range(2):
            given = (each[i : i + 1] for each in (points, labels, boxes, masks.expand_as(fed)))
            alone = predictor.predict_torch(*given, False, True)
            for whole, part in zip(together, alone, strict=True):
                assert torch.allclose(whole[i : i + 1], part, atol=1e-5)


def test_a_mask_alone_and_nothing_at_all_are_prompts(predictor):
    nothing = predictor.predict(return_logits=True)
    fed = predictor.predict(mask_input=np.ones((1, 32, 32)), return_logits=True)
    assert nothing[0].shape == fed[0].shape == (3, 40, 90)
    assert not np.allclose(nothing[2], fed[2])


def encoded(model, monkeypatch) -> list[int]:
    """Receives the number of images of each call of the encoder."""
    calls, encode = [], model.encode
    monkeypatch.setattr(
        model, "encode", lambda images, sizes: calls.append(len(images)) or encode(images, sizes)
    )
    return calls


@pytest.mark.slow
def test_images_of_different_sizes_go_through_the_encoder_together(model, pictures, monkeypatch):
    predictor, alone = SamPredictor(model), SamPredictor(model)
    calls = encoded(model, monkeypatch)
    predictor.set_images(pictures)
    assert calls == [3]
    for number, picture in enumerate(pictures):
        predictor.select(number)
        alone.set_image(picture)
        assert (predictor.original_size, predictor.input_size) == (
            alone.original_size,
            alone.input_size,
        )
        for mine, theirs in zip(asked(predictor)[1:], asked(alone)[1:], strict=True):
            assert np.allclose(mine, theirs, atol=1e-5)


def test_a_resized_image_and_blue_first_give_the_same(predictor, pictures):
    embedding = predictor.get_image_embedding()
    predictor.set_image(pictures[0][..., ::-1], "BGR")
    assert torch.equal(predictor.get_image_embedding(), embedding)
    resized = torch.from_numpy(predictor.transform.apply_image(pictures[0])).permute(2, 0, 1)[None]
    for given in (resized, resized.float()):
        predictor.set_torch_image(given, (40, 90))
        assert torch.equal(predictor.get_image_embedding(), embedding)
        assert (predictor.original_size, predictor.input_size) == ((40, 90), (28, 64))


def test_the_channels_reach_a_model_in_its_own_order(model, pictures, monkeypatch):
    monkeypatch.setattr(model, "image_format", "BGR", raising=False)
    swapped = SamPredictor(model)
    swapped.set_image(pictures[0])
    embedding = swapped.get_image_embedding()
    swapped.set_image(pictures[0][..., ::-1], "BGR")
    assert torch.equal(swapped.get_image_embedding(), embedding)
    monkeypatch.undo()
    swapped.set_image(pictures[0][..., ::-1])
    assert torch.equal(swapped.get_image_embedding(), embedding)


@pytest.mark.slow
def test_cache_replaces_the_encoder(model, pictures, tmp_path, monkeypatch):
    cache = EmbeddingCache(tmp_path)
    first = SamPredictor(model, cache=cache)
    first.set_images([pictures[0], pictures[1], pictures[0]])
    assert len(list(tmp_path.iterdir())) == 2
    expected = asked(first)
    calls = encoded(model, monkeypatch)
    second = SamPredictor(model, cache=cache)
    second.set_image(pictures[0])
    assert calls == []
    assert_same(asked(second), expected)
    second.set_images(pictures)
    assert calls == [1]
    with torch.no_grad():
        model.image_encoder.pos_embed += 1  # other weights have other embeddings
    second.set_image(pictures[0])
    assert calls == [1, 1]
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    second.set_image(pictures[0])
    assert calls == [1, 1, 1]
    with torch.autocast("cpu", torch.bfloat16):  # another arithmetic, too
        second.set_image(pictures[0])
    assert calls == [1, 1, 1, 1]


POINT, LABEL = np.array([[1, 2]]), np.array([1])


@pytest.mark.parametrize(
    "words, message",
    [
        ({"point_coords": POINT}, r"point_coords.*point_labels"),
        ({"point_labels": LABEL}, r"both point_coords and point_labels"),
        (
            {"point_coords": POINT, "point_labels": np.array([1, 1])},
            r"point_coords.*1 x 1 x 2.*1 x 2",
        ),
        ({"point_coords": POINT, "point_labels": np.array([2])}, r"point_labels.*2"),
        ({"point_coords": POINT, "point_labels": np.array([0.7])}, r"point_labels.* got 0.7"),
        ({"mask_input": np.ones((32, 32))}, r"mask_input.*prompts x 1 x 32 x 32.*1 x 32 x 32"),
        (
            {"mask_input": np.ones((1, 256, 256))},
            r"mask_input.*prompts x 1 x 32 x 32.*1 x 1 x 256 x 256",
        ),
        (
            {
                "point_coords": POINT,
                "point_labels": LABEL,
                "box": np.array([[1, 2, 3, 4], [1, 2, 3, 4]]),
            },
            r"box .*2 x 4.*predict_torch",
        ),
        ({"box": np.array([1, 2, 3])}, r"box .*\(got 3\)"),
        ({"box": np.array([1, np.nan, 3, 4])}, r"boxes .*NaN"),
        ({"point_coords": POINT * np.inf, "point_labels": LABEL}, r"point_coords .*NaN"),
        ({"mask_input": np.full((1, 32, 32), np.nan)}, r"mask_input .*NaN"),
        ({"point_coords": np.array([]), "point_labels": np.array([])}, r"x 2 .*got 1 x 0 and"),
        ({"point_coords": np.ones((1, 3)), "point_labels": LABEL}, r"x 2 .*got 1 x 1 x 3 and"),
    ],
)
def test_invalid_input_is_a_one_line_error(predictor, words, message):
    with error_line(message):
        predictor.predict(**words)


def test_the_default_dtype_of_a_program_changes_nothing(predictor):
    expected = asked(predictor)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(asked(predictor), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("box", [(9, 2, 3, 4), (0.1, 0.2, 0.9, 0.8)])
def test_a_reversed_box_and_one_of_fractions_are_warnings(predictor, box):
    with pytest.warns(UserWarning, match=rf"box .*fractions.*got {box[0]} .*width"):
        assert predictor.predict(box=np.array(box))[0].shape == (3, 40, 90)


@pytest.mark.parametrize(
    "kind", ["uint8", "uint16", "uint32", "int8", ">i4", "bool", "float16", ">f8", torch.uint8]
)
def test_labels_of_any_type(predictor, kind):
    """Also of those that cannot hold the label of a padding point, -1."""
    points, labels = np.array([[10, 20], [30, 5]]), np.array([1, 0])
    given = torch.from_numpy(labels).to(kind) if kind is torch.uint8 else labels.astype(kind)
    expected = predictor.predict(points, labels)
    assert_same(expected, predictor.predict(points, given))
    if kind is torch.uint8:
        coords = predictor.transform.apply_coords_torch(torch.from_numpy(points), (40, 90))
        masks, *_ = predictor.predict_torch(coords[None], given[None])
        assert np.array_equal(masks[0], expected[0])


def test_tensors_are_taken_as_arrays_are(model, pictures):
    first, second = SamPredictor(model), SamPredictor(model)
    first.set_image(pictures[0])
    second.set_image(torch.from_numpy(np.ascontiguousarray(pictures[0])))
    points, box = torch.tensor([[10.0, 20.0]], requires_grad=True), torch.tensor([3.0, 4, 35, 38])
    given = points, torch.tensor([1]), box.requires_grad_()
    arrays = [each.detach().numpy() for each in given]
    assert_same(first.predict(*arrays), second.predict(*given))
    low = torch.from_numpy(first.predict(*arrays)[2][:1]).bfloat16()
    assert second.predict(mask_input=low)[0].shape == (3, 40, 90)


@pytest.mark.parametrize("strange", ["read-only", "Fortran", "strided"])
def test_arrays_in_any_layout(model, pictures, strange):
    image = pictures[0][::-1, ::2].copy()
    given = {
        "read-only": image.copy(),
        "Fortran": np.asfortranarray(image),
        "strided": pictures[0][::-1, ::2],
    }[strange]
    given.flags.writeable = False
    first, second = SamPredictor(model), SamPredictor(model)
    first.set_image(image)
    second.set_image(given)
    assert torch.equal(first.features, second.features)


def test_a_program_may_set_the_embedding(model, pictures):
    embedded, predictor = SamPredictor(model), SamPredictor(model)
    embedded.set_image(pictures[0])
    predictor.features, predictor.is_image_set = embedded.features.clone(), True
    predictor.original_size, predictor.input_size = [40, 90], torch.Size([28, 64])
    assert_same(asked(embedded), asked(predictor))
    predictor.set_image(pictures[1])
    before = asked(predictor)[1]
    predictor.features = torch.zeros_like(predictor.features)
    assert not np.array_equal(before, asked(predictor)[1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_predicts_the_same(predictor, copied):
    assert_same(asked(predictor), asked(copied(predictor)))


def test_masks_are_what_exceeds_the_models_threshold(model, pictures, monkeypatch):
    """Masks are resized in boxes, logits whole; a vector's tail may be rounded differently."""
    predictor = SamPredictor(model)
    for picture in pictures:
        predictor.set_image(picture)
        logits = predictor.predict(box=np.array([3, 4, 35, 38]), return_logits=True)[0]
        for threshold in (0.0, float(np.median(logits)), -1.5, float(logits.max())):
            monkeypatch.setattr(model, "mask_threshold", threshold, raising=False)
            masks = predictor.predict(box=np.array([3, 4, 35, 38]))[0]
            is_clear = np.abs(logits - threshold) > 1e-6
            assert is_clear.mean() > 0.999
            assert np.array_equal(masks[is_clear], (logits > threshold)[is_clear])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_model_of_any_type_predicts_also_from_what_is_kept_in_half(
    model, pictures, tmp_path, dtype
):
    for cache in (None, EmbeddingCache(tmp_path, half=True)):
        predictor = SamPredictor(copy.deepcopy(model).to(dtype), cache=cache)
        predictor.set_image(pictures[0])
        masks, iou, low = asked(predictor)
        assert (masks.dtype, iou.dtype, low.dtype) == (bool, np.float32, np.float32)
        assert np.isfinite(low).all()
        wide = torch.promote_types(dtype, torch.float32)
        assert {each.dtype for each in predictor.predict_torch(None, None)[1:]} == {wide}


def test_boxes_have_four_numbers(predictor):
    with error_line(r"boxes.*1 x 3"):
        predictor.predict_torch(None, None, torch.ones(1, 3))
    with error_line(r"points, boxes and masks.*1 and 2"):
        predictor.predict_torch(torch.ones(1, 1, 2), torch.ones(1, 1), torch.ones(2, 4))


@pytest.mark.parametrize(
    "function, parameters",
    [
        (SamPredictor, "sam_model"),
        (SamPredictor.set_image, "self image image_format=RGB"),
        (SamPredictor.set_torch_image, "self transformed_image original_image_size"),
        (
            SamPredictor.predict,
            "self point_coords=None point_labels=None box=None mask_input=None "
            "multimask_output=True return_logits=False",
        ),
        (
            SamPredictor.predict_torch,
            "self point_coords point_labels boxes=None mask_input=None "
            "multimask_output=True return_logits=False",
        ),
        (SamPredictor.get_image_embedding, "self"),
        (SamPredictor.reset_image, "self"),
    ],
)
def test_arguments_are_those_of_metas_class(function, parameters):
    """Names, order and defaults of `SamPredictor` in Segment Anything's repository."""
    assert parameters.split() == [
        name if parameter.default is parameter.empty else f"{name}={parameter.default}"
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]


def test_images_that_are_none_are_one_line(model, pictures):
    predictor = SamPredictor(model)
    for ask in (
        predictor.predict,
        predictor.get_image_embedding,
        lambda: predictor.predict_torch(None, None),
    ):
        with error_line(r"set_image"):
            ask()
    with error_line(r"image_format.*RGB.*BGR.*'HSV'"):
        predictor.set_image(pictures[0], "HSV")
    with error_line(r"image 1.*90 uint8"):
        predictor.set_images([pictures[0], pictures[0][0, :, 0]])
    with error_line(r"image 1.* 2 channels"):
        predictor.set_images([pictures[0], pictures[0][..., :2]])
    with error_line(r"image 0.* 90 channels.*transpose"):
        predictor.set_image(pictures[0].transpose(2, 0, 1))
    with error_line(r"image 0.*float32.*set_window"):
        predictor.set_image(pictures[0].astype(np.float32))
    with error_line(r"no image"):
        predictor.set_images([])
    for image in (pictures[0], "photo.jpg"):
        with error_line("images is one image"):
            predictor.set_images(image)
    with error_line(r"64.*1 x 3 x 40 x 90"):
        predictor.set_torch_image(torch.zeros(1, 3, 40, 90), (40, 90))
    with error_line(r"original_image_size.*40, 90, 3"):
        predictor.set_torch_image(torch.zeros(1, 3, 28, 64), (40, 90, 3))
    with error_line(r"original_image_size.*0, 90"):
        predictor.set_torch_image(torch.zeros(1, 3, 28, 64), (0, 90))
    with error_line(r"transformed_image must be numbers"):
        predictor.set_torch_image(torch.full((1, 3, 28, 64), torch.nan), (40, 90))
    with error_line(r"image 0.*0"):
        predictor.select(0)


@pytest.mark.parametrize("tile", [None, 32])
def test_after_an_image_that_is_refused_none_is_set(model, pictures, tile):
    """Or prompts would be answered on the image before."""
    predictor = SamPredictor(model, tile=tile)
    predictor.set_image(pictures[0])
    with error_line("float32"):
        predictor.set_image(pictures[0].astype(np.float32))
    with error_line("no image is set"):
        asked(predictor)


def test_the_precision_is_the_predictors_or_the_callers(model, pictures, tmp_path):
    found = {}
    for name in ("auto", "fp32", "bf16"):
        for cache in (EmbeddingCache(tmp_path), None):
            predictor = SamPredictor(model, precision=name, cache=cache)
            predictor.set_image(pictures[0])
            assert (predictor.features.dtype == torch.bfloat16) == (name == "bf16")
        found[name] = asked(predictor)
    masks, scores, low = found["bf16"]
    assert (masks.dtype, scores.dtype, low.dtype) == (bool, np.float32, np.float32)
    assert not np.array_equal(low, found["fp32"][2])
    assert np.allclose(low, found["fp32"][2], atol=0.1)
    assert np.array_equal(found["auto"][2], found["fp32"][2]), "fp32 on a CPU"
    predictor = SamPredictor(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predictor.set_image(pictures[0])
        assert np.array_equal(asked(predictor)[2], low), "the caller's autocast is kept"


def test_the_path_of_a_photograph_is_read_upright(model, tmp_path):
    """Whatever the order of channels of pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 90, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(pixels))).save(tmp_path / "a.png", exif=exif)
    predictor, of_pixels = SamPredictor(model), SamPredictor(model)
    of_pixels.set_image(pixels)
    for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
        predictor.set_image(path, "BGR")
        assert (predictor.original_size, of_pixels.original_size) == ((40, 90), (40, 90))
        assert (predictor.features == of_pixels.features).all()
    with error_line(r"none\.png"):
        predictor.set_image(tmp_path / "none.png")


def test_the_embedding_follows_a_model_that_moves():
    """To the meta device, of which every machine has one."""
    predictor = SamPredictor(build_model(SPEC, seed=0).eval())
    predictor.set_image(np.zeros((48, 64, 3), np.uint8))
    predictor.model.to("meta")
    assert predictor.get_image_embedding().device.type == "meta"


def test_a_program_may_set_another_model(model, pictures):
    small = build_model(replace(SPEC, image_size=32), 1).eval()
    predictor, generator = SamPredictor(model), SamAutomaticMaskGenerator(model, points_per_side=2)
    predictor.model, generator.predictor = small, SamPredictor(small)
    expected = SamPredictor(small)
    for each in (predictor, expected):
        each.set_image(pictures[0])
    prompt = {"point_coords": np.array([[20, 20]]), "point_labels": np.array([1])}
    assert_same(predictor.predict(**prompt), expected.predict(**prompt))
    wanted = SamAutomaticMaskGenerator(small, points_per_side=2).generate_proposals(pictures[0])
    found = generator.generate_proposals(pictures[0])
    np.testing.assert_array_equal(found.predicted_iou, wanted.predicted_iou)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_sizes_that_a_program_sets_are_of_any_type(model, pictures, kind):
    predictor = SamPredictor(model)
    with pytest.raises(RuntimeError, match="no image is set"):
        asked(predictor)
    predictor.set_image(pictures[0])
    before = asked(predictor)
    predictor.input_size = kind([28, 64])
    assert_same(asked(predictor), before)
