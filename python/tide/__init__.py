"""TIDE: zero-copy, layout-aware all-gather and reduce-scatter for PyTorch FSDP2.

``tide.comm`` reaches the C library without torch; ``tide.fsdp2`` is the FSDP2 adapter; ``python -m tide.plot`` draws.
"""


def __getattr__(name):
    if name == "__version__":
        from tide._lib import lib

        return lib.tide_version().decode()
    raise AttributeError(f"module 'tide' has no attribute {name!r}")
