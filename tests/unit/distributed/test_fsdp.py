"""What sharding refuses before it starts. How it computes: tests/laws/test_sharding.py."""

from torch import nn

from gigamask.distributed.fsdp import check_blocks
from tests.errors import error_line


def test_blocks_that_share_a_weight_are_refused():
    encoder = nn.Module()
    encoder.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    check_blocks(encoder, list(encoder.blocks), "fsdp")
    with error_line(r"blocks\.0\.weight"):
        check_blocks(encoder, [encoder.blocks[0]] * 2, "fsdp")
    encoder.blocks[1].bias = encoder.blocks[0].bias
    with error_line(r"blocks\.0\.bias"):
        check_blocks(encoder, list(encoder.blocks), "fsdp")
