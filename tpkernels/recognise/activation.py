"""Which of the six activations a function is, decided by what it computes.

Names and classes say little (transformers alone has four classes that are the tanh GELU), so
a candidate is evaluated in float64 and compared, value and gradient, with
:func:`tpkernels.reference.activation.activation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpkernels.recognise.probes import probe
from tpkernels.recognise.structure import ActivationName
from tpkernels.reference.activation import ACTIVATIONS, activation

Function = Callable[[Tensor], Tensor]

# Relative to 1 + |value|. FastGELU writes sqrt(2/pi) with ten digits, which moves it by 4e-12:
# the same function. quick_gelu is off by 1e-2, a float32 computation by 1e-7: not the same.
TOLERANCE = 1e-10
# Far points tell clipped functions (relu6, gelu_10) from those they clip.
_FAR = (13.0, 16.5, 20.0, 50.0, 100.0, 1000.0, 10000.0)
_NAMES: tuple[ActivationName, ...] = ACTIVATIONS  # type: ignore[assignment]


def identify_activation(function: Function | nn.Module) -> ActivationName | None:
    """The name of ``function`` among none, gelu, gelu_tanh, silu, relu, relu2; else None.

    None for anything with parameters, buffers or captured tensors (PReLU), for what is random or
    changes with training mode, for what is not element-wise, and for what is merely close
    (quick_gelu, relu6, a GELU that computes in float32).
    """
    if holds_tensors(function):
        return None
    names = {_match_in_mode(function, training) for training in (False, True)}
    return names.pop() if len(names) == 1 else None


def is_elementwise(function: Function | nn.Module) -> bool:
    """Whether ``function`` has no state and treats every feature alone, so that they split."""
    if holds_tensors(function):
        return False
    for training in (False, True):
        with _mode(function, training):
            if not splits_features(_forward_of(function), 8):
                return False
    return True


def match_formula(function: Function, width: int) -> ActivationName | None:
    """The activation that ``function`` equals on inputs [2, n, width] of float64; else None."""
    x, expectations = _expectations(width)
    result = _value_and_gradient(function, x)
    if result is None:
        return None
    smooth = x != 0  # relu has no derivative there
    for name, (value, slope) in expectations.items():
        if same(result[0], value):
            return name if same(result[1][smooth], slope[smooth]) else None
    return None


def splits_features(function: Callable[..., Tensor], width: int, inputs: int = 1) -> bool:
    """Whether ``function`` of a slice of the features is that slice of the function.

    ``function`` takes ``inputs`` tensors [2, 3, width] of float64. This is what keeping a forward
    around a sharded hidden needs: no reduction over the features, no size written into the code,
    no randomness.
    """
    x = probe(inputs, 2, 3, width, seed=2)
    cut = max(1, width // 3)
    slices = (slice(0, cut), slice(cut, None)) if width > 1 else (slice(0, 1),)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole = function(*x.clone())  # it may work in place
            if not isinstance(whole, Tensor) or whole.shape != x.shape[1:]:
                return False
            parts = [function(*x[..., features].clone()) for features in slices]
            return same(torch.cat(parts, dim=-1), whole)
    except Exception:  # whatever user code raises on another width: it does not split
        return False


def holds_tensors(function: object, depth: int = 3) -> bool:
    """Whether ``function`` keeps parameters, buffers or tensors in attributes or closures."""
    if isinstance(function, Tensor):
        return True
    if depth == 0 or function is None or isinstance(function, type):
        return False
    return any(holds_tensors(part, depth - 1) for part in _parts(function))


def _parts(function: object) -> Iterable[object]:
    if isinstance(function, nn.Module):
        yield from function.parameters()
        yield from function.buffers()
        yield from vars(function).values()
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, list | tuple):
        yield from function
    else:
        yield getattr(function, "__self__", None)
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents


def _match_in_mode(function: Function | nn.Module, training: bool) -> ActivationName | None:
    with _mode(function, training):
        return match_formula(_forward_of(function), 8)


@contextmanager
def _mode(function: Function | nn.Module, training: bool) -> Iterator[None]:
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def _forward_of(function: Function | nn.Module) -> Function:
    return function.forward if isinstance(function, nn.Module) else function  # runs no hooks


@functools.lru_cache(maxsize=8)
def _expectations(width: int) -> tuple[Tensor, dict[ActivationName, tuple[Tensor, Tensor]]]:
    """The grid as [2, n, width] and every activation's value and gradient on it."""
    far = torch.tensor(_FAR, dtype=torch.float64, device="cpu")
    near = torch.linspace(-12, 12, 1501, dtype=torch.float64, device="cpu")
    points = torch.cat([near, far, -far])
    rows = -(-points.numel() // (2 * width))
    x = points.repeat(2 * width * rows // points.numel() + 1)[: 2 * width * rows]
    x = x.flip(0).reshape(2, rows, width)
    expectations = {}
    for name in _NAMES:
        result = _value_and_gradient(functools.partial(activation, act=name), x)
        assert result is not None
        expectations[name] = result
    return x, expectations


def _value_and_gradient(function: Function, x: Tensor) -> tuple[Tensor, Tensor] | None:
    x = x.clone().requires_grad_()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            y = function(x.clone())  # it may work in place
            if not isinstance(y, Tensor) or y.shape != x.shape or not y.requires_grad:
                return None
            (gradient,) = torch.autograd.grad(y.sum(), x)
    except Exception:  # whatever user code raises on a float64 tensor: it is not one of ours
        return None
    return y.detach(), gradient


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal up to :data:`TOLERANCE`."""
    if a.dtype != b.dtype or not bool(torch.isfinite(b).all()):
        return False
    return bool(((a - b).abs() <= TOLERANCE * (1 + b.abs())).all())
