"""Evaluate a promptable segmenter on annotated images, on one process or several."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gigamask.errors import GigamaskError, check_range, counted
from gigamask.pixels import WindowOptions
from gigamask.progress import progress_bar, say, track
from gigamask.workflows.open_data import AnnotationOptions, open_or_build_temporary

if TYPE_CHECKING:
    from gigamask.data.index import Index
    from gigamask.data.storage import Paths
    from gigamask.data.worker_pool import Part
    from gigamask.distributed.world import World
    from gigamask.evaluation.clicks import ClickProtocol, ClickResult
    from gigamask.evaluation.proposals import ProposalRecall
    from gigamask.models.promptable import PromptableModel


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(AnnotationOptions, WindowOptions):
    """Options of an evaluation; each field is a flag of `gigamask evaluate`."""

    needs_flags: ClassVar = {"points_per_side": "automatic"}

    min_predicted_iou: float | None = None
    """evaluate only on masks with at least this predicted_iou in their annotation"""
    max_images: int | None = None
    """number of images to use, the first in the order of their paths; default: all"""
    feed_mask: bool = True
    """feed the previously predicted mask back with each further click, unless the protocol of the
    clicks does not"""
    click_protocol: Literal["gigamask", "efficient_sam", "efficientvit_sam"] = "gigamask"
    """how masks are prompted: clicks in the largest error, one mask from the second on; or as in
    EfficientSAM's tables (random clicks) or EfficientViT-SAM's (always the most confident of three
    masks)"""
    refine: bool = False
    """decode the box and the first click of each mask once more, with the masks that they got"""
    box_noise: float = 0.0
    """also score loose boxes: standard deviation of noise on each side, relative to the width or
    height, such as 0.1"""
    batch_size: int = 4
    """images per forward pass of the encoder; changes speed and memory only"""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto uses cuda if available"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """number format of the model; scores differ slightly in bf16 and fp16; auto: bf16 on a GPU,
    fp32 on a CPU"""
    boundaries: bool = False
    """also score boundaries: Boundary IoU and the boundary F-measure of DAVIS"""
    automatic: bool = False
    """also generate all masks of each image and score their recall: AR@1000"""
    tile: int | None = None
    """side in pixels of the tiles in which prompts for larger images are answered, and --automatic
    generates masks; default: the image is processed as a whole"""
    halo: int | None = None
    """overlap of neighboring tiles in pixels, at most half of a tile; default: an eighth of it"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    points_per_side: int = 32
    """points along each side of the grid for --automatic; SAM's paper uses 64"""

    def check(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        from gigamask.inference.amg_config import AutomaticMaskConfig

        check_range("--min-predicted-iou", self.min_predicted_iou, 0, 1)
        check_range("--box-noise", self.box_noise, 0, 1)
        check_range("--max-images", self.max_images, 1)
        check_range("--batch-size", self.batch_size, 1)
        try:
            AutomaticMaskConfig(
                points_per_side=self.points_per_side, tile=self.tile, halo=self.halo
            )
        except GigamaskError as error:
            name, _, rest = str(error).partition(" ")
            raise GigamaskError(f"--{name.replace('_', '-')} {rest}") from None

    def protocol(self) -> ClickProtocol:
        """Return how masks are prompted and scored."""
        from gigamask.evaluation.clicks import PROTOCOLS

        named = PROTOCOLS[self.click_protocol]
        return replace(
            named,
            feed_mask=named.feed_mask and self.feed_mask,
            refine=self.refine,
            box_noise=self.box_noise,
            boundaries=self.boundaries,
            tile=self.tile,
            halo=self.halo,
        )

    def proposals(self) -> ProposalRecall | None:
        """Return what scores automatic masks, if it is wanted."""
        from gigamask.evaluation.proposals import ProposalRecall, proposal_config

        if not self.automatic:
            return None
        settings = proposal_config(self.points_per_side, self.tile, self.halo)
        return ProposalRecall(settings, precision=self.precision)


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A model, the images it was evaluated on, and the scores."""

    model: PromptableModel
    index: Index
    result: ClickResult
    summary: dict[str, Any]


def evaluate(weights: str | Path | PromptableModel, data: Paths, **options: Any) -> dict[str, Any]:
    """Evaluate weights on annotated images.

    Under torchrun, the processes share the work; all but the main one return an empty dictionary.

    Args:
        weights: A run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face
            folder or id, "starter", or a model.
        data: Tars, folders of tars, globs, URLs, or an index; with `images` or `masks`, one path
            in another format.
        **options: Fields of `EvaluateOptions`, such as `max_images=100` or `device="cpu"`.

    Returns:
        The scores as `gigamask evaluate --json` writes them: "clicks" holds the mean IoU after 1,
        2, 3, 5 and 9 clicks, "box" that of the box prompt, "loose_box" that of boxes with noise,
        "oracle" that of the best of three masks, all in [0, 1]; "protocol" records how they were
        measured.

    Raises:
        GigamaskError: The weights or the data cannot be used, or an option is invalid.
    """
    from gigamask.distributed.precision import choose_device
    from gigamask.distributed.world import destroy_world, init_world
    from gigamask.training.config import with_fields

    evaluate_options = with_fields(EvaluateOptions(), options)
    world = init_world(os.environ, choose_device(evaluate_options.device))
    try:
        with ExitStack() as stack:
            evaluated = score(weights, data, evaluate_options, world, stack)
            return {} if evaluated is None else evaluated.summary
    finally:
        destroy_world(world)


def score(
    weights: str | Path | PromptableModel,
    data: Paths,
    options: EvaluateOptions,
    world: World,
    stack: ExitStack,
    part: Part | None = None,
) -> Evaluated | None:
    """Evaluate weights with the processes of `world`.

    Args:
        weights: As for `evaluate`.
        data: As for `evaluate`.
        options: Options of the evaluation.
        world: The processes that share the images.
        stack: Exit stack that keeps the index open.
        part: A part of the command, or the one that joins the parts; without `automatic`.

    Returns:
        The scores on the main process, None on the others.
    """
    from gigamask.data import worker_pool
    from gigamask.data.dataset import check_pixels
    from gigamask.data.mask_sampling import MaskFilters
    from gigamask.distributed.precision import autocast, choose_precision, describe_device
    from gigamask.evaluation import clicks
    from gigamask.workflows.own_data import own_tars

    def begin() -> tuple[PromptableModel, tuple[str, ...], Index]:
        options.check()
        model = load_model(weights, options.device, options.trust)
        if model is weights:  # a program's own stays as it is
            stack.callback(setattr, model, "config", model.config)
        model.set_window(options.window, options.percentiles)
        tars = own_tars(data, options, print if world.is_main else lambda line: None)
        index = stack.enter_context(open_or_build_temporary(tars))
        check_pixels(index, model.config.pixels, bool(options.flags))
        return model, tars, index

    with progress_bar("read model and data"):
        model, names, index = world.main_first(begin)
    count = min(options.max_images or len(index), len(index))
    filters = MaskFilters(max_area=None, min_predicted_iou=options.min_predicted_iou)
    protocol, proposals = options.protocol(), options.proposals()
    on_image = [proposals.update] if proposals else []
    device = model.device
    precision = choose_precision(options.precision, device)
    _say_images(weights, index, count, f"{describe_device(device)}, {precision}")

    def evaluate_part() -> ClickResult:
        size = options.batch_size

        def run(*args: Any) -> ClickResult:
            with autocast(precision, device):
                return clicks.evaluate_clicks(model, index, filters, protocol, *args)

        if part is None:
            return run(track(world.local_range(count), "evaluate"), size, on_image)
        # The same batches as in one process, so that the scores are the same.
        annotated = [*clicks.scored_rows(index, range(count), filters)]
        batches = [annotated[first : first + size] for first in range(0, len(annotated), size)]
        kind = clicks.ClickResult
        scored = worker_pool.parallel_map(lambda batch: run(batch, size), batches, part, None, kind)
        return kind.concatenate([kind(protocol, 0, []), *scored])

    own_result = world.run_on_all(evaluate_part)
    result = clicks.ClickResult.concatenate(world.gather(own_result))
    proposals = proposals and proposals.gather(world)
    if not world.is_main:
        return None
    summary = {
        **result.summary(),
        **_stated(weights),
        "data": list(names),
        "precision": precision,
        "skipped": result.skipped,
    }
    if proposals:
        summary["automatic"] = proposals.summary()
    return Evaluated(model, index, result, summary)


def _stated(weights: str | Path | PromptableModel) -> dict[str, Any]:
    """Return the name of the weights, and the step if they are a checkpoint, or a run's newest."""
    from gigamask.models import manifest

    if not isinstance(weights, str | Path):
        return {"weights": type(weights).__name__, "step": None}
    path = Path(weights).resolve()  # of the link `best`
    return {"weights": str(weights), "step": manifest.step_of(manifest.newest(path) or path)}


def _say_images(
    weights: str | Path | PromptableModel, index: Index, count: int, computed: str
) -> None:
    """Say how many images are scored and left out, and how many the weights were trained on."""
    from gigamask.config_files import read_run_config, run_folder_of
    from gigamask.evaluation.seen_images import say_seen

    say(
        f"  {count:,} of {counted(index.manifest.images, 'image')} with "
        f"{counted(index.manifest.masks, 'mask')}, "
        f"{len(index.manifest.left_out.skipped)} left out; {computed}"
    )
    first = index.images["first_mask"][: count + 1]
    areas = index.masks["area"][: first[-1]]
    if not areas.all():
        mask = areas.argmin()
        row = first.searchsorted(mask, "right") - 1
        say(
            f"  masks without a pixel left out: {(areas == 0).sum():,}, such as annotation "
            f"{mask - first[row]} of {index.entry_name(row)}"
        )
    if isinstance(weights, str | Path) and (run := run_folder_of(str(weights))):
        with suppress(GigamaskError, KeyError):  # its configuration is damaged
            say_seen(index, range(count), run, read_run_config(str(run))["data"])


def load_model(
    weights: str | Path | PromptableModel, device: str = "auto", trust: bool = False
) -> PromptableModel:
    """Return a model in evaluation mode.

    Args:
        weights: A run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face
            folder or id, "starter", or a model, which is only moved to the device, not set to
            evaluation.
        device: cpu, cuda, cuda:N, or auto for cuda if available.
        trust: Whether to run code that a run folder names and that is not built in.

    Returns:
        The model on the device. A user-defined encoder is built from the run's configuration.

    Raises:
        GigamaskError: The weights do not exist, or are not those of a segmenter.
    """
    from gigamask.config_files import config_of_weights
    from gigamask.distributed.precision import choose_device
    from gigamask.models.promptable import require_model
    from gigamask.training import checkpoint

    if not isinstance(weights, str | Path):
        require_model(weights)
        return weights.to(choose_device(device))
    return checkpoint.load_model(str(weights), device, partial(config_of_weights, trust=trust))


def save_model(model: PromptableModel, path: str | Path) -> None:
    """Write a model's weights in the format that the file name selects.

    Args:
        model: The model.
        path: `NAME.pth` for Meta's format, `NAME.safetensors`, or a folder for Hugging Face's.

    Raises:
        GigamaskError: The name is that of another file of weights, the file cannot be written, or
            its contents differ when read back.
    """
    from gigamask.export import huggingface, official
    from gigamask.models.promptable import require_model

    require_model(model)
    path = Path(path)
    writers = {".pth": official.write_pth, ".safetensors": official.write_safetensors}
    others = ".pt", ".bin", ".ckpt", ".onnx"
    if path.suffix not in writers and path.suffix.lower() in (*writers, *others):
        raise GigamaskError(
            f"{path}: would be a folder; end the name in .pth or .safetensors, or leave its end "
            "out (gigamask export --to onnx writes ONNX)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    writers.get(path.suffix, huggingface.write_huggingface)(model, path)
