from dataclasses import replace
from functools import cache

import pytest

from gigamask.models.lora_config import LoRA
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.workflows import fit as fitting
from gigamask.workflows import plan
from gigamask.workflows.fit import RANK, fit, fit_and_measure, parse_memory
from gigamask.workflows.plan import Hardware, peak_bytes
from tests.errors import error_line
from tests.little import little

pytestmark = pytest.mark.usefixtures("no_shape_checks")
known_dry_run = cache(plan.dry_run)

ONCE = InteractiveSchedule(clicks=0, mask_only_rounds=False)
CPU = replace(little(), data=("x",), init="weights", device="cpu", masks_per_chunk=64, prompts=ONCE)
SINGLE = replace(CPU, micro_batch_size=1, loader=replace(CPU.loader, max_masks=64))
GPU = replace(CPU, device="cuda", micro_batch_size=None)


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    """Dry-run each configuration once."""
    for module in (plan, fitting):
        monkeypatch.setattr(module, "dry_run", known_dry_run)


def peak(config) -> int:
    config = plan.resolve(config, Hardware())
    found = known_dry_run(config, plan.device_of(config), config.micro_batch_size)
    return peak_bytes(config, Hardware(), found)


def fitted(config, memory_bytes: float, spare_gib: float = 0.0):
    hardware = Hardware(spare_gib=spare_gib)
    changed, line = fit(config, f"{memory_bytes / 1e6:.6f}MB", hardware)
    assert peak(changed) <= memory_bytes
    return changed, line.partition(": ")[2]


def test_sizes():
    assert parse_memory("8GB") == parse_memory("8") == parse_memory(" 8 g ") == 8e9
    assert parse_memory("7.5GiB") == 7.5 * 2**30
    for wrong in ("", "GB", "-3GB", "0", "8TBs", "nan", "1e3"):
        with error_line("such as 8GB"):
            parse_memory(wrong)


@pytest.mark.slow
def test_what_fits_is_not_changed():
    changed, line = fitted(CPU, peak(CPU))
    assert changed == CPU
    assert line == "fits as it is"


@pytest.mark.long
def test_gradients_stay_the_same_first():
    """Then the encoder has adapters, then it is frozen."""
    single, recomputed = SINGLE, replace(SINGLE, activation_checkpointing=1)
    chunks = replace(recomputed, masks_per_chunk=4)
    adapters = replace(chunks, lora=LoRA(rank=RANK))
    frozen = replace(single, freeze=("image_encoder",), masks_per_chunk=4)
    peaks = [peak(each) for each in (single, recomputed, chunks, adapters, frozen)]
    assert peaks == sorted(peaks, reverse=True)
    changed, line = fitted(single, peaks[2])
    assert changed == chunks
    assert line == "--activation-checkpointing 1 --masks-per-chunk 4"
    memory = f"{peaks[2] / 1e6:.6f}MB"
    *_, measured = fit_and_measure(single, memory, Hardware(spare_gib=0))
    of_plan = plan.make_plan(chunks, Hardware(), measured)
    assert of_plan["peak_bytes"] == peaks[2], "the plan need not measure again"
    changed, line = fitted(single, peaks[2] - 1)
    assert (changed.lora.rank, changed.freeze) == (RANK, ())
    changed, line = fitted(single, peaks[4])
    assert changed.freeze == ("image_encoder",)
    assert "--freeze image_encoder" in line
    with error_line("a step needs at least"):
        fitted(single, 0.5 * peaks[4])


@pytest.mark.long
def test_without_trained_weights_the_encoder_is_not_frozen():
    least = 0.1 * peak(SINGLE)
    with error_line("a step needs at least"):
        fitted(replace(SINGLE, init=None), least)


@pytest.mark.long
def test_the_largest_micro_batch_of_a_gpu_is_chosen():
    many = peak(replace(GPU, micro_batch_size=3))
    changed, line = fitted(GPU, 2 * many)
    assert changed.micro_batch_size == 3
    assert line == "--micro-batch-size 3"
    changed, _ = fitted(replace(GPU, micro_batch_size=2), 2 * many)
    assert changed.micro_batch_size == 2, "as it was chosen"


@pytest.mark.slow
def test_what_the_gpu_needs_for_itself_is_kept_free(monkeypatch):
    found = known_dry_run(plan.resolve(CPU, Hardware()), "cpu", 2)
    monkeypatch.setattr(fitting, "dry_run", lambda *_: found)
    monkeypatch.setattr(fitting, "dry_run_change", lambda *_: found)
    with error_line(r"leaves 0 GiB beside 1\.5 GiB that are"):
        fitted(GPU, 1e9, 1.5)
