"""Eager has one call for an encoder layer in inference, and one for attention; compiled code takes the long way."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dovetail


@pytest.mark.parametrize("settings", [{}, {"norm_first": True}, {"activation": "gelu"}])
@pytest.mark.parametrize("shape", [(3, 7, 16), (1, 40, 16)])
def test_encoder_layer(settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **settings).eval(), torch.randn(shape)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    dovetail.reset()
    with torch.no_grad():
        got, want = dovetail.compile(layer, options={"fallback_to_eager": False})(x), layer(x)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    assert not dovetail.stats()["fallbacks"]


def test_an_encoder_layer_with_a_mask() -> None:
    layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval(), torch.randn(3, 7, 16)
    mask = torch.arange(7).expand(3, 7) > 4
    with torch.no_grad():
        got = dovetail.compile(layer)(x, src_key_padding_mask=mask)
        torch.testing.assert_close(got, layer(x, src_key_padding_mask=mask))


@pytest.mark.parametrize("needs_weights", [True, False])
def test_attention(needs_weights: bool) -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(3, 7, 16)
    with torch.no_grad():
        got = dovetail.compile(layer)(x, x, x, need_weights=needs_weights)
        torch.testing.assert_close(got, layer(x, x, x, need_weights=needs_weights))
