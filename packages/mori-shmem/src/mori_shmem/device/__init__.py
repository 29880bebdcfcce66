"""Helpers for the code that computes, one module per kind of code: `host` for C++ loops over CPU tensors."""
