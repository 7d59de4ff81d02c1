"""Where the image ends in the padded square."""

import torch

from gigamask.masks.valid_area import covered_parts, inside, valid_cells

EXTENT = torch.tensor([[10.0, 4.0], [1.0, 16.0]])
GRID = (4, 4), (4.0, 4.0)


def test_cells_by_center_and_by_any_part():
    columns, rows = (valid_cells(EXTENT, *GRID).any(axis).tolist() for axis in (1, 2))
    assert columns == [[True, True, False, False], [False] * 4]
    assert rows == [[True, False, False, False], [False] * 4]
    some = valid_cells(EXTENT, *GRID, by_center=False)
    assert some.any(1).tolist() == [[True, True, True, False], [True, False, False, False]]
    assert some.any(2).tolist() == [[True, False, False, False], [True] * 4]


def test_parts_are_those_in_the_image():
    rows, columns = covered_parts(EXTENT, *GRID)
    assert columns[:, 0].tolist() == [[1, 1, 0.5, 0], [0.25, 0, 0, 0]]
    assert rows[:, :, 0].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]


def test_points_move_to_the_outermost_pixels():
    points = torch.tensor([[[9.5, -3.0]], [[0.5, 17.0]]])
    scale = torch.full((2, 2), 2.0)
    assert inside(points, EXTENT, scale).tolist() == [[[8, 0]], [[0, 14]]]
