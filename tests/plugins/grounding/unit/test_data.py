"""Queries as items of samplers and as batches."""

import numpy as np
import pytest
import torch

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.data.shards import ShardReader
from gigamask.models.init import build_model
from gigamask.plugins.grounding import queries
from gigamask.plugins.grounding.data import (
    RELATIONS,
    QueryLoader,
    complexity,
    count_relations,
    difficulty,
    open_queries,
    pad,
)
from gigamask.plugins.grounding.mask_features import MaskFeatureExtractor
from gigamask.plugins.grounding.text_features import TextFeatures
from gigamask.plugins.grounding.vocabulary import words
from gigamask.records import DataCursor, SampleRef, StepPlan
from tests import little
from tests.plugins.grounding.asked import SPEC, write_spoilt
from tests.unit.data.test_sample_table import pair


def read(texts):
    """Each text's letters as numbers."""
    codes = [torch.tensor([[float(ord(letter)), 1.0] for letter in text]) for text in texts]
    features = pad(codes, torch.zeros(0, 0, 2))
    return TextFeatures(features, features[..., 1] > 0)


@pytest.fixture(scope="module")
def extractor():
    return MaskFeatureExtractor(build_model(little.SPEC, 0).eval(), SPEC)


@pytest.fixture
def asker(index, dataset, extractor):
    return lambda most=5, seed=0, reads=read, of=(index, dataset): QueryLoader(
        of[1], of[0], extractor, reads, most, seed
    )


def batch_of(questioner, sample_refs):
    shards = ShardReader(questioner.index.shard_paths)
    try:
        return questioner.batch(sample_refs, shards, DataCursor(7))
    finally:
        shards.close()


def sample_refs_of(dataset, epoch=0):
    return [SampleRef(epoch, row, row, batch_index=row) for row in range(len(dataset.queries))]


@pytest.mark.slow
def test_right_masks_are_among_the_candidates_which_are_few_and_all_of_that_image(
    asker, dataset, index
):
    made = asker(most=5)
    batch = batch_of(made, sample_refs_of(dataset))
    assert batch.mask_valid.shape[1] == 5
    assert batch.texts == tuple(query.text for query in dataset.queries)
    for number, query in enumerate(dataset.queries):
        row = int(dataset.rows[number])
        [held] = made.mask_features.extract_rows(index, ShardReader(index.shard_paths), [row])
        masks = int(index.images["masks"][row])
        assert batch.mask_valid[number].sum() == min(masks, 5)
        assert batch.is_target[number].sum() == min(len(query.mask_indices), 5)
        # Which mask of the image stands where, by its description.
        valid = batch.mask_valid[number]
        equal = (held[None] == batch.features[number][valid][:, None]).all(2)
        numbers = equal.int().argmax(1)
        assert equal.any(1).all()
        assert numbers.tolist() == sorted(set(numbers.tolist()))
        right = numbers[batch.is_target[number][valid]]
        assert set(right.tolist()) == set(query.mask_indices)
    assert batch.cursor == DataCursor(7)
    assert batch.names[0] == f"sa_000000.tar:sa_0: {batch.texts[0]}"


def test_query_with_more_targets_than_fit_keeps_some(asker, index, dataset):
    many = queries.Query(None, "sa_0.jpg", "things", tuple(range(7)))
    batch = batch_of(asker(most=4, of=(index, open_queries(index, [many]))), [SampleRef(0, 0, 0)])
    assert batch.is_target.tolist() == [[True] * 4]
    whole = batch_of(asker(most=99, of=(index, open_queries(index, [many]))), [SampleRef(0, 0, 0)])
    assert whole.is_target[0].nonzero()[:, 0].tolist() == list(range(7))
    assert whole.mask_valid.sum() == index.images["masks"][0]


def test_candidates_are_named_by_seed_epoch_and_position_alone(asker, dataset):
    def features(seed=0, epoch=0, position=3, place=0):
        return batch_of(
            asker(seed=seed), [SampleRef(epoch, position, 3, batch_index=place)]
        ).features

    assert torch.equal(features(), features(place=5))
    others = [features(seed=1), features(epoch=1), features(position=4)]
    assert not any(torch.equal(features(), each) for each in others)
    drawn = torch.cat(
        [batch_of(asker(), [SampleRef(epoch, 0, 3)]).features[0] for epoch in range(30)]
    )
    assert len(drawn.unique(dim=0)) == asker().index.images["masks"][dataset.rows[3]], (
        "each has its turn"
    )


