"""Print the disk space that each dependency of gigamask takes: `python benchmarks/dependencies.py`.

A row is one requirement with all its dependencies: megabytes of the files that their records name,
and the number of distributions. Dependencies that several rows share, such as numpy, count in each;
the last row of the core counts everything once. An extra's row is what it adds to the core. Extras
are measured only where they are installed.
"""

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PURPOSES = {
    "triton": "fused kernels of the plugin kernels",
    "scikit-image": "photographs that are free to show, for pictures of the docs",
    "torch": "tensors, gradients, devices, processes",
    "numpy": "arrays, RLE masks, indexes",
    "simplejpeg": "JPEG by libjpeg-turbo",
    "pillow": "JPEGs that libjpeg-turbo refuses, PNG and other formats",
    "opencv-python-headless": "exact distance transform, connected components, resizing, drawing",
    "msgspec": "fast, checked parsing of SA-1B's json, and of flags and configuration files",
    "safetensors": "checkpoints and weights without pickle",
    "pyyaml": "configuration files",
    "rich": "progress bars",
    "jaxtyping": "shapes in signatures",
    "fsspec": "object stores and web servers",
    "urllib3": "resumable downloads, proxies",
    "psutil": "memory of processes",
    "faster-coco-eval": "COCO's average precision, compressed RLE",
    "lazy-loader": "the Python API, imported when used",
    "filelock": "locks of run folders, indexes and outputs",
    "tensorboard": "event files of a run",
    "wandb": "log runs to Weights & Biases",
    "transformers": "Hugging Face's SAM (export, its folders), text encoders",
    "peft": "LoRA adapters in a language model",
    "bitsandbytes": "8-bit AdamW, 4-bit language models",
    "matplotlib": "the plots of gigamask stats",
    "scipy": "SBD's .mat files",
    "onnx": "writing ONNX files",
    "onnxruntime": "running them, to compare",
    "fastapi": "the web page of gigamask serve",
    "uvicorn": "the server of that page",
    "aiohttp": "data at http(s)://",
    "pyarrow": "data in parquet files",
    "s3fs": "data at s3://",
    "gcsfs": "data at gs://",
    "mkdocs": "the site of these pages",
    "mkdocstrings": "its reference, from the docstrings",
}
"""What each requirement is for."""


PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())[
    "project"
]


def name_of(requirement: Requirement) -> str:
    return requirement.name.lower().replace("_", "-")


def needed_by(name: str, extras: Iterable[str]) -> list[Requirement]:
    """Returns what a distribution requires here, with some of its extras."""
    stated = [Requirement(line) for line in metadata.requires(name) or []]
    return [
        each
        for each in stated
        if each.marker is None
        or any(each.marker.evaluate({"extra": extra}) for extra in ["", *extras])
    ]


def closure(requirements: Iterable[Requirement]) -> dict[str, int]:
    """Returns the bytes of everything that some requirements put there, by name; KeyError where one
    is not installed."""
    found: dict[str, int] = {}
    left = list(requirements)
    while left:
        each = left.pop()
        name = name_of(each)
        if name in found:
            continue
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise KeyError(name) from None
        paths = [about.locate_file(file) for file in about.files or []]
        found[name] = sum(path.stat().st_size for path in paths if path.is_file())
        left += needed_by(name, each.extras)
    return found


def row(what: str, taken: dict[str, int], purpose: str) -> str:
    return f"| {what} | {sum(taken.values()) / 1e6:,.1f} | {len(taken)} | {purpose} |"


def main() -> None:
    print(f"Python {sys.version.split()[0]}, torch {metadata.version('torch')}\n")
    print("| requirement | MB | distributions | for |\n|---|---|---|---|")
    own = [Requirement(line) for line in PROJECT["dependencies"]]
    for each in sorted(own, key=lambda each: -sum(closure([each]).values())):
        print(row(f"`{name_of(each)}`", closure([each]), PURPOSES[name_of(each)]))
    core = closure(own)
    print(row("**the core**", core, "each counted once"))
    print("\n| extra | adds MB | distributions | what |\n|---|---|---|---|")
    for extra, lines in PROJECT["optional-dependencies"].items():
        if extra == "dev":
            continue
        wanted = [Requirement(line) for line in lines]
        told = "; ".join(f"{name_of(each)}: {PURPOSES[name_of(each)]}" for each in wanted)
        try:
            added = {name: size for name, size in closure(wanted).items() if name not in core}
        except KeyError as missing:
            print(f"| `{extra}` | | | {told} (not measured: {missing.args[0]} is not installed) |")
        else:
            print(row(f"`{extra}`", added, told))


if __name__ == "__main__":
    main()
