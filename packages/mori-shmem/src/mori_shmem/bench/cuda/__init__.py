"""The parts of the bench on NVIDIA GPUs, beside NCCL. Times are the GPU's own (events on the caller's
stream)."""
