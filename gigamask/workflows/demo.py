"""The demo: scenes, an index, a training, an evaluation on scenes the model never saw, sheets of its answers, and the report of it all.

Everything goes into one folder, and a second call with the same folder goes on where the first stopped.

Not here: the parts it calls.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from gigamask import config_files, recipes
from gigamask.data import index as indexes
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import clicks, figures
from gigamask.report import history, page
from gigamask.synthetic import scenes
from gigamask.training.checkpoint import load_model
from gigamask.training.trainer import train

TRAIN_SEED, TEST_SEED = 0, 1


def run(out: str, train_images: int, test_images: int, steps: int | None) -> dict[str, Any]:
    """Runs the whole path and returns the scores; prints them, and the next commands to try."""
    began_s = time.perf_counter()
    folder = Path(out)
    for name, images, seed in (
        ("train", train_images, TRAIN_SEED),
        ("test", test_images, TEST_SEED),
    ):
        if not (folder / name / "index").exists():
            print(f"{name}: {images} synthetic scenes", flush=True)
            scenes.write(str(folder / name), images, seed=seed)
            built = indexes.build(folder / name, str(folder / name / "index"))
            print(f"  {len(built)} images, {built.manifest.masks} masks")
    recipe = recipes.make("tiny")
    wanted = replace(
        recipe, data=(str(folder / "train" / "index"),), out=out, steps=steps or recipe.steps
    ).check()
    print(
        f"training {wanted.recipe} for {wanted.steps} steps on {torch.get_num_threads()} threads",
        flush=True,
    )
    state = train(wanted, on_start=lambda: config_files.save_config(wanted))
    test = indexes.Index.open(str(folder / "test" / "index"))
    model = load_model(out)
    result = clicks.evaluate_clicks(
        model,
        test,
        MaskFilters(max_area=None),
        rows=track(range(len(test)), "evaluate", transient=True),
    )
    sheets = figures.write_sheets(model, test, result, folder / "pictures")
    summary = result.summary() | {
        "step": state.step,
        "elapsed_s": round(time.perf_counter() - began_s, 1),
    }
    (folder / "evaluation.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "report.png").write_bytes(
        next(path for path in sheets if path.stem == "typical").read_bytes()
    )
    page.write(
        {folder.name: history.read(folder)},
        {folder.name: config_files.config_as_text(recipe)},
        folder / page.REPORT,
    )
    print(clicks.table(summary))
    print(
        f"{summary['elapsed_s']:.0f} s in all; look at {folder / page.REPORT}, at {folder / 'report.png'}, and at {folder / 'pictures'}"
    )
    print(
        f"next: gigamask train tiny --data YOUR_TARS --init {out} --out runs/mine\n      gigamask follow {folder / 'test'}/sa_000000.tar:0"
    )
    return summary
