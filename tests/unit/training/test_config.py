"""What configurations refuse, what reaches the loader, and what may change on resume."""

from dataclasses import fields, replace

import pytest

from gigamask.data.augment import ColorJitter, LargeScaleJitter
from gigamask.data.index import build
from gigamask.data.mask_sampling import BestMasks, MaskFilters
from gigamask.models.configs import SamConfig
from gigamask.samplers.random import LazyShuffle
from gigamask.synthetic.scenes import write as write_scenes
from gigamask.training.config import check_resume, differences, item_sampler
from gigamask.training.optim import MuonAdamW
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig
from tests.errors import error_line
from tests.little import little
from tests.orders import listed


def test_loader_numbers():
    run = replace(little(), data=("x",))
    with error_line(r"--loader.max-masks must be at least 1"):
        replace(run, loader=replace(run.loader, max_masks=0)).check()
    with error_line(r"--loader.workers must be at least 0"):
        replace(run, loader=replace(run.loader, workers=-1)).check()
    assert run.check() is run


@pytest.mark.parametrize(
    "weights, words",
    [
        ((3,), r"^--data-weights needs a number for each of 2 paths of --data \(got 3\)$"),
        ((3, 0), r"^--data-weights must be at least 1 \(got 0\)"),
    ],
)
def test_every_path_of_the_data_has_a_weight(weights, words):
    with error_line(words):
        replace(little(), data=("x", "y"), data_weights=weights).check()


def test_weights_of_the_data_are_not_combined_with_a_sampler():
    run = replace(little(), data=("x", "y"), data_weights=(3, 1))
    assert run.check() is run
    with error_line(r"^--data-weights draws the samples itself"):
        replace(run, sampler=LazyShuffle()).check()


@pytest.mark.slow
def test_samples_of_each_path_are_drawn_by_its_weight(scenes, tmp_path):
    few = tmp_path / "few"
    write_scenes(str(few), 3, seed=8)
    run = replace(little(), data=(str(few), str(scenes)), data_weights=(1, 3))
    index = build(run.data, tmp_path / "index")
    samples = run.data_source(index)
    order = listed(item_sampler(run).order(samples.items, 0, None))
    rows, _ = samples.locate(order)
    paths = [index.shard_paths[shard] for shard in index.images["shard"][rows]]
    assert [str(few) in path for path in paths] == [False, True, False, False] * 3
    assert len(set(rows.tolist())) == len(rows)
    with error_line("allow-data-change"):
        check_resume(run, replace(run, data_weights=(1, 1)), False)


def test_resume_reports_what_may_change_and_refuses_what_may_not():
    run = replace(little(), data=("x",))
    longer = replace(run, steps=9, optimizer=replace(run.optimizer, lr=1e-4))
    assert check_resume(run, longer, False) == {"steps": (4, 9), "optimizer.lr": (1e-3, 1e-4)}
    with error_line(r"--model.embed-dim.*16.*32.*--out"):
        check_resume(run, replace(run, model=replace(run.model, embed_dim=32)), True)
    other = replace(run, loader=replace(run.loader, filters=MaskFilters(min_area=9)))
    with error_line(r"--loader.filters.min-area.*None.*9.*--allow-data-change"):
        check_resume(run, other, False)
    assert check_resume(run, other, True) == differences(run, other)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"freeze": ("mask_decoder",)}, r"--freeze was empty in .* and is now mask_decoder"),
        (
            {"optimizer": MuonAdamW()},
            r"--optimizer was .*\.optim\.AdamW in .* and is now .*\.optim\.MuonAdamW",
        ),
    ],
)
def test_resume_refuses_what_the_optimizers_state_does_not_fit(change, words):
    run = replace(little(), data=("x",))
    act = "the optimizer state does not fit; .*: --init runs/run and another --out"
    for ours, theirs in ((run, replace(run, **change)), (replace(run, **change), run)):
        with error_line(act):
            check_resume(ours, theirs, allow_data_change=True)
    with error_line(rf"^{words}: {act}$"):
        check_resume(run, replace(run, **change), allow_data_change=True)


def test_every_setting_reaches_the_loader():
    loading = SamLoaderConfig(
        max_masks=7,
        filters=MaskFilters(min_area=3),
        mask_sampler=BestMasks(),
        augment=LargeScaleJitter(),
        color_jitter=ColorJitter(0.1),
        half_scale=True,
        mask_store="store",
    )
    assembly = SamTrainConfig("r", loader=loading).sample_config
    own = {"image_size", "mask_size", "with_masks", "stretch", "class_names", "pixels"}
    shared = {field.name for field in fields(assembly)} - own
    assert {name: getattr(assembly, name) for name in shared} == {
        name: getattr(loading, name) for name in shared
    }
    for stretch in (False, True):
        assert (
            SamTrainConfig("r", model=SamConfig(stretch=stretch)).sample_config.stretch == stretch
        )


@pytest.mark.parametrize(
    "change, name",
    [
        ({"mask_sampler": BestMasks()}, "loader.mask-sampler"),
        ({"augment": LargeScaleJitter()}, "loader.augment"),
        ({"color_jitter": ColorJitter(contrast=0.2)}, "loader.color-jitter.contrast"),
    ],
)
def test_what_samples_are_may_not_change_on_resume(change, name):
    run = SamTrainConfig("r")
    other = replace(run, loader=replace(run.loader, **change))
    with error_line(rf"--{name}.*--allow-data-change"):
        check_resume(run, other, False)
    assert name in check_resume(run, other, True)


def test_where_masks_are_kept_may_change_on_resume():
    run = SamTrainConfig("r")
    other = replace(run, loader=replace(run.loader, mask_store="store", workers=5))
    assert set(check_resume(run, other, False)) == {"loader.mask-store", "loader.workers"}
