"""``import tunix`` and ``tunix --help`` are quick and load nothing heavy."""

import subprocess
import sys

import pytest

import tunix

HEAVY = ("jax", "numpy", "orbax", "optax", "matplotlib", "rich", "pydantic", "jsonargparse")


def loaded(code):
    """Seconds that ``code`` took in a fresh interpreter and the modules it left loaded."""
    timed = (
        f"import time, sys; t = time.perf_counter(); {code}; "
        "print(time.perf_counter() - t, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    seconds, *modules = done.stderr.split()
    return float(seconds), set(modules)


@pytest.mark.parametrize(
    "code",
    ["import tunix; tunix.__version__", "from tunix.cli.main import main; main(['--help'])"],
)
def test_light(code):
    seconds, modules = loaded(code)
    assert not modules & set(HEAVY)
    if seconds > 0.3:  # a busy machine: once more
        seconds = loaded(code)[0]
    assert seconds < 0.3


def test_public_names():
    assert set(tunix._WHERE) == set(tunix.__all__) - {"__version__"}
    assert set(tunix.__all__) <= set(dir(tunix))
    assert tunix.Task(id="a", text="b").id == "a"
    assert tunix.SFTConfig(model="m").batch_size == 32
    with pytest.raises(AttributeError, match="no attribute 'grpoo'"):
        _ = tunix.grpoo
