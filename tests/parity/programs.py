"""Programs for Meta's package in the idioms of public ones, each with the package as an argument.

A program takes the package, a SAM of 64 x 64 pixels, and pictures, and returns what it
has computed, by name. They use nothing but Meta's interface.
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Program = Callable[[ModuleType, Any, list[np.ndarray]], Mapping[str, Any]]
PROGRAMS: dict[str, Program] = {}
BOXES = torch.tensor([[5.0, 8, 40, 33], [20, 3, 60, 30], [1, 1, 9, 30]])
POINTS = torch.tensor([[[12.0, 20]], [[40, 11]], [[3, 30]]])


def program(function: Program) -> Program:
    """Register a program by its name."""
    PROGRAMS[function.__name__] = function
    return function


def prepared(package: ModuleType, sam: Any, image: np.ndarray) -> Tensor:
    """Return an image resized to the model's input, channels first."""
    resized = package.utils.transforms.ResizeLongestSide(sam.image_encoder.img_size).apply_image(
        image
    )
    return torch.as_tensor(resized, device=sam.device).permute(2, 0, 1).contiguous()


def embedded(package: ModuleType, sam: Any, images: list[np.ndarray]) -> Tensor:
    """Return embeddings of images, computed in one batch."""
    batch = [sam.preprocess(prepared(package, sam, image)) for image in images]
    return sam.image_encoder(torch.stack(batch))


def targets(sam: Any, count: int) -> Tensor:
    """Return masks at the low resolution: the inside of each box."""
    height, width = sam.prompt_encoder.mask_input_size
    scale = width / sam.image_encoder.img_size
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    masks = [
        (columns >= x0) & (columns < x1) & (rows >= y0) & (rows < y1)
        for x0, y0, x1, y1 in BOXES[:count] * scale
    ]
    return torch.stack(masks)[:, None].float()


def loss_of(logits: Tensor, iou: Tensor, masks: Tensor) -> Tensor:
    """Return the sum of a cross-entropy, a dice loss and the error of the predicted IoU."""
    probability = logits.sigmoid()
    overlap = (probability * masks).sum((-2, -1))
    dice = 1 - (2 * overlap + 1) / (probability.sum((-2, -1)) + masks.sum((-2, -1)) + 1)
    crossed = F.binary_cross_entropy_with_logits(logits, masks.expand_as(logits))
    return crossed + dice.mean() + F.mse_loss(iou, torch.full_like(iou, 0.5))


