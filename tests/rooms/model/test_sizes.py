import subprocess
import sys

import pytest

from gigamask.faults import Fault
from gigamask.model.sizes import SamSpec, tiny, vit_b, vit_h, vit_l


@pytest.mark.parametrize("make", [vit_b, vit_l, vit_h, tiny])
def test_the_grid_is_four_times_the_embedding(make):
    spec = make()
    assert spec.embedding_side * spec.patch == spec.input_side
    assert spec.grid == 4 * spec.embedding_side


def test_official_sizes_see_1024_pixels_as_64_tokens():
    assert {(spec.input_side, spec.embedding_side, spec.grid) for spec in (vit_b(), vit_l(), vit_h())} == {(1024, 64, 256)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth is 0; it counts something and must be at least 1"),
        ({"input_side": 1000}, "input_side 1000 is not a multiple of patch 16; the nearest that is: 992"),
        ({"heads": 7}, "dim 768 is not a multiple of heads 7"),
        ({"dim": 30, "heads": 3}, "dim 30 is not a multiple of 4"),
        ({"embedding_dim": 100}, "embedding_dim 100 is not a multiple of 8"),
        ({"decoder_heads": 3}, "decoder_heads 3 does not divide half of embedding_dim 256"),
        ({"global_blocks": (2, 12)}, "global_blocks names block 12, but a depth of 12 has blocks 0 to 11"),
        ({"drop_path": 1.0}, r"drop_path is 1.0; it is a rate and must lie in \[0, 1\)"),
    ],
)
def test_impossible_values_are_named(changes, message):
    with pytest.raises(Fault, match=message):
        SamSpec(**changes)


def test_sizes_are_read_without_torch():
    code = "import sys, gigamask.model.sizes as sizes; sizes.tiny(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
