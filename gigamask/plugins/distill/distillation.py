"""Distillation: a student learns the embeddings of a teacher, or its answers to prompts.

The two phases are those of EdgeSAM (Zhou et al. 2023, arXiv 2312.06660); the first alone is that of
MobileSAM (Zhang et al. 2023, arXiv 2306.14289).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.distributed.fsdp import dummy_forward
from gigamask.distributed.precision import Precision, autocast
from gigamask.distributed.profile_ranges import profile_range
from gigamask.interfaces import Loss, Task
from gigamask.masks.transforms import above
from gigamask.models.configs import SamConfig
from gigamask.models.embedding_cache import EmbeddingCache, ImageEmbedder
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.promptable import PromptableModel
from gigamask.training.tasks import SamTask, encode, make_decoder
from gigamask.types import (
    Batch,
    LossSums,
    Prediction,
    PromptRound,
    RandomInputs,
    Targets,
    map_tensors,
)


class Teacher:
    """A frozen model whose embeddings and answers a student learns.

    Args:
        model: The model.
        precision: Precision in which it runs.
        cache: Keeps its embeddings on disk; None computes every embedding.
    """

    def __init__(
        self, model: PromptableModel, precision: Precision, cache: EmbeddingCache | None
    ) -> None:
        self.model, self.precision = model, precision
        self._embedder = ImageEmbedder(model, cache, watched=False)
        model.eval().requires_grad_(False)

    @torch.no_grad()
    def embed(self, batch: Batch) -> Float[Tensor, "B C E E"]:
        """Return the embeddings of the batch's images, in float32 or float64."""
        with profile_range("teacher"), autocast(self.precision, batch.images.device):
            embedding = self._embedder.embed_batch(batch.images, batch.input_sizes)
        return embedding.to(torch.promote_types(embedding.dtype, torch.float32))

    def decoder(
        self,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "m"],
        mask_size: int | None,
    ) -> PromptDecoder:
        """Return the decoder of prompts for some masks of a batch.

        Args:
            embedding: Result of `embed`.
            mask_image: Index of each mask's image in the batch.
            mask_size: Side of the logits to return; None keeps the teacher's own.
        """
        return make_decoder(self.model, embedding, mask_image, self.precision, mask_size)


