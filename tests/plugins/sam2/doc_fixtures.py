"""What the commands of the docs of SAM 2 need, beside `tests.journeys.doc_fixtures`."""

from dataclasses import replace
from pathlib import Path

import yaml

from gigamask.models import weight_files
from gigamask.models.init import build_model
from gigamask.plugins.sam2 import convert
from tests.journeys.doc_fixtures import SMALL_RUN, VIT_SIZES, flags_of
from tests.plugins.sam2 import models, substitutions

SAM2 = replace(models.SAM2, drop_path_rate=0.0)


def populate(folder: Path) -> None:
    """Weights of a small SAM 2 under Meta's names, and its sizes as flags."""
    state = build_model(SAM2, seed=3).state_dict()
    weight_files.write_pth(convert.to_meta(state), SAM2, folder / "sam2.1_hiera_tiny.pt")
    model = flags_of(SAM2, "custom_init", "encoder", "decoder", *VIT_SIZES)
    content = SMALL_RUN | {
        "model": model | {"encoder": flags_of(SAM2.encoder)},
        "loader": {"workers": 0, "max-masks": 2},
    }
    (folder / substitutions.SMALL_SAM2).write_text(yaml.safe_dump(content))
