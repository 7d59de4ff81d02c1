"""Edge scores against Berkeley's own, on the five images that its benchmark carries with the numbers expected of them.

The images are research data and no part of this repository: give the folder `bench/data` of BSDS500 (github.com/BIDS/BSDS500) as GIGAMASK_BSDS_BENCH.
"""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask.evaluate.edges import Protocol, measure

matlab = pytest.importorskip("scipy.io", reason="edge scores want scipy and scikit-image: pip install 'gigamask[edges]'")
pytest.importorskip("skimage", reason="edge scores want scipy and scikit-image: pip install 'gigamask[edges]'")


@pytest.fixture
def bench() -> Path:
    folder = os.environ.get("GIGAMASK_BSDS_BENCH")
    if not folder:
        pytest.skip("no benchmark of BSDS500: set GIGAMASK_BSDS_BENCH to its folder bench/data")
    return Path(folder)


def test_the_benchmarks_five_images(bench):
    images = []
    for path in sorted((bench / "png").glob("*.png")):
        people = matlab.loadmat(bench / "groundTruth" / f"{path.stem}.mat")["groundTruth"][0]
        drawn = np.array([each[0, 0]["Boundaries"] for each in people]) > 0
        images.append((cv2.imread(str(path), cv2.IMREAD_UNCHANGED) / 255.0, drawn))
    assert len(images) == 5
    expected = np.loadtxt(bench / "test_2" / "eval_bdry.txt")
    found = measure(images, Protocol(thresholds=5))
    for name, place in (("threshold", 0), ("ODS", 3), ("OIS", 6), ("AP", 7)):
        assert found[name] == pytest.approx(expected[place], abs=1e-4), name
