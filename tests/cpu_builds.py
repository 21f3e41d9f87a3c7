"""Which builds of the C++ kernels differ on this CPU: as it is, as if it had no AMX, and as if it had no AVX-512 either."""

from pathlib import Path

FLAGS = set(Path("/proc/cpuinfo").read_text().split())
BUILDS = {"cpu": "native"}
if "amx_bf16" in FLAGS:
    BUILDS["cpu without amx"] = "native,no-amx-tile,no-amx-bf16,no-amx-int8"
if "avx512f" in FLAGS:
    BUILDS["cpu with avx2"] = "haswell"
