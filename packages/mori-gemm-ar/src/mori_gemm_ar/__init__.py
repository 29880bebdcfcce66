"""mori-gemm-ar."""
