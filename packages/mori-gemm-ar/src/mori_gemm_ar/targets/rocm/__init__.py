"""AMD MI355X (gfx950): FlyDSL kernels over mori-shmem's windows and device-initiated copy queues."""
