"""Libraries that change what a node's programs are told: clock, kernel, and an NVIDIA driver.

Namespaces share the clock and the kernel of this PC, and it may have no GPU. So a node's sshd hands
LD_PRELOAD and LD_LIBRARY_PATH to its sessions, with the values in the environment.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <time.h>

static long shift(void) {
    const char *text = getenv("SHIM_CLOCK_S");
    return text ? atol(text) : 0;
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
    state->status = atoi(text) ? STA_PLL : STA_UNSYNC;
    return atoi(text) ? TIME_OK : TIME_ERROR;
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

int nvmlInitWithFlags(unsigned flags) { return 0; }
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


def build_shim(folder: Path) -> Path:
    """Compile the library for clock and kernel, and return its path.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    return _compile(SOURCE, folder / "shim.so")


def build_driver(folder: Path) -> Path:
    """Compile a driver's library with one card, and return the folder that it is in.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    place = folder / "driver"
    place.mkdir(exist_ok=True)
    _compile(DRIVER_SOURCE, place / "libnvidia-ml.so.1")
    return place


def _compile(text: str, library: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler: apt-get install build-essential")
    source = library.with_suffix(".c")
    source.write_text(text)
    argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{library.name} could not be compiled: {done.stderr[-400:]}")
    return library
