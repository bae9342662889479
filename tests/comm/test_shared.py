"""Memory that ranks of a host share: what is handed out, where it lies, and when it goes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES, address
from mpishard.comm import shared
from mpishard.comm.shared import PLACE_BYTES, Place, SharedMemory
from mpishard.errors import ConfigError

F4 = DTYPES["float32"]


def segments() -> int:
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:mpishard" in line for line in maps)


def test_arrays_lie_apart_and_aligned() -> None:
    memory = SharedMemory()
    sizes = [0, 1, 7, 1000, 16384, 16385, 100_000, 3]
    arrays = [memory.allocate(size, F4) for size in sizes]
    for number, array in enumerate(arrays):
        assert array.shape == (sizes[number],)
        assert address(array) % 64 == 0
        array[:] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_a_peer_reads_and_writes_the_same_memory() -> None:
    """Another process, which knows the place alone."""
    memory = SharedMemory()
    for count in (5, 50_000):
        array = memory.allocate(count, F4)
        array[:] = np.arange(count)
        place = memory.place(array[1:])
        assert place is not None
        code = (
            "import sys\nfrom mpishard.array.dtypes import DTYPES\n"
            "from mpishard.comm.shared import Place, SharedMemory\n"
            "place = Place.unpack(bytes.fromhex(sys.argv[1]))\n"
            "array = SharedMemory().at(place, int(sys.argv[2]), DTYPES['float32'])\n"
            "assert array.tolist() == list(range(1, len(array) + 1))\narray[-1] = -3\n"
        )
        command = [sys.executable, "-c", code, place.pack().hex(), str(count - 1)]
        subprocess.run(command, check=True, timeout=60)
        assert array[-1] == -3


def test_places() -> None:
    memory = SharedMemory()
    small, large = memory.allocate(10, F4), memory.allocate(100_000, F4)
    for array in (small, large):
        place, part = memory.place(array), memory.place(array[3:7])
        assert place is not None
        assert part is not None
        assert part == place._replace(offset=place.offset + 12)
        assert len(place.pack()) == PLACE_BYTES
        assert Place.unpack(place.pack()) == place
    assert memory.place(np.zeros(10, np.float32)) is None
    assert SharedMemory().place(small) is None


def test_memory_goes_with_its_last_array() -> None:
    before, descriptors = segments(), len(os.listdir("/proc/self/fd"))
    memory, other = SharedMemory(), SharedMemory()
    array = memory.allocate(100_000, F4)
    place = memory.place(array)
    assert place is not None
    theirs, again = other.at(place, 100_000, F4), other.at(place, 10, F4)
    assert segments() == before + 2  # one of each side, however often it is asked for
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    part = array[50:60]
    part[:] = 7
    del array
    assert segments() == before + 2
    del part
    assert segments() == before + 1
    assert (theirs[50:60] == 7).all()  # a peer's mapping outlives the owner's
    del theirs, again
    assert segments() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(MemoryError, match="bytes of shared memory cannot be had"):
        SharedMemory().allocate(1 << 60, F4)


def test_memory_that_cannot_be_mapped() -> None:
    place = Place(2**22 + 1, 3, 1, 4096, 0)  # no process has such a number
    with pytest.raises(ConfigError, match=r"memory of process 4194305 .* cannot be mapped .*transport mpi") as caught:
        SharedMemory().at(place, 1, F4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 3])
def test_memory_of_about_a_large_page(pages: int, beside: int) -> None:
    """Begins at a multiple of it, so that the kernel can map it as one, and is whole and zero."""
    page = shared._large_page() or 1 << 21
    memory = SharedMemory()
    array = memory.allocate(pages * page + beside, DTYPES["uint8"])
    assert array.size == pages * page + beside
    assert not array.any()
    array[:] = 7
    if beside >= 0 or pages > 1:
        assert address(array) % page == 0
    place = memory.place(array)
    assert place is not None
    again = SharedMemory().at(place, array.size, DTYPES["uint8"])
    assert (again == 7).all()


def test_pages_that_several_take() -> None:
    memory = SharedMemory()
    array = memory.common((5 << 21) + 4097)
    for part in range(3):
        memory.take(array, part, 3)
    assert not array.any()


def test_a_kernel_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_large_page", lambda: 0)
    assert shared.gives_large_pages() is None
    array = SharedMemory().allocate(1 << 20, F4)
    array[:] = 3
    assert (array == 3).all()


def test_a_kernel_that_makes_no_pages_large(monkeypatch: pytest.MonkeyPatch) -> None:
    if shared.gives_large_pages() is None:
        pytest.skip("there are no large pages here, or larger ones than are tried")
    monkeypatch.setattr(shared._Segment, "take", lambda *arguments: None)
    monkeypatch.setattr(shared, "_MADV_HUGEPAGE", 15)  # asks for small ones
    assert shared.gives_large_pages() is False
