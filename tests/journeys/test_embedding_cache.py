"""With `--embedding-cache`, a frozen encoder runs once for an image and its mirror image."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from gigamask.models.configs import ConvPyramid
from gigamask.models.promptable import PromptableModel
from gigamask.models.sam.sam import Sam
from tests.commands import LITTLE, invoke, refusal
from tests.journeys.runs import same


@pytest.fixture
def command(scenes, weights) -> str:
    """A training of all but the encoder, without its folder."""
    frozen = f"train {LITTLE} --data {scenes} --init {weights} --freeze image_encoder"
    return f"{frozen} --schedule multistep --schedule.milestones 1.0 --save-every 1 --out"


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
def test_each_image_and_its_mirror_image_is_encoded_once(command, tmp_path, encoded):
    cache = tmp_path / "cache"
    words = f"--embedding-cache {cache} --steps 12"
    invoke(command, f"{tmp_path}/run", words)
    count = len(list(cache.iterdir()))
    assert sum(encoded) == count <= 24, "a dozen images and their mirror images"
    visited = 12 * 3
    assert count < visited
    encoded.clear()
    invoke(command, f"{tmp_path}/again", words)
    assert encoded == []
    assert same(tmp_path / "run", tmp_path / "again")


@pytest.mark.long
def test_it_learns_what_it_learns_without_and_resumes_bit_for_bit(command, weights, tmp_path):
    words = f"--embedding-cache {tmp_path}/cache --steps"
    invoke(command, f"{tmp_path}/plain", "--steps 3")
    invoke(command, f"{tmp_path}/cached", words, "3")
    invoke(command, f"{tmp_path}/stopped", words, "2")
    invoke(f"train --resume {tmp_path}/stopped --steps 3")
    assert same(tmp_path / "cached", tmp_path / "stopped")
    plain, cached = (Sam.from_pretrained(tmp_path / name) for name in ("plain", "cached"))
    begun = Sam.from_pretrained(weights)
    vectors = (parameters_to_vector(each.parameters()) for each in (begun, plain, cached))
    before, exact, rounded = vectors
    assert (rounded - exact).norm() < 0.05 * (exact - before).norm(), "half precision"


@pytest.mark.long
def test_a_damaged_embedding_is_computed_again(command, tmp_path, encoded):
    cache = tmp_path / "cache"
    words = f"--embedding-cache {cache} --steps 4"
    invoke(command, f"{tmp_path}/run", words)
    file = sorted(cache.iterdir())[0]
    file.write_bytes(file.read_bytes()[:-1])
    encoded.clear()
    invoke(command, f"{tmp_path}/again", words)
    assert sum(encoded) == 1
    assert same(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--freeze image_encoder.blocks", "give --freeze image_encoder"),
        ("--loader.augment large_scale_jitter", "use --loader.augment none or flip"),
        ("--loader.color-jitter.contrast 0.1", "without color jitter"),
    ],
)
def test_what_does_not_fit_is_one_line(command, tmp_path, words, message, capsys):
    cache = tmp_path / "cache"
    assert message in refusal(capsys, command, f"{tmp_path}/run --embedding-cache {cache}", words)
    assert not cache.exists()


@pytest.mark.long
def test_models_that_answer_in_windows_have_it_too(scenes, tmp_path, encoded):
    jitter = " ".join(
        f"--loader.color-jitter.{name} 0" for name in ("brightness", "contrast", "saturation")
    )
    invoke(
        f"train compact --data {scenes} --init starter --freeze image_encoder --device cpu",
        f"--loader.augment none {jitter} --loader.workers 0 --batch-size 2 --micro-batch-size 2",
        f"--embedding-cache {tmp_path}/cache --out {tmp_path}/run --steps 2 --evaluation none",
    )
    assert sum(encoded) == len(list((tmp_path / "cache").iterdir())) > 0
    model = Sam.from_pretrained(tmp_path / "run")
    assert isinstance(model.config.encoder, ConvPyramid)
    begun = Sam.from_pretrained("starter").state_dict()
    for name, value in model.state_dict().items():
        assert not name.startswith("image_encoder.") or torch.equal(value, begun[name])
