"""Measure what summing gradients over processes in bf16 changes, beside float32.

Each process has the gradients of one image of `tiny` at its initial weights, as the encoder's are
exchanged. They are summed one after another as in a ring, in float32 and in bf16; the error is the
norm of the difference of the sums divided by the norm of the sum in float64. CPU only.

Run: python -m benchmarks.reduce_error DATA
"""

import argparse
import tempfile

import torch
from torch import Tensor

from gigamask import DataLoader, recipes
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate

RANKS = (2, 8, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data")
    given = parser.parse_args()
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        config = recipes.tiny().with_(data=given.data, out=folder, batch_size=1)
        state, task = TrainState.initialize(config, device), config.task(device)
        parameters = list(state.model.encoder.parameters())
        sums: dict[torch.dtype, Tensor] = {}
        print("| processes | fp32 | bf16 |\n|---|---|---|")
        for number, batch in enumerate(DataLoader(given.data, config), 1):
            state.model.zero_grad(set_to_none=True)
            accumulate(task, state.model, batch, StepMetrics.zero(1, parameters[0].detach()))
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                sums[dtype] = sums.get(dtype, torch.zeros((), dtype=dtype)) + flat.to(dtype)
            if number in RANKS:
                exact = sums[torch.float64]
                errors = [
                    float((sums[dtype].double() - exact).norm() / exact.norm())
                    for dtype in (torch.float32, torch.bfloat16)
                ]
                print(f"| {number} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)
            if number == RANKS[-1]:
                return


if __name__ == "__main__":
    main()
