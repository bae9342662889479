import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES, accumulator, dtype, name_of
from mpishard.errors import ConfigError


def test_the_table_is_closed():
    assert sorted(DTYPES) == ["bfloat16", "float16", "float32", "float64", "int64", "uint16", "uint64", "uint8"]


@pytest.mark.parametrize("name", DTYPES)
def test_names_and_types_go_both_ways(name):
    assert dtype(name) == np.dtype(name)
    assert name_of(dtype(name)) == name
    assert name_of(np.dtype(name).type) == name


@pytest.mark.parametrize("name", ["bf16", "float", "f4", "int32", "", "complex64", "Float32"])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match=f"element type '{name}' is not known; choose one of float64, float32"):
        dtype(name)


@pytest.mark.parametrize("kind", [np.int32, np.bool_, np.complex64, np.longdouble, ">f4", "S3", object])
def test_other_types_are_refused(kind):
    with pytest.raises(ConfigError, match="is not in the table; use one of float64, float32"):
        name_of(np.dtype(kind))


def test_accumulators():
    found = {name: accumulator(dtype(name)).name for name in ("bfloat16", "float16", "float32", "float64")}
    assert found == {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}


@pytest.mark.parametrize("name", ["int64", "uint64", "uint16", "uint8"])
def test_integers_are_not_summed(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be summed; only bfloat16, float16, float32 and float64 can"):
        accumulator(dtype(name))
