"""Libraries that change what a node's programs are told: clock, kernel, and an NVIDIA driver.

Namespaces share the clock and the kernel of this PC, and it may have no GPU. So a node's sshd hands
LD_PRELOAD and LD_LIBRARY_PATH to its sessions, with the values in the environment. A program that
becomes root stands behind the played sudo.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_SHARED = ("-shared", "-fPIC", "-O1")
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

// Whether the time service is on: the file is written by the played timedatectl.
static int is_kept(void) {
    const char *path = getenv("SHIM_NTP");
    char first = 'n';
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, &first, 1) < 1) first = 'n';
    close(file);
    return first == 'y';
}

static long shift(void) {
    const char *text = getenv("SHIM_CLOCK_S");
    return text && !is_kept() ? atol(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (result == 0 && id == CLOCK_REALTIME) now->tv_sec += shift();
    return result;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

int adjtimex(struct timex *state) {
    const char *text = getenv("SHIM_SYNCHRONISED");
    int (*real)(struct timex *) = dlsym(RTLD_NEXT, "adjtimex");
    int result = real(state);
    if (!text) return result;
    int kept = atoi(text) || is_kept();
    state->status = kept ? STA_PLL : STA_UNSYNC;
    return kept ? TIME_OK : TIME_ERROR;
}

int uname(struct utsname *names) {
    int (*real)(struct utsname *) = dlsym(RTLD_NEXT, "uname");
    int result = real(names);
    const char *text = getenv("SHIM_RELEASE");
    if (result == 0 && text) strncpy(names->release, text, sizeof names->release - 1);
    return result;
}
"""


DRIVER_SOURCE = r"""
#include <stdlib.h>
#include <string.h>

static void answer(char *place, unsigned size, const char *name) {
    const char *text = getenv(name);
    strncpy(place, text ? text : "", size);
}

int nvmlInitWithFlags(unsigned flags) {
    const char *text = getenv("SHIM_INIT");
    return text ? atoi(text) : 0;
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = (void *)1; return 0; }
int nvmlSystemGetDriverVersion(char *place, unsigned size) {
    answer(place, size, "SHIM_DRIVER");
    return 0;
}
int nvmlDeviceGetUUID(void *card, char *place, unsigned size) {
    strncpy(place, "GPU-00000000-0000-0000-0000-000000000001", size);
    return 0;
}
int nvmlDeviceGetName(void *card, char *place, unsigned size) {
    strncpy(place, "NVIDIA GeForce Test", size);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *card, int *major, int *minor) {
    const char *text = getenv("SHIM_CAPABILITY");
    *major = atoi(text);
    *minor = atoi(strchr(text, '.') + 1);
    return 0;
}
"""


BECOME_SOURCE = r"""
#define _GNU_SOURCE
#include <grp.h>
#include <unistd.h>

int main(int count, char **words) {
    if (count < 2 || setgroups(0, 0) || setgid(0) || setuid(0)) return 126;
    execvp(words[1], words + 1);
    return 127;
}
"""


def build_become(folder: Path, group_id: int) -> Path:
    """Compile the program that runs its arguments as root, for members of one group alone.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    program = _compile(BECOME_SOURCE, folder / "become", "-O1")
    os.chown(program, 0, group_id)
    program.chmod(0o4750)
    return program


def build_shim(folder: Path) -> Path:
    """Compile the library for clock and kernel, and return its path.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    return _compile(SOURCE, folder / "shim.so", *_SHARED)


def build_driver(folder: Path) -> Path:
    """Compile a driver's library with one card, and return the folder that it is in.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    place = folder / "driver"
    place.mkdir(exist_ok=True)
    _compile(DRIVER_SOURCE, place / "libnvidia-ml.so.1", *_SHARED)
    return place


def _compile(text: str, target: Path, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler: apt-get install build-essential")
    source = target.with_suffix(".c")
    source.write_text(text)
    argv = [compiler, *options, "-o", str(target), str(source), "-ldl"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{target.name} could not be compiled: {done.stderr[-400:]}")
    return target
