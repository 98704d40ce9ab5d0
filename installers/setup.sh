#!/bin/sh
# Set Rackless up on this PC, then run its demo, its tests, or a quick check of a change.
#
#   sh installers/setup.sh demo [arguments of `rackless demo`]
#   sh installers/setup.sh test [arguments of pytest]
#   sh installers/setup.sh check [commit to compare with]
#
# Wants Debian or Ubuntu (WSL too) with python3 3.11 or newer. What it needs of the system comes from
# apt-get (as root, or through `sudo -n`, which never asks for a password), the rest from pip into one
# virtual environment: .venv in the project, or $RACKLESS_VENV. Every package is one that a lock names
# with its hash (*.lock here and in resources/environments; CONTRIBUTING.md says how they are made):
# pip refuses any other file, and builds nothing but the project itself.
#
# PyTorch comes with CUDA where this PC has an NVIDIA GPU, else without; RACKLESS_TORCH=cpu or cu130
# decides otherwise.
#
# A stamp file in the environment, written last, says what it was set up from; as long as that is
# true the set-up is skipped. An environment whose set-up broke off is built anew.
set -eu

project=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
locks="$project/resources/environments"
venv=${RACKLESS_VENV:-$project/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
python="$venv/bin/python"
log="$venv/setup.log"
unfinished="$venv/setup-unfinished"
# sshd, ip and ldconfig are not on the PATH of ordinary users on Debian.
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
export PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

# Python, from a folder of the system and without the caller's variables: `-m venv` would else run a
# venv.py that stands where the caller does, and a build would run what PYTHONPATH names.
isolated() ( # $1: the interpreter; the rest: its arguments
    program=$1
    shift
    unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONINSPECT PYTHONBREAKPOINT
    cd /
    exec "$program" -I "$@"
)

say() { printf '%s\n' "$*" >&2; }

fail() { # what and where, then what to do next
    say ""
    say "Set-up stopped: $1"
    shift
    for line in "$@"; do say "  $line"; done
    exit 1
}

usage() {
    say "usage: sh installers/setup.sh demo [arguments of rackless demo]"
    say "       sh installers/setup.sh test [arguments of pytest]"
    say "       sh installers/setup.sh check [commit to compare with]"
    exit 2
}

# ------------------------------------------------------------------ the system's own packages

# Lines of `package what`: a library's soname, or a command.
WINDOW_PACKAGES='libgl1 libGL.so.1
libegl1 libEGL.so.1
libxkbcommon0 libxkbcommon.so.0
libdbus-1-3 libdbus-1.so.3
libfontconfig1 libfontconfig.so.1
libglib2.0-0 libglib-2.0.so.0
libxcb-cursor0 libxcb-cursor.so.0
libxcb-icccm4 libxcb-icccm.so.4
libxcb-keysyms1 libxcb-keysyms.so.1
libxkbcommon-x11-0 libxkbcommon-x11.so.0
libxcb-shape0 libxcb-shape.so.0'
TEST_PACKAGES='openssh-server sshd
openssh-client ssh-keygen
iproute2 tc
xvfb Xvfb
xauth xauth'

missing_packages() { # of the list in $1
    libraries=$(ldconfig -p 2>/dev/null || true)
    printf '%s\n' "$1" | while read -r package what; do
        case $what in
            *.so.*) case $libraries in *"$what "*) continue ;; esac ;;
            *) command -v "$what" >/dev/null 2>&1 && continue ;;
        esac
        printf '%s ' "$package"
    done | sed 's/ $//'
}

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi; }

may_install() {
    command -v apt-get >/dev/null 2>&1 || return 1
    [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null
}

install_command() { printf 'sudo apt-get update && sudo apt-get install -y --no-install-recommends %s' "$*"; }

apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=120 "$@"
}

apt_install() {
    set -- install --no-install-recommends "$@"
    if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1 && apt_get "$@"; then return 0; fi
    apt_get update && apt_get "$@"  # no lists yet, or lists so old that they name files long gone
}

# The tests start their own sshd; a service that listens on this PC must not come along with it.
forbid_services() { # remembers in $own_policy what has to go again
    policy=/usr/sbin/policy-rc.d
    own_policy=
    [ ! -e "$policy" ] || return 0
    own_policy=$policy
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
}

leave_sshd_off() {
    [ -z "$own_policy" ] || as_root rm -f "$own_policy"
    if command -v systemctl >/dev/null 2>&1; then
        as_root systemctl disable ssh.service ssh.socket || true # releases have one or both
    fi
}

install_packages() ( # a subshell: its trap tidies up, whatever happens
    case " $* " in
        *" openssh-server "*)
            forbid_services
            trap leave_sshd_off EXIT
            trap 'exit 130' INT TERM HUP
            ;;
    esac
    apt_install "$@"
)

