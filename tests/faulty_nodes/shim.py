"""A library that changes what a node's programs are told: clock, its state, and the kernel's name.

Namespaces share the clock and the kernel of this PC. So a node's sshd hands LD_PRELOAD to its
sessions, with the values in the environment.
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


def build_shim(folder: Path) -> Path:
    """Compile the library and return its path.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler: apt-get install build-essential")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SOURCE)
    argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the shim could not be compiled: {done.stderr[-400:]}")
    return library
