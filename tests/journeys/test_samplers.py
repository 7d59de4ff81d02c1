"""Samplers by name, over single masks, with own attributes, from a file, and wrong ones."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gigamask import registry
from gigamask.config_files import parse_train
from gigamask.data.sample_table import COLUMNS
from gigamask.files import exclusive_lock
from gigamask.serialization import read_json
from gigamask.training.sam_config import SamLoaderConfig
from gigamask.training.train_data import TrainData
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.journeys.pages import DOCS
from tests.journeys.runs import records
from tests.little import little


@pytest.fixture(scope="module")
def built(index) -> Path:
    return index.folder


@pytest.fixture
def table(index, tmp_path) -> Path:
    lines = [
        "name,domain,node",
        *(
            f"{index.entry_name(row)},{'street' if row % 3 else 'kitchen'},{row % 2}"
            for row in range(len(index))
        ),
    ]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "table.csv"


@pytest.mark.parametrize("name, flags", [("multi_level", "--sampler.ratio 0 1 1"), ("replay", "")])
def test_a_name_trains_and_goes_on(built, tmp_path, name, flags):
    """Laws and units have all names; the scenes have no fine masks."""
    command = f"train {LITTLE} --data {built} --out {tmp_path} --sampler {name} {flags}"
    command += " --batch-size 6 --micro-batch-size 3"
    invoke(command, "--steps 3")
    invoke(command, "--steps 4")
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]
    assert f"sampler:\n  class: {name}\n" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["stratified_granularity", "loss_weighted"])
def test_masks_may_be_what_is_sampled(built, index, tmp_path, name):
    invoke(f"train {LITTLE} --data {built} --out {tmp_path} --sampler {name} --loader.items mask")
    invoke(f"stats {built} --sampler {name} --items mask --json {tmp_path}/told.json")
    assert read_json(tmp_path / "told.json")["items"] == index.manifest.masks


def test_a_mask_that_is_sampled_is_the_one_that_is_trained_on(built, index):
    run = replace(
        little(),
        data=(str(built),),
        batch_size=1,
        micro_batch_size=1,
        loader=SamLoaderConfig(items="mask", workers=0),
    )
    feed = TrainData(run, index)
    met = []
    for (batch,) in islice(feed.batches(), index.manifest.masks):
        (image,) = (row for row in range(len(index)) if index.entry_name(row) == batch.names[0])
        assert len(batch.mask_image) <= 1
        boxes = index.masks["box"][index.mask_rows(image)].astype(float)
        scale = batch.images.shape[-1] / max(
            index.images["width"][image], index.images["height"][image]
        )
        met += [
            (image, int(np.abs(boxes * scale - box).sum(1).argmin()))
            for box in batch.boxes_input.numpy()
        ]
    assert len(set(met)) == len(met) > 0.9 * index.manifest.masks, (
        "some vanish from so small a grid"
    )


def test_custom_attributes_are_balanced(built, index, table, tmp_path):
    given = f"--loader.attributes {table} --sampler multi_attribute --sampler.attributes domain"
    invoke(f"train {LITTLE} --data {built} --out {tmp_path}/run", given)
    shown = f"--attributes {table} --sampler sharded --sampler.nodes 2 --sampler.column node"
    invoke(f"stats {built}", shown, f"--json {tmp_path}/told.json --picture {tmp_path}/told.png")
    assert read_json(tmp_path / "told.json")["positions"] == 12
    run = parse_train(f"{LITTLE} --data {built} --out {tmp_path} {given}".split()).run
    kitchens = {index.entry_name(row) for row in range(0, len(index), 3)}
    met = [
        name
        for (*batches,) in islice(TrainData(run, index).batches(), 4)
        for batch in batches
        for name in batch.names
    ]
    assert [name in kitchens for name in met].count(True) == len(met) // 2 == 6, (
        "though only a third of the images are kitchens"
    )


def test_the_document_knows_every_sampler_and_column():
    page = (DOCS / "samplers.md").read_text()
    told = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"(?m)^\|(.*?)\|", page)))
    assert {*registry.names("sampler"), *COLUMNS} <= {*told}


def test_changed_attribute_table_is_rejected_unless_allowed(built, table, tmp_path, capsys):
    command = f"train {LITTLE} --data {built} --out {tmp_path}/run --loader.attributes {table}"
    command += " --sampler multi_attribute --sampler.attributes domain"
    invoke(command, "--steps 2")
    table.write_text(table.read_text().replace("kitchen", "street", 1))
    assert "table.csv" in refusal(capsys, command, "--steps 3")
    invoke(command, "--steps 3 --allow-data-change")
    invoke(command, "--steps 4")


@pytest.mark.filterwarnings("always:.*its loss history")
def test_another_sampler_starts_a_new_loss_history_and_says_so(built, tmp_path, capsys):
    command = f"train {LITTLE} --data {built} --out {tmp_path}/run"
    invoke(command, "--steps 2 --sampler replay")
    capsys.readouterr()
    invoke(command, "--steps 3 --sampler loss_weighted --allow-data-change")
    assert "loss history" in capsys.readouterr().err
    invoke(command, "--steps 4 --sampler loss_weighted")
    assert "loss history" not in capsys.readouterr().err


def test_a_refused_command_leaves_the_run_as_it_was(built, tmp_path):
    command = f"train {LITTLE} --data {built} --out {tmp_path}"
    invoke(command, "--steps 2")
    kept = {name: (tmp_path / name).read_bytes() for name in ("config.yaml", "data.json")}
    with exclusive_lock(tmp_path / "lock", "held"):
        assert exit_code(command, "--sampler lazy --allow-data-change") == 2
    region = "--sampler multi_attribute --sampler.attributes region"
    assert exit_code(command, region, "--allow-data-change") == 2
    assert kept == {name: (tmp_path / name).read_bytes() for name in kept}
