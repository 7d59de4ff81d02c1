"""What is worked out of runs."""

import pytest

from gigamask.report import charts, history, page, summary
from tests.unit.report.test_history import record, written


def test_differences_are_only_what_differs():
    one = {"recipe": "a", "out": "x", "steps": "4", "data": ["p", "q"], "seed": "0"}
    two = {"recipe": "b", "out": "y", "steps": "5", "data": ["p", "q"], "sampler.window": "3"}
    assert summary.differing_flags(one, two) == {
        "steps": ["4", "5"],
        "seed": ["0", None],
        "sampler.window": [None, "3"],
    }
    assert summary.differing_flags({"data": []}, {"data": ["p", "q"]}) == {
        "data": ["(none)", "p q"]
    }


def test_throughput_is_of_the_median_record(tmp_path):
    """4 images a step: a tenth of a second waited of 0.4 is a quarter."""
    records = [record(step, memory_gb=step / 10) for step in (10, 20, 30)]
    records[1] |= {"images_per_s": 8.0, "data_time_s": 2.0}
    evaluation = {"step": 30, "evaluation": {"box": 0.5}, "seconds": 7.0}
    found = summary.throughput(history.read(written(tmp_path / "run", *records, evaluation)))
    assert (found["images_per_s"], found["step_s"], found["training_s"]) == pytest.approx(
        (10.0, 0.4, 12.0)
    )
    assert (found["waiting"], found["evaluation_s"], found["memory_gb"]) == pytest.approx(
        (0.25, 7.0, 3.0)
    )
    assert summary.waiting(history.read(tmp_path / "run")) == pytest.approx([0.25, 1.0, 0.25])
    nothing = summary.throughput(history.read(written(tmp_path / "none", config="")))
    assert set(nothing.values()) == {None}


def test_the_best_evaluation_is_by_what_the_run_keeps_its_best_by(tmp_path):
    told = [
        {"step": step, "evaluation": {"1 click": one, "box": box}}
        for step, one, box in ((1, 0.9, 0.1), (2, 0.2, 0.8), (3, 0.3, 0.8))
    ]
    assert summary.best(history.read(written(tmp_path / "plain", *told)))["step"] == 1
    by_box = summary.best(
        history.read(written(tmp_path / "box", *told, config="evaluation.best-by: box\n"))
    )
    assert (by_box["step"], by_box["by"]) == (3, "box")
    other = {"step": 4, "evaluation": {"1 click": 0.1}, "of": "15 masks on 3 images"}
    assert summary.best(history.read(written(tmp_path / "other", *told, other)))["step"] == 4
    assert summary.best(history.read(written(tmp_path / "none", record(1)))) is None
    assert (
        summary.best(
            history.read(
                written(tmp_path / "nan", {"step": 1, "evaluation": {"box": float("nan")}})
            )
        )
        is None
    )


@pytest.mark.parametrize(
    "first, last, compared",
    [("a", "b", [6, 8]), ("", "b", [2, 4, 6, 8]), ("a", "a", [2, 4, 6, 8])],
)
def test_only_scores_of_the_same_data_are_compared(tmp_path, first, last, compared):
    """Other data, of as many masks and images; none are stated by earlier versions."""
    told = [
        {
            "step": step,
            "evaluation": {"box": score},
            "of": "9 masks on 2 images",
            "subject": subject,
        }
        for step, score, subject in (
            (2, 0.9, first),
            (4, 0.8, first),
            (6, 0.3, last),
            (8, 0.2, last),
        )
    ]
    run = history.read(written(tmp_path / "run", *told))
    assert [one["step"] for one in summary.comparable(run)] == compared
    assert [one["step"] for one in charts.curves(run)["evaluations"]] == compared
    assert summary.best(run)["step"] == compared[0]
    runs = {"run": run}
    told = page.page(runs, summary.summarize(runs, {"run": None}))
    assert ("2 evaluations of other data" in told) == (len(compared) == 2)


def test_every_event_of_a_run_is_listed(tmp_path):
    run = history.read(
        written(
            tmp_path / "run",
            {"step": 2, "skipped_sample": "t:sa_1", "reason": "the JPEG of t:sa_1 ends early"},
            {"step": 3, "skipped_step": "t:sa_2"},
            {"step": 3, "save_failed": "no space"},
            {"step": 9, "leak": "this process", "bytes": 5e6, "bytes_per_step": 4000, "since": 2},
            record(10),
            {
                "step": 4,
                "started": "2026-01-02T03:04:05+00:00",
                "device": "cpu",
                "corrupt_checkpoints": ["step_00000008"],
            },
            record(10),
        )
    )
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write("{\n")
    told = summary.recovered(history.read(tmp_path / "run"))
    assert summary.recovered(run) == {
        what: lines for what, lines in told.items() if what != "damaged lines"
    }
    assert told == {
        "resumed after a stop": [
            "at step 4 on 2026-01-02 03:04:05 UTC, at least 6 steps trained again"
        ],
        "damaged checkpoints": ["step_00000008 was damaged; training resumed from step 4"],
        "samples left out": ["step 2: the JPEG of t:sa_1 ends early"],
        "skipped steps": ["step 3, gradient not finite or no mask: t:sa_2"],
        "failed saves": ["step 3: no space"],
        "growing memory": ["step 9: this process holds 5 MB, growing by 4 kB per step"],
        "damaged lines": ["1 of metrics.jsonl"],
    }


def test_going_on_where_a_run_stopped_loses_nothing(tmp_path):
    start = {"step": 10, "started": "2026-01-02T03:04:05+00:00", "device": "cpu"}
    told = summary.recovered(history.read(written(tmp_path / "run", record(10), start, record(20))))
    assert told == {
        "resumed after a stop": ["at step 10 on 2026-01-02 03:04:05 UTC, no recorded step lost"]
    }
    old = summary.recovered(
        history.read(written(tmp_path / "old", record(10), record(20), record(20)))
    )
    assert old == {"resumed after a stop": ["after step 20, from an earlier step"]}


def test_the_last_records_have_a_mean():
    assert summary.last_mean([]) == summary.last_mean([None]) == (None, 1)
    assert summary.last_mean([3.0, 1.0, None]) == (1.0, 1)
    mean, count = summary.last_mean([None, *map(float, range(100))])
    assert (mean, count) == (97.0, 5)
