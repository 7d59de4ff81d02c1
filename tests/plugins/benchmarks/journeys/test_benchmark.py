"""`gigamask benchmark`: archives, shards, reproductions, and wrong arguments."""

import re

import pytest

import gigamask
from gigamask.cli.main import main
from gigamask.models.init import build_model
from gigamask.plugins.benchmarks import literature
from gigamask.plugins.benchmarks.benchmark import BENCHMARKS
from gigamask.plugins.benchmarks.published import ARCHIVES
from gigamask.serialization import read_json
from tests import instances
from tests.commands import invoke, refusal
from tests.little import SPEC
from tests.plugins.benchmarks.archives import write_archive

CPU = "--device cpu --batch-size 1".split()


@pytest.fixture(scope="module")
def grabcut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive") / "GrabCut"
    write_archive("grabcut", folder, count=1)
    return folder


@pytest.mark.long
def test_number_of_clicks_beside_the_literature(grabcut, tmp_path, capsys):
    words = ["benchmark", "grabcut", "starter", *CPU, "--json", str(tmp_path / "scores.json")]
    whole = [*words, "--data", str(grabcut.parent), "--pictures", str(tmp_path)]
    invoke(*whole, "--reproduce", "sbd_vit_b")
    printed, scores = capsys.readouterr().out, read_json(tmp_path / "scores.json")
    for row in literature.rows("grabcut"):
        label = f"{row.model} ({row.trained_on})"
        line = next(line for line in printed.splitlines() if line.startswith(label))
        assert f"{row.scores['NoC@90']:.2f}" in line
        assert row.source in printed
    confident = scores["answers"]["confident"]
    assert (scores["masks"], scores["published_masks"]) == (1, 50)
    assert f"{confident['NoC@85']:.2f}" in printed
    assert re.search(r"grabcut NoC@90 +1\.54 +" + f"{confident['NoC@90']:.2f}", printed)
    assert scores["reproduce"]["published"]["sbd"]["NoC@85"] == 3.28
    assert len(confident["curves"]["2008_000000:0"]) == 20
    assert (tmp_path / "worst_clicks.png").stat().st_size > 1000

    # The masks alone, their photographs elsewhere, and from Python.
    masks, photographs = str(grabcut / "boundary_GT"), str(grabcut / "data_GT")
    invoke(*words, "--data", masks, "--images", photographs, "--answers", "confident")
    again = read_json(tmp_path / "scores.json")
    assert again["answers"]["confident"]["curves"] == confident["curves"]
    found = gigamask.benchmark(
        "grabcut", "starter", grabcut, device="cpu", answers=("best_of_three",)
    )
    assert list(found["answers"]) == ["best_of_three"]
    assert found["answers"]["best_of_three"]["mIoU"]["1"] >= confident["mIoU"]["1"]


def test_shards_are_scored_by_clicks_and_by_masks_of_sa1k(scenes, tmp_path, capsys):
    words = [*f"starter --data {scenes} --max-images 1".split(), *CPU]
    json_flags = f"--json {tmp_path}/scores.json --answers first_token".split()
    invoke("benchmark", "sa1k", *words, *json_flags)
    [answer] = read_json(tmp_path / "scores.json")["answers"].values()
    assert list(answer["mIoU"]) == ["1", "2", "3"]
    assert "NoC@90" not in answer
    assert re.search(
        r"EdgeSAM \(1 % of SA-1B\) +0\.675 +0\.761 +0\.790 .*0\.830", capsys.readouterr().out
    )
    assert "filtered out" in refusal(
        capsys, "benchmark", "bsds", *words, "--min-predicted-iou", "1"
    )


