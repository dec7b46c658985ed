"""Elements against ``ml_dtypes``, an implementation that shares nothing with ours; names that nobody defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minifloat.formats import ELEMENTS, Format

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = {"e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn"}


@pytest.mark.parametrize("name", DTYPES)
def test_small_elements(name: str, device: torch.device) -> None:
    """The value of every code, and the code of every bf16 number and of the fp32 numbers next to it."""
    element, theirs = ELEMENTS[name], getattr(ml_dtypes, DTYPES[name])
    codes: Any = np.arange(1 << element.bits, dtype=np.uint8)
    values = element.values(device).cpu().numpy()
    assert (values == codes.view(theirs).astype(np.float32)).all() and values.max() == element.max
    bf16 = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.cat([bf16, bf16 + 1, bf16 - 1]).view(torch.float32)
    numbers = x[~x.isnan()]
    expected = numbers.numpy().clip(-element.max, element.max).astype(theirs).view(np.uint8)
    assert (element.encode(numbers.to(device)).cpu().numpy() == expected).all()
    assert set(element.encode(x[x.isnan()].to(device)).tolist()) == {(1 << (element.bits - 1)) - 1}


def test_unknown_names_are_errors_where_a_format_is_made() -> None:
    with pytest.raises(ValueError, match="unknown element 'e1m2'; known: e4m3, e5m2, e2m1, identity, e2m3, e3m2"):
        Format("e1m2")
    with pytest.raises(ValueError, match="unknown scale_rule 'e4m0'"):
        Format(scale_rule="e4m0")
    with pytest.raises(ValueError, match="takes e2m1, got 'e2m3'"):
        Format("e2m3", 16, scale_rule="two_level")
    with pytest.raises(ValueError, match="needs a block length"):
        Format("e2m1")
