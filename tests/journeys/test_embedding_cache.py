"""With `--embedding-cache`, a frozen encoder runs once for an image and its mirror image."""

from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from gigamask.cli.main import main
from gigamask.models.configs import ConvPyramid
from gigamask.models.promptable import PromptableModel
from gigamask.models.sam.sam import Sam
from tests.journeys.runs import same

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"
SCHEDULE = "--schedule multistep --schedule.milestones 1.0 --save-every 1".split()


def train(out: Path, scenes, weights, *words: object) -> int:
    frozen = ["--init", weights, "--freeze", "image_encoder", *SCHEDULE]
    return main(
        [str(word) for word in ("train", LITTLE, "--data", scenes, "--out", out, *frozen, *words)]
    )


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Number of images of each pass of an encoder."""
    found, encode = [], PromptableModel.encode

    def counting(self, images, *given):
        found.append(len(images))
        return encode(self, images, *given)

    monkeypatch.setattr(PromptableModel, "encode", counting)
    return found


@pytest.mark.long
def test_each_image_and_its_mirror_image_is_encoded_once(scenes, weights, tmp_path, encoded):
    cache = tmp_path / "cache"
    words = ["--embedding-cache", cache, "--steps", 12]
    assert train(tmp_path / "run", scenes, weights, *words) == 0
    count = len(list(cache.iterdir()))
    assert sum(encoded) == count <= 24, "a dozen images and their mirror images"
    visited = 12 * 3
    assert count < visited
    encoded.clear()
    assert train(tmp_path / "again", scenes, weights, *words) == 0
    assert encoded == []
    assert same(tmp_path / "run", tmp_path / "again")


@pytest.mark.long
def test_it_learns_what_it_learns_without_and_resumes_bit_for_bit(scenes, weights, tmp_path):
    words = ["--embedding-cache", tmp_path / "cache", "--steps"]
    assert train(tmp_path / "plain", scenes, weights, "--steps", 3) == 0
    assert train(tmp_path / "cached", scenes, weights, *words, 3) == 0
    assert train(tmp_path / "stopped", scenes, weights, *words, 2) == 0
    assert main(f"train --resume {tmp_path}/stopped --steps 3".split()) == 0
    assert same(tmp_path / "cached", tmp_path / "stopped")
    plain, cached = (Sam.from_pretrained(tmp_path / name) for name in ("plain", "cached"))
    begun = Sam.from_pretrained(weights)
    vectors = (parameters_to_vector(each.parameters()) for each in (begun, plain, cached))
    before, exact, rounded = vectors
    assert (rounded - exact).norm() < 0.05 * (exact - before).norm(), "half precision"


@pytest.mark.long
def test_a_damaged_embedding_is_computed_again(scenes, weights, tmp_path, encoded):
    cache = tmp_path / "cache"
    words = ["--embedding-cache", cache, "--steps", 4]
    assert train(tmp_path / "run", scenes, weights, *words) == 0
    file = sorted(cache.iterdir())[0]
    file.write_bytes(file.read_bytes()[:-1])
    encoded.clear()
    assert train(tmp_path / "again", scenes, weights, *words) == 0
    assert sum(encoded) == 1
    assert same(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--freeze", "image_encoder.blocks"], "give --freeze image_encoder"),
        (["--loader.augment", "large_scale_jitter"], "use --loader.augment none or flip"),
        (["--loader.color-jitter.contrast", "0.1"], "without color jitter"),
    ],
)
def test_what_does_not_fit_is_one_line(scenes, weights, tmp_path, words, message, capsys):
    cache = tmp_path / "cache"
    assert train(tmp_path / "run", scenes, weights, "--embedding-cache", cache, *words) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not cache.exists()


@pytest.mark.long
def test_models_that_answer_in_windows_have_it_too(scenes, tmp_path, encoded):
    words = ["compact", "--data", scenes, "--init", "starter", "--freeze", "image_encoder"]
    words += ["--loader.augment", "none", "--batch-size", 2, "--micro-batch-size", 2]
    for jitter in ("brightness", "contrast", "saturation"):
        words += [f"--loader.color-jitter.{jitter}", 0]
    words += ["--loader.workers", 0, "--embedding-cache", tmp_path / "cache", "--device", "cpu"]
    words += ["--out", tmp_path / "run", "--steps", 2, "--evaluation", "none"]
    assert main([str(word) for word in ("train", *words)]) == 0
    assert sum(encoded) == len(list((tmp_path / "cache").iterdir())) > 0
    model = Sam.from_pretrained(tmp_path / "run")
    assert isinstance(model.config.encoder, ConvPyramid)
    begun = Sam.from_pretrained("starter").state_dict()
    for name, value in model.state_dict().items():
        assert not name.startswith("image_encoder.") or torch.equal(value, begun[name])
