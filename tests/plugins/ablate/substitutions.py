"""How the commands of the pages of ablations are made small."""

REPLACED = [
    (
        r"^ablate (samplers|losses)",
        "ablate two.yaml",
        "two variants; tests/plugins/ablate/unit/test_ablation.py has the others",
    ),
    (r" --cpu-minutes \d+", "", "one step; tests/plugins/ablate/journeys measures steps"),
    (r"--parallel-runs \d", "--parallel-runs 1", "one core"),
]
ADDED = [
    (
        r"^ablate",
        "",
        "--recipe small.py:small --steps 1 --seeds 1 --max-images 1",
        "one step of a small model, one seed, one image",
    ),
]
