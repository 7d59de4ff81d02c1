"""What the suite checks of each call into gigamask."""

from dataclasses import dataclass

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError

from tests import shape_checks

Boxes = Float[np.ndarray, "n 4"]


@shape_checks.checked
def areas(boxes: Boxes) -> Float[np.ndarray, "n"]:
    return boxes[:, 2] if boxes.sum() == 0 else boxes


@shape_checks.checked
@dataclass
class Found:
    boxes: "Boxes"
    scores: "Float[np.ndarray, 'n']"


@pytest.mark.parametrize(
    "call",
    [
        lambda: areas(np.zeros((2, 3))),
        lambda: areas(np.ones((2, 4))),
        lambda: Found(np.zeros((2, 4)), np.zeros(3)),
    ],
)
def test_the_first_calls_of_each_test_are_checked(call):
    for _ in range(shape_checks.CALLS):
        with pytest.raises(TypeCheckError):
            call()
    call()
    shape_checks.next_test()
    with pytest.raises(TypeCheckError):
        call()


def test_what_has_no_array_is_left_to_pyrefly():
    assert shape_checks.checked(lambda count: count)("one") == "one"
    assert not shape_checks.has_arrays(pytest.raises)
