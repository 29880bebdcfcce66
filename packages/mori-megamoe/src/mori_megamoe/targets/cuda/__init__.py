"""The cuda target's Stage1: GEMM1 kernels for Hopper and what moves rows to them. Compiled on any machine and
checked there (tests/test_cuda_*.py); not yet run on a GPU in this form.

Where to read: gemm1.cu (the GEMM), plan.cuh (the protocol), send.cuh, rows.cuh, weights.py, then stage1.py.
"""
