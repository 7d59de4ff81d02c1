"""What building, loading and training ask of a model, whatever it predicts."""

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.models.configs import DECODER_PREFIX, MAE_PREFIX
from gigamask.rng import make_torch_generator


class Model(nn.Module):
    """Base class of models that are trained; built from `config`, its only argument."""

    config: Any
    kind: ClassVar[str]
    """what the model is called in messages"""

    @staticmethod
    def initial_matrix(shape: torch.Size, generator: torch.Generator, fan_in: int) -> Tensor:
        """Return the initial weight of a linear layer or convolution.

        Its variance is 1 / (3 * fan-in), a standard deviation of 0.02 at ViT-B's width; it is
        truncated at two standard deviations.

        Args:
            shape: Its shape.
            generator: Its random generator.
            fan_in: Inputs of each output.
        """
        std = (3 * fan_in) ** -0.5
        return nn.init.trunc_normal_(
            torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=generator
        )

    def init_parts(self, seed: int) -> Sequence[nn.Module]:
        """Return the parts that have their own initial values, built anew.

        Args:
            seed: Random seed of the run.
        """
        return ()

    def finish_init(self, seed: int) -> None:
        """Change initial values that depend on others.

        Args:
            seed: Random seed of the run.
        """

    @torch.no_grad()
    def init_weights(self, seed: int, left_out: Collection[str] = ()) -> None:
        """Initialize every parameter and buffer from a random generator keyed by its name.

        Values thus depend neither on the order nor on the sizes of other parameters. Of torch's
        layers, weight matrices are `initial_matrix`, biases 0, norms 1 and embeddings standard
        normal. The direct parameters of a module with `parameter_std` are normal with that standard
        deviation; a module with a method `initial_value` has what that returns.

        Args:
            seed: Random seed of the run.
            left_out: Names of tensors that are loaded, and so get no values.

        Raises:
            GigamaskError: There is no rule for a tensor.
        """
        skipped = {each for part in self.init_parts(seed) for each in part.modules()}
        for path, module in self.named_modules():
            if module in skipped:
                continue
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                full = f"{path}.{name}"
                if full.removeprefix(".") in left_out:
                    continue
                generator = make_torch_generator(seed, f"weights {full}")
                value = self._initial_value(module, name, tensor.shape, generator)
                if value is None:
                    raise GigamaskError(
                        f"{full}: there is no initialization for {type(module).__name__}; set "
                        "`parameter_std`, load weights, or initialize it yourself"
                    )
                tensor.copy_(value)
        if not left_out:
            self.finish_init(seed)

    def _initial_value(
        self, module: nn.Module, name: str, shape: torch.Size, generator: torch.Generator
    ) -> Tensor | None:
        """Return the initial value of a parameter or buffer; None: there is no rule for it."""
        if (std := getattr(module, "parameter_std", None)) is not None:
            return std * torch.randn(shape, generator=generator)
        if own := getattr(module, "initial_value", None):
            return own(name, shape, generator)
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and name == "weight":
            # Each pixel of a 2 x 2 transposed convolution has one weight per input channel.
            fan_in = math.prod(shape[1:])
            if isinstance(module, nn.ConvTranspose2d):
                fan_in = shape[0]
            return self.initial_matrix(shape, generator, fan_in)
        if isinstance(module, nn.Embedding):
            return torch.randn(shape, generator=generator)
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) and name == "weight":
            return torch.ones(shape)
        return torch.zeros(shape) if name == "bias" else None

    @property
    def encoder(self) -> nn.Module:
        """The part whose weights are sharded, or whose gradients are exchanged early."""
        return self

    @property
    def encoder_blocks(self) -> list[nn.Module]:
        """The encoder's blocks, from input to output."""
        return list(getattr(self, "blocks", ()))

    @property
    def pretrained_names(self) -> tuple[str, ...]:
        """What the names of the parameters begin with that `load_pretrained` sets."""
        return ()

    def load_pretrained(self) -> None:
        """Load the trained weights that a part comes with, unless training starts from --init."""

    def load_init(self, path: str) -> set[str]:
        """Load initial weights.

        Args:
            path: Path of the weights.

        Returns:
            Names of the tensors whose values come from the weights.

        Raises:
            GigamaskError: The weights do not fit the model.
        """
        if path.startswith((MAE_PREFIX, DECODER_PREFIX)):
            prefix, _, whole = path.partition(":")
            source = "an MAE" if path.startswith(MAE_PREFIX) else "the decoder of another"
            raise GigamaskError(
                f"{path}: {prefix}: starts a SAM from {source}; to continue with the {self.kind} "
                f"itself, pass {whole}"
            )
        from gigamask.models import state_dict
        from gigamask.models.families import suggest_recipe

        weights, _ = state_dict.read_weights(path)
        with suggest_recipe(weights):
            state_dict.load_weights(self, weights, path)
        return set(weights)
