"""Compiles Triton kernels for a GPU where there is none, to see that they compile and what becomes of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, MockTensor, create_function_from_signature


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of a kernel."""

    ptx: str
    registers: int
    """Of a thread."""
    spills: int
    """Bytes of a thread in local memory; 0 is what one wants."""
    shared: int
    """Bytes of a block in shared memory."""
    sass: str


def compile_for(kernel: JITFunction[Any], *args: Any, capability: int = 90, **kwargs: Any) -> Compiled:
    """Compiles a kernel as the launch ``kernel[grid](*args, **kwargs)`` would on a GPU of that compute capability.

    Args:
        args, kwargs: the arguments and options of the launch. A ``torch.dtype`` stands for a tensor of it whose
            address is a multiple of 16; tensors may be on any device.
    """
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, "instrumentation_mode": "", **{name: _mock(arg) for name, arg in kwargs.items()}}
    bound, specialization, rest = binder(*map(_mock, args), **options)
    parsed, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, rest)
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(make(kernel, signature, constexprs, attrs), target=target, options=parsed.__dict__)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Compiled(compiled.asm["ptx"], int(found[1]), int(found[2]), compiled.metadata.shared, compiled.asm["sass"])


def _mock(arg: Any) -> Any:
    return tuple(map(_mock, arg)) if isinstance(arg, tuple) else MockTensor.wrap_dtype(arg)


def _tool(name: str, *args: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *args], check=True, capture_output=True, text=True).stdout
