"""Code that a model names is never run, whoever would load it; its own class takes its place.

The models are copies of the demo's, with every way to name code that the libraries know. The cache
of Transformers' dynamic modules holds the code already, as after one careless download.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.errors import ExpectedError
from agents.program import command
from agents.quantizers.formats.gguf import convert
from app.artifacts.exports.request import ExportRequest
from app.core.artifacts import ExportModel
from app.core.core import Core
from app.core.library import PreviewData, ReadRunFile
from app.core.new_nodes import AddNode
from app.core.nodes import ConnectNodes, SetUpNode
from app.core.runs import PlanRun, StartRun, WatchRun
from app.nodes.node import LocalAddress
from tests.hostile.planted import ROOT, change_json, copy_model, plant, ran, write_run_file

REPOSITORY, COMMIT = "evil/code", "0123456789abcdef0123456789abcdef01234567"
AUTO_MAP = {
    "AutoConfig": f"{REPOSITORY}--evil.Config",
    "AutoModel": f"{REPOSITORY}--evil.Model",
    "AutoModelForCausalLM": f"{REPOSITORY}--evil.Model",
    "AutoTokenizer": [f"{REPOSITORY}--evil.Tokenizer", f"{REPOSITORY}--evil.Tokenizer"],
    "AutoProcessor": f"{REPOSITORY}--evil.Processor",
}
OWN_MAP = {
    name: value.partition("--")[2] if isinstance(value, str) else ["evil.Tokenizer"] * 2
    for name, value in AUTO_MAP.items()
}
CLASSES = "from transformers import PreTrainedTokenizerFast as Tokenizer, LlamaConfig as Config\n"


@dataclass(frozen=True)
class Evil:
    """A home of the hub whose caches hold a stranger's code, and the file that it would write."""

    home: Path
    canary: Path

    @property
    def ran(self) -> str:
        return ran(self.canary)

    def environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }

    def give_code(self, folder: Path) -> None:
        """Put the code beside a model, too."""
        code = f"open({str(self.canary)!r}, 'a').write(__name__ + ' ran')\n{CLASSES}"
        (folder / "evil.py").write_text(code)
        (folder / "modeling_evil.py").write_text(code)


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evil:
    made = Evil(tmp_path / "hub", tmp_path / "canary")
    snapshot = made.home / "hub" / "models--evil--code" / "snapshots" / COMMIT
    modules = made.home / "modules" / "transformers_modules" / "evil" / "code" / COMMIT
    for folder in (snapshot, modules):
        folder.mkdir(parents=True)
        made.give_code(folder)
    for folder in (modules, *list(modules.parents)[:3]):
        (folder / "__init__.py").touch()
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": AUTO_MAP}))
    for name, value in made.environ().items():
        monkeypatch.setenv(name, value)
    return made


def poison(model: Path, auto_map: dict[str, Any] = AUTO_MAP, **changes: Any) -> Path:
    """Let every file of a model name code."""
    for name in ("config.json", "tokenizer_config.json"):
        change_json(model / name, auto_map=auto_map)
    change_json(model / "tokenizer_config.json", **changes)
    return model


@dataclass(frozen=True)
class Ended:
    """How one attack on a program of ours ended."""

    code: int
    stderr: str


LIBRARIES = (
    "import transformers, transformers.models.llama.modeling_llama; "
    "from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer"
)
FORKING = """
import json, os, sys, traceback
def main(arguments):
    given = json.loads(open(arguments[0]).read())
    exec(given["before"], scope := {})
    for number, (code, args) in enumerate(given["attacks"]):
        if pid := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print("ENDED", status, flush=True)
            continue
        os.dup2(os.open(f"{arguments[0]}.{number}", os.O_WRONLY | os.O_CREAT), 2)
        try:
            exec(code, {**scope, "sys": sys, "arguments": args})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return 0
"""
"""A program whose import of the libraries serves all attacks: each runs in a fork of its own."""


def run_children(evil: Evil, before: str, attacks: list[tuple[str, list[str]]]) -> list[Ended]:
    """Run code with arguments in programs of ours, as every program that loads models is run.

    Args:
        evil: the home of the hub.
        before: imports that all attacks begin with.
        attacks: code, and its `arguments`, each for a process of its own.
    """
    place = evil.canary.parent / "child"
    place.mkdir(exist_ok=True)
    (place / "load_it.py").write_text(FORKING)
    question = evil.canary.parent / "attacks.json"
    question.write_text(json.dumps({"before": before, "attacks": attacks}))
    environ = {**evil.environ(), "PYTHONPATH": f"{ROOT}{os.pathsep}{place}"}
    done = subprocess.run(
        command(sys.executable, "load_it", str(question)),
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line[:6] == "ENDED "]
    assert len(codes) == len(attacks), done.stderr
    return [
        Ended(code, Path(f"{question}.{number}").read_text()) for number, code in enumerate(codes)
    ]


