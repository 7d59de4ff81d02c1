"""Queries become batches: which masks they choose from, and that nothing depends on how they are cut."""

import numpy as np
import pytest
import torch

from gigamask.contracts import Cursor, Group, Visit
from gigamask.data import index as indexes
from gigamask.data import queries, tar
from gigamask.data.shards import Shards
from gigamask.grounding.gallery import Gallery
from gigamask.grounding.items import open_queries
from gigamask.grounding.questions import Questioner, padded
from gigamask.grounding.words import Words
from gigamask.model.start import build
from tests import little
from tests.asked import SPEC


def read(texts):
    """Each text's letters as numbers."""
    codes = [torch.tensor([[float(ord(letter)), 1.0] for letter in text]) for text in texts]
    features = torch.nn.utils.rnn.pad_sequence(codes, batch_first=True) if codes else torch.zeros(0, 0, 2)
    return Words(features, features[..., 1] > 0 if codes else torch.zeros(0, 0, dtype=torch.bool))


@pytest.fixture(scope="module")
def index(described, tmp_path_factory):
    return indexes.open_or_build([str(described / "scenes")], str(tmp_path_factory.mktemp("index")))


@pytest.fixture(scope="module")
def catalogue(described, index):
    return open_queries(index, queries.read(described / "scenes" / "queries.jsonl"))


@pytest.fixture(scope="module")
def gallery():
    return Gallery(build(little.SPEC, 0).eval(), SPEC)


@pytest.fixture
def asker(index, catalogue, gallery):
    return lambda most=5, seed=0, reads=read, of=(index, catalogue): Questioner(of[1], of[0], gallery, reads, most, seed)


def batch_of(questioner, visits):
    shards = Shards(questioner.index.shard_paths)
    try:
        return questioner.batch(visits, shards, Cursor(7))
    finally:
        shards.close()


def visits_of(catalogue, epoch=0):
    return [Visit(epoch, number, number, place=number) for number in range(len(catalogue.queries))]


def test_right_masks_are_among_the_candidates_which_are_few_and_all_of_that_image(asker, catalogue, index):
    made = asker(most=5)
    batch = batch_of(made, visits_of(catalogue))
    assert batch.there.shape[1] == 5
    assert batch.texts == tuple(query.text for query in catalogue.queries)
    for number, query in enumerate(catalogue.queries):
        row = int(catalogue.rows[number])
        [held] = made.gallery.rows(index, Shards(index.shard_paths), [row])
        masks = int(index.images["masks"][row])
        assert batch.there[number].sum() == min(masks, 5)
        assert batch.right[number].sum() == min(len(query.right), 5)
        # Which mask of the image stands where, by its description.
        numbers = [int((held == each).all(1).nonzero()[0, 0]) for each in batch.features[number][batch.there[number]]]
        assert numbers == sorted(set(numbers))
        assert {numbers[place] for place in batch.right[number].nonzero()[:, 0].tolist()} == set(query.right)
    assert batch.cursor == Cursor(7)
    assert batch.names[0] == f"sa_000000.tar:sa_0: {batch.texts[0]}"


def test_a_query_of_more_right_masks_than_there_is_room_for_has_some(asker, index, catalogue):
    many = queries.Query(None, "sa_0.jpg", "things", tuple(range(7)))
    batch = batch_of(asker(most=4, of=(index, open_queries(index, [many]))), [Visit(0, 0, 0)])
    assert batch.right.tolist() == [[True] * 4]
    whole = batch_of(asker(most=99, of=(index, open_queries(index, [many]))), [Visit(0, 0, 0)])
    assert whole.right[0].nonzero()[:, 0].tolist() == list(range(7))
    assert whole.there.sum() == index.images["masks"][0]


def test_candidates_are_named_by_seed_epoch_and_position_alone(asker, catalogue):
    def features(seed=0, epoch=0, position=3, place=0):
        return batch_of(asker(seed=seed), [Visit(epoch, position, 3, place=place)]).features

    assert torch.equal(features(), features(place=5))
    others = [features(seed=1), features(epoch=1), features(position=4)]
    assert not any(torch.equal(features(), each) for each in others)
    drawn = torch.cat([batch_of(asker(), [Visit(epoch, 0, 3)]).features[0] for epoch in range(30)])
    assert len(drawn.unique(dim=0)) == asker().index.images["masks"][catalogue.rows[3]], "each has its turn"


