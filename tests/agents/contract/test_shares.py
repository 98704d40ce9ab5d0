"""Shares are recognised from what kernels and Windows write, and guessed at from another PC."""

from __future__ import annotations

import pytest

from agents.contract.in_place import PlaceQuery, guess_folders, may_have
from agents.contract.shares import Share, find_mount, find_places, find_share, parse_mounts

NODE = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
23 22 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
61 22 0:27 / /work rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
70 22 0:50 / /mnt/nas rw,relatime shared:40 - autofs systemd-1 rw,fd=35,pgrp=1,timeout=0,direct
71 70 0:52 / /mnt/nas rw,relatime shared:41 - nfs4 nas.local:/volume1/models rw,vers=4.2,hard,addr=192.168.1.9
72 22 0:52 / /srv/llama rw,relatime shared:41 - nfs4 nas.local:/volume1/models/llama rw,vers=4.2,hard,addr=192.168.1.9
73 22 0:53 / /media/old\040nas ro,relatime - nfs [fe80::1]:/export ro,vers=3,addr=fe80::1
74 22 0:54 / /mnt/smb rw,relatime shared:44 - cifs //NAS/AI\040Data rw,vers=3.1.1,username=me,addr=192.168.1.9
75 22 0:54 /sets /home/me/sets rw,relatime shared:44 - cifs //NAS/AI\040Data rw,vers=3.1.1,addr=192.168.1.9
76 22 0:54 /deep /mnt/deep rw,relatime - cifs //NAS/AI\040Data/deep rw,vers=3.1.1,addr=192.168.1.9
77 22 0:55 / /mnt/ssh rw,nosuid,nodev,relatime - fuse.sshfs me@big:/data rw,user_id=1000,group_id=1000
78 22 259:2 /home/me /mnt/bind rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
79 22 0:58 / /mnt/c rw,noatime - 9p C:\134 rw,dirsync,aname=drvfs;path=C:\;uid=1000;symlinkroot=/mnt/,trans=fd
80 22 0:59 / /mnt/unc rw,noatime - 9p \134\134nas\134ai rw,aname=drvfs;path=UNC\nas\ai;uid=1000,trans=fd,rfd=8
81 22 0:60 / /mnt/z rw,noatime - 9p Z:\134 rw,aname=drvfs;path=Z:\;uid=1000,trans=fd
82 22 0:61 / /mnt/ceph rw,relatime - ceph 192.168.1.7:6789:/ rw,name=admin
broken line
"""  # noqa: E501 - lines as the kernel writes them
MOUNTS = parse_mounts(NODE)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/mnt/nas/llama/config.json", "nas.local:/volume1/models/llama/config.json"),
        ("/srv/llama", "nas.local:/volume1/models/llama"),
        ("/media/old nas/x", "fe80::1:/export/x"),
        ("/mnt/smb/a.jsonl", "//NAS/AI Data/a.jsonl"),
        ("/home/me/sets/a.jsonl", "//NAS/AI Data/sets/a.jsonl"),
        ("/mnt/deep/x", "//NAS/AI Data/deep/x"),
        ("/mnt/ssh/x", "big:/data/x"),
        ("/mnt/unc/x", "//nas/ai/x"),
        ("/mnt/ceph/x", "192.168.1.7:6789:/x"),
        *(
            (path, None)
            for path in ("/mnt/c/x", "/mnt/z/x", "/mnt/bind/x", "/work/x", "/mnt/nasty")
        ),
    ],
)
def test_a_path_is_named_by_its_share(path: str, label: str | None) -> None:
    found = find_share(path, MOUNTS)
    assert (found and found.label) == label


def test_the_last_mount_on_a_place_is_on_top_and_the_root_is_below_all() -> None:
    top, root = find_mount("/mnt/nas", MOUNTS), find_mount("/etc", MOUNTS)
    assert (top and top.kind, root and root.place) == ("nfs4", "/")
    assert len(MOUNTS) == 16


def test_the_same_folder_of_a_server_is_found_wherever_it_is_mounted() -> None:
    wanted = Share(kind="nfs", server="192.168.1.9", path="/volume1/models/llama")
    # A server has several names: its content decides.
    assert find_places(wanted, MOUNTS) == ("/mnt/nas/llama", "/srv/llama")
    # Of two servers with such a path, the one of this name comes first.
    other = parse_mounts("9 1 0:9 / /mnt/a rw - nfs4 old:/volume1 rw") + MOUNTS
    named = Share(kind="nfs", server="nas", path="/volume1/models/llama")
    assert find_places(named, other)[-1] == "/mnt/a/models/llama"
    assert find_places(Share(kind="smb", server="nas", path="/volume1/models"), MOUNTS) == ()
    # SMB has no case, but the rest of the path keeps its own.
    smb = Share(kind="smb", server="nas", path="/ai data/Sets/A.jsonl")
    assert find_places(smb, MOUNTS) == ("/mnt/smb/Sets/A.jsonl", "/home/me/sets/A.jsonl")
    assert find_places(Share(kind="nfs", server="nas", path="/volume1/modelsX"), MOUNTS) == ()


def ask(*paths: str, share: Share | None = None) -> PlaceQuery:
    return PlaceQuery(is_model=True, paths=paths, share=share, files=())


def guess(query: PlaceQuery, **links: str) -> tuple[str, ...]:
    return guess_folders(query, MOUNTS, lambda path: links.get(path.strip("/"), path))


def test_a_folder_is_used_in_place_only_where_one_of_the_pcs_knows_that_it_is_shared() -> None:
    assert guess(ask("/home/me/models")) == ()
    assert guess(ask("/mnt/nas/x")) == ("/mnt/nas/x",)
    assert guess(ask("/models"), models="/mnt/nas/x") == ("/models",)
    # The master serves it itself, and this node has mounted that.
    assert guess(ask("/data/llama")) == ("/mnt/ssh/llama",)
    share = Share(kind="nfs", server="nas", path="/volume1/models/llama")
    # Last, the node may be the server.
    assert guess(ask("/mnt/n/llama", share=share)) == (
        "/mnt/n/llama",
        "/mnt/nas/llama",
        "/srv/llama",
        "/volume1/models/llama",
    )
    # A master with Windows has no path that a node could have.
    windows = Share(kind="smb", server="NAS", path="/AI Data/deep")
    assert guess(ask(share=windows)) == ("/mnt/smb/deep", "/mnt/deep")


def test_a_node_without_shares_is_not_searched_for_files_of_a_disk() -> None:
    local = parse_mounts("22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw")
    share = Share(kind="nfs", server="nas", path="/x")
    assert not may_have([ask("/x")], local)
    assert may_have([ask("/x"), ask("/x", share=share)], local)
    assert may_have([ask("/x")], MOUNTS)


def test_a_query_names_absolute_paths_only() -> None:
    for path in ("models", "/a\0b"):
        with pytest.raises(ValueError, match="not absolute"):
            ask(path).check_foreign()
    with pytest.raises(ValueError, match="at most 4"):
        ask(*["/x"] * 5).check_foreign()
