"""Grounding: finding the masks of an image that a text describes."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="grounding",
    commands={
        "ground": "gigamask.plugins.grounding.cli.ground:GroundCommand",
        "ask": "gigamask.plugins.grounding.cli.ask:AskCommand",
    },
    trainings={"ground train": ""},
    recipes={
        "ground train": {
            "ground": "gigamask.plugins.grounding.recipes:ground",
            "ground_tiny": "gigamask.plugins.grounding.recipes:ground_tiny",
        }
    },
    components={
        "text": {
            "words": "gigamask.plugins.grounding.text_encoders:WordTransformer",
            "minilm": "gigamask.plugins.grounding.presets:MINILM",
            "huggingface": "gigamask.plugins.grounding.text_encoders:HuggingFace",
        },
        "evaluation": {"queries": "gigamask.plugins.grounding.config:GroundingEvalConfig"},
    },
    interfaces={"text": "gigamask.plugins.grounding.text_encoders:TextEncoder"},
    model_configs={"relevance": "gigamask.plugins.grounding.model_config:GroundingModelConfig"},
    text_predictors={"grounding": "gigamask.plugins.grounding.cli.ground:open_predictor"},
)
