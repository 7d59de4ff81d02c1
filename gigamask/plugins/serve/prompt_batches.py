"""Answers the prompts that wait at the same time together, in one call of the decoder.

Edits come before previews, and a preview replaces the one that the same client still waits for.
Prompts of one number of tokens are decoded together, on any images, so that nothing is padded and
the masks are those of one prompt at a time. The masks for a box are refined once.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.inference.classes import class_fields, class_scores
from gigamask.masks.rle import RLEMasks
from gigamask.models.prompt_decoder import PromptDecoder, refined
from gigamask.models.prompt_encoder import make_prompts
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.serve.open_images import Answer, OpenImage
from gigamask.plugins.serve.prompt_steps import MAX_PROMPTS, PromptStep
from gigamask.types import Prompts, map_tensors

MAX_BATCH = 16
"""Most prompts decoded together: it limits memory, and how long the first waits for the others."""
BASE_LOGIT = 8.0
"""Logit inside a mask that is given, not predicted; outside it is negative."""


class SupersededError(GigamaskError):
    """Raised for a preview that nobody waits for, since its client asked for another."""


@dataclass(eq=False)
class PromptRequest:
    """A sequence of prompts on an embedded image, and its answer.

    Attributes:
        opened: The image.
        steps: The prompts, in order.
        multimask_output: Whether to predict three masks; None means three for a single prompt
            and one for several, as in training.
        base: A mask that the prompts correct.
        client: Who previews; None: the answer is not a preview.
        answers: Answers after the first steps.
        future: Answer after the last.
    """

    opened: OpenImage
    steps: tuple[PromptStep, ...]
    multimask_output: bool | None = None
    base: RLEMasks | None = None
    client: str | None = None
    answers: list[Answer] = field(default_factory=list)
    future: "Future[Answer]" = field(default_factory=Future)

    def take_known(self) -> bool:
        """Take the answers that the image has; return whether that is all."""
        while len(self.answers) < len(self.steps):
            known = self.opened.predictions.get(self._key())
            if known is None:
                return False
            self.answers.append(known)
        return True

    def take(self, answer: Answer) -> None:
        """Take the answer after the next step, and let the image keep it."""
        predictions = self.opened.predictions
        if len(predictions) > 4 * MAX_PROMPTS:
            predictions.clear()
        predictions[self._key()] = answer
        self.answers.append(answer)

    @property
    def step(self) -> PromptStep:
        """The next step."""
        return self.steps[len(self.answers)]

    def _key(self) -> Hashable:
        """Return what the answer after the next step depends on."""
        base = None if self.base is None else self.base.to_coco()[0]
        steps = *self.steps[: len(self.answers)], replace(self.step, chosen=None)
        return steps, self.multimask_output, base

    def prompts(self) -> Prompts:
        """Return the prompts of the next step.

        Raises:
            GigamaskError: An earlier step names a mask that was not predicted.
        """
        steps, opened = self.steps[: len(self.answers) + 1], self.opened
        transform, config = opened.predictor.transform, opened.predictor.model.config
        mask_input = None
        if self.base is not None and len(steps) == 1:
            frame = transform.image_transform(opened.size)
            small = frame.apply_masks(self.base, config.mask_size).to_dense()
            mask_input = torch.from_numpy(np.where(small, BASE_LOGIT, -BASE_LOGIT))[None].float()
        if len(steps) > 1:
            before, chosen = self.answers[-1], steps[-2].chosen
            if chosen is not None and not 0 <= chosen < len(before.iou):
                raise GigamaskError(
                    f"mask {chosen} was chosen of {len(before.iou)}; choose one of these"
                )
            number = int(before.iou.argmax()) if chosen is None else chosen
            mask_input = before.low_res_logits(number, config)[None, None]
        points = [step for step in steps if step.point is not None]
        coords = np.array([step.point for step in points], np.float64).reshape(1, -1, 2)
        coords = torch.from_numpy(transform.apply_coords(coords, opened.size))
        labels = torch.tensor([[int(step.foreground) for step in points]])
        boxes = np.array([step.box for step in steps if step.box is not None][-1:], np.float64)
        box = torch.from_numpy(transform.apply_boxes(boxes, opened.size)) if len(boxes) else None
        several = len(steps) == 1 and self.base is None
        return make_prompts(
            *((coords, labels) if points else (None, None)),
            box,
            mask_input,
            several if self.multimask_output is None else self.multimask_output,
            config.mask_size,
        )


class PromptBatches:
    """The requests that wait, and the threads that answer them."""

    def __init__(self, threads: int | None = None) -> None:
        """Start idle.

        Args:
            threads: How many decode; None: one for two cores of a CPU.
        """
        self._lock, self._waiting = threading.Lock(), list[PromptRequest]()
        self._threads = ThreadPoolExecutor(threads or max(1, (os.cpu_count() or 1) // 2))

    def answer(self, request: PromptRequest) -> Answer:
        """Return the answer to a request, once it is its turn.

        Raises:
            SupersededError: It is a preview, and its client asked for another.
            GigamaskError: The prompts are invalid.
        """
        if request.take_known():
            return request.answers[-1]
        with self._lock:
            for each in self._waiting:
                if request.client is not None and each.client == request.client:
                    each.future.set_exception(SupersededError("another preview was asked for"))
            self._waiting = [each for each in self._waiting if not each.future.done()]
            self._waiting.append(request)
        self._threads.submit(self._answer_some)
        return request.future.result()

    def stop(self) -> None:
        """Wait for the threads; requests that wait are answered with an error."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.future.set_exception(GigamaskError("the server is being stopped"))
        self._threads.shutdown()

    def _answer_some(self) -> None:
        """Answer the first of those that wait, edits first; nothing if others took them."""
        with self._lock:
            self._waiting.sort(key=lambda each: each.client is not None)
            some, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        try:
            answer_together(some)
        except Exception as error:
            for each in some:
                if not each.future.done():
                    each.future.set_exception(error)


