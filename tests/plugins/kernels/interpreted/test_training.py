"""Trainings with kernels, in the interpreter."""

from typing import Any

import pytest
import torch

import gigamask
from gigamask.cli.main import main
from gigamask.errors import GigamaskError
from gigamask.plugins.kernels.config import TritonKernels
from tests.plugins.kernels.interpreter import patch_once

patch_once()
SMALL: dict[str, Any] = {
    "device": "cpu",
    "steps": 3,
    "batch_size": 1,
    "processes": 1,
    "model__image_size": 64,
    "model__embedding_dim": 16,
    "model__decoder_num_heads": 1,
    "model__decoder_mlp": 16,
    "model__iou_hidden": 16,
    "prompts__clicks": 1,
    "prompts__mask_only_rounds": 0,
    "loader__max_masks": 1,
    "loader__workers": 0,
    "optimizer__lr": 1e-4,
    "log_every": 1,
}


def weights(run: gigamask.Run) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in run.model.named_parameters()}


@pytest.mark.long
def test_three_steps_equal_those_without_kernels_and_a_resume_every_bit(tmp_path):
    assert main(["synth", str(tmp_path / "scenes"), "--images", "4"]) == 0
    config = gigamask.recipes.tiny().with_(
        **SMALL, data=str(tmp_path / "scenes"), evaluation=gigamask.interfaces.NoEvaluation()
    )
    without = gigamask.train(config, out=str(tmp_path / "without"))
    whole = gigamask.train(config, out=str(tmp_path / "whole"), kernels=TritonKernels())
    parts = {"out": str(tmp_path / "parts"), "kernels": TritonKernels()}
    assert not gigamask.train(config, max_minutes=0, **parts).finished
    resumed = gigamask.train(config, **parts)
    assert resumed.finished
    again, found, wanted = weights(resumed), weights(whole), weights(without)
    for name, other in wanted.items():
        assert torch.equal(again[name], found[name]), name
        # Keys' biases have no gradient but rounding, which Adam scales to steps of lr.
        limit = 2 * SMALL["steps"] * SMALL["optimizer__lr"] if "k_proj.bias" in name else 3e-6
        assert torch.allclose(found[name], other, rtol=1e-4, atol=limit), name
    for one, other in zip(whole.metrics, without.metrics, strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_what_cannot_use_the_kernels_is_refused(tmp_path, monkeypatch):
    config = gigamask.recipes.tiny().with_(
        data="d", out=str(tmp_path), kernels=TritonKernels(), compile=True
    )
    with pytest.raises(GigamaskError, match="--compile"):
        config.check()
    monkeypatch.setattr("gigamask.plugins.kernels.config.find_spec", lambda name: None)
    with pytest.raises(GigamaskError, match=r"gigamask\[kernels\]"):
        config.with_(compile=False).check()
