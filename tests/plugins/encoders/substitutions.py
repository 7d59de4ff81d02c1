"""How the commands of the pages of image encoders are made small."""

REPLACED = [
    (r"hf:[\w-]+/[\w.-]+", "hf:backbones/convnext", "no network; a backbone of random weights"),
    (r"--model.patch-size 14 --model.image-size 518", "", "those of the small model"),
]
