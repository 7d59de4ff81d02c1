"""The public API: what `import gigamask` offers, and what it costs."""

import inspect
import os
import subprocess
import sys
import threading
from copy import deepcopy

import numpy as np
import pytest
import torch

import gigamask
from gigamask import recipes, samplers
from gigamask.models import build_model
from gigamask.models.configs import SamConfig
from gigamask.workflows import open_data
from tests.errors import error_line
from tests.little import SPEC, little

NAMES = (
    "Sam SamConfig SamPredictor SamAutomaticMaskGenerator sam_model_registry build_sam_vit_b "
    "build_sam_vit_l build_sam_vit_h load_model save_model train pretrain evaluate segment plan "
    "recipes open_index DataLoader data losses masks models prompts samplers evaluation inference "
    "training interfaces types Run GigamaskError"
).split()


def test_every_public_name_can_be_imported():
    for name in NAMES:
        assert getattr(gigamask, name) is not None, name
    assert set(NAMES) <= set(dir(gigamask))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = gigamask.nothing_of_this_name


def test_every_name_of_the_component_packages_can_be_imported():
    names = "data evaluation inference losses masks models prompts samplers training"
    for package in (getattr(gigamask, name) for name in names.split()):
        assert [getattr(package, public) for public in package.__all__]


def test_importing_the_package_imports_neither_torch_nor_numpy():
    code = "import sys, gigamask; print({'torch', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_with_changes_fields_and_fields_of_sections(tmp_path):
    config = recipes.tiny().with_(
        data=tmp_path / "scenes", out=tmp_path / "run", steps=7, optimizer__lr=0.5
    )
    assert (config.data, config.out) == ((str(tmp_path / "scenes"),), str(tmp_path / "run"))
    assert (config.steps, config.optimizer.lr) == (7, 0.5)
    assert recipes.tiny().with_(**{"loader.max-masks": 3}).loader.max_masks == 3
    model = recipes.tiny().with_(model__embed_dim=60, model__num_heads=5).model  # 64 and 4 before
    assert (model.embed_dim, model.num_heads) == (60, 5)
    with error_line(r"steps has no fields .got steps__x"):
        recipes.tiny().with_(steps__x=3)
    sampler = samplers.Curriculum()
    assert recipes.tiny().with_(sampler=sampler, data=["a", "b"]).sampler is sampler
    with error_line(r"stepz.*steps"):
        recipes.tiny().with_(stepz=3)
    with error_line(r"optimizer__rate"):
        recipes.tiny().with_(optimizer__rate=3)
    with error_line(r"'lr'; perhaps you meant optimizer__lr"):
        recipes.tiny().with_(lr=3)
    with error_line(r"epochs.*steps"):
        recipes.tiny().with_(epochs=3)
    assert recipes.tiny().with_(steps=1e4).steps == 10_000
    assert recipes.make(recipes.tiny) == recipes.tiny()
    assert recipes.tiny().with_(micro_batch_size=None, seed=np.int64(3)).seed == 3


@pytest.mark.parametrize(
    "name, value, wanted",
    [
        ("steps", 2.5, "int"),
        ("steps", "ten", "int"),
        ("steps", None, "int"),
        ("steps", True, "int"),
        ("optimizer__lr", "high", "float"),
        ("sampler", "curriculum", r"an object.*sampler__FIELD"),
        ("optimizer", {"lr": 3}, "an object"),
        ("data", 3, "tuple"),
        ("out", 3, "str"),
    ],
)
def test_with_refuses_values_of_other_types(name, value, wanted):
    with error_line(rf"^{name} must be {wanted}.*\(got"):
        recipes.tiny().with_(**{name: value})


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory):
    """A run of two steps, trained in a thread that is not the main one."""
    folder = tmp_path_factory.mktemp("api")
    config = little().with_(data=scenes, out=folder / "run", steps=2, device="cpu")
    runs = []
    thread = threading.Thread(target=lambda: runs.append(gigamask.train(config)))
    thread.start()
    thread.join()
    return runs[0]