def changes(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what training has changed of each parameter."""
    return {name: value.detach() - before[name] for name, value in module.state_dict().items()}


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's weights."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def decode(sam: Any, embedding: Tensor, several: bool, **prompts: Any) -> tuple[Tensor, Tensor]:
    """Return low-resolution logits and predicted IoU."""
    sparse, dense = sam.prompt_encoder(**{"points": None, "boxes": None, "masks": None, **prompts})
    return sam.mask_decoder(
        image_embeddings=embedding,
        image_pe=sam.prompt_encoder.get_dense_pe(),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=several,
    )


@program
def train_the_decoder(package, sam, images):
    """Train the decoder with boxes on frozen embeddings, as fine-tuning notebooks do."""
    sam.train()
    for part in (sam.image_encoder, sam.prompt_encoder):
        for parameter in part.parameters():
            parameter.requires_grad = False
    before = copied(sam)
    optimizer = torch.optim.AdamW(sam.mask_decoder.parameters(), lr=1e-2, weight_decay=0.1, eps=0.1)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            embeddings = embedded(package, sam, images)
        logits, scores = [], []
        for embedding in embeddings:
            low, iou = decode(sam, embedding.unsqueeze(0), False, boxes=BOXES)
            logits.append(F.interpolate(low, (64, 64), mode="bilinear", align_corners=False))
            scores.append(iou)
        masks = F.interpolate(targets(sam, 3), (64, 64)).repeat(len(images), 1, 1, 1)
        loss = loss_of(torch.cat(logits), torch.cat(scores), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **changes(sam, before)}


class BoxSam(nn.Module):
    """A SAM that is trained with one box for an image, its prompt encoder frozen."""

    def __init__(self, sam: Any) -> None:
        super().__init__()
        self.image_encoder, self.mask_decoder = sam.image_encoder, sam.mask_decoder
        self.prompt_encoder = sam.prompt_encoder
        for parameter in self.prompt_encoder.parameters():
            parameter.requires_grad = False

    def forward(self, image: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits at the input's size, and predicted IoU."""
        embedding = self.image_encoder(image)
        with torch.no_grad():
            sparse, dense = self.prompt_encoder(points=None, boxes=box[:, None], masks=None)
        low, iou = self.mask_decoder(
            image_embeddings=embedding,
            image_pe=self.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=False,
        )
        return F.interpolate(low, image.shape[2:], mode="bilinear", align_corners=False), iou


@program
def train_all_with_ddp(package, sam, images):
    """Train encoder and decoder, wrapped for several processes, as MedSAM does."""
    before, store = copied(sam), dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(BoxSam(sam).train())
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=0.1)
        for image, box, mask in zip(images, BOXES, targets(sam, 3), strict=False):
            pixels = sam.preprocess(prepared(package, sam, image))
            logits, iou = model(pixels[None], box[None])
            loss = loss_of(logits, iou, F.interpolate(mask[None], logits.shape[2:]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    return changes(sam, before)


class LoraQkv(nn.Module):
    """The projection of an attention, plus low-rank updates of queries and values."""

    def __init__(self, qkv: nn.Linear, rank: int) -> None:
        super().__init__()
        self.qkv, self.dim = qkv, qkv.in_features
        draw = torch.Generator().manual_seed(self.dim + rank)
        self.down, self.up = (
            nn.ParameterList(
                nn.Parameter(torch.randn(*shape, generator=draw) / 10) for _ in range(2)
            )
            for shape in ((rank, self.dim), (self.dim, rank))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return queries, keys and values; the input has four dimensions."""
        qkv = self.qkv(x)
        update = [x @ down.T @ up.T for down, up in zip(self.down, self.up, strict=True)]
        qkv[:, :, :, : self.dim] += update[0]
        qkv[:, :, :, -self.dim :] += update[1]
        return qkv


@program
def train_lora_in_qkv(package, sam, images):
    """Replace each block's projection by a LoRA and train it and the decoder, as SAMed does."""
    for parameter in sam.image_encoder.parameters():
        parameter.requires_grad = False
    for block in sam.image_encoder.blocks:
        block.attn.qkv = LoraQkv(block.attn.qkv, 4)
    trained = [each for each in sam.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    sam.train()
    for image in images:
        low, iou = decode(sam, embedded(package, sam, [image]), True)
        logits = sam.postprocess_masks(low, (64, 64), (50, 60))
        loss = loss_of(logits, iou, F.interpolate(targets(sam, 1), (50, 60)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: each.grad for name, each in sam.named_parameters()}


class LoraLinear(nn.Module):
    """A projection plus a low-rank update of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        draw = torch.Generator().manual_seed(layer.out_features)
        shapes = (2, layer.in_features), (layer.out_features, 2)
        self.down, self.up = (
            nn.Parameter(torch.randn(*shape, generator=draw) / 10) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.layer(x) + x @ self.down.T @ self.up.T


@program
def train_lora_in_the_decoder(package, sam, images):
    """Replace projections of the decoder's attention, as SAMed's second variant does."""
    for parameter in sam.parameters():
        parameter.requires_grad = False
    transformer = sam.mask_decoder.transformer
    attentions = [transformer.final_attn_token_to_image]
    for layer in transformer.layers:
        attentions += [layer.self_attn, layer.cross_attn_token_to_image]
        attentions.append(layer.cross_attn_image_to_token)
    for attention in attentions:
        for name in ("q_proj", "v_proj", "out_proj"):
            setattr(attention, name, LoraLinear(getattr(attention, name)))
    embedding = embedded(package, sam, images[:1])
    labels = torch.tensor([[1], [0], [1]])
    low, iou = decode(sam, embedding, True, points=(POINTS, labels))
    loss_of(low, iou, targets(sam, 3)).backward()
    found = {name: each.grad for name, each in sam.named_parameters() if each.requires_grad}
    return {"low": low, **found}


class ScaleShift(nn.Module):
    """A layer with its outputs scaled and shifted."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, steps = layer, torch.linspace(0.9, 1.1, width)
        self.scale, self.shift = nn.Parameter(steps), nn.Parameter(steps - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled and shifted output."""
        return self.layer(x) * self.scale + self.shift


class Adapter(nn.Module):
    """An MLP with another one beside it."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp, self.act = mlp, mlp.act
        self.scale = nn.Parameter(torch.linspace(0, 1, mlp.lin1.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the MLP, computed from its parts, and of the adapter."""
        return self.mlp.lin2(self.act(self.mlp.lin1(x))) + self.scale * x


class WindowedBlock(nn.Module):
    """A block computed from its parts, between two residual adapters."""

    def __init__(self, package: ModuleType, block: Any) -> None:
        super().__init__()
        self.block, self.package = block, package.modeling.image_encoder
        self.adapter = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after attention and MLP."""
        shortcut, block = x + self.adapter * x, self.block
        x, size = block.norm1(shortcut), x.shape[1:3]
        if block.window_size > 0:
            x, padded = self.package.window_partition(x, block.window_size)
        x = block.attn(x)
        if block.window_size > 0:
            x = self.package.window_unpartition(x, block.window_size, padded, size)
        x = shortcut + x
        return x + block.mlp(block.norm2(x))


@program
def change_parts_of_blocks(package, sam, images):
    """Put adapters around layers, MLPs and whole blocks, as micro-sam's surgeries do."""
    first, second, third, *_ = sam.image_encoder.blocks
    first.attn.qkv = ScaleShift(first.attn.qkv, 3 * first.attn.qkv.in_features)
    first.attn.proj = ScaleShift(first.attn.proj, first.attn.proj.in_features)
    seen: list[Tensor] = []
    third.mlp.lin2.register_forward_hook(lambda module, given, output: seen.append(output))
    first.mlp.lin1 = ScaleShift(first.mlp.lin1, first.mlp.lin1.out_features)
    first.norm1 = ScaleShift(first.norm1, first.norm1.normalized_shape[0])
    second.mlp = Adapter(second.mlp)
    for index, block in enumerate(sam.image_encoder.blocks):
        sam.image_encoder.blocks[index] = WindowedBlock(package, block)
    embedding = embedded(package, sam, images)
    (
        embedding * torch.linspace(-1, 1, embedding[0].numel()).view_as(embedding[0])
    ).mean().backward()
    gradients = {name: each.grad for name, each in sam.image_encoder.named_parameters()}
    return {"embedding": embedding, "mlp": seen[0], **gradients}


@program
def use_another_image_encoder(package, sam, images):
    """Put a module of the program's in the place of the image encoder, and predict."""

    class Encoder(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.img_size = inner, inner.img_size

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner.patch_embed(x)
            if self.inner.pos_embed is not None:
                x = x + self.inner.pos_embed
            for block in self.inner.blocks:
                x = block(x)
            return self.inner.neck(x.permute(0, 3, 1, 2)) / 2

    seen: list[Tensor] = []
    block = sam.image_encoder.blocks[0]
    block.attn.qkv.register_forward_hook(lambda module, given, output: seen.append(output))
    sam.image_encoder = Encoder(sam.image_encoder)
    predictor = package.SamPredictor(sam)
    predictor.set_image(images[0])
    masks, iou, low = predictor.predict(np.array([[70.0, 60]]), np.array([1]))
    return {"masks": masks, "iou": iou, "low": low, "qkv": seen[0]}


@program
def train_with_mask_prompts(package, sam, images):
    """Prompt with a click, then with the click and the mask it gave, as micro-sam trains."""
    transform = package.utils.transforms.ResizeLongestSide(sam.image_encoder.img_size)
    image = torch.from_numpy(images[0]).permute(2, 0, 1)[None].float()
    size = transform.get_preprocess_shape(*image.shape[2:], sam.image_encoder.img_size)
    resized = F.interpolate(image, size, mode="bilinear", align_corners=False, antialias=True)
    normal = (resized.round() - sam.pixel_mean.unsqueeze(0)) / sam.pixel_std.unsqueeze(0)
    side = sam.image_encoder.img_size
    embedding = sam.image_encoder(F.pad(normal, (0, side - size[1], 0, side - size[0])))
    points, total = (POINTS, torch.tensor([[1], [1], [0]])), torch.zeros(())
    low, outputs = None, {}
    for index in range(3):
        boxes = BOXES if index == 2 else None
        low, iou = decode(sam, embedding, False, points=points, boxes=boxes, masks=low)
        total = total + loss_of(low, iou, targets(sam, 3))
        shown = sam.postprocess_masks(masks=low, input_size=size, original_size=(45, 91))
        outputs[f"round {index}"] = shown
    low, _ = decode(sam, embedding, True, masks=low)
    (total + low.square().mean()).backward()
    gradients = {name: each.grad for name, each in sam.named_parameters()}
    return {**outputs, **gradients}


@program
def predict_in_batches(package, sam, images):
    """Call the model with prompts of several images, as Meta's notebook does."""
    transform = package.utils.transforms.ResizeLongestSide(sam.image_encoder.img_size)
    asked = []
    for image in images:
        size = image.shape[:2]
        boxes = torch.tensor([[10.0, 20, 60, 70], [3, 4, 30, 20]], device=sam.device)
        asked.append(
            {
                "image": prepared(package, sam, image),
                "boxes": transform.apply_boxes_torch(boxes, size),
                "original_size": size,
            }
        )
    asked[1] = asked[1] | {"point_coords": POINTS[:2], "point_labels": torch.tensor([[1], [0]])}
    del asked[1]["boxes"]
    with torch.no_grad():
        found = [sam(asked, multimask_output=several) for several in (False, True)]
    return {
        f"{name} {call} {index}": value
        for call, outputs in enumerate(found)
        for index, output in enumerate(outputs)
        for name, value in output.items()
    }


@program
def keep_embeddings(package, sam, images):
    """Embed images in a batch, keep the embeddings, and predict from them elsewhere."""
    predictor = package.SamPredictor(sam)
    predictor.reset_image()
    tensors, sizes, inputs = [], [], []
    for image in images:
        tensor = torch.as_tensor(predictor.transform.apply_image(image), device=predictor.device)
        tensor = tensor.permute(2, 0, 1).contiguous()[None]
        sizes.append(image.shape[:2])
        inputs.append(tuple(tensor.shape[-2:]))
        tensors.append(predictor.model.preprocess(tensor))
    with torch.no_grad():
        features = predictor.model.image_encoder(torch.cat(tensors)).numpy()
    other, found = package.SamPredictor(copy.deepcopy(sam)), {}
    for index, embedding in enumerate(features):
        other.features = torch.as_tensor(embedding[None], device=other.device)
        other.original_size, other.input_size = sizes[index], inputs[index]
        other.is_image_set = True
        box = np.array([10, 10, 90, 80])
        *_, low = other.predict(box=box, multimask_output=False)
        found[f"box {index}"] = low
        found[f"again {index}"], *_ = other.predict(box=box, mask_input=low[0][None])
        found[f"embedding {index}"] = other.get_image_embedding()
    return found


@program
def generate_in_a_subclass(package, sam, images):
    """Filter all masks of an image in a subclass of the generator, after pickling it."""

    class Large(package.SamAutomaticMaskGenerator):
        def __init__(self, model: Any, smallest: int, **settings: Any) -> None:
            super().__init__(model, **settings)
            self.smallest = smallest

        def generate(self, image: np.ndarray) -> list[dict[str, Any]]:
            return [each for each in super().generate(image) if each["area"] >= self.smallest]

    generator = Large(sam, 30, points_per_side=4, pred_iou_thresh=0.0)
    generator.stability_score_thresh = 0.0
    generator.predictor.model = pickle.loads(pickle.dumps(generator.predictor.model))
    found = generator.generate(images[0])
    assert found
    return {
        f"{name} {index}": np.asarray(each[name])
        for index, each in enumerate(found)
        for name in ("segmentation", "area", "bbox", "predicted_iou", "point_coords", "crop_box")
    }


@program
def decode_by_hand(package, sam, images):
    """Run the decoder's parts one by one, as decoders with a head of their own do."""
    embedding = embedded(package, sam, images[:1])
    encoder, decoder = sam.prompt_encoder, sam.mask_decoder
    sparse, dense = encoder(points=(POINTS, torch.ones(3, 1)), boxes=None, masks=None)
    own = torch.cat([decoder.iou_token.weight, decoder.mask_tokens.weight])
    tokens = torch.cat([own.expand(len(sparse), -1, -1), sparse], 1)
    source = embedding.repeat_interleave(len(tokens), 0) + dense
    positions = encoder.get_dense_pe().repeat_interleave(len(tokens), 0)
    hidden, source = decoder.transformer(source, positions, tokens)
    count, width, (height, _) = len(tokens), decoder.transformer_dim, encoder.image_embedding_size
    image = source.transpose(1, 2).reshape(count, width, height, -1)
    upscaled = decoder.output_upscaling(image)
    heads = [
        decoder.output_hypernetworks_mlps[index](hidden[:, 1 + index])
        for index in range(decoder.num_mask_tokens)
    ]
    masks = (torch.stack(heads, 1) @ upscaled.flatten(2)).unflatten(2, upscaled.shape[2:])
    whole, iou = decoder.predict_masks(embedding, encoder.get_dense_pe(), sparse, dense)
    points = POINTS + 0.5
    return {
        "masks": masks,
        "attended": decoder.transformer.final_attn_token_to_image(tokens, source, source),
        "whole": whole,
        "iou": iou,
        "head": decoder.iou_prediction_head(hidden[:, 0]),
        "points": encoder.pe_layer.forward_with_coords(points, encoder.input_image_size),
        "grid": encoder.pe_layer((3, 5)),
    }
