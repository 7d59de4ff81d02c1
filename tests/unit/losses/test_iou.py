import torch

from gigamask.losses.iou import iou_prediction_loss, mask_iou


def test_iou_counts_valid_pixels_above_zero():
    logits = torch.tensor(
        [[[[1.0, 2.0, -1.0], [0.0, 3.0, 9.0]], [[-1.0, -1.0, -1.0], [-1.0, 5.0, -1.0]]]]
    )
    truth = torch.tensor([[[True, False, False], [True, True, True]]])
    valid = torch.ones(1, 2, 3, dtype=torch.bool)
    assert torch.equal(mask_iou(logits, truth, valid), torch.tensor([[3 / 5, 1 / 4]])), (
        "a logit of 0 is background"
    )
    valid[0, :, 2] = False
    assert torch.equal(mask_iou(logits, truth, valid), torch.tensor([[2 / 4, 1 / 3]]))


def test_empty_prediction_of_an_empty_mask_has_iou_one():
    empty, valid = torch.zeros(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, 2, dtype=torch.bool)
    logits = torch.tensor([[[[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, 1.0], [-1.0, -1.0]]]])
    assert mask_iou(logits, empty, valid).tolist() == [[1, 0]]
    assert mask_iou(logits, valid, valid).tolist() == [[0, 0.25]]


def test_iou_is_outside_the_graph():
    logits = torch.zeros(1, 1, 2, 2, requires_grad=True)
    assert not mask_iou(logits, logits[0].detach() > 0, logits[0].detach() == 0).requires_grad


def test_regression_is_squared_or_absolute_and_float32():
    predicted, actual = (
        torch.tensor([[0.5, -0.5]], dtype=torch.bfloat16),
        torch.tensor([[1.0, 1.0]]),
    )
    assert iou_prediction_loss(predicted, actual, "mse").tolist() == [[0.25, 2.25]]
    assert iou_prediction_loss(predicted, actual, "l1").tolist() == [[0.5, 1.5]]
    assert iou_prediction_loss(predicted, actual, "l1").dtype == torch.float32
