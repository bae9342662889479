"""The exceptions of CUDA's runtime, cuBLAS and NCCL as CuPy raises them: a status, and its name in the message."""

from __future__ import annotations

__all__ = ["CUBLASError", "CUDARuntimeError", "NcclError"]

_CUDA = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    9: "cudaErrorInvalidConfiguration: invalid configuration argument",
    12: "cudaErrorInvalidPitchValue: invalid pitch argument",
    21: "cudaErrorInvalidMemcpyDirection: invalid copy direction for memcpy",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}
_CUBLAS = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
}
_NCCL = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_CUDA[status])


class CUBLASError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_CUBLAS[status])


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NCCL[status])
