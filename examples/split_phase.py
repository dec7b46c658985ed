"""Quantizing in phases, so that ranks can agree in between: gathered codes equal those of the gathered tensor.

Two ranks hold half the rows of an activation and of a gradient each. Both amaxes of a rank come from one launch; the
maximum over the ranks, an all-reduce in earnest, is simulated; both casts are one launch again. The ranks then exchange
codes, a byte an element, where gathering first would exchange two.
"""

import torch

from minifloat import Float8CurrentScaling, Quantized, QuantizerRole, cast_all, find_amaxes
from minifloat.quantizer import Amaxes

RECIPE = Float8CurrentScaling()
QUANTIZERS = [RECIPE.quantizer(QuantizerRole("linear", kind)) for kind in ("input", "grad_output")]  # E4M3 and E5M2


def all_reduce_max(ranks: list[list[Amaxes]]) -> list[Amaxes]:
    """For each tensor and each of its casts, the largest amax of all ranks."""
    agreed: list[Amaxes] = []
    for tensors in zip(*ranks, strict=True):
        levels = zip(*tensors, strict=True)
        agreed.append(tuple(torch.stack([a for a in level if a is not None]).amax(0) for level in levels))
    return agreed


def same_bits(shards: list[Quantized], whole: Quantized) -> bool:
    """The shards' codes, one after the other, are those of the whole, under the same scale."""
    codes = torch.cat([shard.any.codes for shard in shards])
    scales = [shard.any.scale_inv for shard in shards]
    assert whole.any.scale_inv is not None
    return torch.equal(codes, whole.any.codes) and all(
        scale is not None and torch.equal(scale, whole.any.scale_inv) for scale in scales
    )


def main() -> list[bool]:
    torch.manual_seed(0)
    x = torch.randn(37, 80, dtype=torch.bfloat16) * torch.randn(37, 1, dtype=torch.bfloat16).exp()
    dy = torch.randn(37, 48, dtype=torch.bfloat16) * 1e-4
    ranks = [[x[:20], dy[:20]], [x[20:], dy[20:]]]  # uneven, and no multiple of anything
    amaxes = all_reduce_max([find_amaxes(tensors, QUANTIZERS) for tensors in ranks])
    casts = [cast_all(tensors, QUANTIZERS, amaxes) for tensors in ranks]
    whole = cast_all([x, dy], QUANTIZERS)
    equal = [same_bits([rank[i] for rank in casts], whole[i]) for i in range(2)]
    for name, quantizer, same in zip(("x", "dy"), QUANTIZERS, equal, strict=True):
        print(f"{name} in {quantizer.row_format.spec}: gather(quantize(shard)) == quantize(gather(shard)): {same}")
    return equal


if __name__ == "__main__":
    main()
