"""What a run refuses, what of it reaches the loader, and what may not change behind a checkpoint's back."""

from dataclasses import fields, replace

import pytest

from gigamask.data.augment import LargeScaleJitter
from gigamask.data.choose import Filters, Quality
from gigamask.data.colour import ColourJitter
from gigamask.faults import Fault
from gigamask.train.optim import MuonAdamW
from gigamask.train.run import check_resume, differences, leaves
from gigamask.train.segmentation import Loading, Segmentation
from tests.little import little


def test_leaves_are_flag_names():
    flat = leaves(little())
    assert flat["steps"] == 4
    assert flat["loading.max-masks"] == 4
    assert flat["loading.filters.max-area"] == 0.9
    assert flat["optimizer.layer-decay"] == 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"--steps is 0, it must be at least 1"),
        ({"masks_per_chunk": -3}, r"--masks-per-chunk is -3"),
        ({"data": ()}, r"--data is empty.*gigamask synth"),
        ({"device": "tpu"}, r"--device is 'tpu', known are auto, cpu, cuda"),
    ],
)
def test_impossible_numbers_are_one_line(change, message):
    with pytest.raises(Fault, match=message):
        replace(little(), **{"data": ("x",), **change}).check()


def test_loader_numbers():
    run = replace(little(), data=("x",))
    with pytest.raises(Fault, match=r"--loading.max-masks is 0"):
        replace(run, loading=replace(run.loading, max_masks=0)).check()
    with pytest.raises(Fault, match=r"--loading.workers is -1"):
        replace(run, loading=replace(run.loading, workers=-1)).check()
    assert run.check() is run


def test_area_targets_are_cut_from_masks_at_the_inputs_resolution():
    run = little()
    assert run.assembly.grid == run.model.grid == 32
    assert replace(run, loading=replace(run.loading, target="area")).assembly.grid == 64


def test_resume_reports_what_may_change_and_refuses_what_may_not():
    run = replace(little(), data=("x",))
    longer = replace(run, steps=9, optimizer=replace(run.optimizer, lr=1e-4))
    assert check_resume(run, longer, False) == {"steps": (4, 9), "optimizer.lr": (1e-3, 1e-4)}
    with pytest.raises(Fault, match=r"--model.dim.*16.*32.*--out"):
        check_resume(run, replace(run, model=replace(run.model, dim=32)), True)
    other = replace(run, loading=replace(run.loading, filters=Filters(min_area=9)))
    with pytest.raises(Fault, match=r"--loading.filters.min-area.*None.*9.*--allow-other-order"):
        check_resume(run, other, False)
    assert check_resume(run, other, True) == differences(run, other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"freeze": ("mask_decoder",)}, r"--freeze was \(\) in .* and is \('mask_decoder',\) now"),
        ({"optimizer": MuonAdamW()}, r"--optimizer was gigamask.train.optim.AdamW in .* and is gigamask.train.optim.MuonAdamW now"),
    ],
)
def test_resume_refuses_what_the_optimizers_state_does_not_fit(change, words):
    run = replace(little(), data=("x",))
    act = "which the optimizer's state does not fit; start anew from its weights: --init runs/run and another --out"
    for ours, theirs in ((run, replace(run, **change)), (replace(run, **change), run)):
        with pytest.raises(Fault, match=act):
            check_resume(ours, theirs, allow_other_order=True)
    with pytest.raises(Fault, match=rf"^{words}, {act}$"):
        check_resume(run, replace(run, **change), allow_other_order=True)


def test_every_setting_reaches_the_loader():
    loading = Loading(
        max_masks=7,
        filters=Filters(min_area=3),
        choice=Quality(),
        augment=LargeScaleJitter(),
        colour=ColourJitter(0.1),
        half_scale=True,
        mask_store="store",
    )
    assembly = Segmentation("r", loading=loading).assembly
    shared = {field.name for field in fields(assembly)} - {"side", "grid", "masks"}
    assert {name: getattr(assembly, name) for name in shared} == {name: getattr(loading, name) for name in shared}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"choice": Quality()}, "loading.choice"),
        ({"augment": LargeScaleJitter()}, "loading.augment"),
        ({"colour": ColourJitter(contrast=0.2)}, "loading.colour.contrast"),
    ],
)
def test_what_samples_are_may_not_change_on_resume(change, name):
    run = Segmentation("r")
    other = replace(run, loading=replace(run.loading, **change))
    with pytest.raises(Fault, match=rf"--{name}.*--allow-other-order"):
        check_resume(run, other, False)
    assert name in check_resume(run, other, True)


def test_where_masks_are_kept_may_change_on_resume():
    run = Segmentation("r")
    other = replace(run, loading=replace(run.loading, mask_store="store", workers=5))
    assert set(check_resume(run, other, False)) == {"loading.mask-store", "loading.workers"}
