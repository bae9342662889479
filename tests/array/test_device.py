"""Which operations a rank gets, and the one line that says why it cannot have a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mpishard.array.cupy_ops import CupyOps
from mpishard.array.device import choose, cuda_problem, identity, operations
from mpishard.array.numpy_ops import NumpyOps
from mpishard.errors import ConfigError
from tests.standin import installed


class Hidden:
    """A finder that has no CuPy, or one that does not load."""

    def __init__(self, error: str | OSError = "") -> None:
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cupy":
            if isinstance(self.error, OSError):
                raise self.error
            if self.error:
                raise ImportError(self.error, name="cupy._core")
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def without_cupy(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)

    def hide(error: str | OSError = "") -> None:
        monkeypatch.setattr(sys, "meta_path", [Hidden(error), *sys.meta_path])

    return hide


@pytest.fixture
def cuda():
    """The stand-in's ``cupy.cuda``, to be broken."""
    with installed():
        import cupy

        yield cupy.cuda


def refused(*words: str) -> None:
    """Both kinds say it in one line: cuda as an error, auto as the reason for the CPU."""
    problem = cuda_problem()
    with pytest.raises(ConfigError) as caught:
        operations("cuda", 0)
    assert str(caught.value) == f"device cuda cannot be used: {problem}; or compute on the CPU (device cpu)"
    assert choose("auto") == ("cpu", f"no GPU can be used: {problem.partition(';')[0]}")
    assert isinstance(operations("auto", 0), NumpyOps)
    assert "\n" not in problem
    for word in words:
        assert word in problem


def test_no_cupy(without_cupy):
    without_cupy()
    refused("the package CuPy is not installed; pip install 'cupy-cuda12x>=14' (cupy-cuda13x, if nvidia-smi names")


def test_a_cupy_that_does_not_load(without_cupy):
    without_cupy("libstdc++.so.6: version `GLIBCXX_3.4.29' not found\nand more")
    refused("CuPy does not load (libstdc++.so.6: version `GLIBCXX_3.4.29' not found); install it anew")


def test_a_cupy_that_finds_no_folder(without_cupy):
    without_cupy(PermissionError(13, "Permission denied", "/home/me/.cupy"))
    refused("CuPy does not load ([Errno 13] Permission denied: '/home/me/.cupy'); set CUPY_CACHE_DIR to a folder that")


def test_an_old_cupy(monkeypatch, cuda):
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "13.6.0")
    refused("CuPy 13.6.0 is installed and 14 or later is needed; pip install 'cupy-cuda12x>=14'")


def test_a_cupy_of_tomorrow(monkeypatch, cuda):
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "15.0.0rc1")
    assert cuda_problem() == ""


def test_no_driver(monkeypatch, cuda):
    monkeypatch.setattr(cuda.runtime, "driverGetVersion", lambda: 0)
    refused("no NVIDIA driver is found (libcuda.so); start on a node that has a GPU")


@pytest.mark.parametrize(
    ("driver", "built", "works"), [(12020, 12090, True), (13000, 12090, True), (12080, 13000, False)]
)
def test_drivers_of_other_versions(monkeypatch, cuda, driver, built, works):
    monkeypatch.setattr(cuda.runtime, "driverGetVersion", lambda: driver)
    monkeypatch.setattr(cuda.runtime, "runtimeGetVersion", lambda: built)
    if works:
        assert cuda_problem() == ""
    else:
        refused("the NVIDIA driver knows CUDA 12.8 and CuPy is built for CUDA 13.0", "pip install 'cupy-cuda12x>=14'")


@pytest.mark.parametrize(("setting", "words"), [(None, "is not set"), ("", "is ''"), ("7", "is '7'")])
@pytest.mark.parametrize("raises", [False, True])
def test_no_visible_device(monkeypatch, cuda, setting, words, raises):
    def count():
        if raises:
            raise cuda.runtime.CUDARuntimeError(100)
        return 0

    monkeypatch.setattr(cuda.runtime, "getDeviceCount", count)
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    refused(f"no GPU is visible (CUDA_VISIBLE_DEVICES {words}); check it, and ask", "(Slurm: --gres=gpu:N)")