def test_how_a_batch_is_cut_changes_no_query(asker, catalogue):
    made, visits = asker(), visits_of(catalogue)[:11]
    whole = batch_of(made, visits)
    for cut in ([slice(0, 4), slice(4, 8), slice(8, 11)], [slice(0, 11, 2), slice(1, 11, 2)]):
        for part in cut:
            batch = batch_of(made, visits[part])
            assert batch.places.tolist() == whole.places[part].tolist()
            assert torch.equal(batch.there, whole.there[part])
            assert torch.equal(batch.right, whole.right[part])
            assert torch.equal(batch.features, whole.features[part])
            length = batch.words.present.shape[1]
            assert torch.equal(batch.words.features, whole.words.features[part][:, :length])
            assert not whole.words.present[part][:, length:].any()


def test_steps_are_groups_of_micro_batches(asker, catalogue):
    visits = tuple(visits_of(catalogue))
    made = asker()
    steps = list(made.batches([Group((visits[:3], visits[3:4]), 0, 4), Group((visits[4:6], ()), 4, 6)]))
    assert [[len(micro.texts) for micro in step] for step in steps] == [[3, 1], [2, 0]]
    assert [step[0].cursor for step in steps] == [Cursor(4), Cursor(6)]
    made.close()


def test_only_some_of_the_queries(asker, catalogue):
    whole = batch_of(asker(), visits_of(catalogue)[:6])
    some = whole.only(torch.tensor([1, 4]))
    assert some.texts == (whole.texts[1], whole.texts[4])
    assert (some.names, some.mask_image.tolist(), len(some.places)) == (whole.names, [1, 4], 6)
    for name in ("features", "there", "right", "strata"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[[1, 4]])
    assert torch.equal(some.words.features, whole.words.features[[1, 4]])
    assert torch.equal(some.words.present, whole.words.present[[1, 4]])
    none = whole.only(torch.tensor([], dtype=torch.int64))
    assert (none.texts, len(none.mask_image), none.words.features.shape[0]) == ((), 0, 0)


def test_strata_are_the_samplers_or_granularities(asker, catalogue):
    batch = batch_of(asker(), [Visit(0, 0, number, stratum=9 if number == 2 else -1) for number in range(12)])
    wanted = catalogue.items.columns["granularity"][:12].tolist()
    wanted[2] = 9
    assert batch.strata.tolist() == wanted
    absent = [number for number in range(12) if not catalogue.queries[number].right]
    assert {wanted[number] for number in absent} == {3}


def test_weights_and_a_text_model_that_learns(asker):
    batch = batch_of(asker(reads=None), [Visit(0, 0, 0, weight=2.5), Visit(0, 1, 1)])
    assert batch.words is None
    assert batch.only(torch.tensor([1])).words is None
    assert batch.to("cpu").words is None
    assert batch.weights.tolist() == [2.5, 1.0]


def test_no_query_is_a_batch_too(asker):
    batch = batch_of(asker(), [])
    assert (batch.features.shape, batch.there.shape, batch.right.dtype, batch.there.dtype) == (
        (0, 0, sum(SPEC.parts)),
        (0, 0),
        torch.bool,
        torch.bool,
    )
    assert (batch.names, batch.texts, len(batch.places)) == ((), (), 0)


def test_queries_of_an_image_that_cannot_be_read_are_left_out_and_named(described, asker, index, gallery, tmp_path):
    shards, members = Shards(index.shard_paths), []
    for row in range(2):
        jpg, told = shards.read_entry(index, row)
        members += [(f"sa_{row}.jpg", jpg[:200] if row else jpg), (f"sa_{row}.json", told)]
    shards.close()
    tar.write(tmp_path / "sa_000000.tar", members)
    spoilt = indexes.open_or_build([str(tmp_path)], str(tmp_path / "index"))
    asked = [query for query in queries.read(described / "scenes" / "queries.jsonl") if query.image in ("sa_0.jpg", "sa_1.jpg")]
    made = Questioner(open_queries(spoilt, asked), spoilt, Gallery(gallery.model, SPEC), read, 4, 0)
    batch = batch_of(made, visits_of(made.catalogue))
    good = [number for number, query in enumerate(asked) if query.image == "sa_0.jpg"]
    assert batch.places.tolist() == good
    assert batch.mask_image.tolist() == list(range(len(good)))
    assert len(batch.names) == len(good)
    assert {each.name for each in batch.rejected} == {"sa_000000.tar:sa_1"}
    assert len(batch.rejected) == len(asked) - len(good)
    assert batch.rejected[0].reason.startswith("sa_000000.tar:sa_1: ")


def test_tables_are_padded_with_zeros():
    told = padded([torch.ones(2, 3), torch.ones(1, 3)], 3)
    assert told[:, :, 0].tolist() == [[1, 1], [1, 0]]
    assert np.prod(padded([], 3).shape) == 0
