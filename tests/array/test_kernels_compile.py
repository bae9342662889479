"""Every kernel file, for every pair of types and every architecture, compiled by NVRTC without a word."""

from __future__ import annotations

import pytest
from cupy_backends.cuda.libs import nvrtc

from mpishard.array import kernels
from mpishard.array.constants import CHUNK, EXACT_WORDS, IGNORE
from mpishard.errors import ConfigError
from tests.array.kernel_proof import NO_DOUBLE, STRICT, Build, builds, compiled, nvrtc_compile


@pytest.mark.parametrize("build", builds(), ids=lambda build: "-".join([build.file, *build.pair, build.architecture]))
def test_no_line_in_the_log(build: Build) -> None:
    log, code = compiled()[build]
    assert log == ""
    assert code.startswith(b"\x7fELF")
    names = [kernel.name for kernel in kernels.KERNELS.values() if kernel.file == build.file]
    assert [name for name in names if f".text.{name}\0".encode() not in code] == []


FAULTS = {
    "variable": ("int unused = 3;", "#177"),
    "set alone": ("int set; set = n;", "#550"),
    "before its value": ("int early; x[0] = early;", "#549"),
    "unreachable": ("return; x[0] = 1;", "#111"),
    "local memory": ("float held[300]; for (int i = 0; i < 300; i++) held[i] = x[i]; x[0] = held[n];", "Local memory"),
    "double": ("x[0] = x[1] * (x[2] + 0.1);", "Double precision"),
    "parameter": ("", "#826"),
    "error": ("x = missing;", "missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_a_line_in_the_log(fault: str) -> None:
    text, message = FAULTS[fault]
    code = f'extern "C" __global__ void k(float* x, int n) {{ if (n < 0) x[1] = 2; {text} }}'
    if fault == "parameter":
        code = code.replace("int n", "int n, int other")
    log, _ = nvrtc_compile(code, ("-std=c++17", "-arch=sm_90", *STRICT, NO_DOUBLE))
    assert message.lower() in log.lower()


def test_numbers_that_the_text_repeats() -> None:
    assert f"constexpr int BLOCK = {kernels.BLOCK};" in kernels.source("rows.cu")
    assert f"constexpr i64 IGNORE = {IGNORE};" in kernels.source("rows.cu")
    assert f"constexpr i64 CHUNK = {CHUNK};" in kernels.source("shards.cu")
    assert f"constexpr int LIMBS = {EXACT_WORDS - 1};" in kernels.source("shards.cu")


def test_signatures_are_read_from_the_text() -> None:
    parameters = kernels.KERNELS["combine_parts"].parameters
    assert [(p.name, p.type, p.pointer, p.const, p.written) for p in parameters[:3]] == [
        ("sums", "A", True, True, False),
        ("out", "G", True, False, True),
        ("width", "i64", False, False, False),
    ]
    text = "".join(kernels.source(file) for file in kernels.FILES)
    assert text.count("__global__") == len(kernels.KERNELS)
    with pytest.raises(ConfigError, match=r"^kernel k has the parameter 'float x\[\]'; write it as"):
        kernels.parse('extern "C" __global__ void k(float x[]) {}')


def test_the_processor_converts_float16() -> None:
    """The CPU runs other text in place of these instructions: to the nearest, small numbers kept."""
    wanted = {"float32": "cvt.rn.f16.f32", "float64": "cvt.rn.f16.f64", "float16": "cvt.f32.f16"}
    for pair in (("float16", "float32"), ("float32", "float16"), ("float64", "float16")):
        program = nvrtc.createProgram(kernels.source("copies.cu"), "kernels.cu", [], [])
        nvrtc.compileProgram(program, (*kernels.options(*pair), "-arch=compute_90"))
        found = {line.split()[0] for line in nvrtc.getPTX(program).decode().splitlines() if ".f16" in line}
        assert wanted[pair[0]] in found <= set(wanted.values())


def test_types_without_kernels() -> None:
    with pytest.raises(ConfigError, match=r"^there are no kernels for the element type int64; use one of float32"):
        kernels.options("int64", "float32")
