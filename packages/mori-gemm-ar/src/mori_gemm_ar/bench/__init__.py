"""`mori-gemm-ar-bench`: see __main__.py."""
