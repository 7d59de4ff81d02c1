"""What `benchmarks.kernel_times` compares computes the same."""

from itertools import chain

import pytest
import torch

from benchmarks import kernel_times
from gigamask.models.init import build_model
from gigamask.profiling.dry_run import tensors_in
from tests.plugins.kernels.interpreted.eager import assert_close
from tests.plugins.kernels.interpreter import patch_once

patch_once()


@pytest.mark.long
def test_kernels_and_torch_are_given_the_same_work():
    torch.manual_seed(0)
    model, names = build_model(kernel_times.SMALL, 0, "cpu"), []
    for operation in chain(
        kernel_times.attention_kernels(model, 2),
        kernel_times.token_kernels(model, 2),
        kernel_times.decoder_operations(model, 2),
        kernel_times.encoder_operations(model),
        kernel_times.round_operations(model, 2),
    ):
        found = {way: run(*operation.args) for way, run in operation.ways.items()}
        one, other = (
            [each.detach() for each in tensors_in(found[way])] for way in ("triton", "torch")
        )
        assert_close(one, other, 1e-4)
        names.append((operation.name, operation.is_called))
    assert len(names) == 17
    assert sum(is_called for _, is_called in names) == 11
