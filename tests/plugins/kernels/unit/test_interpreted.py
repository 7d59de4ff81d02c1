"""The tests of the kernels, each file in a process of its own."""

import pytest

from tests.plugins.kernels.interpreter import run_tests

OF_MANY_SECONDS = (
    "test_upscaling.py",
    "test_encoder.py",
    "test_branch_norm.py",
    "test_mask_features.py",
)
AT_MANY_SHAPES = "test_attention.py", "test_tokens.py", "test_mask_loss.py", "test_next_click.py"
FILES = *OF_MANY_SECONDS, *AT_MANY_SHAPES, "test_decoder.py"


@pytest.mark.slow
def test_kernels_equal_the_eager_operations():
    run_tests(*FILES, "-m", "not long")


@pytest.mark.long
@pytest.mark.parametrize(
    "file",
    [
        *AT_MANY_SHAPES,
        "test_kernel_times.py",
        *(pytest.param(file, marks=pytest.mark.exhaustive) for file in OF_MANY_SECONDS),
    ],
)
def test_kernels_equal_the_eager_operations_at_many_shapes(file):
    run_tests(file, "-m", "long")


@pytest.mark.long
@pytest.mark.exhaustive
def test_trainings_equal_those_without_kernels():
    run_tests("test_training.py")


@pytest.mark.long
def test_kernels_compile_for_all_chips():
    run_tests("test_compiled.py", interpret=False)