def test_how_a_batch_is_cut_changes_no_query(asker, dataset):
    made, sample_refs = asker(), sample_refs_of(dataset)[:11]
    whole = batch_of(made, sample_refs)
    for cut in ([slice(0, 4), slice(4, 8), slice(8, 11)], [slice(0, 11, 2), slice(1, 11, 2)]):
        for part in cut:
            batch = batch_of(made, sample_refs[part])
            assert batch.batch_index.tolist() == whole.batch_index[part].tolist()
            assert torch.equal(batch.mask_valid, whole.mask_valid[part])
            assert torch.equal(batch.is_target, whole.is_target[part])
            assert torch.equal(batch.features, whole.features[part])
            own, all_words = batch.text_features, whole.text_features
            length = own.attention_mask.shape[1]
            assert torch.equal(own.features, all_words.features[part][:, :length])
            assert not all_words.attention_mask[part][:, length:].any()


def test_steps_are_groups_of_micro_batches(asker, dataset):
    refs, made = tuple(sample_refs_of(dataset)), asker()
    plans = StepPlan((refs[:3], refs[3:4]), 0, 4), StepPlan((refs[4:6], ()), 4, 6)
    steps = list(made.batches(plans))
    assert [[len(micro.texts) for micro in step] for step in steps] == [[3, 1], [2, 0]]
    assert [step[0].cursor for step in steps] == [DataCursor(4), DataCursor(6)]
    made.close()


def test_strata_are_the_samplers_or_granularities(asker, dataset):
    batch = batch_of(
        asker(), [SampleRef(0, 0, number, stratum=9 if number == 2 else -1) for number in range(12)]
    )
    wanted = dataset.items.columns["granularity"][:12].tolist()
    wanted[2] = 9
    assert batch.strata.tolist() == wanted
    absent = [number for number in range(12) if not dataset.queries[number].mask_indices]
    assert {wanted[number] for number in absent} == {3}


def test_weights_and_a_text_model_that_learns(asker):
    batch = batch_of(asker(reads=None), [SampleRef(0, 0, 0, weight=2.5), SampleRef(0, 1, 1)])
    assert batch.text_features is None
    assert batch.select(torch.tensor([1])).text_features is None
    assert batch.to("cpu").text_features is None
    assert batch.weights.tolist() == [2.5, 1.0]


def test_no_query_is_a_batch_too(asker):
    batch = batch_of(asker(), [])
    assert batch.features.shape == (0, 0, sum(SPEC.parts))
    assert batch.mask_valid.shape == batch.is_target.shape == (0, 0)
    assert batch.is_target.dtype == batch.mask_valid.dtype == torch.bool
    assert (batch.names, batch.texts, len(batch.batch_index)) == ((), (), 0)


def test_queries_of_an_image_that_cannot_be_read_are_left_out_and_named(
    dataset, index, extractor, tmp_path
):
    spoilt = write_spoilt(index, tmp_path, [1])
    asked = [query for query in dataset.queries if query.image in ("sa_0.jpg", "sa_1.jpg")]
    made = QueryLoader(
        open_queries(spoilt, asked), spoilt, MaskFeatureExtractor(extractor.model, SPEC), read, 4, 0
    )
    batch = batch_of(made, sample_refs_of(made.dataset))
    good = [number for number, query in enumerate(asked) if query.image == "sa_0.jpg"]
    assert batch.batch_index.tolist() == good
    assert batch.mask_image.tolist() == list(range(len(good)))
    assert len(batch.names) == len(good)
    assert {each.name for each in batch.skipped} == {"sa_000000.tar:sa_1"}
    assert len(batch.skipped) == len(asked) - len(good)
    assert batch.skipped[0].reason.startswith("sa_000000.tar:sa_1: ")


@pytest.fixture(scope="module")
def tiny_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries")
    for name in ("street", "indoor"):
        (folder / name).mkdir()
    tar.write(folder / "street" / "a.tar", [*pair(0, [5, 50, 500]), *pair(1, [200, 9])])
    tar.write(folder / "indoor" / "b.tar", pair(2, [1000]))
    return indexes.build([folder / "street", folder / "indoor"], folder / "index")


