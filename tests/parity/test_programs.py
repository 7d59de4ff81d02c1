"""Programs written for Meta's package, run with it and with gigamask in its place.

Where Meta's package is not installed, results are compared with the numbers that it gave:

pip download --no-deps segment-anything && unzip segment_anything-*.whl -d official
PYTHONPATH=official python -m tests.parity.test_programs  # writes programs.json and the table
"""

import copy
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import gigamask.segment_anything
from gigamask.models.init import build_model
from gigamask.synthetic.scenes import compose_scene
from tests import official
from tests.parity.programs import PROGRAMS
from tests.parity.test_official_sam import SPEC

META = "segment_anything"
NUMBERS = Path(__file__).parent / "programs.json"
PAGE = Path(__file__).parents[2] / "docs/segment_anything.md"
MODULES = [
    *("automatic_mask_generator", "build_sam", "predictor", "utils.transforms"),
    *(f"modeling.{name}" for name in ("common", "image_encoder", "mask_decoder")),
    *(f"modeling.{name}" for name in ("prompt_encoder", "sam", "transformer")),
]
DIFFERENT = {
    "Sam()": "takes a `SamConfig`; `sam_model_registry` and `load_model` build it",
    "ImageEncoderViT()": "without `mlp_ratio` (4), `qkv_bias`, `norm_layer`, `act_layer`, "
    "`use_abs_pos` and `rel_pos_zero_init`, which are as in Meta's models",
    **{
        f"{name}()": "has arguments of its own"
        for name in ("Block", "Block.attn", "Block.mlp", "MLP", "TwoWayAttentionBlock")
    },
    "TwoWayAttentionBlock.self_attn()": "has arguments of its own",
    "TwoWayAttentionBlock.forward": "not there: `TwoWayTransformer` computes both blocks at once",
    "TwoWayAttentionBlock.skip_first_layer_pe": "absent; True in the first block",
    "PositionEmbeddingRandom()": "without `scale`, which is 1",
    "MLP.num_layers": "absent; 3",
    "MLP.sigmoid_output": "absent; False",
    "ImageEncoderViT.forward": "the argument is called `pixels`",
    "SamAutomaticMaskGenerator.postprocess_small_regions": "absent; `min_mask_region_area` does it",
    "ResizeLongestSide.apply_image_torch": "the same as in Meta's repository; its release 1.0 "
    "takes the batch and the channels for height and width",
    **{
        f"SamPredictor.{name}": "absent; Meta's class never sets it to anything but None"
        for name in ("input_h", "input_w", "orig_h", "orig_w")
    },
}
"""What is not the same, by class and name."""


def ours() -> ModuleType:
    """Return the package that stands for Meta's, with all its modules."""
    for name in MODULES:
        importlib.import_module(f"gigamask.segment_anything.{name}")
    return gigamask.segment_anything


@pytest.fixture(scope="module")
def mine() -> Any:
    return build_model(SPEC, 0).eval()


def pictures() -> list[np.ndarray]:
    """Return a landscape and a portrait."""
    first, second = (compose_scene(1, index).pixels for index in (3, 4))
    return [first, np.ascontiguousarray(second.transpose(1, 0, 2))]


def run(name: str, package: ModuleType, sam: Any) -> dict[str, np.ndarray | None]:
    """Return what a program computes with a copy of a model."""
    found = PROGRAMS[name](package, copy.deepcopy(sam), pictures())
    return {
        key: None if value is None else np.asarray(torch.as_tensor(value).detach(), np.float64)
        for key, value in found.items()
    }


def summary(found: Mapping[str, np.ndarray | None]) -> dict[str, list[float]]:
    """Return how many results there are of each part, their norm and a projection of them."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, value in sorted(found.items()):
        part = part_of(name) + ("" if value is not None else ": none")
        parts.setdefault(part, []).append(np.zeros(1) if value is None else value.ravel())
    return {
        part: [len(values), float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(len(flat))))]
        for part, values in parts.items()
        for flat in [np.concatenate(values)]
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_it_did_with_metas_package(name, mine):
    found, expected = summary(run(name, ours(), mine)), json.loads(NUMBERS.read_text())[name]
    assert found.keys() == expected.keys()
    for part, (count, norm, projection) in expected.items():
        assert found[part][0] == count, part
        assert found[part][1:] == pytest.approx([norm, projection], rel=1e-4, abs=1e-4 * norm), part


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_it_does_with_metas_package(name, mine):
    if not official.there():
        pytest.skip("Meta's segment_anything is not installed; compared with its numbers instead")
    with official.imported() as package:
        expected = run(name, package, official.with_weights_of(mine, package))
    # What training changes is known to the rounding of the weights only.
    allowed = 1e-4 if name.startswith("train_") else 1e-5
    assert largest_difference(run(name, ours(), mine), expected) < allowed


def largest_difference(
    found: Mapping[str, np.ndarray | None], expected: Mapping[str, np.ndarray | None]
) -> float:
    """Return the largest difference relative to the largest value of the result.

    Results below a hundredth of the largest of their part of the model are compared with that: the
    gradients of the biases of keys, which are zero but for rounding.
    """
    assert found.keys() == expected.keys()
    none = [{name for name, value in each.items() if value is None} for each in (found, expected)]
    assert none[0] == none[1]
    pairs = {name: (found[name], value) for name, value in expected.items() if value is not None}
    largest: dict[str, float] = {}
    for name, (_, value) in pairs.items():
        part = part_of(name)
        largest[part] = max(largest.get(part, 0.0), np.abs(value).max(initial=0))
    worst = 0.0
    for name, (one, other) in pairs.items():
        assert one is not None, name
        assert one.shape == other.shape, name
        size = max(np.abs(other).max(initial=0), largest[part_of(name)] / 100, 1e-30)
        worst = max(worst, np.abs(one - other).max(initial=0) / size)
    return worst


def part_of(name: str) -> str:
    """Return the part of a model that a result belongs to, or the name without its number."""
    return ".".join(name.split(".")[:2]).rstrip(" 0123456789")


def test_a_program_runs_unchanged_with_the_package_under_metas_name(mine):
    source = """
