"""What of a call no graph can hold: an error under ``fullgraph=True``, else the layer runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minifloat import recompute
from minifloat.functional.autograd import exporting
from minifloat.functional.weight_source import asks_in_backward
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import LinearState
from minifloat.tensor import QuantizedTensor


def needs_eager(
    linear: LinearState,
    is_first_microbatch: bool | None,
    fp8_output: bool = False,
    fp8_grad: bool = False,
    checkpointed: bool = False,
    writes: bool = False,
) -> bool:
    """Some option of this call cannot be traced; asked in traced code alone. :func:`run_eager` is the way out.

    ``checkpointed``: the module is about to checkpoint itself. ``writes``: ``out`` or ``dgrad_out`` is given.

    Raises:
        RuntimeError: so it is, and the compiler was told ``fullgraph=True``; ``fp8_output`` in an export.
    """
    special = fp8_output or fp8_grad or checkpointed or writes or is_first_microbatch is False or recompute._inside
    special = special or compiles_backward()
    if not (special or linear.delay_wgrad_compute or linear.fuse_wgrad_accumulation or linear._etp is not None):
        return False
    if fp8_output and exporting():
        raise RuntimeError(
            f"{linear._label}: fp8_output=True gives a quantized tensor, which torch.export does not trace; use False"
        )
    weights, grad = [linear._weight(name) for name in linear._weight_names], torch.is_grad_enabled()
    whole = not torch.compiler.is_dynamo_compiling() or _in_one_graph()  # an export without Dynamo has one graph
    own_gradient, why = grad and any(weight.requires_grad for weight in weights), ""
    reads_cache = is_first_microbatch is False and linear._keeps_weight and not isinstance(weights[0], QuantizedTensor)
    recipe = recipe_in_force(linear)
    delayed = recipe is not None and linear._config(recipe).delayed is not None
    if (checkpointed or recompute._inside) and not whole and delayed:  # ``prepare`` would raise
        return recompute.warns_of_compiled(True)
    if compiles_backward() and grad and (delayed or (own_gradient and linear.fuse_wgrad_accumulation)):
        why = (
            "compiled autograd does not know the histories of delayed scaling and main_grad, which backward writes to; "
            "use another recipe and fuse_wgrad_accumulation=False"
        )
    elif own_gradient and linear.delay_wgrad_compute:
        why = "delay_wgrad_compute=True leaves work for after backward, which no graph does; use False"
    elif linear._etp is not None:
        why = "etp_group gathers weights by a prediction that no graph makes; use None"
    elif writes:
        why = "out and dgrad_out are written to, which no graph does; use None"
    elif reads_cache and recipe is not None:
        why = "is_first_microbatch=False reads a cached weight, whose version no graph knows; use None"
    elif grad and fp8_grad:
        why = "fp8_grad=True returns a quantized gradient, which no graph does; use False"
    elif (
        own_gradient
        and linear.fuse_wgrad_accumulation
        and any(asks_in_backward(each, is_first_microbatch is True) for each in weights)
    ):
        why = (
            "fuse_wgrad_accumulation=True with is_first_microbatch=True, weight.overwrite_main_grad or "
            "weight.zero_out_wgrad asks in backward what to do, which no graph does; zero main_grad instead"
        )
    if why and whole:
        raise RuntimeError(
            f"{linear._label}: {why}, or fullgraph=False, or leave the layer out with torch.compiler.disable"
        )
    # A quantized output has a gradient if what reads it is in the same graph, which another one may not be.
    return why != "" or (grad and fp8_output and not whole)


def compiles_backward() -> bool:
    """Compiled autograd is on, which knows of a graph's backward only what forward saved; compiled code guards this."""
    return torch._dynamo.compiled_autograd.compiled_autograd_enabled


def run_eager(forward: Callable[..., Any], *args: Any) -> Any:
    """``forward(*args)``, uncompiled with all that it calls. A call of this function breaks the graph."""
    return torch.compiler.disable(forward)(*args)


def _in_one_graph() -> bool:
    """The compiler was told ``fullgraph=True``; it calls this, and does not trace it."""
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import; loaded by now

    skip_code(run_eager.__code__)
    tracer: Any = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)


_in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does
run_eager._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable does
