"""Describable scenes as files: determined by seed and number, with queries that name the right
masks.
"""

import pytest

from gigamask.data import index as indexes
from gigamask.plugins.grounding import queries
from gigamask.plugins.grounding.described_scenes import compose_scene, write
from tests.commands import invoke, refusal
from tests.plugins.grounding.laws.test_described_scenes import answers

pytestmark = pytest.mark.slow


def test_files_depend_on_seed_and_number_alone(tmp_path):
    for _ in range(2):  # the second time, over the same files
        paths, asked = write(tmp_path / "one", 5, seed=3, shard_images=3)
    assert [path.name for path in paths] == ["sa_000000.tar", "sa_000001.tar"]
    held = queries.read(tmp_path / "one" / "queries.jsonl")
    assert held == asked
    assert {(query.tar, query.image) for query in held} == {
        (f"sa_00000{number // 3}.tar", f"sa_{number}.jpg") for number in range(5)
    }
    write(tmp_path / "again", 3, seed=3, shard_images=3)
    write(tmp_path / "again", 2, seed=3, shard_images=3, first=3)
    for name in ("sa_000000.tar", "sa_000001.tar", "queries.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    (tmp_path / "again" / "sa_000001.tar").unlink()  # what others have written is not overwritten
    write(tmp_path / "again", 2, seed=4, shard_images=3, first=3)
    both = queries.read(tmp_path / "again" / "queries.jsonl")
    assert [query for query in both if query.tar == "sa_000000.tar"] == [
        query for query in held if query.tar == "sa_000000.tar"
    ]
    assert both != held


def test_queries_name_the_right_masks_of_the_files(tmp_path):
    index = indexes.build(write(tmp_path, 3, seed=1)[0], tmp_path / "index")
    asked = queries.read(tmp_path / "queries.jsonl")
    rows = queries.locate(asked, index)
    scenes = [compose_scene(1, number) for number in range(3)]
    for query, row in zip(asked, rows.tolist(), strict=True):
        things = scenes[int(query.image[3:-4])].objects
        areas = index.masks["area"][index.mask_rows(row)][list(query.mask_indices)]
        assert sorted(areas.tolist()) == sorted(
            things[number].area for number in answers(query.text, things)
        )


def test_the_verb_writes_them(tmp_path, capsys):
    words = ["ground", "synth", str(tmp_path), "--images", "3"]
    invoke(*words, "--long-side", "90", "100")
    assert f"{tmp_path}/queries.jsonl" in capsys.readouterr().out
    for sides in (("31", "100"), ("100", "90"), ("90", "8193")):
        assert f"32 to 8192, the smaller first (got {' '.join(sides)})" in refusal(
            capsys, *words, "--long-side", *sides
        )
