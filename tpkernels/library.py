"""How an op of ours is put into PyTorch's dispatcher: one call, everything in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ConfigError

NAMESPACE = "tpkernels"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # lives as long as the process
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OP_NAMES: list[str] = []  # every op defined here, in order of definition


def define(
    name: str,
    signature: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    autograd: Callable[..., Any] | None = None,
    autocast: bool = True,
) -> Any:
    """Define ``torch.ops.tpkernels.<name>`` and return its default overload.

    ``reference`` serves every device until something faster is registered for one of them.
    ``backward`` with ``setup_context`` are as for ``torch.library.register_autograd``;
    ``autograd`` instead is a kernel of its own for the Autograd key (it may call other ops).
    Under autocast every floating-point argument but float64 is cast, as for ``F.linear``, unless
    ``autocast`` is False.
    """
    qualified = f"{NAMESPACE}::{name}"
    LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=LIBRARY
        )
    elif autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    for device_type in ("cpu", "cuda") if autocast else ():
        LIBRARY.impl(name, _autocast_kernel(op, device_type), f"Autocast{device_type.upper()}")
    OP_NAMES.append(name)
    return op


def _autocast_kernel(op: Any, device_type: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCPU
        if device_type == "cpu"
        else torch._C.DispatchKey.AutocastCUDA
    )

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*(_cast(arg, dtype) for arg in args))

    return kernel


def _cast(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, Tensor):
        if arg.is_floating_point() and arg.dtype is not torch.float64:
            return arg.to(dtype)
    elif isinstance(arg, (list, tuple)):
        return [_cast(item, dtype) for item in arg]
    return arg


def rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K]; also for K = 0, which ``reshape(-1, K)`` cannot do."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of an op on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def vector_jacobian(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], grads: Any
) -> tuple[Tensor, ...]:
    """Gradients of ``function`` at ``inputs`` for the output gradients ``grads``.

    For an op's backward: where a graph of the backward is being made, the results are part of it,
    so that derivatives of every order exist. ``function`` is differentiable PyTorch.
    """
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that one input's history is not mistaken for a path through another.
        points = tuple(
            t.view_as(t) if higher and t.requires_grad else t.detach().requires_grad_()
            for t in inputs
        )
        return torch.autograd.grad(
            function(*points), points, grads, create_graph=higher, materialize_grads=True
        )


def check_gemm(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_name: str = "weight",
    bias_name: str = "bias",
) -> None:
    """Raise :class:`ConfigError` unless x [..., K], weight [N, K], bias [N] fit each other."""
    if weight.dim() != 2:
        raise ConfigError(
            f"{op}: {weight_name} must be [N, K], got {weight.dim()}-D {tuple(weight.shape)}"
        )
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"{op}: x must be [..., K] with K={weight.shape[1]} as {weight_name} "
            f"{tuple(weight.shape)} [N, K] says, got {tuple(x.shape)}. A weight kept as [K, N] is "
            "passed as its .t()"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ConfigError(
            f"{op}: {bias_name} must be [N] with N={weight.shape[0]}, got {tuple(bias.shape)}"
        )
    check_dtypes(op, **{"x": x, weight_name: weight, bias_name: bias})


def check_dtypes(op: str, **tensors: Tensor | None) -> None:
    """Raise :class:`ConfigError` unless all tensors share one of :data:`DTYPES` and a device."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first_name, first = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise ConfigError(
                f"{op}: {name} has dtype {tensor.dtype}; allowed: {allowed}. Fix: {name}.float()"
            )
        if tensor.dtype is not first.dtype:
            fix = f"{name}.to({first.dtype})"
            if first_name in ("x", "dy") and name.startswith("w"):  # the input is what to cast
                fix = f"{first_name}.to({tensor.dtype}), module.to({first.dtype}),"
            raise ConfigError(
                f"{op}: {name} is {tensor.dtype} but {first_name} is {first.dtype}; all tensors "
                f"need one dtype. Fix: {fix} or run under torch.autocast"
            )
        if tensor.device != first.device:
            raise ConfigError(
                f"{op}: {name} is on {tensor.device} but {first_name} is on {first.device}. "
                f"Fix: {name}.to({str(first.device)!r})"
            )


def check_same_shape(op: str, **tensors: Tensor) -> None:
    """Raise :class:`ConfigError` unless all tensors have the shape of the first."""
    (first_name, first), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.shape != first.shape:
            raise ConfigError(
                f"{op}: {name} must have the shape of {first_name}, {tuple(first.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