@pytest.mark.slow
def test_train_returns_the_run(trained, scenes):
    assert trained.step == 2
    assert trained.finished
    assert [record["step"] for record in trained.metrics if "loss" in record][-1] == 2
    assert not trained.model.training
    scores = trained.evaluate(scenes, max_images=1)
    assert scores["clicks"].keys() == {"1", "2", "3", "5", "9"}
    assert gigamask.evaluate(trained.model, scenes, max_images=1, device="cpu")[
        "clicks"
    ] == pytest.approx(scores["clicks"])


@pytest.mark.slow
def test_a_finished_run_can_be_opened_and_continued(trained):
    assert gigamask.Run.open(trained.folder, trust=True).step == 2
    longer = gigamask.train(trained.config.with_(steps=3))
    assert (longer.step, gigamask.Run.open(trained.folder, trust=True).config.steps) == (3, 3)
    with error_line(r"nowhere"):
        gigamask.Run.open("nowhere")


def test_pretrain_refuses_what_is_not_a_pre_training():
    with error_line(r"SamTrainConfig"):
        inspect.unwrap(gigamask.pretrain)(recipes.tiny())  # without the shape checks of tests


@pytest.mark.slow
def test_saved_models_load_equal(trained, tmp_path):
    state = trained.model.state_dict()
    gigamask.save_model(trained.model, tmp_path / "model.safetensors")
    loaded = gigamask.load_model(tmp_path / "model.safetensors", device="cpu").state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    with error_line("converted to half precision, .* save it before that"):
        gigamask.save_model(deepcopy(trained.model).half(), tmp_path / "half.safetensors")
    for name in ("model.onnx", "model.SAFETENSORS"):
        with error_line(f"{name}: would be a folder; end the name in .pth or .safetensors"):
            gigamask.save_model(trained.model, tmp_path / name)


def test_what_a_user_types_first(scenes, tmp_path, no_shape_checks):
    with error_line(r"unknown recipe 'tinny'.*tiny"):
        gigamask.plan("tinny")
    with error_line(r"--steps must be at least 1 .got -3"):
        gigamask.train("tiny", data=scenes, out=str(tmp_path / "run"), steps=-3)
    with error_line(r"no field 'step'"):
        gigamask.pretrain("mae_tiny", step=3)
    with error_line(r"load_model.'starter'"):
        gigamask.SamPredictor("starter")
    predictor = gigamask.SamPredictor(gigamask.load_model("starter", device="cpu"))
    with error_line(r"photo\.jpg.*cannot be read"):
        predictor.set_image("photo.jpg")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda _: gigamask.train("tiny", max_minutes="x"), r"--max-minutes .*at least 0 .got x"),
        (lambda _: gigamask.train(None), r"a recipe, its name or .*None"),
        (lambda _: gigamask.plan("tiny", gpu=3), r"no GPU is called '3'"),
        (lambda data: gigamask.evaluate("starter", data, max_images="x"), r"max_images .*int.*'x'"),
        (lambda data: gigamask.evaluate("starter", data, image=3), r"'image'; perhaps .*images"),
        (lambda data: gigamask.evaluate("starter", data, precision="fp8"), r"one of auto, .*'fp8'"),
        (lambda data: gigamask.evaluate(None, data), r"a model is needed.*NoneType"),
        (lambda _: gigamask.evaluate("starter", None), r"None is not a path"),
        (lambda _: gigamask.load_model("starter", device=3), r"--device must be .*got 3"),
        (lambda _: gigamask.open_index(3), r"3 is not a path"),
        (lambda _: gigamask.SamPredictor(None), r"a model is needed.*NoneType"),
        (
            lambda _: gigamask.SamAutomaticMaskGenerator(
                gigamask.load_model("starter", device="cpu"), points_per_side="x"
            ),
            r"points_per_side must be at least 1 .got x",
        ),
    ],
)
def test_values_of_another_type_are_refused(call, message, scenes, no_shape_checks):
    with error_line(message):
        call(scenes)


def test_predictions_refuse_a_precision_that_is_none(no_shape_checks):
    predictor = gigamask.SamPredictor(gigamask.load_model("starter", device="cpu"), precision="fp8")
    with error_line(r"precision must be one of auto, .*'fp8'"):
        predictor.set_image(np.zeros((8, 8, 3), np.uint8))


