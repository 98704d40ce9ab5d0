"""Setting up nodes that have nothing, of which one alone reaches a package index."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import Cluster
from tests.fakes.package_site import put_pip, use_site
from tests.fakes.packages import lock_of, make_wheel

ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from pathlib import Path
from tests.fakes.package_site import package_site
with package_site(Path(sys.argv[1])) as site:
    print(site.url, flush=True)
    for line in sys.stdin:
        print(site.num_requests, flush=True)
"""


@pytest.mark.campaign
@pytest.mark.netns
def test_nodes_without_any_package_end_ready_from_the_one_index_that_one_of_them_reaches(
    tmp_path: Path, uv_wheel: Path
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(uv_wheel, folder)
    wheels = (make_wheel(folder), make_wheel(folder, "aaa"), put_pip(folder))
    lock = tmp_path / "stand-in.lock"
    lock.write_text(lock_of(*wheels))
    with Cluster(tmp_path / "cluster", num_nodes=2) as cluster:
        online, cut = cluster.nodes
        # On loopback of one node: no packet from elsewhere can reach it.
        index = cluster.start(
            online,
            *(sys.executable, "-c", SERVE, str(folder)),
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert index.stdin is not None
        assert index.stdout is not None
        url = index.stdout.readline().strip()
        for node in (online, cut):
            use_site(node.home, url)
        master = cluster.start(
            cluster.master,
            *(sys.executable, "-m", "tests.cluster.setup_probe", "--key", str(cluster.key)),
            *("--home", str(tmp_path / "master"), "--lock", str(lock)),
            *(f"{n.name}={n.address}={cluster.fingerprint(n)}" for n in (online, cut)),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
        )
        output, _ = master.communicate(timeout=120)
        assert master.returncode == 0
        index.stdin.write("\n")
        index.stdin.flush()
        num_requests = int(index.stdout.readline())
        index.stdin.close()
        index.wait(timeout=10)
    first, second, again_first, again_second = map(json.loads, output.splitlines())
    assert [first["node"], second["node"]] == ["node1", "node2"]
    for one in (first, second):
        assert one["report"]["fits"]
        assert one["report"]["built_with"].startswith("uv ")
    assert any(line.startswith("fetching packages: 3 of 3") for line in first["said"])
    assert "node1 has the packages: copying them from there" in second["said"]
    # One page and one file for each of uv, pip and the two packages, whatever the number of nodes.
    assert num_requests == 8
    for one, again in ((first, again_first), (second, again_second)):
        assert again["said"] == []
        assert again["report"] == one["report"]
