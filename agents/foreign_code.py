"""Prevent Python code that comes with a model or with data from running, in any library.

Several libraries run such code if a model asks for it: Transformers for an `auto_map`, the
converter of llama.cpp with `trust_remote_code=True`, `kernels` for an attention named `org/kernel`,
torch for a pickle. A program that opens untrusted files calls `install` before it imports any of
these libraries. Then:

- No module can be imported from a folder of models, data or downloads (`forbid` adds one), or from
  a library's cache of such code. Python's file loaders refuse it, so the rule also covers libraries
  that are not named here.
- Transformers' functions for such code raise an error that names the code. If Transformers has its
  own class for the model, it uses that, because many models still have an old `auto_map`.
- `torch.load` reads tensors and plain values only, and no files from such a folder.

Modules are patched right after Python has executed them, before others can import their names.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import sys
import zipimport
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from agents.errors import ExpectedError
from agents.shared.files.bounded_work import bound_operators

_HINT = (
    "Use a model whose kind Transformers knows by itself (its config.json needs no auto_map), such "
    "as the version of it that ends in -hf"
)
_VARIABLES = {"HF_DATASETS_TRUST_REMOTE_CODE": "0", "USE_HUB_KERNELS": "0"}
_CONFIGS = (
    *("config.json", "tokenizer_config.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "adapter_config.json"),
)
_MOST_NAMED = 4
# Larger files are not searched for a name that only improves a message.
_MOST_BYTES = 4 << 20
_CACHES = (
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE", "HF_DATASETS_CACHE"),
    "KERNELS_CACHE",
)
_PARTS = ("models", "data", "artifacts", "runs")
_forbidden: set[str] = set()
_is_installed = False


class ForeignCodeRefused(ExpectedError, ValueError):
    """Raised when a model or data set asks to run its own code, which was refused.

    It is a ValueError, too, because callers of Transformers may catch that to fall back.
    """


def install() -> None:
    """Refuse code of models and data in this process from now on."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    # For libraries that read them on import, and for child processes.
    os.environ.update(_VARIABLES)
    for folder in _known_folders(os.environ):
        forbid(folder)
    _guard_loaders()
    for name in _PATCHES:
        if name in sys.modules:
            _patch_loaded(sys.modules[name])


def forbid(folder: str | Path) -> None:
    """Forbid the import of modules from this folder and from the target of its links."""
    # Both spellings, because a module's path may contain links or not.
    for path in (os.path.abspath(folder), os.path.realpath(folder)):
        # A folder that contains Python itself, such as `/`, cannot be forbidden.
        if not _holds_python(path):
            _forbidden.add(os.path.join(path, ""))


def _known_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders of downloads and of files from a master on this PC."""
    home = os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    hub = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    yield hub
    for name in _CACHES:
        if environ.get(name):
            yield environ[name]
    if agent := environ.get("RACKLESS_AGENT_HOME"):
        yield from (os.path.join(agent, part) for part in _PARTS)


def _holds_python(folder: str) -> bool:
    """Return whether Python or a folder of its initial search path is inside `folder`."""
    needed = (sys.prefix, sys.base_prefix, *sys.path, os.path.dirname(os.path.dirname(__file__)))
    inside = os.path.join(folder, "")
    return any(os.path.join(os.path.realpath(p), "").startswith(inside) for p in needed if p)


def _is_forbidden(path: str) -> bool:
    candidates = {os.path.abspath(path), os.path.realpath(path)}
    if any(name.startswith(own) for name in candidates for own in _own_folders(os.environ)):
        return False
    return any(name.startswith(folder) for name in candidates for folder in _forbidden)


def _own_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the caches of torch and Triton for compiled code, also within a forbidden folder."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if environ.get(name):
            yield os.path.join(os.path.abspath(environ[name]), "")


def refuse(what: str, where: object, reason: str = "") -> NoReturn:
    """Raise the error about refused code.

    Raises:
        ForeignCodeRefused: always.
    """
    more = f" ({reason})" if reason else ""
    raise ForeignCodeRefused(
        f"The model in {where} wants to run code of its own: {what}{more}. Rackless never runs "
        "code that comes with a model.",
        _HINT,
    )


# ---------------------------------------------------------------- Python's file loaders


def _guard_loaders() -> None:
    """Check each file before Python executes it as a module, and patch modules in `_PATCHES`."""
    source: Any = importlib.machinery.SourceFileLoader
    bytecode: Any = importlib.machinery.SourcelessFileLoader
    extension: Any = importlib.machinery.ExtensionFileLoader
    archive: Any = zipimport.zipimporter
    for loader, name in (
        (source, "exec_module"),
        (bytecode, "exec_module"),
        (extension, "create_module"),
        (archive, "exec_module"),
        (archive, "load_module"),
    ):
        setattr(loader, name, _guarded(getattr(loader, name)))


def _guarded(load: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, module: Any) -> Any:
        """Load a module unless its file is in a forbidden folder."""
        # A loader of a zip archive has no path of its own.
        path = str(getattr(self, "path", None) or getattr(self, "archive", ""))
        if path and _is_forbidden(path):
            refuse(os.path.basename(path), os.path.dirname(path))
        made = load(self, module)
        # exec_module returns None, create_module the module.
        patch = _PATCHES.get(getattr(module, "__name__", ""))
        if patch is not None:
            patch(module)
        return made

    return guarded


def _patch_loaded(module: Any) -> None:
    """Patch a module that is already imported, and its names in other modules of the package."""
    # Modules of the package may have imported the old functions by name.
    before = dict(vars(module))
    _PATCHES[module.__name__](module)
    changed = {id(old): name for name, old in before.items() if vars(module)[name] is not old}
    package = module.__name__.partition(".")[0]
    for other in [*sys.modules.values()]:
        if getattr(other, "__name__", "").partition(".")[0] == package:
            for name, value in [*vars(other).items()]:
                if id(value) in changed:
                    setattr(other, name, getattr(module, changed[id(value)]))


# ---------------------------------------------------------------- libraries


def _patch_dynamic_modules(module: Any) -> None:
    """Make Transformers refuse a model's code, and use its own class if it has one."""

    def resolve_trust_remote_code(
        trust_remote_code: object = None,
        model_name: object = "",
        has_local_code: bool = False,
        has_remote_code: bool = False,
        error_message: str | None = None,
        upstream_repo: str | None = None,
    ) -> bool:
        # Even if a caller passes True, as the converter of llama.cpp does.
        del trust_remote_code, error_message
        if has_remote_code and not has_local_code:
            refuse(_name_code(model_name, upstream_repo), model_name)
        return False

    def get_class_from_dynamic_module(class_reference: object, model: object, **more: Any) -> Any:
        del more
        refuse(str(class_reference), model)

    def get_cached_module_file(model: object, module_file: object, *rest: Any, **more: Any) -> Any:
        del rest, more
        refuse(str(module_file), model)

    def get_class_in_module(class_name: object, module_path: object, **more: Any) -> Any:
        del more
        refuse(str(class_name), module_path)

    for replacement in (
        resolve_trust_remote_code,
        get_class_from_dynamic_module,
        get_cached_module_file,
        get_class_in_module,
    ):
        setattr(module, replacement.__name__, replacement)


