from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.prompts.boxes import add_box_noise, jitter_boxes
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection

FAR = (1e6, 1e6)


def noisy(boxes, scale, noise, std, limit, extent):
    """`add_box_noise` in images of one size."""
    extents = torch.tensor(extent, dtype=boxes.dtype).expand(len(boxes), 2)
    return add_box_noise(boxes, scale, noise, std, limit, extents)


def test_boxes_stay_in_the_input_and_in_order():
    noise = torch.tensor([[-9.0, -9.0, 9.0, 9.0], [9.0, 0.0, -9.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    boxes = torch.tensor(
        [[5.0, 6.0, 1020.0, 700.0], [100.0, 50.0, 109.0, 60.0], [0.0, 0.0, 1023.0, 767.0]]
    )
    moved = noisy(boxes, torch.ones(3, 2), noise, 0.1, 20.0, (1024.0, 768.0))
    assert moved.tolist() == [
        [0.0, 0.0, 1023.0, 720.0],
        [100.0, 50.0, 109.0, 60.0],
        [0.0, 0.0, 1023.0, 767.0],
    ]
    crossed = noisy(
        boxes[1:2], torch.ones(1, 2), torch.tensor([[9.0, 0.0, -9.0, 0.0]]), 0.2, 20.0, FAR
    )
    assert crossed.tolist() == [[91.0, 50.0, 118.0, 60.0]], "100 + 18 and 109 - 18, sorted"
    assert noisy(boxes[:0], torch.ones(0, 2), noise[:0], 0.1, 20.0, FAR).shape == (0, 4)


def test_noise_and_limits_follow_the_pixels_of_the_stored_image():
    """A box of 10 x 4 stored pixels at 5 x 3 input pixels each is 50 x 12 input pixels."""
    box, scale = torch.tensor([[100.0, 30.0, 145.0, 39.0]]), torch.tensor([[5.0, 3.0]])
    moved = noisy(box, scale, torch.ones(1, 4), 0.1, 20.0, FAR) - box
    assert torch.allclose(moved, torch.tensor([[5.0, 1.2, 5.0, 1.2]]), atol=1e-5)
    assert noisy(box, scale, torch.full((1, 4), 9.0), 1.0, 50.0, (150.0, 60.0)).tolist() == [
        [145.0, 57.0, 145.0, 57.0]
    ]


def test_boxes_of_targets_are_jittered_and_stay_on_the_grid(make_truth, make_draws):
    masks = torch.zeros(3, 20, 30, dtype=torch.bool)
    masks[0, 4:9, 3:20] = masks[1, 2, 2] = masks[2, :, :] = True
    truth, draws = make_truth(masks, cell_xy=(2.0, 3.0)), make_draws(3)
    moved = jitter_boxes(truth, draws, 0.1, 2.0)
    assert torch.equal(
        moved, noisy(truth.boxes_input, truth.scale_xy, draws.box_noise, 0.1, 2.0, (60.0, 60.0))
    )
    assert not torch.equal(moved[1], truth.boxes_input[1])


@pytest.mark.parametrize(
    "schedule",
    [
        InteractiveSchedule(clicks=2, mask_only_rounds=False),
        TwoSidedCorrection(corrections=1),
        MixedPrompts(mask_prob=0.0, point_count_probs=(1.0,)),
    ],
)
def test_each_box_may_have_a_level_of_noise_of_its_own(schedule, make_truth, make_draws, play):
    """Uniform from 0 to the given one; points and all later clicks stay where they are."""
    truth = make_truth(np.ones((2000, 20, 20), bool))
    draws = make_draws(2000, schedule.num_uniforms)
    guess = np.zeros((2000, 20, 20))
    plain, varying = (
        play(guess, truth, each, draws)
        for each in (schedule, replace(schedule, box_noise_varies=True))
    )
    for first, second in zip(plain, varying, strict=True):
        same, varied = first.prompts, second.prompts
        assert torch.equal(same.labels, varied.labels)
        is_corner = same.labels >= 2
        assert torch.equal(same.points_xy_input[~is_corner], varied.points_xy_input[~is_corner])
        boxes = same.labels[:, 0] == 2
        corners = varied.points_xy_input[boxes, :2].flatten(1)
        levels = draws.clicks[boxes, 0, :1]
        noise = schedule.box_noise * levels * draws.box_noise[boxes]
        wanted = add_box_noise(
            truth.boxes_input[boxes], truth.scale_xy[boxes], noise, 1.0, 20.0, truth.extent[boxes]
        )
        assert torch.allclose(corners, wanted, atol=1e-4)
        assert abs(levels.mean() - 0.5) < 0.05
        assert not torch.equal(corners, same.points_xy_input[boxes, :2].flatten(1))


def test_boxes_stay_in_the_image_not_in_the_padded_square(make_truth, make_draws):
    truth, draws = make_truth(torch.ones(1, 20, 30, dtype=torch.bool)), make_draws(1)
    extent = torch.tensor([[33.0, 10.0]])
    boxes = jitter_boxes(replace(truth, extent_xy=extent), draws, 9.0, 500.0)[0]
    assert (boxes.unflatten(0, (2, 2)) <= extent - truth.scale_xy).all()
