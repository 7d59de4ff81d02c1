"""How the commands of the page of memory are made small."""

ADDED = [
    (
        r"^memory sample",
        "",
        "--height 150 --width 225 --masks 10",
        "a tenth of the height and width",
    ),
    (
        r"^memory loader",
        "",
        "--batches 9 --workers 1 --recipe small.py:small",
        "the fewest batches that show growth, of one loader process",
    ),
]
