"""Shared test setup: shape checks on, CPU only, one tiny model for every test that needs one."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".cache", "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

install_import_hook("tunix", "beartype.beartype")

import jax
import pytest

from tunix.models import llama

TINY = llama.LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
    rope_theta=10000.0,
    tie_embeddings=True,
)
"""The one model configuration of the tests, so that compiled programs are shared."""


@pytest.fixture(scope="session")
def tiny_config():
    return TINY


@pytest.fixture(scope="session")
def tiny_params():
    return jax.device_get(llama.initialize(jax.random.key(7), TINY))


@pytest.fixture
def x64():
    """Run a test in float64; shapes and laws, not speed."""
    with jax.enable_x64(True):
        yield
