"""What a run sees and reads with, opened from what its leaves name."""

from dataclasses import replace

import pytest
import torch

from gigamask.faults import Fault
from gigamask.model.start import build
from gigamask.model.weights import save
from tests.asked import SPEC, run_in


@pytest.fixture
def run(tmp_path, described):
    return run_in(tmp_path / "run", described, cache=None)


def test_texts_are_read_and_kept_with_the_run_once(run):
    read = run.senses.reader(["red square", "red square", "circle"])
    words = read(["circle", "red square"])
    assert words.present.sum(1).tolist() == [3, 4]
    assert [path.suffix for path in run.senses.kept.iterdir()] == [".words"]
    before = {path: path.stat().st_mtime_ns for path in run.senses.kept.iterdir()}
    again = replace(run).senses.reader(["circle"])(["red square"])
    assert torch.equal(again.features[0, :4], words.features[1, :4])
    assert {path: path.stat().st_mtime_ns for path in run.senses.kept.iterdir()} == before


def test_texts_that_are_asked_in_passing_are_not_kept(run):
    assert run.senses.reader()(["red"]).features.shape[2] == 16
    assert not run.senses.kept.exists()


def test_a_text_model_that_learns_is_the_networks(tmp_path, described):
    run = run_in(tmp_path / "run", described, lora_rank=2)
    assert run.senses.reader(["red"]) is None
    assert run.build().text.learns
    assert run.build("meta").text.base.device.type == "meta"
    assert run_in(tmp_path / "other", described).build().text is None


def test_a_text_model_of_another_width_is_named(run):
    with pytest.raises(Fault, match=r"^the text model's features have 16 channels, --model.text-dim is 384; give 16$"):
        replace(run, model=replace(SPEC, text_dim=384)).senses.reader()


def test_the_gallery_is_of_the_runs_segmenter(run, tmp_path):
    gallery = run.senses.gallery
    assert gallery.model.spec.embedding_dim == 16
    assert not gallery.model.training
    save(build(SPEC, 0).state_dict(), SPEC, tmp_path / "words.safetensors")
    with pytest.raises(Fault, match=r"words.safetensors: scores masks by words and makes none; name the segmenter it was trained over"):
        _ = replace(run, segmenter=str(tmp_path / "words.safetensors")).senses.gallery
    with pytest.raises(Fault, match=r"nothing.pth"):
        _ = replace(run, segmenter=str(tmp_path / "nothing.pth")).senses.gallery
