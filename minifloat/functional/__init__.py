"""Plain functions on operands, and the plan that says which of them a layer calls."""

from minifloat.functional.gemm import dgrad, fprop, wgrad
from minifloat.kernels.matmul import Gemm, count_gemms

__all__ = ["Gemm", "count_gemms", "dgrad", "fprop", "wgrad"]
