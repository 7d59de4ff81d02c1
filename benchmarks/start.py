"""Time a training from the start of its process to the end of its first step, beside a plain loop.

The plain loop reads one image of a tar with tarfile, Pillow and pycocotools, builds Meta's modules
at the size of `tiny`, makes one step of two rounds with torch's AdamW, writes a scalar for
TensorBoard and saves its weights, with nothing else imported. CPU seconds (user and system)
of one thread, the least of several runs, alternating, so that other work does not count.

Needs `pip install segment-anything`.

Run: python -m benchmarks.start [--repeats 7]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gigamask.synthetic import scenes

PLAIN = """
import io, json, sys, tarfile, types
from functools import partial

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

for name in ("", ".ops", ".ops.boxes", ".transforms", ".transforms.functional"):
    sys.modules["torchvision" + name] = types.ModuleType("torchvision" + name)
vars(sys.modules["torchvision.ops.boxes"]).update(batched_nms=None, box_area=None)
vars(sys.modules["torchvision.transforms.functional"]).update(resize=None, to_pil_image=None)
from segment_anything import modeling

tar, out = sys.argv[1:]
with tarfile.open(tar) as file:
    members = {member.name: file.extractfile(member).read() for member in file}
pairs = []
for name, raw in members.items():
    if name.endswith(".json"):
        image = Image.open(io.BytesIO(members[name.replace(".json", ".jpg")])).convert("RGB")
        masks = [coco.decode(each["segmentation"]) for each in json.loads(raw)["annotations"]]
        masks = [np.asarray(Image.fromarray(each).resize((64, 64))) for each in masks[:8]]
        pairs.append((np.array(image.resize((128, 128))), np.stack(masks)))
pixels, truth = next(iter(DataLoader(pairs[:1], batch_size=1)))
sam = modeling.Sam(
    modeling.ImageEncoderViT(
        img_size=128, patch_size=8, embed_dim=96, depth=4, num_heads=3, out_chans=64,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6), use_rel_pos=True, window_size=8,
        global_attn_indexes=(1, 3),
    ),
    modeling.PromptEncoder(64, (16, 16), (128, 128), 16),
    modeling.MaskDecoder(
        transformer_dim=64, transformer=modeling.TwoWayTransformer(2, 64, 2, 256)
    ),
)
optimizer = torch.optim.AdamW(sam.parameters(), lr=1e-4)
target = truth[0].float()[:, None]
embedding = sam.image_encoder(pixels.permute(0, 3, 1, 2).float() / 255)
points, labels, mask = torch.zeros(len(target), 0, 2), torch.zeros(len(target), 0), None
loss = 0
for number in range(2):
    wrong = target if mask is None else (mask > 0) != (target > 0)
    place = torch.multinomial(wrong.flatten(1) + 1e-6, 1)
    points = torch.cat([points, torch.stack([place % 64, place // 64], -1) * 2.0], 1)
    labels = torch.cat([labels, target.flatten(1).gather(1, place)], 1)
    sparse, dense = sam.prompt_encoder(points=(points, labels), boxes=None, masks=mask)
    low, iou = sam.mask_decoder(embedding, sam.prompt_encoder.get_dense_pe(), sparse, dense, False)
    loss = loss + functional.binary_cross_entropy_with_logits(low, target) + iou.square().mean()
    mask = low.detach()
loss.backward()
torch.nn.utils.clip_grad_norm_(sam.parameters(), 1.0)
optimizer.step()
with SummaryWriter(out) as writer:
    writer.add_scalar("loss", loss.item(), 1)
torch.save(sam.state_dict(), out + "/weights.pth")
"""
OURS = "import sys; from gigamask.cli.main import main; sys.exit(main())"
WORDS = (
    "train tiny --steps 1 --batch-size 1 --loader.max-masks 8 --loader.workers 0 --processes 1 "
    "--schedule.warmup-steps 0 --evaluation none --device cpu"
)


def cpu_s(*words: str) -> float:
    """Returns the CPU seconds of a process that must succeed."""
    nothing, alone = subprocess.DEVNULL, os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", *words], stdout=nothing, stderr=nothing, env=alone
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    took: dict[str, list[float]] = {"import torch": [], "plain loop": [], "gigamask train": []}
    with tempfile.TemporaryDirectory() as folder:
        (tar,) = scenes.write(Path(folder) / "scenes", images=1)
        for number in range(repeats):
            out = f"{folder}/run{number}"
            took["import torch"].append(cpu_s("import torch"))
            took["plain loop"].append(cpu_s(PLAIN, str(tar), f"{folder}/plain{number}"))
            took["gigamask train"].append(
                cpu_s(OURS, *WORDS.split(), "--data", str(tar), "--out", out)
            )
    plain = min(took["plain loop"])
    print("| process | CPU s | against the plain loop |\n|---|---|---|")
    for name, each in took.items():
        least = min(each)
        print(f"| {name} | {least:.2f} | {least / plain:.2f} |")


if __name__ == "__main__":
    main()
