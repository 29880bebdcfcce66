"""mori-shmem."""
