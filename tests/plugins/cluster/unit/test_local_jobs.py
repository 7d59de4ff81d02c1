"""GPUs of the parts of `--submit local`."""

from dataclasses import dataclass

import pytest
import torch

from gigamask.errors import GigamaskError
from gigamask.plugins.cluster.local_jobs import environments_of
from gigamask.plugins.cluster.submission import Plan, SubmitPartsOptions


@dataclass(frozen=True, kw_only=True)
class Options(SubmitPartsOptions):
    device: str = "auto"


def visible(monkeypatch, there: int, chosen: str | None, parallel: int, **options) -> list:
    """Return CUDA_VISIBLE_DEVICES of the parts of `evaluate` that run at once."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    plan = Plan("evaluate", [], Options(submit="local", **options), 8, parallel)
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    return [each.get("CUDA_VISIBLE_DEVICES") for each in environments_of(plan, environment)]


@pytest.mark.parametrize(
    ("there", "chosen", "options", "expected"),
    [
        (2, "4,5", {}, ["4", "5"]),
        (3, "GPU-a,GPU-b,GPU-c", {}, ["GPU-a", "GPU-b"]),
        (4, None, {"submit_gpus": 2}, ["0,1", "2,3"]),
        (1, "4", {"submit_gpus": 0}, ["4", "4"]),
        (1, None, {"device": "cpu"}, [None, None]),
        (0, None, {}, [None, None]),
    ],
)
def test_parts_share_the_gpus_that_the_user_chose(monkeypatch, there, chosen, options, expected):
    assert visible(monkeypatch, there, chosen, 2, **options) == expected


def test_more_parts_at_once_than_gpus_are_refused(monkeypatch):
    message = "--submit-parallel 3 with 1 GPU for each part needs 3, but there are 2; lower"
    with pytest.raises(GigamaskError, match=message):
        visible(monkeypatch, 2, "4,5", 3)
    assert visible(monkeypatch, 2, "4,5", 1) == ["4,5"]
