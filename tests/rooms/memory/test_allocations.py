"""Live bytes of real tensors: each storage once, from when it is made until it is let go."""

import torch

from gigamask.memory.allocations import Allocations


def test_storages_count_once_and_until_they_are_let_go():
    with Allocations() as book:
        first = torch.zeros(1000)
        view = first.view(10, 100)[3:]
        assert book.now == 4000
        second = first + 1
        del first
        assert book.now == 8000  # the view still holds it
        del view
        assert book.now == 4000
        second += 1
        assert (book.now, book.peak) == (4000, 8000)
        assert book.since() == 8000
        assert book.since() == 4000
        del second
    assert book.now == 0


def test_what_autograd_keeps_is_held():
    weight = torch.ones(100, 100, requires_grad=True)
    with Allocations() as book:
        answer = (weight @ weight).exp().sum()
        kept = book.now
        assert kept == 40000 + 4
        answer.backward()
        del answer
        assert book.now == 40000  # the gradient
        assert book.peak > kept + 40000


def test_blocks_round_up():
    with Allocations(512) as book:
        one, two = torch.zeros(1), torch.zeros(129)
        assert book.now == 512 + 1024
        del one, two


def test_several_results_all_count():
    with Allocations() as book:
        parts = torch.ones(10, 10).unbind()
        assert book.now == 400
        values, places = torch.arange(8.0).topk(2)
        assert book.now == 400 + 8 + 16
    assert len(parts) == 10
    assert len(values) == len(places)
