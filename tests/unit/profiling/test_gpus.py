"""GPUs by name, and custom ones."""

import pytest

from gigamask.profiling.gpus import GPUS, find
from tests.errors import error_line


def test_names_are_found_in_any_case():
    assert find("H200").gib == pytest.approx(139.7)
    assert find("a100").peak("bf16") == 312e12
    assert find("a100").peak("fp32") == 19.5e12


def test_every_gpu_has_memory_peaks_and_a_source():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert 10 < gpu.gib < 200
        assert gpu.tflops["fp32"] < gpu.tflops["fp16"]
        assert gpu.source


def test_custom_gpu():
    own = find("mine=24,165.5")
    assert (own.name, own.gib, own.peak("bf16"), own.peak("fp32")) == (
        "mine",
        24,
        165.5e12,
        165.5e12,
    )


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "h20",
            r"^no GPU is called 'h20'; known are b200, h200, .*, t4, and NAME=GIB,TFLOPS for your "
            r"own; perhaps you meant h200$",
        ),
        ("zzz", r"^no GPU is called 'zzz'; known are .* for your own$"),
        ("mine=24", r"^--gpu mine=24: expected NAME=GIB,TFLOPS, such as mine=24,165$"),
        ("mine=a,b", r"^--gpu mine=a,b: expected NAME=GIB,TFLOPS"),
        ("mine=0,5", r"^--gpu mine=0,5: GiB and TFLOP/s must be above 0, such as mine=24,165$"),
        ("mine=nan,5", r"must be above 0"),
    ],
)
def test_what_is_no_gpu_is_one_line(name, message):
    with error_line(message):
        find(name)


def test_a_precision_without_units_is_named():
    with error_line(r"^--gpu t4 has no units for bf16; give --precision fp16 or fp32$"):
        find("t4").peak("bf16")
