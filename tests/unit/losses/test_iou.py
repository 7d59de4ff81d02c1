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


def test_regression_is_float32():
    predicted = torch.tensor([[0.5, -0.5]], dtype=torch.bfloat16)
    for kind, expected in (("mse", [[0.25, 2.25]]), ("l1", [[0.5, 1.5]])):
        found = iou_prediction_loss(predicted, torch.ones(1, 2), kind)
        assert found.dtype == torch.float32
        assert found.tolist() == expected
