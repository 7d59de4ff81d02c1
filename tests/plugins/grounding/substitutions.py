"""How the commands of the pages of grounding are made small."""

SMALL_GROUND = "small_ground.yaml"
REPLACED = [
    (r"--language FOLDER", "--language language", "a placeholder for a language model's folder"),
    (
        r"--segmenter plain\b",
        "--segmenter runs/plain",
        "the page names the run by its model",
    ),
]
ADDED = [
    (
        r"^ground train",
        f"--config {SMALL_GROUND}",
        "--steps 2",
        "the small segmenter's width, and two steps",
    ),
    (
        r"^ground memory",
        "",
        "--language language --vision none",
        "Llama's shapes take twenty seconds; tests/plugins/grounding has them",
    ),
]
