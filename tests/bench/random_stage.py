"""A rank of the trainer whose part of a model is made of random numbers on its own device.

A folder with the weights of 70B would be 140 GB. Here a rank makes the layers that it holds, in NF4
as a loaded one, and everything else is the trainer's own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.agents.trainer.ranks import DEMO


def write_shape(folder: Path, config: dict[str, Any]) -> Path:
    """Write the config of a Llama and the demo's tokenizer."""
    folder.mkdir(parents=True)
    whole = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config}
    (folder / "config.json").write_text(json.dumps(whole))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / name, folder / name)
    return folder


def make_model(spec: Any, path: Path, device: Any, report: Any, choose: Any, *_: Any) -> Any:
    """Return the base model of this rank; stands in for `load_model`."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import AutoConfig, AutoModelForCausalLM

    from agents.trainer.model import experts
    from agents.trainer.model.layer_holdings import ModelOutline
    from agents.trainer.model.layer_loading import AbsentModule, find_layers
    from agents.trainer.model.model import choose_dtype

    dtype = choose_dtype(spec.precision, device)
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    names = find_layers(model)
    outline = ModelOutline(
        class_name=type(model).__name__,
        layer_bytes=(1,) * len(names),
        embedding_bytes=1,
        head_bytes=1,
    )
    holdings = choose(outline)
    for place in holdings.find("absent"):
        above, _, last = names[place].rpartition(".")
        layer = AbsentModule(model.get_submodule(names[place]))
        setattr(model.get_submodule(above), last, layer)
    if not holdings.embedding:
        model.set_input_embeddings(AbsentModule(model.get_input_embeddings()))
    if not holdings.head:
        model.lm_head = AbsentModule(model.lm_head)
    torch.manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=dtype, device=device).mul_(0.02)

    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            made = Linear4bit(
                *(module.in_features, module.out_features),
                bias=False,
                compute_dtype=dtype,
                quant_type="nf4",
                device="meta",
            )
            values = draw(module.out_features, module.in_features)
            kept = Params4bit(
                values.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            made.weight = kept.to(device)
            made.training = True  # as `load_model` keeps the layout on a CPU
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, made)
        elif isinstance(module, (torch.nn.Embedding, torch.nn.Linear)):
            module.weight = torch.nn.Parameter(draw(*module.weight.shape))
        elif type(module).__name__.endswith("RMSNorm"):
            ones = torch.ones(module.weight.shape, dtype=dtype, device=device)
            module.weight = torch.nn.Parameter(ones)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(config=config).to(device)
    model.config.quantization_config = None
    model.eval()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.training = True
    model.requires_grad_(False)
    experts.use_own_products(model)
    return model


def main() -> int:
    """Be one rank of an attempt, by the environment that the trainer reads."""
    from agents.trainer import __main__ as trainer
    from agents.trainer import prepare

    prepare.load_model = make_model
    prepare.find_model = lambda path, spec: Path(path)
    prepare.hash_model = lambda folder, memory: "random"
    trainer.start_reading = lambda attempt: None
    return trainer.main()


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
