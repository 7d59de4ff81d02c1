"""SAM 2.1's image models against Hugging Face's `Sam2Model` with the same weights."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from transformers import Sam2Config, Sam2Model
from transformers.models.sam2.configuration_sam2 import (
    Sam2HieraDetConfig,
    Sam2MaskDecoderConfig,
    Sam2PromptEncoderConfig,
    Sam2VisionConfig,
)

from gigamask import load_model
from gigamask.inference.predictor import SamPredictor
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.state_dict import load_weights
from gigamask.plugins.sam2 import configs, convert
from gigamask.plugins.sam2.configs import Hiera, Sam2Decoder
from gigamask.plugins.sam2.mask_decoder import high_res_maps
from gigamask.types import Prompts
from tests.errors import error_line
from tests.parity.test_huggingface_sam import assert_close

# From stride 8 on, tokens need padding to whole windows.
SMALL = SamConfig(
    image_size=128,
    stretch=True,
    embedding_dim=32,
    decoder_num_heads=4,
    decoder_mlp=64,
    iou_hidden=32,
    encoder=Hiera(
        embed_dim=16, depths=(1, 2, 3, 2), global_attn_indexes=(4,), window_sizes=(8, 6, 6, 3)
    ),
    decoder=Sam2Decoder(),
)
SIZES = {
    "sam2_tiny": configs.sam2_tiny,
    "sam2_small": configs.sam2_small,
    "sam2_base_plus": configs.sam2_base_plus,
    "sam2_large": configs.sam2_large,
}


def theirs_of(config: SamConfig) -> Sam2Model:
    """Written from transformers' documentation, not by `huggingface_config`."""
    hiera = config.encoder
    assert isinstance(hiera, Hiera)
    widths = [hiera.embed_dim * 2**stage for stage in range(4)]
    size = config.embedding_size
    backbone = Sam2HieraDetConfig(
        hidden_size=widths[0],
        num_attention_heads=hiera.num_heads,
        image_size=[config.image_size] * 2,
        blocks_per_stage=list(hiera.depths),
        embed_dim_per_stage=widths,
        num_attention_heads_per_stage=[hiera.num_heads * 2**stage for stage in range(4)],
        window_size_per_stage=list(hiera.window_sizes),
        global_attention_blocks=list(hiera.global_attn_indexes),
        window_positional_embedding_background_size=[hiera.position_size] * 2,
    )
    vision = Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=widths[::-1],
        backbone_feature_sizes=[[4 * size] * 2, [2 * size] * 2, [size] * 2],
        fpn_hidden_size=config.embedding_dim,
    )
    prompt = Sam2PromptEncoderConfig(
        hidden_size=config.embedding_dim, image_size=config.image_size, patch_size=16
    )
    decoder = Sam2MaskDecoderConfig(
        hidden_size=config.embedding_dim,
        mlp_dim=config.decoder_mlp,
        num_attention_heads=config.decoder_num_heads,
        iou_head_hidden_dim=config.iou_hidden,
    )
    return Sam2Model(
        Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    )


@pytest.fixture(scope="module")
def models():
    chance = torch.Generator().manual_seed(0)
    theirs = theirs_of(SMALL).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=chance)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    theirs.shared_image_embedding.positional_embedding.data.copy_(
        theirs.prompt_encoder.shared_embedding.positional_embedding
    )
    model = build_model(SMALL, 1)
    load_weights(model, convert.from_huggingface(theirs.state_dict()), "theirs")
    return model.eval(), theirs


@pytest.fixture(scope="module")
def images():
    chance = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (2, 3, 128, 128), generator=chance, dtype=torch.uint8)


@torch.no_grad()
def embedding(model, images):
    return model.encode(images, torch.full((len(images), 2), SMALL.image_size))


@pytest.mark.parametrize("name", SIZES)
def test_names_and_shapes_of_the_published_sizes_are_theirs(name):
    config = SIZES[name]()
    with torch.device("meta"):
        theirs = theirs_of(config).state_dict()
    mine = convert.to_huggingface(build_model(config, 0, "meta").state_dict())
    assert {key: value.shape for key, value in mine.items()} == {
        key: value.shape for key, value in theirs.items()
    }


def test_their_names_and_back_change_nothing(models):
    model, theirs = models
    again = convert.to_huggingface(model.state_dict())
    expected = theirs.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@torch.no_grad()
