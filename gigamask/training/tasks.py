"""The losses of a training step of SAM: those of rounds of prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from gigamask.distributed.foreign_modules import is_foreign
from gigamask.distributed.fsdp import dummy_forward, is_sharded
from gigamask.distributed.precision import HALF_DTYPES, Precision, autocast
from gigamask.distributed.profile_ranges import profile_generator, profile_range
from gigamask.errors import GigamaskError
from gigamask.interfaces import Kernels, Loss, Mining, PromptSchedule, Task
from gigamask.masks.valid_area import covered_parts, valid_cells
from gigamask.models.layers import LayerNorm2d, TokenNorm
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.promptable import PromptableModel
from gigamask.models.weight_copies import casting_blocks, weight_copies
from gigamask.prompts.rounds import run_rounds
from gigamask.types import (
    Batch,
    ImageEmbedding,
    LossSums,
    Prediction,
    PromptRound,
    Prompts,
    RandomInputs,
    Targets,
)

CAST_MODULES = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, LayerNorm2d, TokenNorm)
"""Modules of the mask decoder that compute in half precision under autocast."""
CAST_IN_BLOCKS = (nn.Linear, nn.Conv2d)
"""Likewise of the image encoder's blocks."""
FILL = 8
"""Multiple up to which groups of masks are filled, since oneDNN prepares each new shape."""


@dataclass(frozen=True)
class CompiledRound:
    """Compiled functions of a round, for one number of masks.

    Attributes:
        decode: `PromptDecoder.__call__`.
        loss: The loss.
        schedule: The schedule, whose methods are compiled.
    """

    decode: Callable[[PromptDecoder, Prompts], Prediction]
    loss: Callable[[PromptRound, Targets], LossSums]
    schedule: PromptSchedule


