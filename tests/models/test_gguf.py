"""GGUF files written by the ``gguf`` library itself, of the tiny golden models."""

import gguf as library
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.golden.weights import MODELS, weights
from tests.models.ggml_blocks import BLOCKS, random_rows
from tunix.errors import ModelError
from tunix.models import gguf
from tunix.models.gguf_tokenizer import tokenizer_from_metadata
from tunix.models.llama import Llama3Scaling, LlamaConfig
from tunix.models.policy import load_policy

BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(matrix, heads):
    """What llama.cpp's converter does to q and k: ``permute`` of convert_hf_to_gguf.py."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def gguf_tensors(name):
    tensors = {}
    config = MODELS[name]
    heads = config["num_attention_heads"]
    for key, value in weights(name).items():
        if "q_proj" in key:
            value = interleave(value, heads)
        if "k_proj" in key:
            value = interleave(value, config.get("num_key_value_heads", heads))
        key = key.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        key = key.replace("lm_head", "output").replace("model.layers", "blk")
        for theirs, ours in BLOCK.items():
            key = key.replace(theirs, ours)
        tensors[key] = np.ascontiguousarray(value)
    return tensors


def write(
    path, name="mha_untied", change=None, kind=Kind.F32, tensors=None, arch="llama", raw=None
):
    """Write a tiny model; ``change(writer)`` adds metadata, bytes are blocks of type ``raw``."""
    config = MODELS[name]
    writer = library.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    if change:
        change(writer)
    for key, value in (tensors or gguf_tensors(name)).items():
        if value.dtype == np.uint8:
            writer.add_tensor(key, value, raw_dtype=raw)
            continue
        stored = kind if value.ndim == 2 and value.shape[1] % 32 == 0 else Kind.F32
        if stored in (Kind.F32, Kind.F16):
            writer.add_tensor(key, value.astype(np.float16 if stored == Kind.F16 else np.float32))
        else:
            writer.add_tensor(key, library.quants.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["mha_untied", "gqa_tied"])
def test_equals_the_hugging_face_folder(tmp_path, tiny_folder, name):
    """The row permutation is undone, so both forms of one model load bit-equal."""
    ours = load_policy(write(tmp_path / "m.gguf", name))
    theirs = load_policy(tiny_folder(name))
    assert ours.config == theirs.config
    assert ours.tokenizer is None
    for (path, a), (_, b) in zip(*(map_leaves(p.params) for p in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def map_leaves(params):
    flat = {k: v for k, v in params.items() if k != "layers"} | params["layers"]
    return sorted(flat.items())


def test_half_split_order_inverts_the_converter():
    rows = np.arange(24)[:, None]
    interleaved = interleave(rows, 3)[:, 0]
    ours = np.empty(24, int)
    ours[gguf.half_split_order(3, 8)] = interleaved
    np.testing.assert_array_equal(ours, rows[:, 0])


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Kind.F16, 1e-3),
        (Kind.BF16, 1e-2),
        (Kind.Q8_0, 1e-2),
        (Kind.Q5_0, 0.1),
        (Kind.Q4_0, 0.2),
        (Kind.Q4_1, 0.2),
    ],
)
def test_quantised_weights_are_near_the_originals(tmp_path, kind, error):
    params = load_policy(write(tmp_path / "m.gguf", kind=kind)).params
    up = weights("mha_untied")["model.layers.1.mlp.up_proj.weight"]
    difference = np.abs(np.asarray(params["layers"]["up"][1]) - up.T).max()
    assert 0 < difference <= error * np.abs(up).max()


WIDE = {
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
"""Sizes whose matrices (all but ``attn_output``) have rows of whole 256-number blocks."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_block_type_means_what_ggml_says(tmp_path, monkeypatch, kind):
    """A whole model of random blocks, against the meaning written out in ``ggml_blocks.py``."""
    monkeypatch.setitem(MODELS, "wide", WIDE)
    shapes = {
        "token_embd": (24, 256),
        "output": (24, 256),
        "blk.0.attn_q": (16, 256),
        "blk.0.attn_k": (8, 256),
        "blk.0.attn_v": (8, 256),
        "blk.0.ffn_gate": (512, 256),
        "blk.0.ffn_up": (512, 256),
        "blk.0.ffn_down": (256, 512),
    }
    plain = {name: np.ones(256, np.float32) for name in ("output_norm", "blk.0.attn_norm")}
    plain["blk.0.ffn_norm"] = plain["output_norm"]
    plain["blk.0.attn_output"] = np.ones((256, 16), np.float32)
    raw, values = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        raw[name], values[name] = random_rows(kind, shape, seed)
    tensors = {f"{name}.weight": value for name, value in (plain | raw).items()}
    params = load_policy(write(tmp_path / "m.gguf", "wide", tensors=tensors, raw=Kind[kind])).params

    def halves(matrix, heads):  # rows 2 i + j of a head are rows j * half + i of ours
        return matrix.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(matrix.shape)

    values["blk.0.attn_q"] = halves(values["blk.0.attn_q"], 2)
    values["blk.0.attn_k"] = halves(values["blk.0.attn_k"], 1)
    found = {"token_embd": params["embedding"], "output": params["head"]}
    for leaf in ("query", "key", "value", "gate", "up", "down"):
        name = gguf.NAMES[f"layers/{leaf}"].format(layer=0).removesuffix(".weight")
        found[name] = params["layers"][leaf][0].T
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert len(np.unique(value)) > 100
        np.testing.assert_allclose(
            found[name], value, rtol=1e-6, atol=1e-6 * np.abs(value).max(), err_msg=name
        )


