"""What the kernels refuse before a training starts."""

import pytest

from gigamask import recipes
from gigamask.errors import GigamaskError
from gigamask.plugins.kernels.config import TritonKernels


def test_another_decoder_is_refused():
    run = recipes.make("compact").with_(data="x", kernels=TritonKernels())
    with pytest.raises(GigamaskError, match=r"SAM's mask decoder \(got WindowDecoder\)"):
        run.check()


def test_a_cpu_is_refused_before_the_training(scenes):
    run = recipes.tiny().with_(data=str(scenes), kernels=TritonKernels(), device="cpu")
    with pytest.raises(GigamaskError, match=r"needs a GPU \(got --device cpu\)"):
        run.check().check_inputs()