def test_embeddings_agree(models, images):
    model, theirs = models
    pixels = (images.float() - model.pixel_mean) / model.pixel_std
    four, twice, coarse = theirs.get_image_embeddings(pixels)
    mine = embedding(model, images)
    assert_close(mine[:, :32], coarse)
    for map_, expected in zip(high_res_maps(mine[:, 32:]), (twice, four), strict=True):
        assert_close(map_, expected)


@pytest.mark.parametrize("stability_threshold", [0.98, 0.0])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("kind", ["point", "points", "box", "point and mask"])
@torch.no_grad()
def test_prompts_agree(models, images, kind, several, stability_threshold):
    """A single mask is replaced by the best of three if it is not stable."""
    model, theirs = models
    chance = torch.Generator().manual_seed(3)
    masks = None
    if kind == "box":
        boxes = torch.tensor([10.0, 20, 90, 100]) + torch.rand(2, 3, 4, generator=chance)
        asked = {"input_boxes": boxes}
        points, labels = boxes.flatten(0, 1).view(-1, 2, 2), torch.tensor([[2, 3]]).expand(6, 2)
    else:
        count = 1 if "mask" in kind else 3
        points = 127 * torch.rand(2, count, 2 if kind == "points" else 1, 2, generator=chance)
        labels = torch.randint(0, 2, points.shape[:3], generator=chance)
        asked = {"input_points": points, "input_labels": labels}
        points, labels = points.flatten(0, 1), labels.flatten(0, 1)
        if "mask" in kind:
            asked["input_masks"] = torch.randn(2, 1, 32, 32, generator=chance)
            masks = asked["input_masks"][:, 0]
    threshold = theirs.mask_decoder.dynamic_multimask_stability_thresh
    theirs.mask_decoder.dynamic_multimask_stability_thresh = stability_threshold
    own = model.mask_decoder.options
    model.mask_decoder.options = replace(own, stability_threshold=stability_threshold)
    try:
        pixels = (images.float() - model.pixel_mean) / model.pixel_std
        answer = theirs(pixel_values=pixels, multimask_output=several, **asked)
        logits, iou, _, score = model.predict(
            embedding(model, images),
            torch.arange(2).repeat_interleave(len(points) // 2),
            Prompts(points, labels, masks, several),
        )
    finally:
        theirs.mask_decoder.dynamic_multimask_stability_thresh = threshold
        model.mask_decoder.options = own
    assert_close(logits, answer.pred_masks.flatten(0, 1))
    assert_close(iou, answer.iou_scores.flatten(0, 1))
    assert_close(score, answer.object_score_logits.flatten())


@pytest.mark.parametrize("several", [True, False])
@torch.no_grad()
def test_the_predictor_stretches_images(models, several):
    """An oblong image, a point and a box, from pixels to masks of its size."""
    model, theirs = models
    picture = np.random.default_rng(4).integers(0, 256, (60, 100, 3), dtype=np.uint8)
    square = np.array(Image.fromarray(picture).resize((128, 128), Image.Resampling.BILINEAR))
    pixels = torch.from_numpy(square).permute(2, 0, 1).float()
    scale = torch.tensor([128 / 100, 128 / 60])
    point, box = torch.tensor([[30.0, 20.0]]), torch.tensor([[10.0, 5.0, 80.0, 50.0]])
    predictor = SamPredictor(model)
    predictor.set_image(picture)
    for asked, given in (
        (
            {"point_coords": point.numpy(), "point_labels": np.array([1])},
            {
                "input_points": (point * scale).view(1, 1, 1, 2),
                "input_labels": torch.ones(1, 1, 1, dtype=torch.long),
            },
        ),
        ({"box": box[0].numpy()}, {"input_boxes": (box * scale.repeat(2))[None]}),
    ):
        answer = theirs(
            pixel_values=(pixels - model.pixel_mean)[None] / model.pixel_std,
            multimask_output=several,
            **given,
        )
        expected = functional.interpolate(answer.pred_masks[0], (60, 100), mode="bilinear")
        masks, iou, low = predictor.predict(**asked, multimask_output=several, return_logits=True)
        assert_close(torch.as_tensor(masks), expected[0])
        assert_close(torch.as_tensor(iou), answer.iou_scores[0, 0])
        assert_close(torch.as_tensor(low), answer.pred_masks[0, 0])


def test_their_processor_stretches_too(tmp_path, models):
    """Its configuration is that of facebook/sam2.1-hiera-tiny, at another size."""
    models[0].save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert stated["image_processor_type"] == "Sam2ImageProcessor"
    assert stated["size"] == {"height": 128, "width": 128}
    assert stated["mask_size"] == {"height": 32, "width": 32}
    assert stated["image_mean"] == pytest.approx([0.485, 0.456, 0.406], abs=1e-5)
    padded = replace(SMALL, stretch=False).build()
    with error_line(r"Sam2Model stretches images, .* --model.no-stretch"):
        padded.save_pretrained(tmp_path / "padded")


def test_folders_of_theirs_and_ours(tmp_path, models, images):
    model, theirs = models
    theirs.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    read = Sam2Model.from_pretrained(tmp_path / "ours").eval()
    for name, value in theirs.state_dict().items():
        assert torch.equal(read.state_dict()[name], value)
    again = load_model(tmp_path / "ours")
    assert again.config == SMALL
    assert torch.equal(embedding(again, images), embedding(model, images))


def meta_file(path, state, extra=()):
    """Write a file like `sam2.1_hiera_tiny.pt`, with some of the tensors of videos."""
    video = {
        "maskmem_tpos_enc": torch.zeros(7, 1, 1, 64),
        "no_mem_pos_enc": torch.zeros(1, 1, 256),
        "no_obj_ptr": torch.zeros(1, 256),
        "no_obj_embed_spatial": torch.zeros(1, 64),
        "memory_attention.layers.0.norm1.weight": torch.zeros(256),
        "memory_encoder.out_proj.weight": torch.zeros(64, 256, 1, 1),
        "mask_downsample.weight": torch.zeros(1, 1, 4, 4),
        "obj_ptr_proj.layers.0.weight": torch.zeros(256, 256),
        "obj_ptr_tpos_proj.weight": torch.zeros(64, 256),
    }
    torch.save({"model": {**convert.to_meta(state), **video, **dict(extra)}}, path)
    return path


def test_metas_file_of_a_published_size(tmp_path):
    """Its tensors of videos are left out; its configuration follows from the shapes."""
    state = build_model(configs.sam2_tiny(), 3).state_dict()
    read = load_model(meta_file(tmp_path / "sam2.1_hiera_tiny.pt", state))
    assert read.config == configs.sam2_tiny()
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())