@dataclass(frozen=True)
class SamTask(Task):
    """Promptable segmentation: encode images once, then run rounds of prompts on chunks of masks.

    Every round of a chunk is one term of the loss. The logits passed on as the next round's mask
    prompt are detached, so that rounds share only the image embedding and can be back-propagated
    one by one (the paper does not say whether gradients flow through the mask prompt).

    Args:
        schedule: The prompts of each round.
        loss: The loss of a round.
        masks_per_chunk: Masks decoded at once.
        precision: Precision of the model.
        full_resolution: Whether losses and clicks use the grid of the batch's masks, to which the
            logits are upsampled, instead of the model's low-resolution grid.
        mining: Chooses the masks to train on; None trains on all.
        compile_backend: Backend of torch.compile for `compiled`; None compiles nothing.
        fast: Compiled functions of a round; chunks with fewer masks are filled up for them.
        frozen_encoder: Returns the embeddings of a batch if the encoder is frozen; None runs the
            encoder.
        kernels: What the model computes with in `compiled`, if there is no backend.
    """

    schedule: PromptSchedule
    loss: Loss
    masks_per_chunk: int
    precision: Precision = "fp32"
    full_resolution: bool = False
    mining: Mining | None = None  # pyrefly: ignore[bad-override] (a property in `Task`)
    compile_backend: str | None = None
    fast: CompiledRound | None = None
    frozen_encoder: Callable[[PromptableModel, Batch, Precision], Tensor] | None = None
    kernels: Kernels = field(default_factory=Kernels)

    @contextmanager
    def compiled(self, model: PromptableModel) -> Iterator[Task]:
        """Yield the task whose rounds are compiled, if there is a backend, or use the kernels.

        Args:
            model: Model to train, whose encoder is compiled within the context.
        """
        if self.compile_backend is None:
            with self.kernels.used(self, model) as task:
                yield task
            return
        from gigamask.distributed.compilation import (
            compile_function,
            compile_methods,
            compiled_modules,
        )

        backend = self.compile_backend
        fast = CompiledRound(
            compile_function(PromptDecoder.__call__, backend),
            compile_function(self.loss.__call__, backend),
            compile_methods(self.schedule, backend),
        )
        with compiled_modules(model, backend):
            yield replace(self, fast=fast)

    def compute_losses(
        self, model: PromptableModel, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the loss of each round of each chunk of masks.

        Args:
            model: The model.
            batch: The micro-batch; without masks, a sharded model runs on a dummy image.
            detach: Detaches the embedding, on which the gradients of all rounds accumulate.
        """
        if not len(batch.mask_image):
            side = model.config.image_size
            image = batch.images.new_zeros(1, batch.images.shape[1], side, side)
            size = batch.input_sizes.new_full((1, 2), side)
            dummy_forward(model, lambda: encode(model, image, size, None, self.precision))
            return
        if self.frozen_encoder is not None:
            encoded = self.frozen_encoder(model, batch, self.precision)
        else:
            drop_path = batch.random_inputs.drop_path
            dtype = None if self.fast else HALF_DTYPES.get(self.precision)
            if dtype and casts_itself(model):
                dtype = None
            with casting_blocks(model.encoder_blocks, CAST_IN_BLOCKS, dtype):
                encoded = encode(model, batch.images, batch.input_sizes, drop_path, self.precision)
        # In float32, since the gradients of all rounds are summed here.
        embedding = detach(encoded.to(torch.promote_types(encoded.dtype, torch.float32)))
        yield from profile_generator("rounds", self._rounds(model, batch, embedding))

    def _rounds(
        self, model: PromptableModel, batch: Batch, embedding: ImageEmbedding
    ) -> Iterator[LossSums]:
        """Yield the losses of each round of each chunk of masks."""
        modules = model.prompt_encoder, model.mask_decoder
        dtype = HALF_DTYPES.get(self.precision)
        with weight_copies(modules, CAST_MODULES, dtype, share=self.fast is None) as copies:
            for chosen, schedule in self.schedule.groups(batch.random_inputs):
                group = batch if chosen is None else batch.select(chosen.nonzero()[:, 0])
                fill = 1 if chosen is None or not self.loss.supports_filling else FILL
                task = replace(self, schedule=schedule)
                count = len(group.mask_image)
                for start in range(0, count, self.masks_per_chunk):
                    part = slice(start, min(start + self.masks_per_chunk, count))
                    for sums in task._chunk_rounds(model, group, embedding, part, fill):
                        yield sums
                        copies.add_gradients()
            copies.finish()

    def _chunk_rounds(
        self,
        model: PromptableModel,
        batch: Batch,
        embedding: ImageEmbedding,
        part: slice,
        fill: int,
    ) -> Iterator[LossSums]:
        """Yield the losses of each round of one chunk of masks, filled to a multiple of `fill`."""
        image = index = batch.mask_image[part]
        targets, random_inputs = self.make_targets(batch, part, model.config.mask_size)
        count = self.masks_per_chunk if self.fast else -(-len(image) // fill) * fill
        if count > len(image):
            targets = targets.filled(count)
            rows = torch.arange(count, device=image.device).clamp(max=len(image) - 1)
            random_inputs, index = select_random_inputs(random_inputs, rows), image[rows]
        decode = make_decoder(model, embedding, index, self.precision, targets.masks.shape[-1])
        weights = batch.weights[image]
        for sums in self.round_losses(decode, targets, random_inputs, batch.mask_only_round_u):
            per_mask = sums.per_mask if index is image else sums.per_mask[: len(image)]
            yield replace(
                sums,
                loss=(per_mask * weights).sum(),
                per_mask=per_mask.detach(),
                first=part.start,
                image=image,
            )

    def round_losses(
        self,
        decode: PromptDecoder,
        targets: Targets,
        random_inputs: RandomInputs,
        mask_only_round_u: float,
    ) -> Iterator[LossSums]:
        """Yield the loss of each round of some masks.

        Args:
            decode: Predicts masks from prompts.
            targets: Ground truth of the masks.
            random_inputs: Random numbers of the masks.
            mask_only_round_u: Uniform number in [0, 1) that picks the mask-only round.
        """
        answer, compute_loss, schedule = decode, self.loss, self.schedule
        if self.fast:
            answer = partial(self.fast.decode, decode)
            compute_loss, schedule = self.fast.loss, self.fast.schedule
        for prompt_round in run_rounds(answer, targets, schedule, random_inputs, mask_only_round_u):
            yield compute_loss(prompt_round, targets)

    def make_targets(
        self, batch: Batch, part: slice, mask_prompt_size: int
    ) -> tuple[Targets, RandomInputs]:
        """Return the targets of some masks of a batch, and the random numbers of their rounds.

        Args:
            batch: The batch.
            part: Range of its masks.
            mask_prompt_size: Side of the model's low-resolution grid.
        """
        targets = targets_from_batch(batch, part, mask_prompt_size, self.full_resolution)
        random_inputs = select_random_inputs(batch.random_inputs, part)
        if self.loss.num_uniforms:
            targets = replace(targets, shift=random_inputs.clicks[:, -1])
        return targets, random_inputs


def casts_itself(model: PromptableModel) -> bool:
    """Return whether a block of the encoder casts itself: one sharded, recomputed or foreign.

    Autocast casts the weights of others one by one.
    """
    from gigamask.distributed.activation_checkpointing import is_checkpointed

    is_other = is_sharded(model) or is_foreign(model.image_encoder)
    return is_other or any(map(is_checkpointed, model.encoder_blocks))


def encode(
    model: PromptableModel,
    images: Tensor,
    input_sizes: Tensor,
    drop_path: Tensor | None,
    precision: Precision,
) -> ImageEmbedding:
    """Return the embedding; a frozen encoder runs without drop path, and without gradients unless
    the decoder trains a part of the embedding.

    Args:
        model: The model.
        images: RGB in 0..255.
        input_sizes: Height and width of each image without padding.
        drop_path: Uniform numbers that decide which residual branches are skipped.
        precision: Precision of the model.
    """
    is_trained = any(parameter.requires_grad for parameter in model.image_encoder.parameters())
    learns = is_trained or model.config.decoder.trains_embedding
    with (
        profile_range("encode"),
        autocast(precision, images.device),
        torch.set_grad_enabled(learns and torch.is_grad_enabled()),
    ):
        return model.encode(images, input_sizes, drop_path if is_trained else None)


def make_decoder(
    model: PromptableModel,
    embedding: ImageEmbedding,
    mask_image: Int64[Tensor, "m"],
    precision: Precision,
    mask_size: int | None = None,
) -> PromptDecoder:
    """Return the decoder of prompts for some masks of a batch.

    Args:
        model: The model that computed the embedding.
        embedding: Embeddings of the batch's images.
        mask_image: Index of each mask's image in the batch.
        precision: Precision of the model.
        mask_size: Side of the logits to return; None keeps the model's own.
    """
    resize = None if mask_size is None else partial(_resize_logits, side=mask_size)
    context = partial(autocast, precision, embedding.device)
    return PromptDecoder(model, embedding, mask_image, resize, context)


def _resize_logits(logits: Float[Tensor, "m k g g"], side: int) -> Float[Tensor, "m k G G"]:
    if logits.shape[-1] == side:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.interpolate(wide, (side, side), mode="bilinear", align_corners=False)


def targets_from_batch(
    batch: Batch, part: slice, mask_prompt_size: int, full_resolution: bool = False
) -> Targets:
    """Return the targets of some masks of a batch.

    Args:
        batch: The batch.
        part: Range of its masks.
        mask_prompt_size: Side of the model's low-resolution grid.
        full_resolution: Whether to keep the grid of the batch's masks; otherwise masks on a finer
            grid are averaged over the cells of the low-resolution one.

    Raises:
        GigamaskError: The finer grid is not a multiple of the low-resolution one.
    """
    dense = batch.dense(part.start, part.stop)
    mask_size = batch.mask_size if full_resolution else mask_prompt_size
    scale = batch.images.shape[-1] / mask_size
    mask_image = batch.mask_image[part]
    extent_xy = batch.input_sizes[mask_image].flip(1).float()
    is_averaged = batch.mask_size != mask_size
    grid = (mask_size, mask_size), (scale, scale)
    return Targets(
        _average(dense, mask_size, extent_xy, scale) if is_averaged else dense,
        valid_cells(extent_xy, *grid, by_center=not is_averaged),
        batch.boxes_input[part],
        (scale, scale),
        batch.scale_xy[mask_image],
        mask_prompt_size=mask_prompt_size,
        classes=None if batch.classes is None else batch.classes[part],
        extent_xy=extent_xy,
    )


def _average(
    dense: Tensor, mask_size: int, extent_xy: Tensor, scale: float
) -> Float[Tensor, "m G G"]:
    """Return the share of each cell's part in the image that a mask covers."""
    if dense.shape[-1] % mask_size:
        raise GigamaskError(
            f"the side of the masks' grid must be a multiple of {mask_size} to average them "
            f"(got {dense.shape[-1]}); use --loader.target hard"
        )
    shares = functional.avg_pool2d(dense[:, None].float(), dense.shape[-1] // mask_size)[:, 0]
    rows, columns = covered_parts(extent_xy, (mask_size, mask_size), (scale, scale))
    return torch.where(shares > 0, shares / (rows * columns), 0.0).clamp(max=1)


def select_random_inputs(
    random_inputs: RandomInputs, part: slice | Int64[Tensor, "m"]
) -> RandomInputs:
    """Return the random inputs of some masks of a batch.

    Args:
        random_inputs: Random inputs of the batch.
        part: Range of its masks, or their indices.
    """
    return replace(
        random_inputs,
        first_prompt=random_inputs.first_prompt[part],
        clicks=random_inputs.clicks[part],
        box_noise=random_inputs.box_noise[part],
    )
