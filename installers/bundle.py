"""Build the desktop bundle: one folder with everything that the window needs, and on Linux a .deb.

    python installers/bundle.py [--out FOLDER] [--no-deb] [--keep-env]

It makes an environment in build/bundle-env from app.lock and bundle.lock, builds the folder with
PyInstaller (installers/bundle/rackless.spec), and tries it: `rackless --self-test`. Run it on the
oldest system that the bundle is for: a bundle works with the glibc that it was built on and with
newer ones. On Windows the same command builds the same folder; nothing is made of it there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "installers" / "bundle"
LOCKS = tuple(ROOT / "installers" / name for name in ("app.lock", "bundle.lock"))
MAINTAINER = "Rackless contributors <contributors@rackless.invalid>"
DEPENDS = (
    *("libc6 (>= 2.36)", "libstdc++6", "libglib2.0-0 | libglib2.0-0t64", "libdbus-1-3"),
    *("libfontconfig1", "libfreetype6", "libbrotli1", "libgssapi-krb5-2", "libgl1", "libegl1"),
    *(
        "libx11-6",
        "libx11-xcb1",
        "libxkbcommon0",
        "libxkbcommon-x11-0",
        "libxcb1",
        "libxcb-cursor0",
    ),
    *("libxcb-glx0", "libxcb-icccm4", "libxcb-image0", "libxcb-keysyms1", "libxcb-randr0"),
    *("libxcb-render0", "libxcb-render-util0", "libxcb-shape0", "libxcb-shm0", "libxcb-sync1"),
    *("libxcb-util1", "libxcb-xfixes0", "libxcb-xkb1"),
    *("libwayland-client0", "libwayland-cursor0", "libwayland-egl1"),
)
"""Packages of Debian and Ubuntu with the libraries that the bundle takes from the system."""
SIZES_PX = (16, 24, 32, 48, 64, 128, 256)


def main() -> int:
    """Read the command line, build, and print what was made."""
    parser = argparse.ArgumentParser(description="Build the desktop bundle.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--no-deb", action="store_true", help="the folder alone")
    parser.add_argument("--keep-env", action="store_true", help="use build/bundle-env as it is")
    options = parser.parse_args()
    out = options.out.absolute()
    python = make_environment(ROOT / "build" / "bundle-env", keep=options.keep_env)
    folder = build_folder(python, out)
    print(f"{folder}: {size_of(folder) / 1e6:.0f} MB")
    program = folder / ("rackless.exe" if sys.platform == "win32" else "rackless")
    run([str(program), "--self-test"], environ={"QT_QPA_PLATFORM": "offscreen"})
    if sys.platform.startswith("linux") and not options.no_deb:
        package = build_deb(folder, out)
        print(f"{package}: {package.stat().st_size / 1e6:.0f} MB")
    return 0


def version() -> str:
    """Return the version that pyproject.toml states."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(pyproject["project"]["version"])


