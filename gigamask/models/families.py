"""Families of models: how weights of each are named in others' files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.models import convert
from gigamask.models.configs import ModelConfig, SamConfig, as_sam, tiny, vit_b, vit_h, vit_l
from gigamask.models.weight_files import State
from gigamask.models.weight_paths import PROCESSORS
from gigamask.serialization import read_json

MAX_CONFIG_BYTES = 1 << 20
"""Largest config.json that is read."""


def check_processor(config: SamConfig, weights: Path) -> None:
    """Check that an image processor beside weights has the pixels that the model sees.

    Args:
        config: Configuration of the model.
        weights: The file of the weights.

    Raises:
        GigamaskError: It scales pixels by another mean or standard deviation.
    """
    for path in map(weights.with_name, PROCESSORS):
        content = read_json(path, dict, MAX_CONFIG_BYTES) if path.is_file() else {}
        nested = content.get("image_processor")
        stated = nested if isinstance(nested, dict) else content
        for name, own in zip(("image_mean", "image_std"), config.pixel_scale, strict=True):
            expected = [round(value / 255, 3) for value in own]
            found = stated.get(name) or expected
            values = found if isinstance(found, list) else [found]
            if [round(each, 3) if isinstance(each, float) else each for each in values] != expected:
                raise GigamaskError(
                    f"{path}: {name} is {found}, the model's is {expected}; train it with these "
                    "again"
                )


class ModelFamily(ABC):
    """A published family of models, whose weights have names of their own in others' files."""

    huggingface: ClassVar[str]
    """what transformers' classes are called, without `Model` and `Processor`"""
    meta_key: ClassVar[str] = ""
    """key of the weights in Meta's file; "": the file has nothing else"""

    @abstractmethod
    def from_others(
        self, state: State, stated: ModelConfig | None, source: Path
    ) -> tuple[State, ModelConfig | None] | None:
        """Return weights that others have named under gigamask's names.

        Args:
            state: The tensors of a file.
            stated: The configuration that it states.
            source: The file.

        Returns:
            The weights, and the configuration that the file, another beside it or the sizes of the
            tensors state; None if the names are not this family's.

        Raises:
            GigamaskError: The names are this family's, but not all, or files contradict each other.
        """

    @abstractmethod
    def to_meta(self, state: State) -> State:
        """Return weights under the names of Meta's file."""

    def other_tensors(self, source: Path) -> State:
        """Return the tensors of Meta's file that `from_others` leaves out, under Meta's names.

        Args:
            source: The file.
        """
        return {}

    @abstractmethod
    def to_huggingface(self, state: State) -> State:
        """Return weights under the names of transformers' model."""

    @abstractmethod
    def huggingface_config(self, config: SamConfig) -> dict[str, Any]:
        """Return the content of config.json for transformers' model.

        Args:
            config: Configuration of the model.
        """

    @abstractmethod
    def recipe(self, state: State) -> str | None:
        """Return which recipes train models of the size of these weights; None: no built-in one.

        Args:
            state: Weights under gigamask's names, or of a pre-trained encoder alone.
        """


class SamFamily(ModelFamily):
    """Meta's SAM, whose names are gigamask's."""

    huggingface = "Sam"

    def from_others(
        self, state: State, stated: ModelConfig | None, source: Path
    ) -> tuple[State, ModelConfig | None] | None:
        """Return the weights of a `SamModel` under gigamask's names.

        Args:
            state: The tensors of a file.
            stated: The configuration that it states.
            source: The file.
        """
        if not any(name.startswith("vision_encoder.") for name in state):
            return None
        path = source.with_name("config.json")
        if not path.is_file():
            return convert.from_huggingface(state), stated
        content = read_json(path, dict, MAX_CONFIG_BYTES)
        config = convert.parse_huggingface_config(content, str(path))
        own = as_sam(stated, str(source))
        if own is not None:
            # They only matter in training, or are of the pixels, and config.json states neither.
            config = replace(
                config,
                drop_path_rate=own.drop_path_rate,
                custom_init=own.custom_init,
                pixels=own.pixels,
            )
            if config != own:
                raise GigamaskError(
                    f"{path}: contradicts the configuration in {source.name}; export the folder "
                    "again"
                )
        check_processor(config, source)
        return convert.from_huggingface(state), config

    def to_meta(self, state: State) -> State:
        """Return the weights as they are."""
        return state

    def to_huggingface(self, state: State) -> State:
        """Return weights under the names of `SamModel`."""
        return convert.to_huggingface(state)

    def huggingface_config(self, config: SamConfig) -> dict[str, Any]:
        """Return the content of config.json for `SamModel`."""
        return convert.huggingface_config(config)

    def recipe(self, state: State) -> str | None:
        """Return which recipes train a ViT of the width and depth of these weights."""
        encoder = {name.removeprefix("image_encoder."): value for name, value in state.items()}
        width = encoder["pos_embed"].shape[-1] if "pos_embed" in encoder else 0
        depth = len(convert.block_indices(encoder, r"blocks\."))
        for make, names in SAM_RECIPES.items():
            config = make()
            if (config.embed_dim, config.depth) == (width, depth):
                return names
        return None


SAM_RECIPES = {
    vit_b: "sam_vit_b or finetune",
    vit_l: "sam_vit_l or finetune_vit_l",
    vit_h: "sam_vit_h or finetune_vit_h",
    tiny: "tiny",
}
"""Recipes that train each size of SAM, for error messages."""
SAM = SamFamily()


def families() -> list[ModelFamily]:
    """Return all families, SAM's last, since other names begin like SAM's, too."""
    return [*plugin.load_all("model_families"), SAM]


@contextmanager
def suggest_recipe(weights: State) -> Iterator[None]:
    """Add to the error of weights of another size which recipes they fit.

    Args:
        weights: The weights.
    """
    try:
        yield
    except GigamaskError as error:
        names = next(filter(None, (each.recipe(weights) for each in families())), "")
        hint = f"; these weights fit the recipe {names}" if names else ""
        raise GigamaskError(f"{error}{hint}") from None
