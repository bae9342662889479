"""A stand-in for CuPy on machines without a GPU: strict, and a record of what orders what.

::

    from tests.standin import Trace, installed, ordering, mutate

    with installed() as machine:             # `import cupy` now finds the stand-in
        ops = CupyOps()
        ...

    trace = Trace("two steps")
    with installed(trace):
        trace.label(array.data.ptr, array.nbytes, "gathered")
        ...
    ordering.assert_ordered(trace)           # every pair of accesses that nothing orders, by name
    mutate.print_table(mutate.table([trace]))    # which ordering edges can go without a conflict; paths=True tells
                                                 # apart who asked for them

    with installed(strict=True): ...         # kernels change nothing but what they say they write
    with installed(late="needed"): ...       # work runs only when somebody waits for it; or "others" first

It is used in a program of its own, also under mpiexec, by ``python -m tests.standin.run script.py args`` or
``python -m tests.standin.run -m mpishard train ... --device cuda``; see run.py for its environment.

Device memory is host memory that only explicit copies, kernels, cuBLAS and NCCL may touch. Kernels are compiled for
the CPU from their CUDA text. What is not offered raises AttributeError, DeviceFault or TypeError. The files:
machine.py (when work runs; the late modes), memory.py, arrays.py, streams.py, runtime.py, function.py, cublas.py,
nccl.py (over meeting.py); trace.py, watching.py, messages.py (the record); ordering.py, mutate.py (what it tells).
"""

from tests.standin import mutate, ordering
from tests.standin.cupy_module import installed
from tests.standin.memory import DeviceFault
from tests.standin.trace import Trace

__all__ = ["DeviceFault", "Trace", "installed", "mutate", "ordering"]
