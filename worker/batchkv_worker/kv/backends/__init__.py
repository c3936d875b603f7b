"""What depends on the device: its switches, its kernels, how long it takes.

``contract.Backend`` lists everything that may differ. ``generic`` implements it with MLX's own
kernels. ``gpu.backend`` (Metal) and ``cpu.backend`` inherit from that, ``cuda.backend`` from
``gpu.backend``. ``kv.start.backend`` chooses one. ``device`` says what MLX computes on.
"""
