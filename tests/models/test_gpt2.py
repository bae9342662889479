import numpy as np
import pytest

from mpishard.errors import ConfigError
from mpishard.models.gpt2 import Gpt2, gpt2, public_config
from tests.models.engine_access import engine_for, named

SMALL = Gpt2(layers=2, width=6, heads=3, sequence=5, vocabulary=11)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "parameters"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_sizes_of_the_public_checkpoints(layers, width, heads, parameters):
    model = gpt2(Gpt2(layers, width, heads, sequence=1024, vocabulary=50257))
    assert model.parameters == parameters
    assert model.sample_shape == model.target_shape == (1024,)
    assert model.sample_dtype == "int64"


def test_names_and_shapes_are_those_of_the_public_checkpoints():
    block = {
        "ln_1.weight": (6,), "ln_1.bias": (6,), "attn.c_attn.weight": (6, 18), "attn.c_attn.bias": (18,),
        "attn.c_proj.weight": (6, 6), "attn.c_proj.bias": (6,), "ln_2.weight": (6,), "ln_2.bias": (6,),
        "mlp.c_fc.weight": (6, 24), "mlp.c_fc.bias": (24,), "mlp.c_proj.weight": (24, 6), "mlp.c_proj.bias": (6,),
    }  # fmt: skip
    expected = {"wte.weight": (11, 6), "wpe.weight": (5, 6), "ln_f.weight": (6,), "ln_f.bias": (6,)}
    for i in range(2):
        expected |= {f"h.{i}.{name}": shape for name, shape in block.items()}
    model = gpt2(SMALL)
    found = [(unit.prefix + spec.name, spec.shape) for unit in model.units for spec in unit.specs]
    assert found == list(expected.items())


def test_matrices_decay_and_vectors_do_not():
    for unit in gpt2(SMALL).units:
        assert all(spec.decay == (len(spec.shape) == 2) and spec.trainable for spec in unit.specs)


def test_units_and_stages():
    model = gpt2(SMALL)
    assert [(u.name, u.keep) for u in model.units] == [("root", True), ("h.0", False), ("h.1", False)]
    found = [(s.name, s.units, s.backward_units) for s in model.stages]
    assert found == [
        ("embed", ("root",), ()),
        ("h.0", ("h.0",), ("h.0",)),
        ("h.1", ("h.1",), ("h.1",)),
        ("head", ("root",), ("root",)),
    ]


def test_initial_values_have_the_deviations_of_gpt_2():
    engine = engine_for(Gpt2(layers=3, width=96, heads=3, sequence=64, vocabulary=99), batch=1, dtype_name="float32")
    for name, param in named(engine, "param").items():
        last = name.rsplit(".", 1)[1]
        if param.ndim == 1:
            assert (param == (last == "weight")).all()
            continue
        std = 0.01 if name.startswith("wpe") else 0.02 / np.sqrt(6) if name.endswith("c_proj.weight") else 0.02
        assert abs(param.std() / std - 1) < 4 / np.sqrt(2 * param.size)
        assert abs(param.mean()) < 4 * std / np.sqrt(param.size)


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match="4 heads do not divide a width of 6; choose a divisor of the width"):
        gpt2(Gpt2(layers=1, width=6, heads=4, sequence=5, vocabulary=11))


def test_public_config():
    """tests/parity/test_transformers.py opens it; here is what that cannot see."""
    config = public_config(SMALL)
    assert (config["n_positions"], config["activation_function"], config["bos_token_id"]) == (5, "gelu_new", None)
    sizes = Gpt2(2, 6, 3, 5, vocabulary=50257, dropout=0.25, gelu_tanh=False, positions=9, std=0.5)
    config = public_config(sizes)
    assert (config["n_positions"], config["activation_function"], config["eos_token_id"]) == (9, "gelu", 50256)
    assert [config[f"{name}_pdrop"] for name in ("embd", "resid", "attn")] == [0.25, 0.25, 0.0]
    assert config["initializer_range"] == 0.5
