"""Elements against ``ml_dtypes``, an implementation that shares nothing with ours; names that nobody defined."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minifloat.formats import ELEMENTS, Format, ScaleRule, define_element, define_scale_rule, parse
from minifloat.formats.elements import SmallFloat

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


@pytest.mark.parametrize("name", ["e4m3", "e2m3", "two words", "a,b", "a;b", "a/b", ""])
def test_names_of_new_elements(name: str) -> None:
    """Those of others would not change formats that are there; lists of names and specs are split at commas."""
    with pytest.raises(ValueError, match=re.escape(f"element {name!r}: its name must be an identifier, and none of")):
        define_element(SmallFloat(name, 6, 7.5, mantissa=3, bias=1))
    with pytest.raises(ValueError, match="scale rule 'e8m0': its name must be"):
        define_scale_rule(ScaleRule("e8m0"))


def test_copies_have_the_same_element_and_rule() -> None:
    fmt = parse("e2m1/1x16/two_level")
    for twin in (copy.copy(fmt), copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt)), replace(fmt)):
        assert twin == fmt and hash(twin) == hash(fmt) and twin != replace(fmt, block=32) and twin != "e2m1"
        assert twin.encoding is fmt.encoding and twin.scaling is fmt.scaling