def test_plain_floats_are_read_bit_for_bit(tmp_path):
    up = weights("mha_untied")["model.layers.1.mlp.up_proj.weight"]
    for kind, stored in ((Kind.F16, np.float16), (Kind.BF16, ml_dtypes.bfloat16)):
        params = load_policy(write(tmp_path / "m.gguf", kind=kind)).params
        np.testing.assert_array_equal(
            params["layers"]["up"][1], up.astype(stored).astype(np.float32).T
        )


def llama3_factors(factor=8.0, low=1.0, high=4.0, original=8192, head_dim=8, base=5e5):
    """``rope_freqs`` as llama.cpp's converter writes it, from the published formula."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * base ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_recovered(tmp_path):
    tensors = gguf_tensors("mha_untied") | {"rope_freqs.weight": llama3_factors()}
    override = MODELS["mha_untied"] | {"rope_theta": 5e5}
    MODELS["scaled"] = override
    try:
        config = load_policy(write(tmp_path / "m.gguf", "scaled", tensors=tensors)).config
        assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
        tensors["rope_freqs.weight"] = llama3_factors(original=4096)
        with pytest.raises(ModelError, match=r"rope_freqs\.weight.*8192"):
            load_policy(write(tmp_path / "n.gguf", "scaled", tensors=tensors))
    finally:
        del MODELS["scaled"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"arch": "gemma3"}, r"general\.architecture = 'gemma3'.*'llama'"),
        (
            {"kind": Kind.TQ1_0, "tensors": {"t": np.zeros((4, 256), np.float32)}},
            r"m\.gguf: tensor 't' is quantised as TQ1_0.*F32, F16, BF16, Q8_0.*Q6_K",
        ),
        ({"change": lambda w: w.add_string("llama.rope.scaling.type", "yarn")}, "'yarn'"),
        ({"change": lambda w: w.add_rope_dimension_count(4)}, "rope.dimension_count = 4"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, options, match):
    with pytest.raises(ModelError, match=match):
        load_policy(write(tmp_path / "m.gguf", **options))


def test_rows_of_part_of_a_block_are_refused(tmp_path):
    """A file that says a row of Q4_K has 48 numbers; its bytes mean nothing then."""
    path = write(tmp_path / "m.gguf")
    name = b"blk.1.ffn_down.weight"
    content = bytearray(path.read_bytes())
    kind = content.index(name) + len(name) + 4 + 2 * 8
    content[kind : kind + 4] = int(Kind.Q4_K).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"ffn_down.*Q4_K has shape \(32, 48\).*multiple of 256"):
        load_policy(path)


@pytest.mark.parametrize("broken", ["missing", "shape", "extra"])
def test_misfits_are_named(tmp_path, broken):
    tensors = gguf_tensors("mha_untied")
    if broken == "missing":
        del tensors["blk.1.ffn_up.weight"]
        match = r"'blk\.1\.ffn_up\.weight' of shape \(48, 32\) is missing"
    elif broken == "shape":
        tensors["blk.1.ffn_up.weight"] = np.zeros((32, 48), np.float32)
        match = r"shape \(32, 48\), expected \(48, 32\)"
    else:
        tensors["blk.1.attn_q.bias"] = np.zeros(32, np.float32)
        match = r"unexpected.*'blk\.1\.attn_q\.bias'"
    with pytest.raises(ModelError, match=match):
        load_policy(write(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize(
    ("keep", "match"),
    [
        (0, r"m\.gguf cannot be read as GGUF"),
        (3, r"m\.gguf cannot be read as GGUF: the file ends within its header"),
        (400, r"m\.gguf cannot be read as GGUF: the file ends within its header"),
        (-100, r"m\.gguf is truncated: tensor '.*' ends at byte \d+, but the file has \d+"),
    ],
)
def test_truncated_or_foreign_files_are_named(tmp_path, keep, match):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=match):
        load_policy(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="does not begin with 'GGUF'"):
        load_policy(path)


# tokenizers


def byte_level(pre, **changes):
    tokens = ["<|end|>", *"0123456789abĊĠ", "12", "123", "ab", "ĊĊ", "Ġa"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a", "a b", "Ċ Ċ"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **changes,
    }


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["1", "2", "3", "ĊĊ", "1", "Ġa", "b"]),
        ("llama-bpe", ["123", "ĊĊ", "1", "Ġa", "b"]),
        ("gpt-2", ["123", "Ċ", "Ċ", "1", "Ġa", "b"]),
    ],
)
def test_words_are_cut_as_the_family_does(pre, tokens):
    """Single digits; up to three digits; all digits at once, and a newline kept for the number."""
    tokenizer = tokenizer_from_metadata(byte_level(pre), "file")
    assert [tokenizer.token(i) for i in tokenizer.encode("123\n\n1 ab")] == tokens
    assert tokenizer.decode(tokenizer.encode("123\n\n1 ab")) == "123\n\n1 ab"
    assert tokenizer.encode("<|end|>") == [0]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 0, None)
    assert tokenizer.adds_bos is (pre == "llama-bpe")


def test_bos_and_template_follow_the_metadata():
    metadata = byte_level("smollm", **{"tokenizer.ggml.add_bos_token": True})
    metadata["tokenizer.chat_template"] = "T"
    tokenizer = tokenizer_from_metadata(metadata, "file")
    assert tokenizer.encode_text("a") == [0, tokenizer.token_id("a")]
    assert tokenizer.chat_template == "T"


@pytest.mark.parametrize(
    "changes", [{"tokenizer.ggml.model": "bert"}, {"tokenizer.ggml.pre": "qwen2"}]
)
def test_unknown_tokenizers_are_named(changes):
    with pytest.raises(ModelError, match=r"file: tokenizer.*is not supported.*'smollm'"):
        tokenizer_from_metadata(byte_level("smollm", **changes), "file")


def test_sentence_piece():
    """Merges by score: 'ab' (-1) before 'bc' (-2); unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["▁", "a", "b", "c", "bc", "ab", "▁ab"]
    scores = [0.0] * len(pieces) + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.scores": scores,
    }
    tokenizer = tokenizer_from_metadata(metadata, "file")
    texts = [tokenizer.token(i) for i in tokenizer.encode_text("abc é")]
    assert texts == ["<s>", "▁ab", "c", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 0)


def test_smollm2(smollm2):
    assert smollm2.config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rms_norm_epsilon=1e-5,
        rope_theta=100000.0,
        tie_embeddings=True,
    )
    tokenizer = smollm2.tokenizer
    assert smollm2.stop_ids == {2}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (1, 2, 2, 0)
    assert not tokenizer.adds_bos
    assert tokenizer.vocab_size == 49152
