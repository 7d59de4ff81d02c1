"""Mean number of clicks to 85 and 90 % IoU, at most 20, and the mean IoU after each click.

The protocol is that of `gigamask evaluate`; a mask that never reaches the IoU counts as 20 clicks.

Run: python -m benchmarks.number_of_clicks WEIGHTS DATA
"""

import argparse

import numpy as np

from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, evaluate_clicks
from gigamask.training.checkpoint import load_model
from gigamask.workflows.open_data import open_or_build_temporary

MOST_CLICKS = 20


def number_of_clicks(result: ClickResult, target: float) -> tuple[float, int]:
    """Return the mean number of clicks to an IoU, and how many masks never reach it.

    Args:
        result: Scores after each number of clicks.
        target: IoU to reach.
    """
    counts, failures = [], 0
    for score in result.scores:
        reached = [clicks for clicks, iou in score.clicks.items() if iou >= target]
        failures += not reached
        counts.append(min(reached, default=MOST_CLICKS))
    return float(np.mean(counts)), failures


def main() -> None:
    """Evaluate a model, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("data", nargs="+")
    options = parser.parse_args()
    protocol = ClickProtocol(clicks=tuple(range(1, MOST_CLICKS + 1)))
    with open_or_build_temporary(options.data) as index:
        model = load_model(options.weights, "cpu")
        result = evaluate_clicks(model, index, MaskFilters(max_area=None), protocol)
    print(f"{len(result.scores)} masks of {result.images} images")
    for target in (0.85, 0.9):
        mean, failures = number_of_clicks(result, target)
        print(f"NoC {100 * target:.0f}: {mean:.2f} clicks, {failures} masks never reach it")
    for clicks in (1, 2, 3, 5, 9, MOST_CLICKS):
        print(f"{clicks:2} clicks: IoU {np.mean([s.clicks[clicks] for s in result.scores]):.3f}")


if __name__ == "__main__":
    main()
