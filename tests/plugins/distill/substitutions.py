"""How the commands of the pages of distillation are made small."""

from tests.journeys.substitutions import SMALL, SMALL_COMPACT

REPLACED = [
    (r"\bsam_vit_h_4b8939.pth", "sam_vit_b_01ec64.pth", "one small model in place of all sizes"),
]
ADDED = [
    (r"^(distill|plan) edge_sam", f"--config {SMALL}", "--steps 2", "a small model and two steps"),
    (
        r"^(distill|plan) mobile_sam",
        "--config small_features.yaml",
        "--steps 2",
        "the same without prompts",
    ),
    (r"^distill compact_student", f"--config {SMALL_COMPACT}", "--steps 2", "as for compact"),
    (
        r"^distill (edge_sam|compact_student)(?!.*--features.steps)",
        "",
        "--features.steps 2 --features.batch-size 2",
        "two steps in each phase",
    ),
    (r"^pretrain sami_", "", "--model.feature-channels 16", "those of the small teacher"),
    (
        r"^train efficient_sam",
        "",
        "--model.encoder.embed-dim 16 --model.encoder.depth 2 --model.encoder.num-heads 2",
        "the sizes of the small masked autoencoder",
    ),
]
