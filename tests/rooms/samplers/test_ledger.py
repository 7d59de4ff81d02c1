"""The book of losses."""

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.ledger import Book


def noted(book: Book, items: list[int], epoch: int, losses: list[float]) -> Book:
    book.note(np.array(items), np.full(len(items), epoch), np.array(losses))
    return book


def test_an_average_begins_with_the_first_loss_and_moves_by_decay():
    book = noted(noted(Book.empty("", 4, 0.75), [0, 2], 0, [4.0, 8.0]), [2], 1, [4.0])
    assert np.array_equal(book.losses, np.array([4.0, np.nan, 7.0, np.nan], np.float32), equal_nan=True)
    assert book.seen.tolist() == [0, -1, 1, -1]


def test_without_decay_the_last_loss_stands():
    assert noted(noted(Book.empty("", 1, 0.0), [0], 0, [4.0]), [0], 0, [1.0]).losses.tolist() == [1.0]


def test_an_item_that_a_step_holds_twice_counts_with_its_mean():
    book = noted(noted(Book.empty("", 2, 0.5), [1], 0, [8.0]), [1, 1], 0, [1.0, 3.0])
    assert book.losses[1] == 5.0
    book.freeze(1)
    assert book.frozen.epoch_losses.tolist() == [4.0]


def test_an_item_was_last_seen_in_its_own_epoch_where_a_step_holds_two():
    book = Book.empty("", 3, 0.5)
    book.note(np.array([0, 1, 0, 2]), np.array([0, 0, 1, 1]), np.ones(4))
    assert book.seen.tolist() == [1, 0, 1]


def test_what_has_no_loss_changes_nothing():
    book = noted(Book.empty("", 2, 0.5), [0, 1], 3, [np.nan, np.inf])
    assert np.isnan(book.losses).all()
    assert book.seen.tolist() == [-1, -1]
    book.freeze(0)
    assert not len(book.frozen.epoch_losses)


def test_epochs_have_means_and_those_without_losses_none():
    book = noted(noted(noted(Book.empty("", 9, 0.5), [0, 1], 0, [1.0, 3.0]), [2], 2, [5.0]), [3], 0, [5.0])
    book.freeze(4)
    assert np.array_equal(book.frozen.epoch_losses, [3.0, np.nan, 5.0, np.nan], equal_nan=True)
    book.freeze(1)
    assert book.frozen.epoch_losses.tolist() == [3.0], "what goes on has no mean yet"


def test_what_is_frozen_stays():
    book = noted(Book.empty("", 2, 0.5), [0], 0, [1.0])
    book.freeze(1)
    noted(book, [0, 1], 1, [9.0, 9.0])
    assert np.array_equal(book.frozen.losses, np.array([1.0, np.nan], np.float32), equal_nan=True)
    assert book.frozen.seen.tolist() == [0, -1]
    assert book.frozen.epoch_losses.tolist() == [1.0]


def test_a_book_comes_back_whole():
    book = noted(Book.empty("", 3, 0.5), [0, 1], 0, [1.0, 2.0])
    book.freeze(1)
    noted(book, [1, 2], 1, [5.0, 7.0])
    back = Book.of(book.arrays(), "", 0.5, "there")
    assert book.arrays().keys() == back.arrays().keys()
    assert all(np.array_equal(array, back.arrays()[name], equal_nan=True) for name, array in book.arrays().items())


@pytest.mark.parametrize("odd", ["sums", "more"])
def test_a_book_with_another_content_is_refused(odd):
    arrays = Book.empty("", 3, 0.5).arrays()
    if arrays.pop(odd, None) is None:
        arrays[odd] = np.zeros(1)
    with pytest.raises(Fault, match=f"there: {odd} is missing or unknown in the ledger; give another --out"):
        Book.of(arrays, "", 0.5, "there")
