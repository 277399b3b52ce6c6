"""Python binding of the compiled core: numpy in and out. No other folder sees a C pointer."""

from ._ffi import Error, installed_file, library_build
from .calibration import CalibrationParams
from .engines import Engine, Memory
from .file_identity import files_of
from .ggml import (
    Device,
    cpu_kernel_sets,
    devices,
    ggml_version,
    load_backend,
    probe_buffer_type,
    quantize,
)
from .limits import MAX_PARALLEL, MAX_TOP, MAX_VERIFY, PAGE
from .load_config import (
    CACHE_TYPES,
    DEFAULT_N_CTX,
    DEFAULTS,
    MAX_LAYERS,
    OPTIONS,
    LoadConfig,
    Option,
)
from .models import Drafter, Model
from .node_selection import NO_THRESHOLD, BreakEven, Selection, select_nodes
from .passes import BatchEntry, Draft, DraftRequest, Rows
from .prefixes import Prefix, PrefixTensor
from .progress import Progress, interruptible
from .samplers import CoreSampler, SampleRequest, SamplerOptions
from .sequences import Sequence
from .suffix_index import Proposals, SuffixIndex

__all__ = [
    "CACHE_TYPES",
    "DEFAULTS",
    "DEFAULT_N_CTX",
    "MAX_LAYERS",
    "MAX_PARALLEL",
    "MAX_TOP",
    "MAX_VERIFY",
    "NO_THRESHOLD",
    "OPTIONS",
    "PAGE",
    "BatchEntry",
    "BreakEven",
    "CalibrationParams",
    "CoreSampler",
    "Device",
    "Draft",
    "DraftRequest",
    "Drafter",
    "Engine",
    "Error",
    "LoadConfig",
    "Memory",
    "Model",
    "Option",
    "Prefix",
    "PrefixTensor",
    "Progress",
    "Proposals",
    "Rows",
    "SampleRequest",
    "SamplerOptions",
    "Selection",
    "Sequence",
    "SuffixIndex",
    "cpu_kernel_sets",
    "devices",
    "files_of",
    "ggml_version",
    "installed_file",
    "interruptible",
    "library_build",
    "load_backend",
    "probe_buffer_type",
    "quantize",
    "select_nodes",
]