# Install what is missing of the list in $1; leaves the names of what stayed missing in $lacking.
provide_packages() {
    lacking=$(missing_packages "$1")
    [ -n "$lacking" ] || return 0
    may_install || return 0
    say "  system packages: $lacking"
    apt_log=$(mktemp)
    # shellcheck disable=SC2086  # a list of names
    if install_packages $lacking >"$apt_log" 2>&1; then
        case " $lacking " in
            *" openssh-server "*) say "  (its ssh service stays off: sudo systemctl enable --now ssh)" ;;
        esac
        lacking=
    else
        tail -n 5 "$apt_log" >&2
    fi
    rm -f "$apt_log"
}

provide_window() {
    provide_packages "$WINDOW_PACKAGES"
    [ -z "$lacking" ] || fail "the window needs system libraries that are not here: $lacking" \
        "Type:  $(install_command "$lacking")" \
        "or run the demo without a window:  sh installers/setup.sh demo --headless"
}

provide_test_tools() {
    provide_packages "$WINDOW_PACKAGES
$TEST_PACKAGES"
    [ -n "$lacking" ] || return 0
    [ "${CI:-}" != true ] || fail "the tests need system packages that are not here: $lacking" \
        "Type:  $(install_command "$lacking")"
    say "  not here, so the tests that need them are skipped: $lacking"
    say "  Type:  $(install_command "$lacking")"
}

wants_window() {
    [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] || return 1
    for argument in "$@"; do [ "$argument" != --headless ] || return 1; done
}

# ------------------------------------------------------------------ the virtual environment