def make_glm(folder: Path) -> Path:
    """Return a GLM-4 of a few thousand parameters with the demo's tokenizer."""
    from transformers import Glm4Config, Glm4ForCausalLM

    copy_model(folder)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink()
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = Glm4Config(**sizes, **heads, pad_token_id=0, eos_token_id=1)
    Glm4ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["GLM-4", "Llama of HybridDNA"])
def test_a_gguf_export_never_runs_code_of_the_model(
    evil: Evil, tmp_path: Path, attack: Callable[..., None], kind: str
) -> None:
    folder = tmp_path / "model"
    if kind == "GLM-4":
        model = poison(make_glm(folder))
    else:
        model = poison(copy_model(folder), tokenizer_class="HybridDNATokenizer")
    evil.give_code(model)
    happened = "the converter took Transformers' own class"
    try:
        convert(model, tmp_path / "made.gguf", "F16")
    except ExpectedError as error:
        happened = error.message
    attack(
        given=f"a {kind} whose auto_map names code that is in the hub's cache",
        tried="to run it in llama.cpp's converter, which passes trust_remote_code=True",
        happened=evil.ran or happened,
    )
    assert evil.ran == ""


def test_a_gguf_export_names_the_code_that_it_refuses(
    evil: Evil, tmp_path: Path, attack: Callable[..., None]
) -> None:
    model = poison(copy_model(tmp_path / "model"), tokenizer_class="EvilTokenizer")
    change_json(model / "config.json", model_type="evil")
    with pytest.raises(ExpectedError) as refused:
        convert(model, tmp_path / "made.gguf", "F16")
    attack(
        given="a model of a kind that Transformers does not know, with its own tokenizer class",
        tried="to run that class in llama.cpp's converter",
        happened=refused.value.message,
    )
    assert evil.ran == ""
    assert "wants to run code of its own" in refused.value.message
    assert f"{REPOSITORY}--evil.Tokenizer" in refused.value.message
    assert str(model) in refused.value.message
    assert refused.value.hint


def test_code_is_refused_by_name_beside_an_auto_map_in_an_odd_form(
    evil: Evil, tmp_path: Path, attack: Callable[..., None]
) -> None:
    odd_forms: list[object] = [["evil.Tokenizer", None], "evil.Tokenizer", 5]
    models = []
    for number, odd in enumerate(odd_forms):
        models.append(copy_model(tmp_path / f"model{number}"))
        own = {"AutoConfig": "evil.Config"}
        change_json(models[-1] / "config.json", model_type="evil", auto_map=own)
        change_json(models[-1] / "tokenizer_config.json", auto_map=odd)
        evil.give_code(models[-1])
    load = "transformers.AutoConfig.from_pretrained(arguments[0])"
    attacks = [(load, [str(model)]) for model in models]
    for odd, done in zip(odd_forms, run_children(evil, LIBRARIES, attacks), strict=True):
        last = done.stderr.strip().splitlines()[-1]
        attack(given=f"auto_map: {odd} of a tokenizer", tried="to load the config", happened=last)
        assert "wants to run code of its own: evil.Config (named in config.json)" in done.stderr
    assert evil.ran == ""


LOADS = {
    "tokenizer, config and model": "[getattr(transformers, name).from_pretrained(arguments[0], "
    "trust_remote_code=True) for name in ('AutoTokenizer', 'AutoConfig', 'AutoModelForCausalLM')]",
    "dynamic class": "__import__('transformers.dynamic_module_utils', fromlist=['x'])"
    ".get_class_from_dynamic_module('evil/code--evil.Model', arguments[0])",
    "processor": "transformers.AutoProcessor.from_pretrained(arguments[0], trust_remote_code=True)",
    "cached module": "__import__('transformers.dynamic_module_utils', fromlist=['x'])"
    ".get_class_in_module('Config', 'transformers_modules/evil/code/" + COMMIT + "/evil.py')",
    "module of the hub's cache": "sys.path.insert(0, arguments[1]) or __import__('evil')",
    "generate": "transformers.AutoModelForCausalLM.from_pretrained(arguments[0])"
    ".generate(custom_generate='evil/code', trust_remote_code=True)",
}


def test_no_library_in_our_programs_runs_code_of_a_model(
    evil: Evil, tmp_path: Path, attack: Callable[..., None]
) -> None:
    model = poison(copy_model(tmp_path / "model"))
    cached = evil.home / "hub" / "models--evil--code" / "snapshots" / COMMIT
    (cached / "custom_generate").mkdir()
    shutil.copyfile(cached / "evil.py", cached / "custom_generate" / "generate.py")
    attacks = [(load, [str(model), str(cached)]) for load in LOADS.values()]
    for load, done in zip(LOADS, run_children(evil, LIBRARIES, attacks), strict=True):
        last = (done.stderr.strip().splitlines() or ["it went on without it"])[-1]
        attack(
            given="a model whose auto_map names code, with that code in every cache",
            tried=f"to run it through: {load}, with trust_remote_code=True",
            happened=evil.ran or last,
        )
        # A kind that Transformers has itself goes on with its own class.
        if load.startswith("tokenizer"):
            assert done.code == 0, done.stderr
        elif load != "processor":
            assert "ForeignCodeRefused" in done.stderr, (load, done.stderr)
    assert evil.ran == ""


