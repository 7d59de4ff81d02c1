"""Mask features against definitions on pixels, their cache, and the backbones of a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.data import annotation, image, tar
from gigamask.data import index as indexes
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.init import build_model
from gigamask.models.state_dict import save_weights
from gigamask.plugins.grounding import mask_features
from gigamask.plugins.grounding.mask_features import (
    MaskFeatureExtractor,
    colours,
    geometry,
    masked_mean,
    outlines,
)
from gigamask.plugins.grounding.soft_masks import soft_masks
from tests import little
from tests.errors import error_line
from tests.plugins.grounding.asked import DAMAGES, SPEC, run_in, untrained, write_spoilt

SIDE = little.SPEC.image_size


@pytest.fixture(scope="module")
def sam():
    return build_model(little.SPEC, 0).eval()


def random_masks(height, width, seed=0):
    """Noise, blocks, one pixel, a corner's, a row, and all of the image."""
    generator = np.random.default_rng(seed)
    masks = np.zeros((8, height, width), bool)
    masks[0] = generator.random((height, width)) < 0.3
    masks[1, height // 4 : height // 2, width // 3 :] = True
    masks[2] = masks[0] & masks[1]
    masks[3, height // 2, width // 3] = masks[4, -1, -1] = masks[5, 0] = masks[7, :, -1] = True
    masks[6] = True
    return masks


def shares(masks, size, grid):
    """The share of each cell of the input square that masks cover, by the overlaps of pixels and
    cells written out."""
    height, width = size
    h, w = ImageTransform.resize_longest_side(size, SIDE).resized

    def lie(pixels, resized):
        edges, found = np.arange(grid + 1) * SIDE / grid * pixels / resized, np.arange(pixels)
        overlap = np.minimum(edges[1:, None], found + 1) - np.maximum(edges[:-1, None], found)
        return np.clip(overlap, 0, None) / np.diff(edges)[:, None]

    return lie(height, h) @ masks.astype(float) @ lie(width, w).T


@pytest.mark.parametrize("size", [(48, 64), (64, 64), (90, 31), (33, 47)])
def test_what_lies_under_masks_is_their_weighted_mean(size):
    masks, generator = random_masks(*size), np.random.default_rng(1)
    pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
    transform, runs = ImageTransform.resize_longest_side(size, SIDE), RLEMasks.from_dense(masks)
    embedding, weights = (
        torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(0)),
        shares(masks, size, 8),
    )
    wanted = np.einsum("nyx,cyx->nc", weights, embedding.numpy()) / weights.sum((1, 2))[:, None]
    found = masked_mean(embedding, torch.from_numpy(soft_masks(transform, runs, 8)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)

    resized = transform.apply_image(pixels)
    square = np.zeros((3, SIDE, SIDE))
    square[:, : resized.shape[1], : resized.shape[2]] = resized.numpy() / 127.5 - 1
    weights = shares(masks, size, SIDE)
    weights /= weights.sum((1, 2), keepdims=True)
    mean = np.einsum("nyx,cyx->nc", weights, square)
    spread = np.sqrt(
        np.einsum("nyx,ncyx->nc", weights, (square[None] - mean[:, :, None, None]) ** 2)
    )
    found = colours(resized, runs, transform)
    np.testing.assert_allclose(found, np.concatenate([mean, spread], 1), rtol=0, atol=2e-3)
    assert (spread[6] > 0.2).all()
    if size == (64, 64):  # an image that is not resized: the pixels themselves
        for told, mask in zip(found, masks, strict=True):
            under = pixels[mask] / 127.5 - 1
            assert np.allclose(told, [*under.mean(0), *under.std(0)], atol=2e-3)


@pytest.mark.parametrize("size", [(48, 64), (90, 31)])
def test_positions_are_relative_boxes_and_area_fractions(size):
    masks, (height, width) = random_masks(*size), size
    for mask, told in zip(masks, geometry(RLEMasks.from_dense(masks)), strict=True):
        y, x = np.nonzero(mask)
        x0, y0, x1, y1, long = x.min(), y.min(), x.max() + 1, y.max() + 1, max(size)
        box, share = (x1 - x0) * (y1 - y0), mask.sum() / mask.size
        wanted = [
            ((x0 + x1) - width) / 2 / long,
            ((y0 + y1) - height) / 2 / long,
            (x1 - x0) / long,
            (y1 - y0) / long,
        ]
        wanted += [
            np.sqrt(share),
            np.log(share) / 8,
            mask.sum() / box,
            np.log((x1 - x0) / (y1 - y0)),
        ]
        assert told == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("side", [1, 4, 7])
def test_outlines_are_boxes_stretched_to_squares(side):
    masks = random_masks(48, 64)
    for mask, told in zip(masks, outlines(RLEMasks.from_dense(masks), side), strict=True):
        y, x = np.nonzero(mask)
        crop = mask[y.min() : y.max() + 1, x.min() : x.max() + 1].astype(np.float32)
        # Each pixel as many times as there are cells, so that every cell is a whole number of them.
        fine = np.repeat(np.repeat(crop, side, 0), side, 1)
        wanted = fine.reshape(side, len(crop), side, crop.shape[1]).mean((1, 3))
        assert np.allclose(told, wanted, atol=1e-5)
    assert (outlines(RLEMasks.from_dense(masks), side)[3:] == 1).all(), (
        "one pixel, a row and the whole image fill their boxes"
    )


@pytest.mark.slow
def test_masks_without_a_pixel_and_no_masks_have_numbers(sam):
    """Annotations may hold such; the features of the others must not change."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    masks = np.zeros((3, 20, 30), bool)
    masks[1, 3:9, 4:7] = True
    extract = MaskFeatureExtractor(sam, SPEC).extract
    found, alone, none = (
        extract(pixels, RLEMasks.from_dense(each)) for each in (masks, masks[1:2], masks[:0])
    )
    assert found.isfinite().all()
    assert torch.allclose(found[1:2], alone, atol=1e-6)
    assert none.shape == (0, sum(SPEC.parts))
    with pytest.raises(
        CorruptSampleError, match="the image has 10 x 30 pixels, but its masks have 20 x 30"
    ):
        extract(pixels[:10], RLEMasks.from_dense(masks))


@pytest.mark.slow
def test_a_row_is_all_parts_in_order(sam, index):
    made, shards = MaskFeatureExtractor(sam, SPEC), ShardReader(index.shard_paths)
    [found] = made.extract_rows(index, shards, [2])
    jpg, json_bytes = shards.read_entry(index, 2)
    entry = annotation.parse(json_bytes, "x")
    masks, pixels = entry.masks, image.decode(jpg, "x", entry.size)
    transform = ImageTransform.resize_longest_side(entry.size, SIDE)
    look, colour, place, outline = found.split(SPEC.parts, 1)
    with torch.no_grad():
        h, w = transform.resized
        square = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)
        square[0, :, :h, :w] = transform.apply_image(pixels)
        embedding = sam.encode(square, torch.tensor([[h, w]]))[0]
    mean = masked_mean(embedding, torch.from_numpy(soft_masks(transform, masks, 8)))
    assert torch.allclose(look, mean, atol=1e-5)
    assert torch.equal(colour, colours(transform.apply_image(pixels), masks, transform))
    assert torch.equal(place, torch.from_numpy(geometry(masks)))
    assert torch.equal(outline, torch.from_numpy(outlines(masks, SPEC.crop_side)).flatten(1))
    assert (made.width, made.encoded) == (found.shape[1], 1)
    shards.close()


def described_rows(made, index, rows):
    shards = ShardReader(index.shard_paths)
    found = made.extract_rows(index, shards, rows)
    shards.close()
    return found


@pytest.mark.slow
def test_tars_of_one_name_in_different_folders_have_separate_features(sam, index, tmp_path):
    """Two data sets whose first image has the same name, as in training and --evaluation.data."""
    shards, found = ShardReader(index.shard_paths), []
    made = MaskFeatureExtractor(sam, SPEC)
    for row in (0, 1):
        jpg, json_bytes = shards.read_entry(index, row)
        about = json.loads(json_bytes)
        about["image"] |= {"image_id": 0, "file_name": "sa_0.jpg"}
        folder = tmp_path / str(row)
        folder.mkdir()
        tar.write(
            folder / "sa_000000.tar",
            [("sa_0.jpg", jpg), ("sa_0.json", json.dumps(about).encode())],
        )
        other = indexes.open_or_build([str(folder)], str(folder / "index"))
        assert other.entry_name(0) == "sa_000000.tar:sa_0"
        found += described_rows(made, other, [0])
    shards.close()
    wanted = described_rows(MaskFeatureExtractor(sam, SPEC), index, [0, 1])
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert made.encoded == 2


@pytest.mark.slow
def test_other_weights_or_settings_have_separate_features(sam, index, tmp_path):
    kept = EmbeddingCache(tmp_path / "kept", None)
    described_rows(MaskFeatureExtractor(sam, SPEC, kept), index, [0])
    other = MaskFeatureExtractor(build_model(little.SPEC, 1).eval(), SPEC, kept)
    finer = MaskFeatureExtractor(sam, replace(SPEC, crop_side=5), kept)
    assert described_rows(finer, index, [0])[0].shape[1] == sum(finer.config.parts)
    described_rows(other, index, [0])
    assert (other.encoded, finer.encoded, len(list((tmp_path / "kept").iterdir()))) == (1, 1, 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_computed_anew(sam, index, tmp_path, damage):
    [wanted] = described_rows(
        MaskFeatureExtractor(sam, SPEC, EmbeddingCache(tmp_path, None)), index, [0]
    )
    [path] = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = MaskFeatureExtractor(sam, SPEC, EmbeddingCache(tmp_path, None))
    assert torch.equal(described_rows(again, index, [0])[0], wanted)
    assert again.encoded == 1
    assert torch.equal(EmbeddingCache(tmp_path, None).get(path.stem), wanted), "and is whole again"


@pytest.mark.slow
def test_memory_holds_what_was_used_last(sam, index):
    most = max(index.images["masks"][:6].tolist()) * sum(SPEC.parts) * 4
    made = MaskFeatureExtractor(sam, SPEC, memory_bytes=2 * most)
    described_rows(made, index, [0, 1, 0])
    assert made.encoded == 2
    described_rows(made, index, [2, 3, 4, 5])
    assert sum(each.nbytes for each in made._memory.values()) <= 2 * most
    described_rows(made, index, [5, 4])
    assert made.encoded == 6
    described_rows(made, index, [0])
    assert made.encoded == 7, "which was let go"
    tight = MaskFeatureExtractor(sam, SPEC, memory_bytes=1)
    described_rows(tight, index, [0, 0, 1, 0])
    assert tight.encoded == 3, "the last one always stays"


def test_images_that_cannot_be_described_are_named_and_others_are_not_lost(sam, index, tmp_path):
    spoilt = write_spoilt(index, tmp_path, cut=[1], without=[2])
    made = MaskFeatureExtractor(sam, SPEC, EmbeddingCache(tmp_path / "kept", None))
    good, cut, bare = described_rows(made, spoilt, [0, 1, 2])
    assert isinstance(good, torch.Tensor)
    assert isinstance(cut, CorruptSampleError)
    assert str(cut).startswith("sa_000000.tar:sa_1: ")
    assert str(bare).startswith("sa_000000.tar:sa_2: ")
    assert made.encoded == len(list((tmp_path / "kept").iterdir())) == 1


def test_colours_are_taken_on_a_grid_no_finer_than_wanted(monkeypatch):
    """Of an input twice as fine, four pixels are one cell."""
    monkeypatch.setattr(mask_features, "COLOUR_GRID", SIDE // 2)
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[::2] = 255
    mask = RLEMasks.from_dense(np.ones((1, SIDE, SIDE), bool))
    transform = ImageTransform.resize_longest_side((SIDE, SIDE), SIDE)
    found = colours(transform.apply_image(pixels), mask, transform)
    assert torch.allclose(found, torch.zeros(6), atol=1e-3)


@pytest.fixture
def run(tmp_path, described):
    return run_in(tmp_path / "run", described, cache=None)


def test_texts_are_read_and_kept_with_the_run_once(run):
    read = run.backbones.text_features(["red square", "red square", "circle"])
    words = read(["circle", "red square"])
    assert words.attention_mask.sum(1).tolist() == [3, 4]
    assert [path.suffix for path in run.backbones.cache_folder.iterdir()] == [".words"]
    before = {path: path.stat().st_mtime_ns for path in run.backbones.cache_folder.iterdir()}
    again = replace(run).backbones.text_features(["circle"])(["red square"])
    assert torch.equal(again.features[0, :4], words.features[1, :4])
    assert {
        path: path.stat().st_mtime_ns for path in run.backbones.cache_folder.iterdir()
    } == before


@pytest.mark.slow
def test_a_text_model_that_learns_is_the_networks(tmp_path, described):
    run = run_in(tmp_path / "run", described, lora_rank=2)
    assert run.backbones.text_features(["red"]) is None
    assert run.build().text.trainable
    assert run.build("meta").text.base.device.type == "meta"
    assert run_in(tmp_path / "other", described).build().text is None


def test_a_text_model_of_another_width_is_named(run):
    with error_line(r"--model.text-dim is 384.* 16\b"):
        replace(run, model=replace(SPEC, text_dim=384)).backbones.text_features()


def test_mask_features_use_the_runs_segmenter(run, tmp_path):
    extractor = run.backbones.mask_features
    assert extractor.model.config.embedding_dim == 16
    assert not extractor.model.training
    save_weights(untrained().state_dict(), SPEC, tmp_path / "words.safetensors")
    with error_line(r"words.safetensors"):
        _ = replace(run, segmenter=str(tmp_path / "words.safetensors")).backbones.mask_features
    with error_line(r"nothing.pth"):
        _ = replace(run, segmenter=str(tmp_path / "nothing.pth")).backbones.mask_features
