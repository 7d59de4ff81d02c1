"""Milliseconds from a click to its mask in the page, alone and with 30 annotators at once.

Starts `gigamask serve --project` on synthetic scenes of SA-1B's size, embeds them, and asks for the
mask under the pointer: one request after another, then all annotators' at the same time.

Run: python -m benchmarks.annotators [--weights WEIGHTS] [--long-side PX]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gigamask.data.image import write_png
from gigamask.synthetic.scenes import compose_scene

IMAGES = 3
ANNOTATORS = 30


def ask(address: str, path: str, body: dict) -> float:
    """Send a request and return its milliseconds.

    Args:
        address: Address of the page.
        path: Path of the request.
        body: Its JSON.
    """
    request = urllib.request.Request(
        f"{address}api/project/images/{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    start_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.read()
    return 1000 * (time.perf_counter() - start_s)


def measure(address: str, sizes: Sequence[tuple[int, int]], clicks: int) -> None:
    """Print the times of embedding, of single clicks, and of those of all annotators.

    Args:
        address: Address of the page.
        sizes: (H, W) of each image.
        clicks: Clicks of each annotator.
    """
    embedding = [ask(address, f"{row}/embed", {}) for row in range(IMAGES)]
    rng = np.random.default_rng(0)

    def click(row: int) -> float:
        height, width = sizes[row]
        point = [int(rng.integers(width)), int(rng.integers(height))]
        return ask(address, f"{row}/preview", {"steps": [{"point": point}]})

    click(0)
    alone = [click(i % IMAGES) for i in range(2 * ANNOTATORS)]
    with ThreadPoolExecutor(ANNOTATORS) as pool:
        start_s = time.perf_counter()
        together = list(pool.map(click, [i % IMAGES for i in range(clicks * ANNOTATORS)]))
        seconds = time.perf_counter() - start_s
    print(f"embedding: {np.median(embedding):.0f} ms")
    for name, times in (("alone", alone), (f"{ANNOTATORS} at once", together)):
        p50, p95 = np.percentile(times, [50, 95])
        print(f"click to mask, {name}: median {p50:.0f} ms, 95 % within {p95:.0f} ms")
    print(f"{len(together) / seconds:.1f} masks a second")


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the page and measure it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="starter")
    parser.add_argument("--long-side", type=int, default=1500)
    parser.add_argument("--clicks", type=int, default=4)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        sizes: list[tuple[int, int]] = []
        for i in range(IMAGES):
            pixels = compose_scene(0, i, (options.long_side, options.long_side)).pixels
            sizes.append(pixels.shape[:2])
            write_png(photos / f"{i}.png", pixels)
        command = [sys.executable, "-m", "gigamask", "serve", "--port", "0"]
        command += ["--project", f"{folder}/project", "--images", str(photos)]
        command += ["--weights", options.weights]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().strip()
                print(f"{options.weights}, images of {sizes} px")
                measure(address, sizes, options.clicks)
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
