"""The compiled core in Python terms: numpy in, numpy out. No other module sees a C pointer."""

from .._ffi import Error, library_build
from .ggml import Device, devices, ggml_version, load_backend, probe_buffer_type, quantize
from .models import Drafter, Model
from .sessions import Checkpoint, Rows, Session

__all__ = [
    "Checkpoint",
    "Device",
    "Drafter",
    "Error",
    "Model",
    "Rows",
    "Session",
    "devices",
    "ggml_version",
    "library_build",
    "load_backend",
    "probe_buffer_type",
    "quantize",
]
