"""Distillation: a small model learns from a large one, or its encoder from another's embedding."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="distill",
    trainings={
        "distill": "train a small model to do what a larger one does, or resume a run",
    },
    recipes={
        "distill": {
            "compact_student": "gigamask.plugins.distill.recipes:compact_student",
            "edge_sam": "gigamask.plugins.distill.recipes:edge_sam",
            "mobile_sam": "gigamask.plugins.distill.recipes:mobile_sam",
        },
        "pretrain": {
            "sami_vit_t": "gigamask.plugins.distill.sami_recipes:sami_vit_t",
            "sami_vit_s": "gigamask.plugins.distill.sami_recipes:sami_vit_s",
        },
        "train": {"efficient_sam": "gigamask.plugins.distill.sami_recipes:efficient_sam"},
    },
    functions={"distill": "gigamask.plugins.distill.run:distill"},
)