def test_a_program_refuses_pickles_in_place_of_weights_and_kernels_of_the_hub(
    evil: Evil, tmp_path: Path, attack: Callable[..., None]
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, (f"open({str(evil.canary)!r}, 'w').write('pickle ran')",))

    # A stand-in for the package that downloads kernels, which an adopted environment may have.
    package = tmp_path / "child" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"def get_kernel(*args, **more):\n    open({str(evil.canary)!r}, 'w').write('kernel ran')\n"
    )
    attacks = [("import kernels; kernels.get_kernel('evil/kernel')", [""])]
    model = copy_model(tmp_path / "model")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (model / name).write_bytes(pickle.dumps(Bomb()))
        load = "torch.load(arguments[0], weights_only=False)"
        attacks.append((load, [str(model / name)]))
    arrays = tmp_path / "array.npy"
    arrays.write_bytes(pickle.dumps(Bomb()))
    attacks.append(("numpy.load(arguments[0], allow_pickle=True)", [str(arrays)]))
    kernel, *pickles = run_children(evil, "import numpy, torch", attacks)
    attack(
        given="a config that names evil/kernel as its attention",
        tried="to download and run it",
        happened=evil.ran or kernel.stderr.strip().splitlines()[-1],
    )
    attack(
        given="pickles that run code, named like weights, arrays and states of training",
        tried="to load them with weights_only=False and allow_pickle=True",
        happened=evil.ran or pickles[0].stderr.strip().splitlines()[-1],
    )
    assert evil.ran == ""
    assert "evil/kernel" in kernel.stderr
    assert all(done.code == 1 for done in pickles)


LATE = """
import sys
from transformers.models.auto import auto_factory
from agents import foreign_code
foreign_code.install()
auto_factory.resolve_trust_remote_code(True, sys.argv[1], False, True)
"""


def test_libraries_that_were_imported_before_the_guard_are_bound_by_it(
    evil: Evil, tmp_path: Path
) -> None:
    """A module has taken the function by then: it is changed there, too."""
    model = poison(copy_model(tmp_path / "model"))
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(model)],
        env=evil.environ(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert evil.ran == ""
    assert "ForeignCodeRefused" in done.stderr, done.stderr


@pytest.mark.slow
def test_plan_preview_run_and_export_go_on_with_the_models_own_class(
    evil: Evil, tmp_path: Path, attack: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master sends the model, a node trains on it, merges it and quantizes it."""
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "agent"))
    run_file = write_run_file(tmp_path / "run")
    model = run_file.parent / "model"
    poison(model, OWN_MAP)
    evil.give_code(model)
    plant(model, evil.canary)

    async def train_and_export() -> Path:
        async with Core.open(tmp_path / "master") as core:
            await core.do(AddNode(name="here", address=LocalAddress()))
            await core.do(ConnectNodes())
            await core.do(SetUpNode(name="here", python=sys.executable))
            spec = await core.do(ReadRunFile(path=run_file))
            assert (await core.do(PlanRun(spec=spec))).chosen is not None
            assert (await core.do(PreviewData(spec=spec, whole=False))).num_rows == 40
            run = await core.do(StartRun(spec=spec))
            async with asyncio.timeout(100):
                run = await core.do(WatchRun(run_id=run.run_id))
            assert run.state == "done", (run.message, run.hint)
            made = await core.do(
                ExportModel(
                    request=ExportRequest(run_id=run.run_id, to="gguf", types=("Q8_0",)),
                    out=tmp_path / "gguf",
                )
            )
            return made.path

    made = asyncio.run(train_and_export())
    attack(
        given="a Llama whose files name code of its own, which lies beside them",
        tried="to run it in plan, preview, training, merge, conversion and proof",
        happened=evil.ran or "all of them took Transformers' own class",
    )
    assert evil.ran == ""
    assert any(path.suffix == ".gguf" for path in made.iterdir())
    files = [path for path in (tmp_path / "agent").rglob("*") if path.is_file()]
    assert [path for path in files if path.name == "config.json" and "merged" in str(path)]
    assert not [path for path in files if path.suffix == ".py"], "code was sent or exported"
    named = [path for path in files if path.suffix == ".json" and '"auto_map"' in path.read_text()]
    assert not named, "what was sent or exported still names code"