def make_environment(folder: Path, *, keep: bool) -> Path:
    """Return the interpreter of an environment with the locked packages and Rackless.

    Args:
        folder: of the environment.
        keep: whether the packages that are there are used; Rackless itself is installed anew.
    """
    venv.create(folder, with_pip=True, clear=not keep)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [str(python), "-I", "-m", "pip", "install", "--quiet", "--no-deps"]
    for lock in () if keep else LOCKS:
        run([*pip, "--require-hashes", "--only-binary", ":all:", "-r", str(lock)])
    # From a copy: setuptools leaves its work in the source folder.
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    names = ("app", "agents", "resources", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        copy_source(ROOT / name, source / name)
    run([*pip, "--no-build-isolation", "--no-index", "--force-reinstall", str(source)])
    return python


def copy_source(path: Path, to: Path) -> None:
    """Copy a file or a folder without what Python compiled there."""
    if path.is_dir():
        shutil.copytree(path, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)


def build_folder(python: Path, out: Path) -> Path:
    """Build the bundle's folder below `out` and return it."""
    work = out.parent / "build"
    work.mkdir(parents=True, exist_ok=True)
    draw_icons(python, work)
    spec = HERE / "rackless.spec"
    places = ["--distpath", str(out), "--workpath", str(work / "bundle")]
    run(
        [
            str(python),
            "-I",
            "-m",
            "PyInstaller",
            "--noconfirm",
            "--log-level",
            "WARN",
            *places,
            str(spec),
        ]
    )
    return out / "rackless"


def draw_icons(python: Path, folder: Path) -> None:
    """Write rackless.ico and rackless-SIZE.png from the drawing among the resources."""
    code = (
        "import sys; from PySide6.QtGui import QGuiApplication, QIcon\n"
        "app = QGuiApplication([]); icon = QIcon(sys.argv[1])\n"
        "for size in map(int, sys.argv[3:]):\n"
        "    assert icon.pixmap(size, size).save(f'{sys.argv[2]}/rackless-{size}.png')\n"
        "assert icon.pixmap(256, 256).save(f'{sys.argv[2]}/rackless.ico', 'ICO')\n"
    )
    drawing = ROOT / "resources" / "icons" / "rackless.svg"
    sizes = map(str, SIZES_PX)
    environ = {"QT_QPA_PLATFORM": "offscreen"}
    run([str(python), "-I", "-c", code, str(drawing), str(folder), *sizes], environ=environ)


# ---------------------------------------------------------------- .deb


def build_deb(folder: Path, out: Path) -> Path:
    """Pack the bundle as a package of Debian and Ubuntu, and return it."""
    root = out / "deb"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(folder, root / "opt" / "rackless", symlinks=True)
    lay_out(root, folder.parent.parent / "build")
    control = root / "DEBIAN" / "control"
    control.parent.mkdir()
    control.write_text(control_text(size_of(root)), encoding="utf-8")
    package = out / f"rackless_{version()}_{architecture()}.deb"
    os.chmod(root, 0o755)
    for path in root.rglob("*"):
        if not path.is_symlink():
            is_program = path.is_dir() or os.access(path, os.X_OK)
            path.chmod(0o755 if is_program else 0o644)
    run(["dpkg-deb", "--root-owner-group", "--build", "-Zxz", str(root), str(package)])
    shutil.rmtree(root)
    return package


def lay_out(root: Path, icons: Path) -> None:
    """Add the command, the desktop entry, the icons and the licence."""
    command = root / "usr" / "bin" / "rackless"
    command.parent.mkdir(parents=True)
    command.symlink_to("/opt/rackless/rackless")
    share = root / "usr" / "share"
    copy_source(HERE / "rackless.desktop", share / "applications" / "rackless.desktop")
    scalable = share / "icons" / "hicolor" / "scalable" / "apps" / "rackless.svg"
    copy_source(ROOT / "resources" / "icons" / "rackless.svg", scalable)
    for size in SIZES_PX:
        place = share / "icons" / "hicolor" / f"{size}x{size}" / "apps" / "rackless.png"
        copy_source(icons / f"rackless-{size}.png", place)
    copy_source(ROOT / "LICENSE", share / "doc" / "rackless" / "copyright")


def control_text(num_bytes: int) -> str:
    """Return the description of the package."""
    fields = {
        "Package": "rackless",
        "Version": version(),
        "Architecture": architecture(),
        "Maintainer": MAINTAINER,
        "Installed-Size": str(num_bytes // 1024),
        "Depends": ", ".join(DEPENDS),
        "Recommends": "openssh-client, python3 (>= 3.10)",
        "Section": "science",
        "Priority": "optional",
        "Description": "control centre for the GPU cluster you already own\n"
        " A desktop app that talks over SSH to the other PCs of your network, shows\n"
        " their GPUs, and fine-tunes language models across all of them.",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def architecture() -> str:
    """Return the name that Debian has for this processor."""
    done = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, check=True)
    return done.stdout.decode().strip()


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def run(command: Sequence[str], environ: dict[str, str] | None = None) -> None:
    """Run a command in the project's folder; a failure ends the build with its output shown."""
    subprocess.run(command, cwd=ROOT, env={**os.environ, **(environ or {})}, check=True)


if __name__ == "__main__":
    sys.exit(main())
