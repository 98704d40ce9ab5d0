"""Copies are made, held against their hashes, and deleted; the last one only when it is meant."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.requests.exports import Origin
from app.artifact import ArtifactSnapshot, tell_last
from app.artifacts.copies import copy_artifact
from app.artifacts.deletion import DeletedArtifact, delete_artifact
from app.artifacts.record import add_folder, find_artifact, look_at_folders, record_export
from app.artifacts.verification import check_artifact
from app.errors import UsageError, UserError
from app.runs.services import Services
from tests.fakes.artifacts import make_folder
from tests.fakes.cluster import FakeCluster, make_services

ORIGIN = Origin(base="org/base", data="chats.jsonl", run_id="r-1", run_name="poems", step=40)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("alpha", "beta")


@pytest.fixture
def services(tmp_path: Path, cluster: FakeCluster) -> Services:
    return make_services(tmp_path / "home", cluster)


@pytest.fixture
def made(services: Services, tmp_path: Path) -> ArtifactSnapshot:
    folder = make_folder(tmp_path / "out", ORIGIN, "merged")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(bytes(3 << 20))
    return record_export(services, folder, "merged", (), ORIGIN)


def copy(services: Services, made: ArtifactSnapshot, to: str) -> list[str]:
    told: list[str] = []
    asyncio.run(copy_artifact(services, look(services, made), to, told.append))
    return told


def look(services: Services, made: ArtifactSnapshot) -> ArtifactSnapshot:
    return look_at_folders(find_artifact(services, made.label), services.pool.names())


def delete(
    services: Services, made: ArtifactSnapshot, place: str | None, *, even_last: bool = False
) -> DeletedArtifact:
    return asyncio.run(delete_artifact(services, look(services, made), place, even_last))


def states(services: Services, made: ArtifactSnapshot) -> dict[str, str]:
    asyncio.run(check_artifact(services, look(services, made), lambda text: None))
    return {Path(one.place).name: one.state for one in look(services, made).copies}


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_copy_in_a_folder_is_whole_or_not_there(
    services: Services, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    told = copy(services, made, str(tmp_path / "deep" / "two"))
    assert content(tmp_path / "deep" / "two") == content(tmp_path / "out")
    assert "3.0 / 3.0 MiB" in told[-1]
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "two"]
    with pytest.raises(UserError, match="exists already"):
        copy(services, made, str(tmp_path / "deep" / "two"))


def test_the_folder_that_this_runs_in_stays(
    services: Services, made: ArtifactSnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="here exists already"):
        copy(services, made, "./")
    assert (tmp_path / "here").is_dir()


def test_a_copy_that_broke_off_goes_on_with_what_is_missing(
    services: Services, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    weights = tmp_path / "out" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(b"bitrot"[: len(kept)])  # the same size, other bytes
    with pytest.raises(UserError, match="arrived damaged"):
        copy(services, made, str(tmp_path / "two"))
    part = tmp_path / ".two.part"
    assert not (tmp_path / "two").exists()
    big = part / "adapter" / "adapter_model.safetensors"
    before = big.stat().st_ino
    weights.write_bytes(kept)
    copy(services, made, str(tmp_path / "two"))
    assert (tmp_path / "two" / "adapter" / big.name).stat().st_ino == before
    assert content(tmp_path / "two") == content(tmp_path / "out")
    assert not part.exists()


def test_nodes_get_and_give_copies(
    services: Services, cluster: FakeCluster, made: ArtifactSnapshot
) -> None:
    copy(services, made, "alpha")
    (path,) = cluster["alpha"].artifacts
    assert path.startswith("artifacts/poems-merged-")
    assert cluster["alpha"].artifacts[path] == made.files
    assert states(services, made) == {"out": "whole", "alpha": "whole"}

    delete(services, made, str(Path(made.copies[0].place)))
    copy(services, made, "beta")
    assert cluster.copies == [("alpha", "beta", path)]


def damage(cluster: FakeCluster, node: str) -> None:
    """Change a byte of a copy on a node, where the size stays."""
    for path, files in cluster[node].artifacts.items():
        changed = [replace(one, sha256="0" * 64) for one in files[-1:]]
        cluster[node].artifacts[path] = (*files[:-1], *changed)


def test_a_damaged_copy_on_a_node_is_made_anew(
    services: Services, cluster: FakeCluster, made: ArtifactSnapshot
) -> None:
    copy(services, made, "alpha")
    damage(cluster, "alpha")
    assert states(services, made) == {"out": "whole", "alpha": "damaged"}
    copy(services, made, "alpha")
    assert states(services, made) == {"out": "whole", "alpha": "whole"}


def test_damage_does_not_spread_from_node_to_node(
    services: Services, cluster: FakeCluster, made: ArtifactSnapshot
) -> None:
    copy(services, made, "alpha")
    delete(services, made, str(Path(made.copies[0].place)))
    damage(cluster, "alpha")
    for node in ("beta", "alpha"):
        with pytest.raises(
            UserError, match="the copy on alpha differs from the hashes of poems-merged:1"
        ):
            copy(services, made, node)
        (left,) = find_artifact(services, made.label).copies
        assert (left.place, left.state, cluster["beta"].artifacts) == ("alpha", "damaged", {})
        services.artifacts.save_copy(made, replace(left, state="whole"))


def test_what_is_neither_a_node_nor_a_folder_is_asked_for(
    services: Services, made: ArtifactSnapshot
) -> None:
    with pytest.raises(UsageError, match="there is no node backup"):
        copy(services, made, "backup")


def test_a_check_finds_what_is_gone_changed_or_silent(
    services: Services, cluster: FakeCluster, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    copy(services, made, "alpha")
    copy(services, made, "beta")
    copy(services, made, str(tmp_path / "two"))
    weights = tmp_path / "two" / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    cluster["alpha"].artifacts.clear()
    cluster["beta"].reachable = False
    assert states(services, made) == {
        "out": "missing", "two": "damaged", "alpha": "missing", "beta": "unknown"
    }  # fmt: skip
    problems = {one.place: one.problem for one in find_artifact(services, made.label).copies}
    assert problems[str(tmp_path / "two")] == "model.safetensors changed since the export"
    assert problems["beta"] == "beta cannot be reached"


def test_the_last_copy_goes_only_when_it_is_meant(
    services: Services, cluster: FakeCluster, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    copy(services, made, "alpha")
    out = str(tmp_path / "out")
    assert tell_last(look(services, made), out) == ""
    assert tell_last(look(services, made), None) == "Deletes all 2 copies of poems-merged:1."
    done = delete(services, made, out)
    assert (done.deleted, done.is_forgotten, done.left) == ((out,), False, ())
    assert not (tmp_path / "out").exists()

    with pytest.raises(UserError, match="This is the last copy of poems-merged:1"):
        delete(services, made, "alpha")
    with pytest.raises(UserError, match="no copy of poems-merged:1 is in beta"):
        delete(services, made, "beta", even_last=True)
    done = delete(services, made, None, even_last=True)
    assert (done.deleted, done.is_forgotten) == (("alpha",), True)
    assert cluster["alpha"].artifacts == {}
    with pytest.raises(UserError, match="there is no artifact"):
        look(services, made)


def test_a_copy_on_a_node_that_was_removed_is_none(
    services: Services, cluster: FakeCluster, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    copy(services, made, "alpha")
    removed = cluster.nodes.pop("alpha")
    with pytest.raises(UserError, match="This is the last copy of poems-merged:1"):
        delete(services, made, str(tmp_path / "out"))
    assert (tmp_path / "out").is_dir()
    cluster.nodes["alpha"] = removed
    delete(services, made, str(tmp_path / "out"))
    assert [one.place for one in look(services, made).copies] == ["alpha"]


def test_another_spelling_of_a_place_is_no_other_copy(
    services: Services, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = ("out", "x/../out", "link/out", "link/../" + tmp_path.name + "/out")
    (tmp_path / "x").mkdir()
    for name in names:
        add_folder(services, tmp_path / name)
        assert [one.place for one in look(services, made).copies] == [str(tmp_path / "out")]
    for name in names:
        with pytest.raises(UserError, match="This is the last copy"):
            delete(services, made, str(tmp_path / name))
    for name in ("loop", "x", "x/../two"):
        with pytest.raises(UserError, match="no copy of poems-merged:1 is in"):
            delete(services, made, str(tmp_path / name))
    with pytest.raises(UserError, match="is not a usable path"):
        copy(services, made, str(tmp_path / "loop"))
    for deed in (copy, delete):
        with pytest.raises(UserError, match=r"no such user|no copy of poems-merged:1 is in"):
            deed(services, made, "~nobody-of-that-name/out")
    with pytest.raises(UserError, match="no such user"):
        add_folder(services, Path("~nobody-of-that-name/out"))
    copy(services, made, str(tmp_path / "x" / ".." / "two"))
    assert look(services, made).copies[-1].place == str(tmp_path / "two")


def test_deleting_leaves_what_is_not_of_the_artifact(
    services: Services, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    notes = tmp_path / "out" / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "out" / "Modelfile-Q8_0").write_text("FROM ./poems-Q8_0.gguf\n")
    done = delete(services, made, None, even_last=True)
    assert list((tmp_path / "out").rglob("*")) == [notes]
    assert done.left == (f"{tmp_path / 'out'} holds other files too, which are kept",)
    assert done.freed_bytes == made.size_bytes


def test_a_place_that_holds_another_model_by_now_is_left_alone(
    services: Services, made: ArtifactSnapshot, tmp_path: Path
) -> None:
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            path.write_bytes(b"another model altogether")
    done = delete(services, made, None, even_last=True)
    assert done.left == (f"{tmp_path / 'out'} now holds something else, so it is kept",)
    assert len(content(tmp_path / "out")) == len(made.files)
