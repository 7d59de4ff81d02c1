"""Replay faults and attacks: kills, flipped bits, full disks, hostile files, requests of strangers.

Each row runs the tests that replay one kind and counts the attacks: those tried, and those after
which the result was right or one line said what is wrong. A traceback, a hang, a silent change or
code that ran makes a test fail, and its attacks do not count as survived.

    python benchmarks/faults.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import format_faults

ROOT = Path(__file__).resolve().parents[1]
UNIT = "tests/unit"
PAGE = "tests/plugins/serve/unit"
WEIGHTS = {
    "adapters of peft": ["tests/plugins/peft/parity", "tests/plugins/peft/unit/test_config.py"],
    "encoders that draw and collect": [
        "tests/laws/test_foreign_modules.py",
        f"{UNIT}/distributed/test_activation_checkpointing.py",
        f"{UNIT}/distributed/test_fsdp.py",
        f"{UNIT}/training/test_first_step.py",
    ],
    "parameters without a gradient": [f"{UNIT}/training/test_unreached.py"],
    "prompts at the border": [
        "tests/laws/test_prompt_coordinates.py",
        f"{UNIT}/masks/test_valid_area.py",
    ],
    "averaged adapters, rates, idle heads": ["tests/laws/test_adapters_of_processes.py"],
}
"""Weights that would be wrong without a word."""
KINDS = {
    **WEIGHTS,
    "kill -9 at random moments, saves included": [
        "tests/laws/test_survival.py::test_thirty_kills_at_any_moment"
    ],
    "kill -9 in every evaluation": [
        "tests/laws/test_survival.py::test_kills_in_every_evaluation_change_neither_scores_nor_the_best"
    ],
    "signals in evaluations": [
        "tests/journeys/test_stopping.py::"
        "test_a_signal_ends_the_last_evaluation_which_a_resume_does",
        f"{UNIT}/evaluation/test_in_training.py::"
        "test_a_signal_to_one_process_stops_all_after_the_same_image",
    ],
    "small /dev/shm, 48 files, full board, epochs": ["tests/journeys/test_little_room.py"],
    "saves, damages, resumes: what is removed": [
        "tests/laws/test_retention.py",
        f"{UNIT}/training/test_retention.py",
    ],
    "other workers and processes, slow ones": [
        "tests/laws/test_training.py::test_ten_steps_killed_and_ten_more_are_twenty",
        "tests/laws/test_survival.py::"
        "test_no_process_waits_in_a_step_for_what_the_main_one_does_alone",
        "tests/laws/test_survival.py::test_every_sampler_goes_on_with_other_processes",
        "tests/journeys/test_evaluate_ranks.py",
        "tests/journeys/test_lora.py::test_two_processes_train_as_one",
    ],
    "signals to commands and their workers": [
        "tests/journeys/test_stopping.py",
        f"{UNIT}/test_signals.py",
        f"{UNIT}/cli/test_main.py",
        f"{UNIT}/data/test_worker_pool.py",
    ],
    "flipped bits: checkpoints, however named": [
        f"{UNIT}/training/test_checkpoint.py::test_flipped_bits_are_all_found",
        f"{UNIT}/training/test_checkpoint.py::"
        "test_flipped_bits_of_a_checkpoint_are_found_however_it_is_named",
    ],
    "flipped bits: exports": [
        f"{UNIT}/export/test_export.py::test_flipped_bits_of_an_export_are_found"
    ],
    "flipped bits: indexes, tars, mask stores": ["tests/laws/test_flipped_bits.py"],
    "full disk under every command": ["tests/journeys/test_full_disk.py"],
    "malformed weights": [f"{UNIT}/models/test_malformed_weights.py"],
    "malformed tars": ["tests/laws/test_malformed_tars.py"],
    "fuzzed headers and annotations": ["tests/laws/test_fuzz.py"],
    "damaged run folders": [f"{UNIT}/report/test_damaged.py"],
    "run folders that name code": ["tests/journeys/test_trust.py"],
    "JSON and YAML of strangers": [f"{UNIT}/test_serialization.py"],
    "projects: kills, damage, odd folders, no room": [
        f"{PAGE}/test_project_attacks.py",
        f"{PAGE}/test_lost_images.py",
    ],
    "requests of strangers to the page": [
        f"{PAGE}/test_security.py",
        f"{PAGE}/test_server.py",
        f"{PAGE}/test_session.py",
        f"{PAGE}/test_runs_view.py",
    ],
}


def main() -> None:
    """Print a row for each kind, and exit with 1 if an attack was not survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kinds whose name contains this text")
    only = parser.parse_args().only
    print(f"{'fault':46}{'tried':>8}{'survived':>10}", flush=True)
    failed = False
    for kind, paths in KINDS.items():
        if only in kind:
            tried, survived = replay(paths)
            failed |= survived < tried
            print(f"{kind:46}{tried:>8}{survived:>10}", flush=True)
    sys.exit(failed | attack_formats(only, 2000))


def attack_formats(only: str, mutations: int) -> bool:
    """Print a row for mutated files of each format of people's; return whether one got through.

    Args:
        only: Rows whose name contains this text.
        mutations: How many, of each format.
    """
    failed = False
    for name in format_faults.FORMATS:
        kind = f"mutated files: {name}"
        if only in kind:
            found = format_faults.run(name, mutations)
            failed |= found["survived"] < found["tried"]
            print(
                f"{kind:46}{found['tried']:>8}{found['survived']:>10}   peak {found['peak_mb']} MB "
                f"({found['over_start_mb']} over a sound file), slowest {found['slowest_s']} s",
                flush=True,
            )
    return failed


def replay(paths: list[str]) -> tuple[int, int]:
    """Return the attacks that the tests tried, and those survived.

    A test counts as one attack unless it records the property `tried`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
        done = subprocess.run(
            [*command, "--no-shape-checks", "-o", "junit_family=xunit1", f"--junitxml={report}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            sys.exit(
                f"{' '.join(paths)}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}"
            )
        tried = survived = 0
        for test in ElementTree.parse(report).iter("testcase"):
            if test.find("skipped") is not None:
                continue
            told = {each.get("name"): each.get("value") for each in test.iter("property")}
            count = int(told.get("tried") or 1)
            tried += count
            survived += count if test.find("failure") is None and test.find("error") is None else 0
    if done.returncode:
        print(
            "\n".join(
                line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            )
        )
    return tried, survived


if __name__ == "__main__":
    main()