def _name_code(model: object, upstream: str | None) -> str:
    """Return the names of code in a model's files, for the message."""
    named: dict[str, str] = {}
    for file, reference in _read_references(Path(str(model))):
        if upstream is None or reference.startswith(f"{upstream}--"):
            named.setdefault(reference, file)
    shown = [f"{reference} (named in {file})" for reference, file in named.items()]
    more = len(shown) - _MOST_NAMED
    several = f" and {more} more" if more > 0 else ""
    return ", ".join(shown[:_MOST_NAMED]) + several or (
        f"code of {upstream}" if upstream else "code"
    )


def _read_references(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, reference) for each custom class that a model's files name."""
    for name in _CONFIGS:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            path = folder / name
            if path.stat().st_size <= _MOST_BYTES:
                found = json.loads(path.read_bytes())
                named = found.get("auto_map") if isinstance(found, dict) else None
                for value in named.values() if isinstance(named, dict) else [named]:
                    for reference in value if isinstance(value, list) else [value]:
                        if isinstance(reference, str):
                            yield name, reference


def _patch_hub_kernels(module: Any) -> None:
    """Make Transformers refuse kernels from the hub, which are code."""

    def get_kernel(kernel_name: object = "", *rest: Any, **more: Any) -> Any:
        del rest, more
        refuse(str(kernel_name), "the hub", "a kernel, named by its config.json")

    def load_and_register_attn_kernel(
        attn_implementation: str = "", *rest: Any, **more: Any
    ) -> Any:
        del rest, more
        if module.is_kernel(str(attn_implementation).rpartition("|")[2]):
            get_kernel(attn_implementation)

    for replacement in (get_kernel, load_and_register_attn_kernel):
        if hasattr(module, replacement.__name__):
            setattr(module, replacement.__name__, replacement)


def _patch_kernels(module: Any) -> None:
    """Make the package `kernels` refuse all loading."""

    def load(name: object = "", *rest: Any, **more: Any) -> Any:
        del rest, more
        refuse(str(name), "the hub", "a kernel")

    for name in ("get_kernel", "get_local_kernel", "get_locked_kernel", "load_kernel"):
        if hasattr(module, name):
            setattr(module, name, load)


def _patch_torch_load(module: Any) -> None:
    """Make `torch.load` refuse pickles that could run code."""
    load = module.load

    def load_values(file: Any, *rest: Any, **more: Any) -> Any:
        """Load tensors and plain values; torch itself refuses other objects in a pickle."""
        if isinstance(file, (str, os.PathLike)) and _is_forbidden(os.fspath(file)):
            raise ForeignCodeRefused(
                f"{file} is a pickle, which can run code, and is never loaded.",
                "Save it again with model.save_pretrained(folder), which writes safetensors",
            )
        # Overrides the caller's argument.
        more["weights_only"] = True
        more.pop("pickle_module", None)
        return load(file, *rest[:1], **more)  # the first of `rest` is map_location

    module.load = load_values


def _patch_numpy(module: Any) -> None:
    """Make `numpy.load` refuse pickles."""
    load = module.load

    def load_arrays(file: Any, *rest: Any, **more: Any) -> Any:
        more["allow_pickle"] = False
        return load(file, *rest[:1], **more)  # the first of `rest` is mmap_mode

    module.load = load_arrays


def _patch_jinja(module: Any) -> None:
    """Limit the work of a single operation in a template."""
    bound_operators(module.SandboxedEnvironment)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "transformers.dynamic_module_utils": _patch_dynamic_modules,
    "transformers.integrations.hub_kernels": _patch_hub_kernels,
    "kernels": _patch_kernels,
    "kernels.utils": _patch_kernels,
    "torch.serialization": _patch_torch_load,
    "jinja2.sandbox": _patch_jinja,
    "numpy.lib._npyio_impl": _patch_numpy,
}
"""Function that patches a module, by the module's name."""