@dataclass(frozen=True)
class FeatureTask(Task):
    """Mean squared error between the embeddings of student and teacher; the loss counts images.

    Tokens in the padding do not count.

    Args:
        teacher: The teacher, whose embedding has the size of the student's.
        precision: Precision of the student.
    """

    teacher: Teacher
    precision: Precision = "fp32"

    @property
    def frozen_models(self) -> tuple[nn.Module, ...]:
        """The teacher."""
        return (self.teacher.model,)

    def compute_losses(
        self, model: PromptableModel, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the loss of all images, as one term.

        Args:
            model: The student.
            batch: The micro-batch; without images, a sharded model runs on a dummy image.
            detach: Detaches the embedding.
        """
        images = batch.images
        if not len(images):
            side = model.config.image_size
            image, size = (
                images.new_zeros(1, images.shape[1], side, side),
                batch.input_sizes.new_full((1, 2), side),
            )
            dummy_forward(model, lambda: encode(model, image, size, None, self.precision))
            return
        target = self.teacher.embed(batch)
        drop_path = batch.random_inputs.drop_path
        encoded = encode(model, images, batch.input_sizes, drop_path, self.precision)
        embedding = detach(encoded.to(target.dtype))
        valid = valid_tokens(batch.input_sizes, model.config)
        errors = (embedding - target).square().mean(1) * valid
        per_image = errors.sum((1, 2)) / valid.sum((1, 2))
        yield LossSums(
            loss=(per_image * batch.weights).sum(),
            count=torch.full((), float(len(images)), device=images.device),
            parts={"mse": per_image.detach().sum()},
            per_mask=per_image.detach(),
            image=torch.arange(len(images), device=images.device),
        )


def valid_tokens(input_sizes: Int64[Tensor, "B 2"], config: SamConfig) -> Bool[Tensor, "B E E"]:
    """Return which tokens of an embedding see part of the image.

    Args:
        input_sizes: Height and width of each image without padding.
        config: Configuration of the model.
    """
    size = config.embedding_size
    starts = torch.arange(size, device=input_sizes.device) * config.patch_size
    heights, widths = input_sizes[:, :, None].unbind(1)
    return (starts < heights)[:, :, None] & (starts < widths)[:, None, :]


@dataclass(frozen=True)
class PromptTask(SamTask):
    """Rounds of prompts that teacher and student answer; the teacher's masks are the targets.

    Each answer of the student learns the teacher's answer with the same index. The first prompts
    come from the annotated masks, later clicks from the difference between the masks that teacher
    and student prefer. Both see the same points, and each its own previous mask.

    Args:
        teacher: The teacher.
        iou_weight: Weight of the squared difference between the predicted IoUs.
        embedding: The teacher's embeddings of the micro-batch.
    """

    teacher: Teacher | None = None
    iou_weight: float = 0.0
    embedding: Float[Tensor, "B C E E"] | None = None

    @property
    def frozen_models(self) -> tuple[nn.Module, ...]:
        """The teacher."""
        assert self.teacher is not None
        return (self.teacher.model,)

    def compute_losses(
        self, model: PromptableModel, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the loss of each round of each chunk of masks.

        Args:
            model: The student.
            batch: The micro-batch; without masks, a sharded model runs on a dummy image.
            detach: Detaches the student's embedding, on which the gradients of all rounds
                accumulate.
        """
        assert self.teacher is not None
        embedding = self.teacher.embed(batch) if len(batch.mask_image) else None
        return SamTask.compute_losses(replace(self, embedding=embedding), model, batch, detach)

    def round_losses(
        self,
        decode: PromptDecoder,
        targets: Targets,
        random_inputs: RandomInputs,
        mask_only_round_u: float,
    ) -> Iterator[LossSums]:
        """Yield the loss of each round of some masks.

        Args:
            decode: The student's decoder.
            targets: Annotated masks.
            random_inputs: Random numbers of the masks.
            mask_only_round_u: Uniform number in [0, 1) that picks the mask-only round.
        """
        assert self.teacher is not None
        assert self.embedding is not None
        assert decode.image_index is not None
        side = targets.masks.shape[-1]
        teach = self.teacher.decoder(self.embedding, decode.image_index, side)
        index, previous = 0, None
        prompts = self.schedule.next(None, targets, random_inputs, mask_only_round_u)
        while prompts is not None:
            with torch.no_grad():
                asked = prompts  # of the teacher, with the mask of its own answer before
                if prompts.masks is not None and previous is not None:
                    asked = replace(prompts, masks=previous.mask_input)
                answer = teach(asked)
            previous = PromptRound(index, prompts, answer)
            student = PromptRound(index, prompts, decode(prompts))
            yield distillation_loss(self.loss, student, previous, targets, self.iou_weight)
            index += 1
            taught = replace(targets, masks=previous.pred_mask)
            prompts = self.schedule.next(student, taught, random_inputs, mask_only_round_u)
            del student


def distillation_loss(
    loss: Loss, student: PromptRound, teacher: PromptRound, targets: Targets, iou_weight: float
) -> LossSums:
    """Return the loss of one round: the mean over a mask's answers, each against the teacher's.

    Args:
        loss: The loss of an answer.
        student: The student's answers to the prompts of M masks.
        teacher: The teacher's, as many for each mask.
        targets: Where the grid is valid.
        iou_weight: Weight of the squared difference between the predicted IoUs.
    """
    prediction, taught = student.prediction, teacher.prediction
    count = prediction.logits.shape[1]
    rows = torch.arange(len(prediction.logits), device=prediction.logits.device)
    rows = rows.repeat_interleave(count)
    single = PromptRound(student.index, student.prompts.select(rows), _separate(prediction))
    masks = above(taught.logits, 0.0).flatten(0, 1)
    sums = loss(single, replace(targets.select(rows), masks=masks))
    per_mask = sums.per_mask.unflatten(0, (-1, count)).mean(1)
    parts = {name: value / count for name, value in sums.parts.items()}
    if iou_weight:
        predicted = prediction.iou_predictions
        dtype = torch.promote_types(predicted.dtype, torch.float32)
        errors = (predicted.to(dtype) - taught.iou_predictions.to(dtype)).square().mean(1)
        per_mask = per_mask + iou_weight * errors
        parts["iou_difference"] = targets.total(errors.detach())
    return LossSums(targets.total(per_mask), targets.count, parts, per_mask)


def _separate(prediction: Prediction) -> Prediction:
    """Return the prediction with each answer as a mask of its own."""

    def single(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[:, None]

    return replace(map_tensors(single, prediction), class_logits=None)
