"""SAM 2's names of weights."""

from pathlib import Path
from typing import Any

from gigamask.models.configs import ModelConfig, SamConfig
from gigamask.models.families import MAX_CONFIG_BYTES, ModelFamily, check_processor
from gigamask.models.weight_files import State, read_pth
from gigamask.plugins.sam2 import convert
from gigamask.serialization import read_json


class Sam2Family(ModelFamily):
    """The image models of SAM 2.1."""

    huggingface = "Sam2"
    meta_key = "model"

    def from_others(
        self, state: State, stated: ModelConfig | None, source: Path
    ) -> tuple[State, ModelConfig | None] | None:
        """Return the weights of Meta's file or of a `Sam2Model` under gigamask's names.

        Args:
            state: The tensors of a file.
            stated: The configuration that it states.
            source: The file.
        """
        if convert.is_meta(state):
            state = convert.from_meta(state, str(source))
        elif convert.is_huggingface(state):
            state = convert.from_huggingface(state)
            config, path = convert.infer_config(state), source.with_name("config.json")
            if not stated and config and path.is_file():
                content = read_json(path, dict, MAX_CONFIG_BYTES)
                config = convert.with_huggingface_config(config, content, str(path))
                check_processor(config, source)
                return state, config
        else:
            return None
        return state, stated or convert.infer_config(state)

    def to_meta(self, state: State) -> State:
        """Return weights under Meta's names, without those of videos."""
        return convert.to_meta(state)

    def other_tensors(self, source: Path) -> State:
        """Return the tensors of the memory and of videos."""
        state, _ = read_pth(source)
        is_kept = convert.VIDEO.match if convert.is_meta(state) else lambda name: False
        return {name: value for name, value in state.items() if is_kept(name)}

    def to_huggingface(self, state: State) -> State:
        """Return weights under the names of `Sam2Model`."""
        return convert.to_huggingface(state)

    def huggingface_config(self, config: SamConfig) -> dict[str, Any]:
        """Return the content of config.json for `Sam2Model`."""
        return convert.huggingface_config(config)

    def recipe(self, state: State) -> str | None:
        """Return the recipe of the published size of these weights."""
        return convert.recipe(state)


SAM2 = Sam2Family()
