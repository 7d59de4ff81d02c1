from dataclasses import replace

import pytest
import torch

from gigamask.data.sample_config import SampleConfig
from gigamask.models.init import build_model
from gigamask.models.mae import MAE
from gigamask.profiling.dry_run import blank_batch
from gigamask.rng import make_rng
from gigamask.training.mae_task import MAETask
from gigamask.types import Batch, RandomSpec
from tests.unit.models.test_mae import SPEC


def batch_of(images: int, sizes: list[tuple[int, int]] | None = None) -> Batch:
    """Return images of circular waves without masks."""
    rng = make_rng(0, "test batch")
    place = torch.arange(32.0)
    distance = (place[:, None] - 16).hypot(place[None, :] - 16)
    waves = torch.from_numpy(rng.random((images, 3, 1, 1)) * 0.5 + 0.2)
    patches = torch.from_numpy(rng.random((images, SPEC.patches), dtype="float32"))
    config = SampleConfig(image_size=32, mask_size=8)
    batch = blank_batch(config, RandomSpec(0, 0, 0, SPEC.patches), images, 0)
    return replace(
        batch,
        images=(127 + 100 * (distance * waves).sin()).to(torch.uint8),
        input_sizes=torch.tensor(sizes or [(32, 32)] * images, dtype=torch.int64).view(-1, 2),
        random_inputs=replace(batch.random_inputs, patches=patches),
    )


def terms_of(model: MAE, batch: Batch, precision="fp32"):
    (terms,) = MAETask(precision).compute_losses(model, batch, lambda whole: whole)
    return terms


def test_every_image_is_one_term():
    model, batch = build_model(SPEC, 0), batch_of(3)
    terms = terms_of(model, batch)
    assert float(terms.count) == 3
    assert terms.image.tolist() == [0, 1, 2]
    assert terms.per_mask.shape == (3,)
    assert not terms.per_mask.requires_grad
    assert float(terms.loss.detach()) == pytest.approx(float(terms.per_mask.sum()), rel=1e-6)
    assert float(terms.parts["mse"]) == pytest.approx(float(terms.per_mask.sum()), rel=1e-6)
    alone = [
        float(terms_of(model, each).per_mask[0])
        for each in (part(batch, image) for image in range(3))
    ]
    assert terms.per_mask.tolist() == pytest.approx(alone, rel=1e-5)


def part(batch: Batch, image: int) -> Batch:
    one = slice(image, image + 1)
    tensors = {
        name: getattr(batch, name)[one]
        for name in ("names", "images", "input_sizes", "scale_xy", "batch_index", "weights")
    }
    draws = replace(
        batch.random_inputs,
        drop_path=batch.random_inputs.drop_path[one],
        patches=batch.random_inputs.patches[one],
    )
    return replace(batch, random_inputs=draws, **tensors)


def test_weights_multiply_the_loss_and_not_what_is_noted():
    model, batch = build_model(SPEC, 0), batch_of(3)
    weights = torch.tensor([0.0, 2.0, 0.5])
    plain, weighted = terms_of(model, batch), terms_of(model, replace(batch, weights=weights))
    assert torch.equal(plain.per_mask, weighted.per_mask)
    assert float(weighted.loss.detach()) == pytest.approx(
        float((plain.per_mask * weights).sum()), rel=1e-6
    )


def test_image_without_masked_patches_is_not_counted():
    terms = terms_of(build_model(SPEC, 0), batch_of(2, [(32, 32), (4, 32)]))
    assert float(terms.count) == 1
    assert terms.per_mask[0] > 0
    assert terms.per_mask[1] == 0


def test_a_batch_without_images_has_no_terms():
    assert (
        list(MAETask().compute_losses(build_model(SPEC, 0), batch_of(0), lambda whole: whole)) == []
    )


def test_bf16_gives_nearly_the_same_gradients():
    model, batch, gradients = build_model(SPEC, 0), batch_of(3), []
    for precision in ("fp32", "bf16"):
        terms = terms_of(model, batch, precision)
        assert terms.loss.dtype == torch.float32
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients.append(
            torch.cat([each.flatten() for each in torch.autograd.grad(terms.loss, trained)])
        )
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99