from segment_anything import SamPredictor, sam_model_registry
from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam
from segment_anything.modeling.image_encoder import window_partition
from segment_anything.utils.transforms import ResizeLongestSide

assert isinstance(sam, Sam) and isinstance(sam.image_encoder, ImageEncoderViT)
size = ResizeLongestSide(sam.image_encoder.img_size).get_preprocess_shape(30, 60, 64)
"""
    names = {"sam": mine}
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith(META)}
    try:
        sys.modules[META] = gigamask.segment_anything
        exec(source, names)
    finally:
        for name in [name for name in sys.modules if name.startswith(META)]:
            del sys.modules[name]
        sys.modules.update(kept)
    assert names["size"] == (32, 64)


def instances(package: ModuleType, sam: Any) -> dict[str, Any]:
    """Return an instance of each of Meta's classes, by its name."""
    predictor, transformer = package.SamPredictor(sam), sam.mask_decoder.transformer
    block, layer = sam.image_encoder.blocks[0], transformer.layers[0]
    return {
        "Sam": sam,
        "ImageEncoderViT": sam.image_encoder,
        "Block": block,
        "Block.attn": block.attn,
        "Block.mlp": block.mlp,
        "PromptEncoder": sam.prompt_encoder,
        "PositionEmbeddingRandom": sam.prompt_encoder.pe_layer,
        "MaskDecoder": sam.mask_decoder,
        "MLP": sam.mask_decoder.iou_prediction_head,
        "TwoWayTransformer": transformer,
        "TwoWayAttentionBlock": layer,
        "TwoWayAttentionBlock.self_attn": layer.self_attn,
        "SamPredictor": predictor,
        "SamAutomaticMaskGenerator": package.SamAutomaticMaskGenerator(sam),
        "ResizeLongestSide": predictor.transform,
    }


def attributes(instance: Any) -> dict[str, str]:
    """Return the public attributes and methods of Meta's class and how they are written."""
    is_module = isinstance(instance, torch.nn.Module)
    names = set(dir(instance)) - set(dir(torch.nn.Module()) if is_module else ())
    names |= {"forward"} if is_module else set()
    written = {"()": call(type(instance))}
    for name in sorted(each for each in names if not each.startswith("_")):
        value = getattr(instance, name)
        is_method = callable(value) and not isinstance(value, torch.nn.Module)
        written[name] = call(value) if is_method else ""
    return written


def call(function: Any) -> str:
    """Return the names of a function's parameters as it is called."""
    return f"({', '.join(inspect.signature(function).parameters)})"


def table(package: ModuleType, sam: Any) -> list[str]:
    """Return the lines of the table of Meta's classes."""
    lines = []
    for kind, instance in instances(package, sam).items():
        for name, written in attributes(instance).items():
            joined = "()" if name == "()" else f".{name}"
            shown = f"{kind}{written}" if name == "()" else f"{kind}.{name}{written}"
            lines.append(f"| `{shown}` | {DIFFERENT.get(kind + joined, 'the same')} |")
    return lines


def printed() -> list[str]:
    """Return the lines of the table in the documentation."""
    _, lines = PAGE.read_text().split("| Meta's | Here |\n|---|---|\n")
    return lines.splitlines()


def rows(kinds: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return class, name, parameters and remark of each line of the table in the documentation."""
    found = []
    for line in printed():
        shown, remark = (cell.strip() for cell in line.strip("|").split(" | "))
        head, _, parameters = shown.strip("`").partition("(")
        kind, _, name = head.rpartition(".") if head not in kinds else (head, "", "")
        found.append((kind, name, parameters.rstrip(")") if "(" in shown else "-", remark))
    return found


def test_every_row_of_the_table_is_true(mine):
    by_class = instances(ours(), mine)
    found = rows(by_class)
    assert len(found) > 80
    for kind, name, parameters, remark in found:
        instance = by_class[kind]
        if remark != "the same":
            assert DIFFERENT[f"{kind}.{name}" if name else f"{kind}()"] == remark
            assert not remark.startswith("absent") or not hasattr(instance, name), name
            continue
        mine_is = getattr(instance, name) if name else type(instance)
        if parameters != "-":
            asked = [each for each in parameters.split(", ") if each]
            assert list(inspect.signature(mine_is).parameters)[: len(asked)] == asked, (kind, name)


def test_the_table_has_every_attribute_of_metas_classes(mine):
    if not official.there():
        pytest.skip("Meta's segment_anything is not installed")
    with official.imported() as package:
        expected = table(package, official.with_weights_of(mine, package))
    assert printed() == expected


def write() -> None:
    """Write the numbers of Meta's package, and print its table and the largest differences."""
    sam, numbers = build_model(SPEC, 0).eval(), {}
    with official.imported() as package:
        theirs = official.with_weights_of(sam, package)
        for name in PROGRAMS:
            expected = run(name, package, theirs)
            numbers[name] = {
                part: [count, *(float(f"{each:.7g}") for each in values)]
                for part, (count, *values) in summary(expected).items()
            }
            print(f"{name}: {largest_difference(run(name, ours(), sam), expected):.1e}")
        print(*table(package, theirs), sep="\n")
    NUMBERS.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    write()
