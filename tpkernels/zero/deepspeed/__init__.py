"""DeepSpeed's JSON configuration, read into the settings of :class:`tpkernels.zero.ZeroConfig`."""

from tpkernels.zero.deepspeed.document import read_deepspeed

__all__ = ["read_deepspeed"]
