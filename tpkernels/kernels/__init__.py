"""Triton kernels: raw launchers on 2-D tensors. They allocate outputs and choose nothing.

Importing this package, or ``available``, ``config`` and ``table``, imports no Triton.
"""
