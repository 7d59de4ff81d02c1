from dataclasses import replace

import pytest

from gigamask.errors import GigamaskError
from gigamask.models.lora_config import LoRA
from gigamask.workflows.fit import RANK, fit, parse_memory
from gigamask.workflows.plan import Hardware, make_plan
from tests.little import little

CPU = replace(little(), data=("x",), init="weights", device="cpu", masks_per_chunk=64)
GPU = replace(CPU, device="cuda", micro_batch_size=None)


def peak(config) -> int:
    return make_plan(config, Hardware())["peak_bytes"]


def fitted(config, memory_bytes: float, spare_gib: float = 0.0):
    hardware = Hardware(spare_gib=spare_gib)
    changed, line = fit(config, f"{memory_bytes / 1e6:.6f}MB", hardware)
    assert peak(changed) <= memory_bytes
    return changed, line.partition(": ")[2]


def test_sizes():
    assert parse_memory("8GB") == parse_memory("8") == parse_memory(" 8 g ") == 8e9
    assert parse_memory("7.5GiB") == 7.5 * 2**30
    for wrong in ("", "GB", "-3GB", "0", "8TBs", "nan", "1e3"):
        with pytest.raises(GigamaskError, match="such as 8GB"):
            parse_memory(wrong)


def test_what_fits_is_not_changed():
    changed, line = fitted(CPU, peak(CPU))
    assert changed == CPU
    assert line == "fits as it is"


def test_gradients_stay_the_same_first():
    """Then the encoder has adapters, then it is frozen."""
    single = replace(CPU, micro_batch_size=1, loader=replace(CPU.loader, max_masks=64))
    recomputed = replace(single, activation_checkpointing=1)
    chunks = replace(recomputed, masks_per_chunk=4)
    adapters = replace(chunks, lora=LoRA(rank=RANK))
    frozen = replace(single, freeze=("image_encoder",), masks_per_chunk=4)
    peaks = [peak(each) for each in (single, recomputed, chunks, adapters, frozen)]
    assert peaks == sorted(peaks, reverse=True)
    changed, line = fitted(single, peaks[2])
    assert changed == chunks
    assert line == "--activation-checkpointing 1 --masks-per-chunk 4"
    changed, line = fitted(single, peaks[2] - 1)
    assert (changed.lora.rank, changed.freeze) == (RANK, ())
    changed, line = fitted(single, peaks[4])
    assert changed.freeze == ("image_encoder",)
    assert "--freeze image_encoder" in line
    with pytest.raises(GigamaskError, match="a step needs at least"):
        fitted(single, 0.5 * peaks[4])


def test_without_trained_weights_the_encoder_is_not_frozen():
    single = replace(CPU, micro_batch_size=1)
    assert fitted(single, 0.99 * peak(replace(single, activation_checkpointing=1)))
    with pytest.raises(GigamaskError, match="a step needs at least"):
        fitted(replace(single, init=None), 0.5 * peak(single))


def test_the_largest_micro_batch_of_a_gpu_is_chosen():
    many = peak(replace(GPU, micro_batch_size=3))
    changed, line = fitted(GPU, 2 * many)
    assert changed.micro_batch_size == 3
    assert line == "--micro-batch-size 3"
    changed, _ = fitted(replace(GPU, micro_batch_size=2), 2 * many)
    assert changed.micro_batch_size == 2, "as it was chosen"


def test_what_the_gpu_needs_for_itself_is_kept_free():
    with pytest.raises(GigamaskError, match=r"leaves 0 GiB beside 1\.5 GiB that are"):
        fitted(GPU, 1e9, 1.5)
