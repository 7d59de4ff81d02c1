"""What a run says about loading reaches the loader, and may not change behind a checkpoint's back."""

from dataclasses import fields, replace

import pytest

from gigamask.data.augment import LargeScaleJitter
from gigamask.data.choose import Filters, Quality
from gigamask.data.colour import ColourJitter
from gigamask.faults import Fault
from gigamask.train.run import check_resume
from gigamask.train.segmentation import Loading, Segmentation


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
    with pytest.raises(Fault, match=rf"--{name} was .* and is .* now, which changes the data or its order; give --allow-other-order"):
        check_resume(run, other, False)
    assert name in check_resume(run, other, True)


def test_where_masks_are_kept_may_change_on_resume():
    run = Segmentation("r")
    other = replace(run, loading=replace(run.loading, mask_store="store", workers=5))
    assert set(check_resume(run, other, False)) == {"loading.mask-store", "loading.workers"}