@pytest.mark.long
def test_coco_and_lvis_beside_the_literature(tmp_path, capsys):
    """AP of ViTDet's boxes if they are there, boxes by size, and the clicks of two papers."""
    model = build_model(SPEC, 0)
    model.save_pretrained(tmp_path / "model")
    for name, lvis in (("coco", False), ("lvis", True)):
        instances.write(tmp_path / name, model.eval(), lvis)
    coco, lvis, scores = tmp_path / "coco", tmp_path / "lvis", tmp_path / "scores.json"
    (coco / "photos").rename(coco / "val2017")
    (coco / "instances.json").rename(coco / "instances_val2017.json")
    words = [str(tmp_path / "model"), *CPU, "--json", str(scores)]
    invoke("benchmark", "coco", *words, "--data", coco)
    out = capsys.readouterr().out
    assert "no mask AP: --boxes, coco_vitdet.json" in out
    assert "its annotation 5 (id 99)" in out
    published = r"^EfficientViT-SAM-XL1 \(SA-1B\) +0\.478 .*0\.598 .* 0\.713 +0\.753 "
    assert re.search(published, out, re.M)
    assert re.search(r"^EfficientSAM-S \(SA-1B; random clicks\) .* 0\.500 ", out, re.M)
    (coco / "source_json_file").mkdir()
    (coco / "boxes.json").rename(coco / "source_json_file/coco_vitdet.json")
    figures = ["--pictures", str(tmp_path / "figures")]
    invoke("benchmark", "coco", *words, "--data", coco, *figures)
    found = read_json(scores)["answers"]
    assert list(found) == ["confident", "random clicks", "first_token"]
    assert 0 < found["confident"]["AP"] < 1
    assert list(found["confident"]["mIoU"]) == ["1", "3", "5"]
    (coco / "val2017/12.jpg").rename(tmp_path / "12.jpg")
    refined = ["--data", str(coco), "--answers", "refined", "confident"]
    invoke("benchmark", "coco", *words, *refined)
    assert "12.jpg" in capsys.readouterr().out
    partly = read_json(scores)
    assert partly["images"] == 2
    refined = partly["answers"]["refined"]["detected_boxes"]["prompts"]["answer"]
    assert refined.startswith("refined: the single mask for the box and")
    assert found["first_token"]["AP"] != found["confident"]["AP"]
    assert (tmp_path / "figures/best.png").is_file()
    (lvis / "photos/val2017").rename(lvis / "val2017")
    (lvis / "annotations").mkdir()
    (lvis / "instances.json").rename(lvis / "annotations/lvis_v1_val.json")
    boxes = f"--boxes {lvis}/boxes.json --answers first_token".split()
    invoke("benchmark", "lvis", *words, "--data", lvis, *boxes)
    assert "AP frequent" in capsys.readouterr().out
    [answer] = [each for each in read_json(scores)["answers"].values() if "AP" in each]
    assert answer["detected_boxes"]["protocol"]["federated"]
    assert answer["detected_boxes"]["found"] == 27, "nobody looked for the category of three"
    (lvis / "bad.json").write_text(
        '[{"image_id": 99, "category_id": 3, "bbox": [1, 1, 4, 4], "score": 1}]'
    )
    assert "its image_id 99 is not in" in refusal(
        capsys, "benchmark", "lvis", *words, "--data", lvis, "--boxes", f"{lvis}/bad.json"
    )


def test_sbd_is_converted_and_scored(tmp_path, capsys):
    write_archive("sbd", tmp_path / "SBD")
    (tmp_path / "SBD/train.txt").write_text("2008_000001\n")
    words = f"--images {tmp_path}/SBD/img --list {tmp_path}/SBD/train.txt".split()
    source, out = str(tmp_path / "SBD/inst"), str(tmp_path / "shards")
    invoke("convert", source, *words, "--out", out)
    assert "1 image with" in capsys.readouterr().out
    data = f"--data {tmp_path}/SBD --max-images 1 --answers confident".split()
    invoke("benchmark", "sbd", "starter", *data, *CPU)
    assert "of 6,671" in capsys.readouterr().out


def test_a_reproduction_is_described_without_weights(tmp_path, capsys):
    path = tmp_path / "known.json"
    invoke(f"benchmark --reproduce edge_sam --json {path}")
    printed, known = capsys.readouterr().out, read_json(path)["reproduce"]
    assert known["published"]["sa1k"]["box"] == 0.83
    for words in ("planned hours", "another result", "gigamask distill edge_sam"):
        assert words in printed


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name a benchmark"),
        (["grabcut"], "needs weights and --data"),
        (["grabcut", "starter"], "needs weights and --data"),
        (["starter", "grabcut"], "unknown benchmark 'starter'"),
        ("grabcutt starter --data x".split(), "choose from grabcut"),
        ("grabcut starter --data nothing".split(), "GrabCut.zip"),
        ("grabcut starter --data x y".split(), "one folder"),
        ("coco starter --data x y".split(), "one folder"),
        ("grabcut starter --data nothing --images x".split(), "folder of masks"),
        ("bsds starter --data x --images y".split(), "--images"),
        ("bsds starter --data x --answers confident confident".split(), "--answers"),
        (
            "grabcut starter --data {} --answers refined".split(),
            "--answers refined is not for GrabCut",
        ),
        ("bsds starter --data x --max-images 0".split(), "max-images"),
        ("bsds starter --data x --min-predicted-iou 7".split(), "--min-predicted-iou"),
        ("coco starter --data x".split(), "must hold instances_val2017.json"),
        ("bsds starter --data x --boxes y".split(), "--boxes is for coco and lvis"),
        ("grabcut nothing.pth --data {}".split(), "nothing.pth"),
        (["--reproduce", "tiny"], "--reproduce tiny"),
    ],
)
def test_wrong_arguments_are_one_line(words, message, grabcut, tmp_path, capsys):
    filled = [str(grabcut) if word == "{}" else word for word in words]
    assert main(["benchmark", *filled, "--json", str(tmp_path / "none.json")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "none.json").exists()


def test_every_archive_is_a_benchmark_with_published_rows():
    assert set(ARCHIVES) == {name for name, each in BENCHMARKS.items() if each.archive}
    for name in BENCHMARKS:
        assert literature.rows(name)
