"""`mori-shmem-bench`: how fast windows, copy queues, signals and barriers are, beside memcpy and gloo."""