new_enough() { isolated "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

choose_python() { # leaves it in $system_python
    for system_python in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$system_python" >/dev/null 2>&1 && new_enough "$system_python"; then return 0; fi
    done
    found=$(python3 -V 2>/dev/null || echo "no python3")
    fail "Python 3.11 or newer is needed; this PC has $found." \
        "Debian 12, Ubuntu 24.04 and newer bring it:  $(install_command python3 python3-venv)" \
        "On an older release install a newer Python beside it, so that 'python3.12' starts."
}

provide_venv_module() {
    isolated "$system_python" -c 'import ensurepip, venv' 2>/dev/null && return 0
    version=$(isolated "$system_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    package="python$version-venv"
    if may_install; then
        say "  system packages: $package"
        install_packages "$package" >/dev/null 2>&1 || true
    fi
    isolated "$system_python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python $version has no venv module." "Type:  $(install_command "$package")"
}

remove_venv() {
    [ -e "$venv" ] || return 0
    if [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
        fail "$venv is not a virtual environment, so it is not touched." \
            "Move it away, or name another folder:  RACKLESS_VENV=FOLDER sh installers/setup.sh ..."
    fi
    rm -rf "$venv"
}

create_venv() {
    choose_python
    provide_venv_module
    say "  virtual environment: $venv ($("$system_python" -V 2>&1))"
    remove_venv
    mkdir "$venv"
    : >"$unfinished"
    : >"$venv/setup-by-hash"
    isolated "$system_python" -m venv "$venv" >"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        fail "the virtual environment could not be created in $venv." "The lines above say why."
    }
}

explain_pip_failure() {
    if grep -q 'DO NOT MATCH THE HASHES' "$log"; then explain_wrong_file; fi
    tail -n 8 "$log" | cut -c 1-300 >&2
    if grep -q 'No space left on device' "$log"; then
        fail "the disk is full ($venv)." "Free some gigabytes there, then type the same again."
    fi
    if grep -qE 'NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|ProxyError|Temporary failure|Network is unreachable' "$log"; then
        fail "pip cannot reach the package index: is this PC online?" \
            "Behind a proxy, first type:  export https_proxy=http://HOST:PORT" \
            "Then type the same again."
    fi
    if grep -qE 'ResolutionImpossible|No matching distribution' "$log"; then
        fail "pip finds no ready-built package of the version that is locked for this PC." \
            "Is the package index reachable (pip config list), and is there a build for this PC" \
            "($(uname -m), $("$python" -V))? All that pip said is in $log"
    fi
    fail "pip could not install the packages." "The lines above say why; all of it is in $log"
}

explain_wrong_file() { # pip names the file, then "Expected sha256 ..." and "Got ..."
    package=$(sed -n '/DO NOT MATCH THE HASHES/,$p' "$log" | sed -n 's/^ *\([A-Za-z0-9._-]*==[^ ]*\) from .*/\1/p' | head -n 1)
    got=$(sed -n 's/^ *Got *\([0-9a-f]\{64\}\).*/\1/p' "$log" | head -n 1)
    expected=$(sed -n 's/^ *Expected sha256 \([0-9a-f]\{64\}\).*/\1/p' "$log" | head -n 1)
    from=$(sed -n '/DO NOT MATCH THE HASHES/,$p' "$log" | sed -n 's/^ *[^ ]*==[^ ]* from \([^ #]*\).*/\1/p' | head -n 1)
    fail "${package:-a package} is not the file that is locked, so it was not installed." \
        "It came from ${from:-the package index} with sha256 ${got:-unknown}." \
        "The lock names ${expected:-another hash} (*.lock in installers and resources/environments)." \
        "If the download broke off, type the same again. If it repeats, the package index or a proxy" \
        "serves another file than the one that was checked: see  pip config list  and ask whoever runs" \
        "it. All that pip said is in $log"
}

# Without bytecode: making it takes half of the set-up, and most of the 14,000 modules are never
# imported. Python makes and keeps that of each module when it is first imported.
try_pip() { # arguments of pip
    began_at=$(wc -c <"$log" 2>/dev/null || echo 0)
    isolated "$python" -m pip install --quiet --no-deps --no-compile "$@" >>"$log" 2>&1
}

pip_install() { # $1: what to show; the rest: arguments of pip
    say "  packages: $1"
    shift
    try_pip "$@" || explain_pip_failure
}

install_lock() { # $1: what to show; $2: the lock
    pip_install "$1" --require-hashes --only-binary :all: --requirement "$2"
}

# Which build of PyTorch: the one for this PC's GPU, or the one without CUDA.
torch_build() {
    if [ -n "${RACKLESS_TORCH:-}" ]; then
        printf '%s' "$RACKLESS_TORCH"
    elif [ -e /proc/driver/nvidia/version ] || [ -e /usr/lib/wsl/lib/nvidia-smi ] ||
        command -v nvidia-smi >/dev/null 2>&1; then # its module may not be loaded just now
        printf cu130
    else
        printf cpu
    fi
}

# The build without CUDA is not on PyPI: taken from the configured index if it has it, then from
# PyTorch's own. Where neither can be reached, the build on PyPI works without a GPU, too.
install_torch() {
    build=$(torch_build)
    lock="$locks/torch-$build.lock"
    [ -f "$lock" ] || fail "there is no lock for the build of PyTorch '$build' (RACKLESS_TORCH)." \
        "Name one of these:  $(cd "$locks" && ls torch-*.lock | sed 's/^torch-//; s/.lock$//' | xargs)"
    if [ "$build" != cpu ]; then
        # pip takes 2.13.0+cpu for 2.13.0, so the other build has to go first.
        case $(isolated "$python" -m pip show torch 2>/dev/null) in
            *+cpu*) isolated "$python" -m pip uninstall --quiet --yes torch >>"$log" 2>&1 ;;
        esac
        install_lock "PyTorch (the big one: up to some minutes)" "$lock"
        return
    fi
    say "  packages: PyTorch without CUDA"
    set -- --require-hashes --only-binary :all: --requirement "$lock"
    if try_pip "$@"; then return 0; fi
    lacks_package || explain_pip_failure
    if try_pip --extra-index-url https://download.pytorch.org/whl/cpu "$@"; then return 0; fi
    lacks_package || explain_pip_failure
    say "  (neither the package index nor download.pytorch.org has it; taking the build with CUDA)"
    install_lock "PyTorch (the big one: up to some minutes)" "$locks/torch-cu130.lock"
}

lacks_package() { # whether pip's last try found no file, rather than a wrong one
    tail -c "+$((began_at + 1))" "$log" | grep -q 'No matching distribution'
}

install_project() {
    install_lock "window and command line" "$project/installers/app.lock"
    install_torch
    install_lock "training" "$locks/train.lock"
    [ "$1" = demo ] || install_lock "tests" "$project/installers/test.lock"
    pip_install "Rackless itself" --no-index --no-build-isolation --editable "$project"
}

fingerprint() { # of all that the environment is made from
    version=$(isolated "$python" -c 'import pip, sys; print(sys.version)' 2>/dev/null) || return 1
    {
        printf '%s\n%s\n%s\n' "$version" "$project" "$(torch_build)"
        cat "$project"/installers/*.lock "$locks"/*.lock "$project/pyproject.toml" "$0"
    } |
        sha256sum | cut -d ' ' -f 1
}

is_ready() { # for $1; what was set up for the tests is enough for the demo
    [ ! -e "$unfinished" ] || return 1
    now=$(fingerprint) || return 1
    for stamp in "$venv/setup-$1" "$venv/setup-test"; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then return 0; fi
    done
    return 1
}

provide_environment() {
    is_ready "$1" && return 0
    if ! { mkdir -p "$(dirname -- "$venv")" && : >>"$venv.lock"; } 2>/dev/null; then
        fail "$venv cannot be written." \
            "Name another folder:  RACKLESS_VENV=FOLDER sh installers/setup.sh $1"
    fi
    exec 9>>"$venv.lock"
    flock 9 # a second set-up beside this one waits here, then finds all done
    if ! is_ready "$1"; then
        # What an older set-up installed was never compared with a hash.
        if [ -e "$unfinished" ] || [ ! -e "$venv/setup-by-hash" ] || ! fingerprint >/dev/null; then
            create_venv
        fi
        : >"$unfinished"
        install_project "$1"
        fingerprint >"$venv/setup-$1.new"
        mv "$venv/setup-$1.new" "$venv/setup-$1"
        rm -f "$unfinished"
        say "  done in $(($(date +%s) - began)) s"
    fi
    exec 9>&- # what is started below must not hold the lock
}

# ------------------------------------------------------------------ what to run

# Tests start hundreds of programs. Without bytecode, each would compile all that it imports: torch,
# Transformers and our own packages take 2 to 3 times as long.
unset PYTHONDONTWRITEBYTECODE

run_check() { # $1: its name; the rest: arguments of python
    check=$1
    shift
    say ""
    say "== $check"
    "$python" "$@" || failed="$failed $check"
}

check_types() { # for Linux; for Windows, what the window and the command line import
    "$python" -m mypy && "$python" -m mypy --platform win32 --cache-dir .mypy_cache/windows \
        -p app -p agents.contract -p agents.shared
}

run_tests() {
    cd "$project"
    types_said=$(mktemp)
    trap 'rm -f "$types_said"' EXIT
    failed=
    check_types >"$types_said" 2>&1 &  # beside the tests
    types=$!
    run_check "format" -m ruff format --check .
    run_check "lint" -m ruff check .
    if [ $# -gt 0 ]; then
        run_check "tests" -m pytest "$@"
    else
        # Tests wait for nodes, links and time-outs: one process more than cores keeps these busy.
        workers=$(($(nproc) + 1))
        [ "$workers" -le 4 ] || workers=4
        run_check "tests" -m pytest -m 'not campaign and not alone' \
            --numprocesses "$workers" --dist loadfile --no-loadscope-reorder \
            --durations 30 --durations-min 4
        # Only the files that have some: to import all others takes as long as some of these tests.
        # shellcheck disable=SC2046  # a list of names
        run_check "tests against a clock" -m pytest -m 'alone and not campaign' \
            $(grep -rlE --include='test_*.py' 'mark\.alone\b' tests)
    fi
    say ""
    say "== types"
    wait "$types" || failed="$failed types"
    cat "$types_said"
    say ""
    if [ -n "$failed" ]; then
        say "Failed:$failed"
        exit 1
    fi
    say "All checks passed in $(($(date +%s) - began)) s."
}

# Format, lint, types and the tests near what changed, for before a commit. Slow tests are left to
# `test`, and so is what does not fit the time: pytest ends after $CHECK_TESTS_S and says so.
CHECK_TESTS_S=35
run_quick_check() { # $1: the commit to compare with; none: where this branch left origin/main
    cd "$project"
    failed=
    near_said=$(mktemp)
    trap 'rm -f "$near_said"' EXIT
    run_check "format" -m ruff format --check .
    run_check "lint" -m ruff check .
    say ""
    say "== types"
    check_types || failed="$failed types"
    say ""
    say "== tests near the change"
    near=$("$python" installers/near_tests.py "$@")
    # shellcheck disable=SC2086  # a list of names
    if ! "$python" -m pytest --session-timeout "$CHECK_TESTS_S" \
        -m 'not campaign and not alone and not slow and not netns' $near >"$near_said" 2>&1; then
        grep -q 'session-timeout' "$near_said" && ! grep -qE '^(FAILED|ERROR)' "$near_said" ||
            failed="$failed tests"
    fi
    tail -n 25 "$near_said"
    say ""
    [ -z "$failed" ] || { say "Failed:$failed"; exit 1; }
    say "Quick check passed in $(($(date +%s) - began)) s; 'sh installers/setup.sh test' runs every test."
}

began=$(date +%s)
[ "$(uname -s)" = Linux ] || fail "this script is for Linux and WSL; this is $(uname -s)."
[ $# -ge 1 ] || usage
job=$1
shift
case $job in
    demo)
        say "Rackless: setting up for the demo"
        if wants_window "$@"; then provide_window; fi
        provide_environment demo
        exec "$python" -P -m app demo "$@"
        ;;
    test)
        say "Rackless: setting up for the tests"
        provide_test_tools
        provide_environment test
        run_tests "$@"
        ;;
    check)
        say "Rackless: setting up for the check"
        provide_test_tools
        provide_environment test
        run_quick_check "$@"
        ;;
    *) usage ;;
esac
