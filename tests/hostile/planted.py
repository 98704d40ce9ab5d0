"""Modules that write a canary when anything imports them, and models that ask for their code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "resources" / "demo"
OURS = ("app", "agents")
NAMES = (
    *("json", "torch", "numpy", "transformers", "tokenizers", "jinja2", "peft", "safetensors"),
    *("sitecustomize", "usercustomize", "conftest", "asyncio", "yaml", "pydantic", "asyncssh"),
    *("bitsandbytes", "tokenize", "typing_extensions", "huggingface_hub", "pkgutil", "venv"),
)
_CODE = """
with open({canary!r}, "a") as file:
    file.write(__name__ + chr(10))
"""


def plant(folder: Path, canary: Path, *more: str) -> None:
    """Put a module of each name into a folder; each writes its name to `canary`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*NAMES, *more):
        (folder / f"{name}.py").write_text(_CODE.format(canary=str(canary)), encoding="utf-8")


def ran(canary: Path) -> str:
    """Return what was imported of what was planted; empty: nothing."""
    return canary.read_text(encoding="utf-8") if canary.exists() else ""


def copy_model(folder: Path) -> Path:
    """Return a copy of the demo's model."""
    return Path(shutil.copytree(DEMO / "model", folder))


def change_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    about = json.loads(path.read_bytes()) if path.exists() else {}
    about.update(changes)
    path.write_text(json.dumps({k: v for k, v in about.items() if v is not None}))


def write_run_file(folder: Path, **changes: Any) -> Path:
    """Return a run file beside a copy of the demo's model and data."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        copy_model(folder / "model")
    rows = (DEMO / "train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    about = {
        "name": "attacked",
        "model": "model",
        "data": {"train": "train.jsonl", "format": "chat"},
        "sequence_tokens": 128,
        "batch_sequences": 4,
        "max_steps": 1,
        **changes,
    }
    (folder / "run.yaml").write_text(json.dumps(about), encoding="utf-8")
    return folder / "run.yaml"
