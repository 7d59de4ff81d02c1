"""How the commands of the pages of benchmarks are made small."""

ADDED = [
    (r"^benchmark \w", "", "--max-images 1", "one image"),
]
