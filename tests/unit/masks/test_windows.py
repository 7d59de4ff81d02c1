"""Windows against sums over cells, one by one."""

import pytest
import torch
from torch import Tensor

from gigamask.masks.windows import paste, sample_per_image, sample_per_window, sampling_matrices

CHANCE = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=CHANCE, dtype=torch.float64)


def windows(*edges: tuple[float, float, float, float]) -> Tensor:
    return torch.tensor(edges, dtype=torch.float64)


def area_average(image: Tensor, first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return the mean of a map over an area from edges (y, x) to edges (y, x); 0 beyond the map."""
    total = 0.0
    for row in range(image.shape[0]):
        high = max(0.0, min(last[0], row + 1) - max(first[0], row))
        for column in range(image.shape[1]):
            wide = max(0.0, min(last[1], column + 1) - max(first[1], column))
            total += high * wide * float(image[row, column])
    return total / ((last[0] - first[0]) * (last[1] - first[1]))


@pytest.mark.parametrize(
    "edges",
    [
        (0.0, 0.0, 11.0, 7.0),  # the whole map
        (1.3, 0.4, 9.9, 6.1),  # parts wider than a cell, that cut cells
        (-4.0, 2.5, 8.0, 15.5),  # partly beyond
        (-30.0, -30.0, 60.0, 60.0),  # the map is a few parts
    ],
)
def test_sample_is_the_mean_over_its_part(edges):
    image, samples = normal(7, 11), 4
    x0, y0, x1, y1 = edges
    found = sample_per_window(image[None], sampling_matrices(windows(edges), (7, 11), samples))[0]
    high, wide = (y1 - y0) / samples, (x1 - x0) / samples
    # Parts of less than a cell are widened.
    grow_y, grow_x = max(high, 1.0) / 2, max(wide, 1.0) / 2
    for i in range(samples):
        for j in range(samples):
            y, x = y0 + (i + 0.5) * high, x0 + (j + 0.5) * wide
            mean = area_average(image, (y - grow_y, x - grow_x), (y + grow_y, x + grow_x))
            assert float(found[i, j]) == pytest.approx(mean, abs=1e-12)


def test_parts_smaller_than_a_cell_are_interpolated():
    """At 4 x the resolution, inside the map: `grid_sample`'s bilinear interpolation."""
    image = normal(9, 9)
    found = sample_per_window(
        image[None], sampling_matrices(windows((2.0, 3.0, 6.0, 7.0)), (9, 9), 16)
    )[0]
    centers = (torch.arange(16, dtype=torch.float64) + 0.5) / 4
    y, x = torch.meshgrid(3 + centers, 2 + centers, indexing="ij")
    grid = torch.stack([x, y], 2) * 2 / 9 - 1
    expected = torch.nn.functional.grid_sample(
        image[None, None], grid[None], "bilinear", align_corners=False
    )[0, 0]
    assert torch.allclose(found, expected, atol=1e-12)


def test_row_sums_are_the_part_inside():
    rows, columns = sampling_matrices(
        windows((-4.0, 0.0, 4.0, 8.0), (20.0, 20.0, 30.0, 30.0)), (8, 6), 4
    )
    assert rows.shape == (2, 4, 8)
    assert columns.shape == (2, 4, 6)
    assert rows[0].sum(1).tolist() == pytest.approx([1, 1, 1, 1])
    assert columns[0].sum(1).tolist() == pytest.approx([0, 0, 1, 1])
    assert not rows[1].any()
    half, _ = sampling_matrices(windows((0.0, -3.0, 8.0, 5.0)), (8, 8), 2)
    assert half[0].sum(1).tolist() == pytest.approx([0.25, 1])


class Unread(torch.Tensor):
    """As on a GPU, where nothing may be read."""


@pytest.mark.parametrize("kind", [torch.Tensor, Unread])
@pytest.mark.parametrize(
    "image_index", [[0, 0, 2, 2, 2], [1, 1, 1, 1, 1], [0, 1, 2, 3, 3], [3, 3, 3, 3, 3]]
)
def test_several_images_are_sampled_as_each_alone(image_index, kind):
    """Also those without any window."""
    maps, index = normal(4, 3, 6, 5), torch.tensor(image_index).as_subclass(kind)
    matrices = sampling_matrices(5 * normal(5, 4).cumsum(1).abs() + torch.arange(4), (6, 5), 3)
    found = sample_per_image(maps, index, matrices)
    assert found.shape == (5, 3, 3, 3)
    for r, image in enumerate(image_index):
        for channel in range(3):
            own = tuple(matrix[r : r + 1] for matrix in matrices)
            alone = sample_per_window(maps[image, channel][None], own)[0]
            assert torch.allclose(found[r, channel], alone, atol=1e-12)


@pytest.mark.parametrize("images", [1, 3])
def test_no_window_at_all(images):
    matrices = sampling_matrices(torch.zeros(0, 4), (6, 5), 3)
    none = torch.zeros(0, dtype=torch.int64)
    assert sample_per_image(torch.zeros(images, 2, 6, 5), none, matrices).shape == (0, 2, 3, 3)


@pytest.mark.parametrize("kind", [torch.Tensor, Unread])
def test_gradients_are_those_of_a_linear_map(kind):
    """The gradient of a product with `weights`, times a change, is what the change changes."""
    matrices = sampling_matrices(windows((-1.0, 0.5, 3.0, 4.0), (1, 1, 2, 2)), (4, 5), 2)
    index, edges = (
        torch.tensor([0, 2]).as_subclass(kind),
        windows((1.2, -2.0, 6.1, 5.0), (0, 0, 8, 8)),
    )
    for function, shape in (
        (lambda maps: sample_per_image(maps, index, matrices), (3, 2, 4, 5)),
        (lambda maps: sample_per_window(maps, matrices), (2, 4, 5)),
        (lambda maps: paste(maps, edges, 8, 0.0), (2, 3, 3)),
    ):
        maps, change = normal(*shape).requires_grad_(), normal(*shape)
        result = function(maps)
        weights = normal(*result.shape)
        (gradient,) = torch.autograd.grad((result * weights).sum(), maps)
        assert float((gradient * change).sum()) == pytest.approx(
            float((function(change) * weights).sum()), rel=1e-12
        )


def test_a_constant_is_pasted_inside_and_nothing_else():
    pasted = paste(
        torch.full((2, 5, 5), 2.5), windows((1.6, 3, 6, 7), (-3, -3, 4, 20)).float(), 10, -4.0
    )
    expected = torch.full((2, 10, 10), -4.0)
    expected[0, 3:7, 2:6] = 2.5  # cell 1 has its center at 1.5, outside
    expected[1, :, :4] = 2.5
    assert torch.allclose(pasted, expected, atol=1e-6)


def test_a_window_outside_pastes_nothing():
    assert (paste(normal(1, 4, 4), windows((12, 0, 20, 8)), 10, -4.0) == -4).all()


def test_pasting_interpolates_between_samples():
    """A plane stays a plane between the outermost samples, in both axes."""
    centers = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    plane = 3 * centers[:, None] - 5 * centers
    (pasted,) = paste(plane[None], windows((4, 8, 20, 24)), 32, -4.0)
    cells = (torch.arange(32, dtype=torch.float64) + 0.5) / 16
    exact = 3 * (cells[:, None] - 0.5) - 5 * (cells - 0.25)
    assert torch.allclose(pasted[9:23, 5:19], exact[9:23, 5:19], atol=1e-12)
    assert float(pasted[8, 10]) == pytest.approx(3 / 16 - 5 * float(cells[10] - 0.25)), (
        "beyond the outermost samples their values go on"
    )


def test_what_was_pasted_is_sampled_again():
    centers = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    smooth = torch.sin(3 * centers[:, None]) + torch.cos(2 * centers)
    edges = windows((8.0, 4.0, 40.0, 36.0))
    pasted = paste(smooth[None], edges, 48, 0.0)
    again = sample_per_window(pasted, sampling_matrices(edges, (48, 48), 16))[0]
    assert (again - smooth)[1:-1, 1:-1].abs().max() < 0.01
    assert (again - smooth).abs().max() < 0.05, "beyond the outermost samples"
