"""Compute two published memory estimates for SA-1B from their own formulas (docs/plan.md).

Run: python benchmarks/memory_estimates.py
"""

GB = 1e9
PARAMETERS_7B, VIT_H_WEIGHTS_GB = 7e9, 2.5
GROUNDING_GB = {
    "vision encoder": 2.0,
    "language model": 3.5,
    "gradients": 3.5,
    "optimizer": 1.0,
    "cross-modal head": 1.0,
    "masks": 0.3,
    "activations": 2.0,
}


def batch_estimate(images: int, height: int, width: int, masks: int) -> dict[str, float]:
    """Return GB: float32 masks at full size, activations of twice the weights for each image."""
    pixels = height * width
    return {
        "batch": images * (3 * pixels + 4 * masks * pixels + 500 * masks) / GB,
        "weights": VIT_H_WEIGHTS_GB,
        "activations": 2 * VIT_H_WEIGHTS_GB * images,
        "gradients": VIT_H_WEIGHTS_GB,
        "optimizer": 2 * VIT_H_WEIGHTS_GB,
    }


def main() -> None:
    """Print both estimates."""
    batch = batch_estimate(2, 1500, 2250, 100)
    in_half = 2 * PARAMETERS_7B / GB
    rest = sum(GROUNDING_GB.values()) - GROUNDING_GB["gradients"] - GROUNDING_GB["optimizer"]
    for title, parts in (("ViT-H, two images", batch), ("grounding, 7e9 in 4 bits", GROUNDING_GB)):
        print(f"{title}, GB")
        for part, size in (parts | {"total": sum(parts.values())}).items():
            print(f"  {part:18}{size:8.2f}")
    print(f"gradients of 7e9 in fp16, and their 8-bit Adam state: {in_half:.1f} GB each")
    print(f"grounding total with these two: {rest + 2 * in_half:.1f} GB")
    print(f"16 masks in float16 at 1024 x 1024: {16 * 2 * 1024**2 / GB:.2f} GB")
    print(f"float32 parameters with AdamW in 1.0 GB: {GB / 16 / 1e6:.1f} M")


if __name__ == "__main__":
    main()
