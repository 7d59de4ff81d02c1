"""Milliseconds from a click to its mask in the page, alone and with 30 annotators at once.

Starts `gigamask serve --project` on synthetic scenes of SA-1B's size, embeds them, and asks for the
mask under the pointer: one request after another, then one of each annotator at the same time, and
then those of annotators who move on as soon as they see a mask. With --photographs, a tenth of them
annotated, it measures how long the server takes to state the loop of training, and how long
the thread of the page, in chromium, works to open one of many and to act on it.

Run: python -m benchmarks.annotators [--weights WEIGHTS] [--long-side PX] [--photographs N]
"""

import argparse
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import local
from urllib.parse import urljoin, urlsplit
from urllib.request import urlopen

import numpy as np
import psutil

from gigamask.data.image import write_png
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.edits import Edit, ImageEdits, MaskObject
from gigamask.plugins.serve.project import Project
from gigamask.synthetic.scenes import compose_scene

IMAGES = 3
ANNOTATORS = 30
OPENED = 10
LONG_TASKS = """() => {
  window.busy = window.longest = 0;
  new PerformanceObserver((list) => {
    for (const { duration } of list.getEntries()) {
      busy += duration;
      longest = Math.max(longest, duration);
    }
  }).observe({ type: "longtask", buffered: true });
}"""
"""Adds up the tasks of a page's thread that take more than 50 ms."""


class Client:
    """Sends requests, each thread on a connection that it keeps, as browsers do."""

    def __init__(self, address: str) -> None:
        """Start without connections."""
        self._host, self._connections = urlsplit(address).netloc, local()

    def ask(self, path: str, body: dict) -> float:
        """Send a request and return its milliseconds.

        Args:
            path: Path of the request.
            body: Its JSON.
        """
        if not hasattr(self._connections, "own"):
            self._connections.own = http.client.HTTPConnection(self._host, timeout=600)
        connection, headers = self._connections.own, {"content-type": "application/json"}
        arguments = "POST", f"/api/project/images/{path}", json.dumps(body), headers
        start_s = time.perf_counter()
        try:
            connection.request(*arguments)
            answer = connection.getresponse()
        except ConnectionError:  # closed by the server, since it was idle
            connection.close()
            connection.request(*arguments)
            answer = connection.getresponse()
        content = answer.read()
        elapsed_ms = 1000 * (time.perf_counter() - start_s)
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {content[:200]!r}")
        return elapsed_ms


def measure(
    address: str, server: psutil.Process, sizes: Sequence[tuple[int, int]], clicks: int
) -> None:
    """Print the times of embedding, of single clicks, and of those of all annotators.

    Args:
        address: Address of the page.
        server: Its process.
        sizes: (H, W) of each image.
        clicks: Clicks of each annotator.
    """
    client, rng = Client(address), np.random.default_rng(0)
    embedding = [client.ask(f"{row}/embed", {}) for row in range(IMAGES)]
    print(f"embedding: {np.median(embedding):.0f} ms")

    def click(number: int) -> float:
        height, width = sizes[number % IMAGES]
        point = [int(rng.integers(width)), int(rng.integers(height))]
        body = {"steps": [{"point": point}], "client": str(number % ANNOTATORS)}
        return client.ask(f"{number % IMAGES}/preview", body)

    def report(name: str, times: Sequence[float]) -> None:
        p50, p95 = np.percentile(times, [50, 95])
        print(f"click to mask, {name}: median {p50:.0f} ms, 95 % within {p95:.0f} ms")

    click(0)
    report("alone", [click(number) for number in range(2 * ANNOTATORS)])
    with ThreadPoolExecutor(ANNOTATORS) as pool:
        once = [list(pool.map(click, range(ANNOTATORS))) for _ in range(clicks)]
        report(f"{ANNOTATORS} at once", np.concatenate(once).tolist())
        start_s, before = time.perf_counter(), server.cpu_times()

        def annotate(annotator: int) -> list[float]:
            return [click(annotator) for _ in range(clicks)]

        moving = list(pool.map(annotate, range(ANNOTATORS)))
        seconds = time.perf_counter() - start_s
        report(f"{ANNOTATORS} without a pause", np.concatenate(moving).tolist())
    after, masks = server.cpu_times(), ANNOTATORS * clicks
    cpu_ms = 1000 * (after.user - before.user + after.system - before.system) / masks
    print(f"{masks / seconds:.1f} masks a second, {cpu_ms:.1f} CPU ms of the server each")


