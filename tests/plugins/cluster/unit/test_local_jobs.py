"""GPUs of the parts of `--submit local`."""

from types import SimpleNamespace

import torch

from gigamask.plugins.cluster.local_jobs import environments_of
from tests.errors import error_line


def test_parts_share_the_gpus_that_the_user_chose(monkeypatch, no_shape_checks):
    def visible(there, chosen, parallel=2, gpus=1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
        plan = SimpleNamespace(options=None, parallel=parallel, count=999, gpus=gpus)
        given = {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}
        return [each.get("CUDA_VISIBLE_DEVICES") for each in environments_of(plan, given)]

    assert visible(3, "GPU-a,GPU-b,GPU-c") == ["GPU-a", "GPU-b"]
    assert visible(4, "", gpus=2) == ["0,1", "2,3"]
    assert visible(0, "") == [None, None]
    with error_line("--submit-parallel 3 with 1 GPU for each part needs 3, but there are 2; lower"):
        visible(2, "4,5", 3)
    with error_line("--submit-parallel 999: more than four"):
        visible(2, "4,5", 999)