@torch.inference_mode()
def answer_together(requests: Sequence[PromptRequest]) -> None:
    """Answer requests, decoding what is alike together; wrong ones get an error as their answer.

    Args:
        requests: Requests on embedded images.
    """
    pending = list(requests)
    while pending:
        alike: dict[Hashable, list[tuple[PromptRequest, Prompts]]] = defaultdict(list)
        for request in pending:
            if request.take_known():
                continue
            try:
                prompts = request.prompts()
            except GigamaskError as error:
                request.future.set_exception(error)
                continue
            predictor = request.opened.predictor
            # Crops are chosen for one prompt after another, and their answers are dense.
            alone = request if predictor.crop_decoders else predictor.model
            counts = prompts.multimask_output, prompts.labels.shape[1], prompts.masks is None
            alike[alone, counts, not request.step.box].append((request, prompts))
        for group in alike.values():
            _decode(group)
        for request in pending:
            if len(request.answers) == len(request.steps):
                request.future.set_result(request.answers[-1])
        pending = [request for request in pending if not request.future.done()]


def _decode(group: Sequence[tuple[PromptRequest, Prompts]]) -> None:
    """Decode prompts that have the same number of tokens, with one model."""
    request, prompts = group[0]
    predictor, box = request.opened.predictor, request.step.box
    if predictor.crop_decoders:
        [decode] = predictor.crop_decoders
        with predictor.autocast():
            found = decode(prompts)
            if box:
                found = refined(decode, prompts, found)
        answer = Answer(
            found.low_res_logits[0].float().cpu(),
            found.iou_predictions[0].float().cpu(),
            _classes(predictor.model, found.class_logits, 0),
        )
        for number, dense in enumerate(found.logits[0].float().cpu()):
            answer.keep(number, (dense, (0, 0)), request.opened.size)
        request.take(answer)
        return
    images = list(dict.fromkeys(request.opened for request, _ in group))
    group = sorted(group, key=lambda pair: images.index(pair[0].opened))
    embedding = torch.cat([image.predictor.get_image_embedding() for image in images])
    rows = torch.tensor([images.index(request.opened) for request, _ in group]).to(embedding.device)
    prompts = _stack([each for _, each in group])
    decoder = PromptDecoder(predictor.model, embedding, rows, autocast=predictor.autocast)
    if box:
        found = decoder(prompts)
        per_mask = replace(decoder, image_index=rows.repeat_interleave(found.logits.shape[1]))
        found = refined(per_mask, prompts, found)
        masks, windows = found.logits, found.in_window
    else:
        found = decoder.output(prompts)
        masks, windows = found.masks, found.windows
    for row, (request, _) in enumerate(group):
        if windows is None:
            logits = cast(Tensor, masks)[row].float().cpu()
        else:
            logits = map_tensors(partial(_row, row), windows)
        classes = _classes(predictor.model, found.class_logits, row)
        request.take(Answer(logits, found.iou_predictions[row].float().cpu(), classes))


def _row(row: int, tensor: Tensor) -> Tensor:
    return tensor[row : row + 1].float().cpu()


def _classes(
    model: PromptableModel, logits: Float[Tensor, "M K C"] | None, row: int
) -> list[dict[str, Any]] | None:
    """Return the classes of the masks of one prompt; None if the model has none."""
    if logits is None:
        return None
    return class_fields(class_scores(logits[row]).cpu().numpy(), model.config.class_names)


def _stack(prompts: Sequence[Prompts]) -> Prompts:
    """Return prompts with the same number of tokens as one."""
    masks = [each.masks for each in prompts if each.masks is not None]
    return Prompts(
        torch.cat([each.points_xy_input for each in prompts]),
        torch.cat([each.labels for each in prompts]),
        torch.cat(masks) if masks else None,
        prompts[0].multimask_output,
    )
