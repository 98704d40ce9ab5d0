"""Print the test files near what changed: `python near_tests.py [BASE]`, one path a line.

Changed is what differs from BASE (default: where this branch left main), committed or not. A test
is near a module when it mirrors its path (`tests/app/runs/test_launch.py` for
`app/runs/launch.py`), or when it imports it. The tests of layers and documents are always near:
they read every file.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = ("tests/test_layers.py", "tests/test_docs.py")
MAX_IMPORTING = 6
"""Maximum number of test files that are taken for an import alone."""


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none where it fails, as outside of a repository."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files(base: str | None) -> list[Path]:
    """Return the Python files that differ from `base`, new ones included."""
    start = [base] if base else git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    names = git("diff", "--name-only", start[0]) + git("ls-files", "--others", "--exclude-standard")
    files = [Path(name) for name in dict.fromkeys(names) if name.endswith(".py")]
    return [file for file in files if (ROOT / file).is_file()]


def module_name(file: Path) -> str:
    """Return the dotted name under which a file is imported.

    >>> module_name(Path("app/runs/__init__.py"))
    'app.runs'
    """
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(test: Path) -> set[str]:
    """Return the modules that a test file imports, those inside functions included."""
    tree = ast.parse((ROOT / test).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {str(node.module) for node in found}
    return names | {f"{node.module}.{alias.name}" for node in found for alias in node.names}


def near_tests(changed: list[Path]) -> list[str]:
    """Return tests that changed, tests that mirror what changed, then a few importers."""
    tests = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    mirrors = {Path("tests") / file.parent / f"test_{file.name}" for file in changed}
    near = [test for test in tests if test in changed or test in mirrors]
    modules = {module_name(file) for file in changed if file.parts[0] != "tests"}
    importing = [t for t in tests if t not in near and imported_modules(t) & modules]
    chosen = [str(test) for test in [*near, *importing[:MAX_IMPORTING]]]
    return [*chosen, *(test for test in ALWAYS if test not in chosen)]


if __name__ == "__main__":
    print("\n".join(near_tests(changed_files(sys.argv[1] if len(sys.argv) > 1 else None))))
