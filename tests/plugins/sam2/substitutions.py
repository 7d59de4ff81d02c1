"""How the commands of the pages of SAM 2 are made small."""

SMALL_SAM2 = "small_sam2.yaml"
ADDED = [
    (r"^(train|plan) sam2_", f"--config {SMALL_SAM2}", "", "a small Hiera"),
    (r"^train sam2_", "", "--steps 2", "two steps"),
]
