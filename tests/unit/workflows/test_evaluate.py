"""What an evaluation says of its images before it scores them."""

import numpy as np

from gigamask.data import annotation, index, tar
from gigamask.data.image import encode_jpeg
from gigamask.datatools.image_files import QUALITY
from gigamask.masks.rle import RLEMasks
from gigamask.workflows.evaluate import _say_images, _stated


def test_the_step_of_a_link_to_a_checkpoint_is_stated(tmp_path):
    (tmp_path / "step_00000008").mkdir()
    (tmp_path / "best").symlink_to("step_00000008")
    assert [_stated(tmp_path / name)["step"] for name in ("step_00000008", "best")] == [8, 8]


def test_masks_without_a_pixel_are_named(tmp_path, capsys):
    dense = np.zeros((5, 20, 30), bool)
    dense[[0, 1, 3], 2:9, 2:9] = True
    masks, members = RLEMasks.from_dense(dense), []
    jpg = encode_jpeg(np.zeros((20, 30, 3), np.uint8), QUALITY)
    for number, some in enumerate((masks[:2], masks[2:])):
        n, ones = len(some), np.ones(len(some))
        record = annotation.image_record(number, some, range(n), np.zeros((n, 2)), ones, ones)
        members += [(f"sa_{number}.jpg", jpg), (f"sa_{number}.json", annotation.encode(record))]
    tar.write(tmp_path / "a.tar", iter(members))
    found = index.open_or_build([str(tmp_path / "a.tar")], str(tmp_path / "index"))
    _say_images(None, found, 1, "cpu")
    assert "without a pixel" not in capsys.readouterr().out, "of the images that are scored"
    _say_images(None, found, 2, "cpu")
    said = capsys.readouterr().out
    assert "masks without a pixel left out: 2, such as annotation 0 of a.tar:sa_1" in said