ASKED = [
    queries.Query("street/a.tar", "sa_1.jpg", "the red disc", (0,), "name"),
    queries.Query(None, "sa_0", "the red striped disc", (1,), "name", "night"),
    queries.Query(None, "sa_0", "all small things left of the large box", (0, 1), "all"),
    queries.Query(None, "sa_2", "zebra", (), "absent"),
    queries.Query(None, "sa_1", "a zebra", (1,), "name", "night"),
]


def test_columns_are_the_queries(tiny_index):
    found = open_queries(tiny_index, ASKED, seed=4)
    columns = found.items.columns
    assert (found.items.count, found.items.seed, found.items.tars) == (5, 4, 2)
    found_of = {name: each.tolist() for name, each in columns.items() if each.dtype == np.int32}
    assert found_of == {
        "tar": [1, 1, 1, 0, 1],
        "masks": [2, 3, 3, 1, 2],
        "granularity": [2, 1, 1, 3, 0],
        "length": [3, 4, 8, 1, 2],
        "relations": [0, 0, 1, 0, 0],
        "complexity": [0, 1, 2, 0, 0],
        "domain": [2, 1, 2, 0, 1],
        "kind": [2, 2, 1, 0, 2],
    }
    assert found.kinds == ("absent", "all", "name")
    assert found.domains == ("indoor", "night", "street")
    assert columns["area_fraction"] == pytest.approx([0.2, 0.05, 0.0275, 0, 0.009])
    expected = difficulty(
        columns["area_fraction"], columns["length"], columns["masks"], columns["relations"]
    )
    assert np.array_equal(columns["difficulty"], expected)
    assert expected[3] == pytest.approx(0.3 + 0.2 / 50 + 0.3 / 20)
    named = " ".join(tiny_index.entry_name(row) for row in found.rows.tolist())
    assert named == "a.tar:sa_1 a.tar:sa_0 a.tar:sa_0 b.tar:sa_2 a.tar:sa_1"
    none = open_queries(tiny_index, []).items
    assert none.count == 0
    assert [len(column) for column in none.columns.values()] == [0] * 10


def test_columns_are_computed_lazily_and_once(tiny_index):
    columns = open_queries(tiny_index, ASKED).items.columns
    assert "area_fraction" not in columns.computed
    assert columns["granularity"] is columns["granularity"]
    assert sorted({*columns.computed} - {"tar"}) == ["area_fraction", "granularity"]
    assert len(columns) == len(list(columns)) == 10
    assert "domain" in columns
    assert "width" not in columns


@pytest.mark.parametrize(
    "text, number",
    [
        ("the red disc", 0),
        ("the disc left of the box", 1),
        ("The disc, on top of the box.", 1),
        ("the cup on the table next to the window", 2),
        ("the man in front of the car behind the tree under the lamp", 3),
        ("the ring  between\nthe boxes", 1),
        ("an onion on the left", 1),
        ("overalls, beloved, nearly, underwear, Aboveground", 0),
        ("", 0),
    ],
)
def test_relations_are_whole_phrases_the_longest_first(text, number):
    assert count_relations(text) == number


def test_every_relation_counts_once():
    assert len(set(RELATIONS)) == len(RELATIONS)
    assert [each for each in RELATIONS if count_relations(f"the disc {each} the box") != 1] == []


@pytest.mark.parametrize(
    "text, kind",
    [
        ("potted plant", 0),
        ("all striped objects", 0),
        ("the red striped disc", 1),
        ("a vase with flowers", 1),
        ("a stuffed teddy bear", 1),
        ("the disc left of the box", 2),
        ("the red striped disc with a hole above the box", 2),
    ],
)
def test_complexity_is_plain(text, kind):
    assert complexity(text) == kind


def test_words_are_counted_without_signs():
    found = "the dog's t-shirt 2 red discs and a hat"
    assert words("The dog's T-shirt, 2 red_discs — and a hat!") == found.split()


def test_difficulty_is_the_stated_sum():
    share, counts = np.array([1, 0, 0.5]), np.array([[0, 50, 10], [0, 20, 5], [0, 5, 1]])
    found = difficulty(share, *counts)
    assert found == pytest.approx([0, 1, 0.15 + 0.2 * 0.2 + 0.3 * 0.25 + 0.2 * 0.2])
    assert found.dtype == np.float32
    assert difficulty(share, *10 * counts)[1] == 1
