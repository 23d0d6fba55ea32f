"""What each function makes of a rank's part of a tensor: the same part of another whole, an answer
for the part alone (refused), or nothing to speak of.

Sets hold functions as ``__torch_function__`` gets them; dictionaries also how a message calls them.
"""

from __future__ import annotations

from typing import Any

import torch


def _found(owners: tuple[tuple[str, Any], ...], *names: str) -> dict[Any, str]:
    """The functions of those names, and how to call them by name in a message."""
    return {
        getattr(owner, name): f"{path}.{name}"
        for path, owner in owners
        for name in names
        if hasattr(owner, name)
    }


_ANYWHERE = (
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.Tensor", torch.Tensor),
    ("torch", torch),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
)
KEEPS_SPEC = {  # same shape, same meaning: the result is the same part of another global tensor
    *_found(  # an update, a decayed or averaged gradient
        _ANYWHERE[2:], "add", "sub", "mul", "div", "neg", "lerp", "addcmul", "addcdiv"
    ),
    torch.Tensor.detach,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.to,
    torch.Tensor.type,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.pin_memory,
    torch.Tensor.requires_grad_,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.clone,
    torch.detach,
    torch.Tensor.data.__get__,  # type: ignore[union-attr,attr-defined]
}
KEEP_SPECS = {  # the same, of lists
    torch._foreach_add,
    torch._foreach_sub,
    torch._foreach_mul,
    torch._foreach_neg,
}
ELEMENT_WISE = set(  # of a range of a flattened tensor: the result is the same range, likewise
    _found(
        _ANYWHERE,
        *("pow", "__pow__", "__rpow__", "__rsub__", "__rdiv__", "__rtruediv__", "square", "sqrt"),
        *("rsqrt", "reciprocal", "abs", "absolute", "sign", "exp", "expm1", "log", "log1p", "log2"),
        *("log10", "relu", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "clip"),
        *("maximum", "minimum", "nan_to_num", "true_divide", "fmax", "fmin", "fmod", "remainder"),
        *("isfinite", "isnan", "isinf", "isposinf", "isneginf", "isclose", "signbit", "sgn"),
        *("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater"),
        *("greater_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
        *("round", "floor", "ceil", "trunc", "frac", "floor_divide", "negative", "positive"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh"),
        *("atanh", "erf", "erfc", "erfinv", "exp2", "logit", "xlogy", "hypot", "copysign"),
        *("float_power", "logaddexp", "where", "masked_fill", "subtract", "multiply", "divide"),
        *("gelu", "silu", "elu", "softplus", "softsign", "logsigmoid", "leaky_relu", "hardtanh"),
        *("threshold", "dropout", "bernoulli"),
    )
    | _found(
        _ANYWHERE[2:3],
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__"),
        *("__xor__", "__invert__", "__abs__", "__pos__", "__mod__", "__floordiv__"),
        *("bool", "int", "long", "short", "char", "byte"),
    )
)
FLATTENS = set(_found(_ANYWHERE[2:], "view", "reshape", "flatten", "ravel"))  # what is flat
TRANSPOSES = {  # of two dimensions: the result is the same part of the transposed whole
    **_found(_ANYWHERE[2:], "t"),
    torch.Tensor.T.__get__: "torch.Tensor.T",  # type: ignore[union-attr,attr-defined]
    torch.Tensor.mT.__get__: "torch.Tensor.mT",  # type: ignore[union-attr,attr-defined]
}
WANTS_ALL = _found(  # reductions and matrix products: a part's result is not the whole's
    _ANYWHERE,
    *("norm", "vector_norm", "matrix_norm", "normalize", "renorm", "_foreach_norm"),
    *("sum", "nansum", "mean", "nanmean", "prod", "std", "var", "std_mean", "var_mean"),
    *("median", "nanmedian", "quantile", "logsumexp", "_foreach_max"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin"),
    *("__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner"),
    *("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "linear", "bilinear"),
    *("chain_matmul", "multi_dot", "svd", "svdvals", "qr"),
)
USES_A_WEIGHT = _found(  # what a module does with its weight, which a range of it cannot serve
    _ANYWHERE,
    *("embedding", "embedding_bag", "layer_norm", "rms_norm", "group_norm", "batch_norm"),
    *("instance_norm", "prelu", "scaled_dot_product_attention", "multi_head_attention_forward"),
    *("conv1d", "conv2d", "conv3d", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("transpose", "permute", "movedim", "adjoint", "outer"),
)
SEES_A_PART = _found(  # of a range of a flattened tensor: it depends on the other elements too
    _ANYWHERE,
    *(name for name in dir(torch.nn.functional) if name.endswith("_loss")),
    *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("cosine_similarity", "pairwise_distance", "dist", "cdist", "pdist", "cov", "corrcoef"),
    *("softmax", "log_softmax", "softmin", "gumbel_softmax", "glu", "multinomial"),
    *("cumsum", "cumprod", "cumsum_", "cumprod_", "cummax", "cummin", "logcumsumexp"),
    *("trapz", "trapezoid", "cumulative_trapezoid", "diff", "gradient", "flip", "roll"),
    *("sort", "argsort", "msort", "topk", "kthvalue", "mode", "unique", "unique_consecutive"),
    *("histc", "histogram", "bincount", "searchsorted", "isin", "count_nonzero", "nonzero"),
    *("argwhere", "nonzero_static", "any", "all", "equal", "allclose", "diag", "diagflat"),
    *("kron", "cross", "vander", "combinations", "cartesian_prod", "block_diag"),
    *("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"),
)
JOINS = _found(  # parts of several wholes, one after another: no part of anything
    _ANYWHERE[2:],
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"),
    "row_stack",
)
FLAT_REFUSES = {**USES_A_WEIGHT, **SEES_A_PART, **JOINS, **TRANSPOSES}
PICKS = set(  # one of the elements, or a tensor that has nothing to do with them
    _found(
        _ANYWHERE[2:],
        *("__getitem__", "select", "select_copy", "unbind", "unbind_copy", "squeeze", "squeeze_"),
        *("squeeze_copy", "index_select", "take", "gather", "narrow", "as_strided", "view_as"),
        *("reshape_as", "expand", "expand_as", "new", "new_tensor", "new_empty", "new_zeros"),
        *("new_empty_strided", "new_ones", "new_full"),
    )
)
ZEROES = set(_found(_ANYWHERE[2:], "zero_", "_foreach_zero_"))
GRADIENTS = {torch.autograd.grad, torch.autograd.backward}
SPLITS = {torch.chunk, torch.Tensor.chunk}  # how fully_shard starts to shard a parameter
HANDLED = {  # all others, such as optimizers' in-place updates, run on the part as they are
    *KEEPS_SPEC,
    *KEEP_SPECS,
    *ELEMENT_WISE,
    *FLATTENS,
    *WANTS_ALL,
    *FLAT_REFUSES,
    *ZEROES,
    *SPLITS,
    *GRADIENTS,
}
