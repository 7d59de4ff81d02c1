"""The classes in Meta's `segment_anything.modeling.prompt_encoder`."""

from gigamask.models.prompt_encoder import PositionEmbeddingRandom, PromptEncoder

__all__ = ["PositionEmbeddingRandom", "PromptEncoder"]
