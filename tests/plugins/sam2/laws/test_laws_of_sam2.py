"""What holds for every model holds for SAM 2's."""

from dataclasses import replace

import pytest
import torch

from gigamask import recipes
from gigamask.data.index import build as build_index
from gigamask.models.configs import vit_b
from gigamask.models.init import build_model
from gigamask.models.state_dict import save_weights
from gigamask.plugins.sam2.configs import sam2_small, sam2_tiny
from gigamask.plugins.sam2.convert import SIZES
from gigamask.training.train_data import TrainData
from tests.errors import error_line
from tests.laws import test_rounds_gradients, test_training
from tests.plugins.sam2.models import SAM2, little_sam2
from tests.unit.export import test_export
from tests.unit.models import test_channels, test_embedding_cache, test_lora
from tests.unit.models.test_class_head import classed
from tests.unit.training import test_state, test_synchronization


@pytest.fixture(scope="module")
def world():
    return test_rounds_gradients.make_world(SAM2)


test_gradients = test_rounds_gradients.test_leaf_gradients_in_any_chunks_are_the_whole_graphs
test_masks_fed_back = test_rounds_gradients.test_the_masks_fed_back_matter_to_the_gradient


@pytest.mark.long
def test_it_goes_on_where_it_stopped(tmp_path, scenes):
    test_training.test_other_models_go_on_where_they_stopped(tmp_path, scenes, little_sam2)


def test_how_a_batch_is_cut_changes_nothing(tmp_path, scenes):
    changes = {"recipe": little_sam2}
    test_training.test_how_a_batch_is_cut_changes_nothing(tmp_path, scenes, changes)


@pytest.mark.long
def test_no_value_is_read(monkeypatch):
    test_synchronization.test_no_value_is_read(little_sam2, monkeypatch)
    test_synchronization.test_another_optimizer_reads_none(little_sam2, monkeypatch)


@pytest.mark.long
def test_onnx_scores_classes_as_the_model_does(tmp_path, no_shape_checks):
    test_export.test_onnx_scores_classes_as_the_model_does(SAM2, tmp_path, no_shape_checks)


@torch.no_grad()
def test_weights_for_rgb_see_gray_images_as_before(tmp_path):
    test_channels.test_weights_for_rgb_see_gray_images_in_five_channels_as_before(SAM2, tmp_path)


@pytest.mark.parametrize("on", [("attention",), ("all",)], ids=" ".join)
def test_the_merged_model_computes_the_same_bit_for_bit(on):
    test_lora.check_merged(little_sam2(), on)


@pytest.mark.long
def test_the_key_of_an_embedding_changes_with_the_decoder():
    test_embedding_cache.check_key(SAM2, "mask_decoder")


def test_its_embedding_is_not_kept():
    assert sam2_tiny().embedding_channels == 4 * 256
    config = replace(little_sam2(), data=("a.tar",), embedding_cache="cache", init="weights")
    with error_line(r"--embedding-cache.*a part of the embedding"):
        replace(config, freeze=("image_encoder",)).check()


def test_beside_a_frozen_encoder_all_of_the_decoder_learns(scenes, tmp_path):
    """Also what it adds to the embedding, whose graph the encoder has no part in."""
    run = replace(little_sam2(), freeze=("image_encoder",), batch_size=2, micro_batch_size=2)
    (batch,) = next(TrainData(run, build_index(scenes, tmp_path / "index")).batches())
    state, before = test_state.after_steps(run, batch)
    own = tuple(f"mask_decoder.{part}" for part in state.model.embedding_parts)
    now = {name: each for name, each in state.model.named_parameters() if name.startswith(own)}
    assert len(now) == 5
    assert not [name for name, each in now.items() if torch.equal(each, before[name])]


def test_others_have_no_classes(tmp_path):
    with error_line(r"classes.*safetensors"):
        build_model(classed(SAM2), 0).save_pretrained(tmp_path / "folder")


def test_recipes_train_the_published_sizes():
    for make in SIZES:
        model = recipes.make(make.__name__).model
        assert replace(model, drop_path_rate=0.0) == make()


@pytest.mark.long
def test_weights_of_sam2_name_their_recipe(tmp_path):
    state = build_model(sam2_tiny(), 0).state_dict()
    save_weights(state, sam2_tiny(), tmp_path / "w.safetensors")
    for config in (sam2_small(), vit_b()):
        with error_line(r"w\.safetensors.*fit the recipe sam2_tiny$"):
            build_model(config, 0).load_init(str(tmp_path / "w.safetensors"))
