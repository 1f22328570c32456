"""Adapters of the tiny models, made by real ``peft``, with logits in float64; and the way back.

Needs torch, transformers, peft and what make_golden.py needs, and imports nothing of tunix::

    python tests/golden/make_lora.py                # writes lora/NAME/ beside itself
    python tests/golden/make_lora.py check FOLDER   # peft and transformers open what tunix wrote

FOLDER of ``check`` has ``adapter/`` (which names its base), ``merged/``, and ``values.npz`` with
``tokens`` and tunix's ``logits``.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

# see make_golden.py, which does the same unless it is to check
CHECK = sys.argv[1:2] == ["check"]
if not CHECK:
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double

import peft  # noqa: E402
import transformers  # noqa: E402
from make_golden import tiny  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from weights import tokens  # noqa: E402

HERE = Path(__file__).parent / "lora"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "attention": ("mha_untied", {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
    "everything": (
        "mha_untied",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"],
        },
    ),
    "all_linear": ("gqa_tied", {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}),
}
"""Name of the adapter: its base, and its settings."""


def make(name: str, seed: int) -> None:
    """One adapter with random matrices, its folder as peft saves it, and its logits."""
    base, settings = ADAPTERS[name]
    settings = settings | {"lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tiny(base), peft.LoraConfig(**settings)).double().eval()
    random = np.random.default_rng(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            drawn = random.normal(0, 0.2, parameter.shape).astype(np.float32)
            parameter.data = torch.tensor(drawn).double()
    with torch.no_grad():
        ids = torch.tensor(tokens(base)).long()
        logits = model(ids).logits.numpy()
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"../{base}"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "adapter_model.safetensors"
    tensors = {key: value.astype(np.float32) for key, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    np.savez_compressed(folder / "logits.npz", logits=logits)


def check(folder: Path) -> None:
    """Logits of the adapter on its base and of the merged model, in float64 but for norms."""
    values = np.load(folder / "values.npz")
    ids = torch.tensor(values["tokens"]).long()
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    for name, model in (("peft", adapted), ("merged", merged)):
        with torch.no_grad():
            logits = model.double().eval()(ids).logits.numpy()
        difference = np.abs(logits - values["logits"]).max()
        print(
            f"{name}: largest difference of logits {difference:.3g} of {np.abs(logits).max():.3g}"
        )
        assert difference <= 5e-4, difference
    print("ok: peft and transformers open both folders and compute the same")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    if CHECK:
        check(Path(sys.argv[2]))
    else:
        for number, adapter in enumerate(ADAPTERS):
            make(adapter, number)
            print(adapter, sum(file.stat().st_size for file in (HERE / adapter).iterdir()), "bytes")