def test_open_index_keeps_a_new_index_or_not(scenes, tmp_path):
    kept = gigamask.open_index(scenes, tmp_path)
    brief = gigamask.open_index(scenes)
    assert len(kept) == len(brief) == 12
    for process, is_there in ((os.getpid() + 1, True), (os.getpid(), False)):  # a child, and this
        open_data._remove(str(brief.folder), process)
        assert brief.folder.exists() == is_there


@pytest.mark.slow
def test_the_loader_yields_epochs_one_after_the_other(scenes):
    loader = gigamask.DataLoader(scenes, little(), batch_size=4, num_workers=0)
    first, second = ([batch.names for batch in loader] for _ in range(2))
    assert len(first) == len(second) == len(loader) == 3
    assert sorted(sum(first, ())) == sorted(sum(second, ()))
    assert first != second
    again = gigamask.DataLoader(scenes, little(), batch_size=4, num_workers=0)
    assert [batch.names for batch in again] == first
    uneven = gigamask.DataLoader(scenes, little(), batch_size=5, num_workers=0)
    next(iter(uneven))
    for _ in range(3):  # epochs of 12, of which two are dropped
        names = sum((batch.names for batch in uneven), ())
        assert len(names) == len(set(names)) == 10


@pytest.mark.long
def test_plan_is_that_of_the_command():
    config = recipes.tiny().with_(device="cpu", prompts__clicks=0)
    assert gigamask.plan(config, world=2)["peak_bytes"] > 0
    with error_line(r"--efficiency"):
        gigamask.plan(config, efficiency=0.3)


def test_registry_builds_metas_models():
    assert list(gigamask.sam_model_registry) == ["default", "vit_h", "vit_l", "vit_b"]
    assert list(inspect.signature(gigamask.build_sam_vit_b).parameters) == ["checkpoint"]


def test_forward_takes_and_returns_what_metas_does():
    """Each image is answered as the predictor answers it."""
    model = build_model(SPEC, 0).eval()
    assert isinstance(model.config, SamConfig)
    side = SPEC.image_size
    image = torch.randint(0, 256, (3, side // 2, side), dtype=torch.uint8)
    points, labels = torch.tensor([[[5.0, 7.0], [9.0, 3.0]]]), torch.tensor([[1, 0]])
    boxes = torch.tensor([[1.0, 2.0, 20.0, 15.0], [3.0, 3.0, 9.0, 9.0]])
    whole = {"image": image, "original_size": (50, 100)}
    batched = [
        whole | {"point_coords": points, "point_labels": labels},
        {"image": image[..., : side // 2], "original_size": (40, 40), "boxes": boxes},
        whole,
    ]
    with torch.no_grad():
        outputs = model(batched, multimask_output=True)
        single = model(batched[:1], multimask_output=False)[0]
    shapes = [tuple(output["masks"].shape) for output in outputs]
    assert shapes == [(1, 3, 50, 100), (2, 3, 40, 40), (1, 3, 50, 100)]
    assert single["masks"].dtype == torch.bool
    assert single["low_res_logits"].shape == (1, 1, SPEC.mask_size, SPEC.mask_size)
    predictor = gigamask.SamPredictor(model)
    predictor.set_torch_image(image[None].float(), (50, 100))
    masks, scores, low = predictor.predict_torch(points, labels, multimask_output=True)
    assert torch.equal(outputs[0]["masks"], masks)
    assert torch.allclose(outputs[0]["iou_predictions"], scores, atol=1e-6)
    assert torch.allclose(outputs[0]["low_res_logits"], low, atol=1e-5)
    model.mask_threshold = float(low.max()) / 2
    with torch.no_grad():
        fewer = model(batched[:1], multimask_output=True)[0]["masks"]
    assert torch.equal(fewer, predictor.predict_torch(points, labels)[0])
    assert fewer.sum() < masks.sum()
    with error_line(str(side)):
        model([{"image": torch.zeros(3, side + 1, 4), "original_size": (9, 9)}], True)
