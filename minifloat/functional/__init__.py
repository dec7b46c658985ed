"""Plain functions on operands, and the spec, exchange and weight source of each layer's call."""

from minifloat.arguments import checked
from minifloat.functional import gemm
from minifloat.functional.grouped import quantize_groups
from minifloat.functional.router import Routing, permute, permute_probabilities, sort_by_expert, unpermute
from minifloat.ops.matmul import Gemm, count_gemms

# What layers call for each forward is checked where users call it.
fprop = checked(gemm.fprop)
dgrad = checked(gemm.dgrad)
wgrad = checked(gemm.wgrad)

__all__ = [
    "Gemm", "Routing", "count_gemms", "dgrad", "fprop", "permute", "permute_probabilities",
    "quantize_groups", "sort_by_expert", "unpermute", "wgrad",
]  # fmt: skip