def test_a_driver_that_fails(monkeypatch, cuda):
    def count():
        raise cuda.runtime.CUDARuntimeError(700)

    monkeypatch.setattr(cuda.runtime, "getDeviceCount", count)
    refused("the NVIDIA driver fails (cudaErrorIllegalAddress: an illegal memory", "nvidia-smi")


def test_no_nvrtc(monkeypatch, cuda):
    class NotFoundError(Exception):
        pass

    def version():
        raise NotFoundError('Failure finding "libnvrtc.so.12": No such file\nlisting')

    monkeypatch.setattr(cuda, "nvrtc", SimpleNamespace(getVersion=version), raising=False)
    refused('NVRTC, which compiles the kernels, does not load (Failure finding "libnvrtc.so.12": No such file); pip')


def test_no_cublas(monkeypatch, cuda):
    def missing(name):
        raise ImportError('Failure finding "libcublas.so.12": No such file\nlisting')

    monkeypatch.delattr(cuda, "cublas")
    monkeypatch.setattr(cuda, "__getattr__", missing, raising=False)
    refused("cuBLAS, which multiplies matrices, does not load (Failure finding", "'nvidia-cublas-cu12==12.*'")


def test_a_gpu_that_another_program_holds(monkeypatch, cuda):
    class BusyError(RuntimeError):
        status = 46

    def malloc(nbytes):
        raise BusyError("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(cuda.runtime, "CUDARuntimeError", BusyError)
    monkeypatch.setattr(cuda.runtime, "malloc", malloc)
    for kind in ("auto", "cuda"):  # no silent CPU where a GPU was found
        with pytest.raises(ConfigError, match=r"^GPU 0 of 1 cannot be used \(cudaErrorDevicesUnavailable.*nvidia-smi"):
            operations(kind, 3)


def test_what_is_asked_for(cuda):
    assert choose("cpu") == ("cpu", "the CPU was asked for")
    assert choose("cuda") == ("cuda", "a GPU was asked for")
    assert choose("auto") == ("cuda", "a GPU is there")
    assert isinstance(operations("cpu", 0), NumpyOps)
    assert operations("auto", None).device == "cuda:0 Stand-in"
    assert operations("cuda", 5, tf32=True).gpu.tf32
    with pytest.raises(ConfigError, match=r"^device 'gpu' is not known; choose one of auto, cpu, cuda$"):
        operations("gpu", 0)


def test_ranks_of_a_machine_share_its_gpus_in_turn():
    with installed(devices=3):
        import cupy

        found = [operations("cuda", rank) for rank in (0, 1, 2, 3, None)]
        assert [ops.device.partition(" ")[0] for ops in found] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:0"]
        assert all(isinstance(ops, CupyOps) for ops in found)
        names = [identity(ops) for ops in found]
        assert len(set(names)) == 3
        assert names[0] == names[3] == names[4] == identity(found[0].on(found[0].stream))
        assert identity(NumpyOps()) == ""
        cupy.cuda.runtime.setDevice(0)


def test_parts_of_one_gpu_have_names_of_their_own(monkeypatch, cuda):
    ops, names, plain = operations("cuda", 0), set(), cuda.runtime.getDeviceProperties
    for uuid in (b"\x01" * 16, b"\x02" * 16):
        monkeypatch.setattr(cuda.runtime, "getDeviceProperties", lambda index, uuid=uuid: plain(index) | {"uuid": uuid})
        names.add(identity(ops))
    assert names == {"0000:01:00.0 " + "01" * 16, "0000:01:00.0 " + "02" * 16}


def test_nothing_of_cupy_is_loaded_for_the_cpu(without_cupy):
    without_cupy("must not be asked for")
    assert isinstance(operations("cpu", 0), NumpyOps)
    assert identity(operations("cpu", 0)) == ""
