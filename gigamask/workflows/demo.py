"""The demo: draw scenes, index, train, evaluate on new scenes, and write figures and a report."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from gigamask import config_files, files, plugin, recipes
from gigamask.data import index as indexes
from gigamask.data.mask_sampling import MaskFilters
from gigamask.distributed.precision import choose_device
from gigamask.errors import GigamaskError, TrainingInterruptedError, counted
from gigamask.evaluation import clicks, figures
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.progress import progress_bar, track
from gigamask.report import history, html, page
from gigamask.synthetic import scenes
from gigamask.training.checkpoint import load_model
from gigamask.workflows.train import count_processes, train

RECIPE, TRAIN_SEED, TEST_SEED = "compact", 0, 1
STEPS, EVALUATIONS, CURVE_IMAGES = 160, 4, 10
"""Training steps, and evaluations during them on a few images for the learning curve."""
CAN = (
    "After these minutes it separates objects that differ from their surroundings in color or "
    "texture, for a click, a box, or several clicks. It was trained on drawings, so photographs of "
    "your own make it better at photographs.",
    "It knows no names of things, does not see what is larger than the image or smaller than a few "
    "pixels, and is often unsure whether a click means a part or the whole: a box or a second "
    "click says so.",
)
"""What a model of the demo can and cannot do, for its report."""


def run(out: str, train_images: int, test_images: int, steps: int | None) -> dict[str, Any]:
    """Run the demo, and print the scores and the next commands to try.

    Args:
        out: Output folder; a second call with the same folder resumes.
        train_images: Number of training scenes.
        test_images: Number of held-out scenes.
        steps: Number of training steps; None: enough for a useful model, in a few minutes.

    Returns:
        The scores.
    """
    start_s = time.perf_counter()
    folder, recipe = Path(out), recipes.make(RECIPE)
    config_files.check_run_out(replace(recipe, out=out))
    for name, images, seed in (
        ("train", train_images, TRAIN_SEED),
        ("test", test_images, TEST_SEED),
    ):
        shards = folder / name
        if not (shards / "index").exists():
            print(f"{name}: {images} synthetic scenes", flush=True)
            with progress_bar(name):
                scenes.write(shards, images, seed=seed)
            index = indexes.build(shards, shards / "index")
            print(f"  {counted(len(index), 'image')}, {counted(index.manifest.masks, 'mask')}")
        elif (found := len(indexes.Index.open(shards / "index"))) != images:
            raise GigamaskError(
                f"{shards}: holds {counted(found, 'scene')}, not {images:,}; ask for as many, or "
                "give another --out"
            )
    data = (str(folder / "train" / "index"),)
    steps = steps or STEPS
    evaluation = ClickEvaluation(
        data=(str(folder / "test" / "index"),),
        images=CURVE_IMAGES,
        interval=max(1, steps // EVALUATIONS),
    )
    config = replace(recipe, data=data, out=out, steps=steps, evaluation=evaluation).check()
    processes = count_processes(config, choose_device(config.device), os.environ)
    print(f"train {config.recipe}: {config.steps} steps, {processes} process(es)", flush=True)
    run = train(config)
    if not run.finished:
        raise TrainingInterruptedError(
            f"{out}: interrupted and saved at step {run.step} of {steps}; run the same command to "
            "continue"
        )
    test = indexes.Index.open(str(folder / "test" / "index"))
    model = load_model(out)
    rows = track(range(len(test)), "evaluate")
    result = clicks.evaluate_clicks(model, test, MaskFilters(max_area=None), rows=rows)
    paths = figures.write_figures(model, test, result, folder / "pictures")
    elapsed_s = round(time.perf_counter() - start_s, 1)
    summary = result.summary() | {"step": run.step, "elapsed_s": elapsed_s}
    files.write_text(folder / "evaluation.json", json.dumps(summary, indent=1) + "\n")
    typical = next(path for path in paths if path.stem == "typical")
    picture, report = folder / "report.png", folder / page.REPORT
    files.write_bytes(picture, typical.read_bytes())
    recipe_texts = {folder.name: config_files.config_as_text(recipe)}
    page.write({folder.name: history.read(folder)}, recipe_texts, report, guide(out))
    print(clicks.table(summary))
    print(f"done in {elapsed_s:.0f} s; see {report}, {picture} and {folder / 'pictures'}")
    first, *others = next_commands(out)
    print("\n".join([f"next: {first[0]}", *(f"      {command}" for command, _ in others)]))
    return summary


def next_commands(out: str) -> list[tuple[str, str]]:
    """Return commands to try with the demo's model, and what they do.

    Args:
        out: Folder of the demo.
    """
    page = (
        f"gigamask serve --weights {quote(out)}",
        "try the model on images of your own, in a web page",
    )
    return [
        *([page] if "serve" in plugin.merged("commands") else []),
        (
            "gigamask train compact --data YOUR_TARS --init starter --out runs/mine",
            "train it on your own photographs; gigamask convert makes tars of COCO JSON or of "
            "label images",
        ),
        (
            f"gigamask follow {quote(f'{Path(out)}/test/sa_000000.tar:0')}",
            "see what one image goes through in training",
        ),
    ]


def guide(out: str) -> str:
    """Return HTML about what the demo's model can do, and what to do next.

    Args:
        out: Folder of the demo.
    """
    commands = (
        html.Markup(f"<code>{html.escaped(command)}</code>: {html.escaped(text)}")
        for command, text in next_commands(out)
    )
    return "".join(html.note(text, "") for text in CAN) + html.bullets(commands)
