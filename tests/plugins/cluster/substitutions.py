"""How the commands of the pages of Slurm are made small."""

REPLACED = [
    (r"--submit slurm --submit-jobs \d+", "--submit local --submit-jobs 2", "no Slurm here"),
    (
        r"--submit slurm --submit-nodes 16 --submit-gpus 8",
        "--submit local --submit-gpus 0",
        "one machine without Slurm; tests/plugins/cluster/journeys/test_submit.py plays Slurm",
    ),
]
