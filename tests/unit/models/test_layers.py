import torch
from torch import nn

from gigamask.models.layers import MLP, LayerNorm2d, MLPBlock, layer_norm, working_dtype


def test_layer_norm_2d_normalises_channels_of_each_pixel():
    x = torch.randn(2, 8, 3, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    result = LayerNorm2d(8)(x)
    assert result.shape == x.shape
    assert result.mean(1).abs().max() < 1e-5
    assert (result.var(1, correction=0) - 1).abs().max() < 1e-4


def test_normalise_keeps_the_dtype_under_autocast():
    x, norm = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), nn.LayerNorm(16)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer_norm(x.bfloat16(), norm)
    assert half.dtype == torch.bfloat16
    assert (half - norm(x)).abs().max() < 0.05
    assert torch.equal(layer_norm(x, norm), norm(x))


def test_working_dtype_is_autocasts_only_where_it_applies():
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    assert working_dtype(single) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert working_dtype(single) == torch.bfloat16
        assert working_dtype(double) == torch.float64


def test_mlps_have_metas_names_and_shapes():
    assert {
        name: tuple(value.shape) for name, value in MLPBlock(4, 6, nn.GELU).state_dict().items()
    } == {"lin1.weight": (6, 4), "lin1.bias": (6,), "lin2.weight": (4, 6), "lin2.bias": (4,)}
    heads = MLP(4, 6, 2)
    assert [tuple(layer.weight.shape) for layer in heads.layers] == [(6, 4), (6, 6), (2, 6)]
    assert heads(torch.zeros(3, 4)).shape == (3, 2)
