"""All code that depends on the device: its settings, its kernels, its timing.

``contract.Backend`` lists everything that may differ. ``generic`` implements it with MLX's own
kernels. ``gpu.backend`` (Metal) and ``cpu.backend`` inherit from that, ``cuda.backend`` from
``gpu.backend``. ``kv.start.backend`` chooses one. ``device`` describes MLX's device.
"""