def test_metas_names():
    """Some of the names of `sam2.1_hiera_tiny.pt`, and the number of them without videos'."""
    names = set(convert.to_meta(build_model(configs.sam2_tiny(), 0, "meta").state_dict()))
    assert names >= {
        "no_mem_embed",
        "image_encoder.trunk.pos_embed",
        "image_encoder.trunk.pos_embed_window",
        "image_encoder.trunk.patch_embed.proj.weight",
        "image_encoder.trunk.blocks.1.proj.weight",
        "image_encoder.trunk.blocks.0.attn.qkv.weight",
        "image_encoder.trunk.blocks.0.mlp.layers.0.weight",
        "image_encoder.neck.convs.0.conv.weight",
        "sam_prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        "sam_prompt_encoder.point_embeddings.0.weight",
        "sam_prompt_encoder.mask_downscaling.0.weight",
        "sam_mask_decoder.transformer.layers.0.mlp.layers.1.weight",
        "sam_mask_decoder.obj_score_token.weight",
        "sam_mask_decoder.pred_obj_score_head.layers.2.bias",
        "sam_mask_decoder.conv_s0.weight",
        "sam_mask_decoder.iou_prediction_head.layers.0.weight",
        "sam_mask_decoder.output_hypernetworks_mlps.3.layers.2.weight",
        "sam_mask_decoder.output_upscaling.3.weight",
    }
    assert not any(re.search(r"lin1|lin2", name) for name in names)


def test_what_their_configuration_states_is_read_or_refused(tmp_path):
    config = configs.sam2_tiny()
    theirs_of(replace(config, image_size=512)).config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["mask_decoder_config"]["dynamic_multimask_via_stability"] = False
    found = convert.with_huggingface_config(config, content, "c")
    assert (found.image_size, found.decoder.dynamic_multimask) == (512, False)
    sizes = content["prompt_encoder_config"]
    sizes["image_size"] = [512, 512]
    assert convert.with_huggingface_config(config, content, "c") == found
    sizes["image_size"] = [512, 256]
    with error_line(r"c: image_size is \[512, 256\], but images must be square"):
        convert.with_huggingface_config(config, content, "c")
    sizes["image_size"] = 512
    assert replace(found, image_size=1024, decoder=config.decoder) == config
    content["vision_config"]["backbone_config"]["global_attention_blocks"] = [5, 6, 9]
    with error_line(r"c: .*global_attention_blocks is \[5, 6, 9\], but SAM 2.1"):
        convert.with_huggingface_config(config, content, "c")
