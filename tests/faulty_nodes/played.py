"""Programs of a system that a namespace does not have: ufw, systemd, apt, drivers and swap.

Each is a shell script that does the visible part: it keeps its state below `$STATE`, a folder of
its node, where the check finds it through mounts and libraries of the site. ufw really opens the
node's filter of packets, and mkswap, chmod and stat are the system's own, on a file of the node.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import packet_filter

SWAP_FILE = "/rackless.swap"
DRIVER = "580.65.06"

UFW = f"""
case "$*" in
status) echo 'Status: active'; sed 's,.*,Anywhere  ALLOW IN  &/tcp,' $STATE/ufw;;
'allow proto tcp from '*) echo "$5" >> $STATE/ufw; ip link set dev eth0 xdp off;;
'delete allow proto tcp from '*)
  sed -i "/^$6\\$/d" $STATE/ufw
  {shlex.quote(sys.executable)} {shlex.quote(str(packet_filter.__file__))} eth0 syn "$6";;
*) exit 1;;
esac"""
TIMEDATECTL = """
case "$*" in
*--value*) cat $STATE/ntp;;
show*) echo NTP=$(cat $STATE/ntp); echo CanNTP=yes;;
'set-ntp true') echo yes > $STATE/ntp;;
'set-ntp false') echo no > $STATE/ntp;;
*) exit 1;;
esac"""
LOGINCTL = """
case $1 in
enable-linger) touch "/var/lib/systemd/linger/$2";;
disable-linger) rm -f "/var/lib/systemd/linger/$2";;
*) exit 1;;
esac"""
BUSCTL = "echo b true"
SYSTEMCTL = """
case $1 in
mask) ln -s /dev/null "/etc/systemd/system/$2";;
unmask) rm -f "/etc/systemd/system/$2";;
show) if [ -h "/etc/systemd/system/$5" ]; then echo masked; else echo loaded; fi;;
*) echo inactive; exit 3;;
esac"""
NVIDIA_SMI = """
case "$*" in
'-pm 1') echo Enabled > $STATE/persistence;;
'-pm 0') echo Disabled > $STATE/persistence;;
*) cat $STATE/persistence;;
esac"""
IW = """
case "$3 $4" in
'get power_save') echo "Power save: $(cat $STATE/power)";;
'set power_save') echo "$5" > $STATE/power;;
*) exit 1;;
esac"""
UBUNTU_DRIVERS = f"[ $1 = install ] && echo {DRIVER} > $STATE/driver"
# A package is a line of a file; a compiler is a program in a folder of the PATH, too.
APT_GET = """
package=$3
case $1 in
update) ;;
install) echo "$package" >> $STATE/packages
  [ $package != build-essential ] || ln -s /usr/bin/gcc $STATE/bin/gcc;;
remove) sed -i "/^$package\\$/d" $STATE/packages
  [ $package != build-essential ] || rm $STATE/bin/gcc;;
*) exit 1;;
esac"""
DPKG_QUERY = """
shift 3
for package; do
  if grep -qxF "$package" $STATE/packages; then echo installed; else echo not-installed; fi
done"""
FALLOCATE = 'truncate -s "$2" "$STATE$3"'
# The kernel's swap is that of this whole PC, so only the count in /proc/meminfo is changed.
_COUNT_SWAP = """
sed "s/^SwapTotal: .*/SwapTotal:      {kib} kB/" $STATE/meminfo > $STATE/meminfo.new
cat $STATE/meminfo.new > $STATE/meminfo; rm $STATE/meminfo.new"""
SWAPON = f"""
case $1 in
--show*) if grep -q '^SwapTotal:      8' $STATE/meminfo; then echo {SWAP_FILE}; fi; exit;;
esac{_COUNT_SWAP.format(kib=8 << 20)}"""
SWAPOFF = _COUNT_SWAP.format(kib=0)


def reroute(name: str) -> str:
    """Return the script of a program of this PC that finds the swap file below `$STATE`."""
    program = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
    return f"""
for word; do
  [ "$word" != {SWAP_FILE} ] || word=$STATE{SWAP_FILE}
  set -- "$@" "$word"; shift
done
exec {program} "$@\""""


SWAP_TOOLS: Mapping[str, str] = {
    "fallocate": FALLOCATE,
    "swapon": SWAPON,
    "swapoff": SWAPOFF,
    **{name: reroute(name) for name in ("chmod", "mkswap", "rm", "stat")},
}


def write_programs(folder: Path, state: Path, scripts: Mapping[str, str]) -> Path:
    """Write scripts, which keep their state in `state`, as programs; return their folder."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\nSTATE={shlex.quote(str(state))}\n{text.strip()}\n")
        program.chmod(0o755)
    return folder