def measure_page(address: str) -> None:
    """Print how long the page's thread takes to open images of the project, and to act on one.

    Args:
        address: Address of the page.
    """
    from playwright.sync_api import Page, sync_playwright

    def ready(page: Page) -> None:
        page.wait_for_selector("#a-state:text-is('all saved')", timeout=600_000)

    def report(page: Page, what: str, count: int) -> None:
        page.wait_for_timeout(500)
        busy, longest = page.evaluate("[busy, longest]")
        print(f"{what}: {busy / count:.0f} ms of the page's thread, the longest task {longest:.0f}")
        page.evaluate("busy = longest = 0")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(bypass_csp=True)
        start_s = time.perf_counter()
        page.goto(address)
        ready(page)
        print(f"first image after {time.perf_counter() - start_s:.1f} s")
        page.evaluate(LONG_TASKS)
        report(page, "the list", 1)
        for _ in range(OPENED):
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(300)
            ready(page)
        report(page, "open an image", OPENED)
        page.click("#a-marks")
        for key in ("Enter", "n"):
            page.keyboard.press(key)
        page.wait_for_timeout(1000)
        ready(page)
        report(page, "click, accept and done", 1)
        browser.close()


def write_photographs(folder: Path, count: int) -> list[tuple[int, int]]:
    """Write a small photograph many times, in subfolders of a thousand; return its (H, W)."""
    one = folder.parent / "one.png"
    pixels = compose_scene(0, 0, (96, 96)).pixels
    write_png(one, pixels)
    for i in range(count):
        path = folder / f"{i // 1000:03d}" / f"{i:06d}.png"
        path.parent.mkdir(exist_ok=True)
        path.hardlink_to(one)
    return [pixels.shape[:2]]


def annotate(folder: Path, photos: Path, size: tuple[int, int]) -> None:
    """Annotate every tenth photograph: eight objects of two clicks each, which are accepted."""
    with Project.open(folder, photos) as project:
        dense = np.eye(*size, dtype=bool)[None]
        mask = MaskObject(RLEMasks.from_dense(dense).to_coco()[0].decode(), origin="clicked")
        for row in range(0, len(project.names), 10):
            edits = ImageEdits(size)
            for key in range(1, 9):
                for each in (mask, mask, replace(mask, accepted=True)):
                    edits = edits.with_edit(project.stamped(Edit("prompt", {key: each})))
            project.change(row, 0, lambda _, edits=edits: edits, size)


def measure_loop(address: str) -> None:
    """Print how long the server takes to state the loop of training, as a page asks for it."""
    times = []
    for _ in range(OPENED):
        start_s = time.perf_counter()
        with urlopen(urljoin(address, "/api/project/loop")) as answer:
            answer.read()
        times.append(1000 * (time.perf_counter() - start_s))
    print(f"the loop: {times[0]:.0f} ms at first, then {np.median(times[1:]):.0f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the page and measure it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="starter")
    parser.add_argument("--long-side", type=int, default=1500)
    parser.add_argument("--clicks", type=int, default=4)
    parser.add_argument("--photographs", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        sizes = write_photographs(photos, options.photographs) if options.photographs else []
        if options.photographs:
            annotate(Path(folder) / "project", photos, sizes[0])
        for i in range(0 if options.photographs else IMAGES):
            pixels = compose_scene(0, i, (options.long_side, options.long_side)).pixels
            sizes.append(pixels.shape[:2])
            write_png(photos / f"{i}.png", pixels)
        command = [sys.executable, "-m", "gigamask", "serve", "--no-token", "--port", "0"]
        command += ["--project", f"{folder}/project", "--images", str(photos)]
        command += ["--weights", options.weights, "--progress", "none"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().strip()
                print(f"{options.weights}, images of {sizes} px")
                if options.photographs:
                    measure_loop(address)
                    measure_page(address)
                    return
                measure(address, psutil.Process(process.pid), sizes, options.clicks)
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
