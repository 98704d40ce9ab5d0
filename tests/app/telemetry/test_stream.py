"""Samples become devices: CPU or GPUs, replays, ranks, totals, alarms and words."""

import pytest

from agents.contract.node import GpuFacts, GpuSample, GpuUse, NodeFacts, Sample
from agents.contract.spec import DataSpec, RunSpec
from app.events import NodeSnapshot, RankProgress, RunSnapshot
from app.telemetry.alerts import check_disk, check_heat, check_memory, check_run, check_throttle
from app.telemetry.notices import Notices
from app.telemetry.state import describe_device, describe_node, describe_run
from app.telemetry.stream import MEMORY, TOKENS, DeviceKey, Telemetry
from app.telemetry.whole import describe_whole

GIB = 1024**3


def node(name="alpha", *, gpus=(), state="online", last_seen_s=100.0):
    facts = NodeFacts(
        hostname=name,
        os="Debian 12",
        kernel="6",
        python="3.11.7",
        architecture="x86_64",
        cpu="Ryzen 7",
        memory_bytes=32 * GIB,
        gpus=gpus,
    )
    return NodeSnapshot(
        name=name,
        transport="ssh",
        address=f"u@{name}:22",
        state=state,
        facts=facts,
        last_seen_s=last_seen_s,
    )


def gpu(index=0, **values):
    return GpuSample(uuid=f"GPU-{index}", index=index, name="RTX 4070", **values)


def run(state="running", **values):
    values.setdefault("phase", "training")
    return RunSnapshot(
        run_id="r1",
        name="first",
        state=state,
        spec=RunSpec(model="m", data=DataSpec(train="t")),
        attempt=1,
        nodes=("alpha",),
        created_s=0.0,
        **values,
    )


def test_a_node_without_gpu_shows_its_cpu_even_before_the_first_sample():
    telemetry = Telemetry()
    assert telemetry.expect(node())
    assert not telemetry.expect(node()), "nothing new the second time"
    (device,) = telemetry.of_node("alpha")
    assert device.key == DeviceKey("alpha", "cpu")
    assert device.reading.utilisation is None
    telemetry.take("alpha", Sample(time_s=1.0, seq=1, cpu_utilisation=0.5))
    assert telemetry[device.key].reading.utilisation == 0.5
    assert telemetry[device.key].reading.name == "Ryzen 7"


def test_gpus_stand_in_their_order_and_the_cpu_is_no_device():
    telemetry = Telemetry()
    facts = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="RTX 4070") for i in range(12))
    telemetry.expect(node(gpus=facts))
    telemetry.take("alpha", Sample(time_s=1.0, seq=1, gpus=(gpu(1), gpu(0)), cpu_utilisation=1.0))
    assert [d.key.device for d in telemetry.of_node("alpha")] == [f"cuda:{i}" for i in range(12)]
    assert telemetry.take("alpha", Sample(time_s=2.0, seq=2, cpu_utilisation=1.0)) == []


def test_a_replay_that_overlaps_adds_nothing_twice():
    telemetry = Telemetry()
    telemetry.expect(node())
    for time_s in (1.0, 2.0, 3.0, 2.0, 3.0, 4.0):
        telemetry.take("alpha", Sample(time_s=time_s, seq=1, memory_used_bytes=int(time_s)))
    history = telemetry[DeviceKey("alpha", "cpu")].history.view()
    assert history[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert history[MEMORY].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_rank_brings_its_tokens_and_takes_them_away_again():
    telemetry = Telemetry()
    telemetry.expect(node())
    key = DeviceKey("alpha", "cpu")
    rank = RankProgress(rank=0, node="alpha", device="cpu", state="running", tokens_per_s=120.0)
    assert telemetry.follow_runs([run(ranks=(rank,))]) == [key]
    telemetry.take("alpha", Sample(time_s=1.0, seq=1))
    assert telemetry[key].history.view()[TOKENS].tolist() == [120.0]
    assert "first" in describe_device(telemetry[key], node(), 100.0).text
    assert telemetry.follow_runs([run(state="done", ranks=(rank,))]) == [key]
    assert telemetry[key].reading.tokens_per_s is None


def test_totals_are_unknown_rather_than_zero():
    telemetry = Telemetry()
    telemetry.expect(node())
    totals = telemetry.totals(frozenset({"alpha"}))
    assert (totals.num_cpus, totals.power_w, totals.tokens_per_s) == (1, None, None)
    assert telemetry.totals(frozenset()).num_cpus == 0


def test_a_removed_gpu_disappears_and_a_removed_node_too():
    telemetry = Telemetry()
    facts = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="RTX 4070") for i in range(2))
    telemetry.expect(node(gpus=facts))
    assert telemetry.expect(node(gpus=facts[:1]))
    assert len(telemetry.of_node("alpha")) == 1
    telemetry.forget("alpha")
    assert list(telemetry) == []


def test_heat_is_raised_at_the_limit_and_cleared_below_it():
    assert check_heat(84.9, is_gpu=True) is None
    assert check_heat(85.0, is_gpu=True)
    assert check_heat(81.0, is_gpu=True, active=frozenset({"hot"}))
    assert check_heat(79.0, is_gpu=True, active=frozenset({"hot"})) is None
    assert check_heat(90.0, is_gpu=False) is None
    assert check_heat(None, is_gpu=True) is None


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        (None, None),
        ((), None),
        (("gpu idle",), None),
        (("power",), "throttled: power"),
        (("gpu idle", "heat", "power"), "throttled: heat, power"),
    ],
)
def test_only_throttling_that_costs_speed_is_told(reasons, text):
    alert = check_throttle(reasons)
    assert (alert.text if alert else None) == text


def test_nearly_full_memory_and_disk():
    assert check_memory(98, 100)
    assert not check_memory(90, 100)
    assert not check_memory(None, 100)
    assert check_memory(96, 100, frozenset({"memory_full"}))
    assert check_disk(96, 100)
    assert not check_disk(96, None)


def test_samples_of_a_nearly_full_disk_raise_an_alert_until_it_is_freed():
    telemetry, notices = Telemetry(), Notices()
    telemetry.expect(node())
    seen = []
    for second, used in enumerate((90, 96, 94, 92, 96), 1):
        sample = Sample(time_s=second, seq=second, disk_used_bytes=used, disk_total_bytes=100)
        devices = [telemetry[key] for key in telemetry.take("alpha", sample)]
        status = describe_device(devices[0], node(), 100.0)
        whole = describe_whole([node()], [], devices)
        titles = [notice.title for notice in notices.take_devices(devices, 100.0)]
        seen.append((status.tone, status.text, whole.text, titles))
    assert seen == [
        ("calm", "idle", "nothing runs", []),
        ("warning", "disk nearly full: 96 %", "alpha: disk nearly full: 96 %",
         ["alpha: disk nearly full: 96 %"]),
        ("warning", "disk nearly full: 94 %", "alpha: disk nearly full: 94 %", []),
        ("calm", "idle", "nothing runs", []),
        ("warning", "disk nearly full: 96 %", "alpha: disk nearly full: 96 %",
         ["alpha: disk nearly full: 96 %"]),
    ]  # fmt: skip


def test_a_loss_that_is_no_number_and_a_stall_are_told():
    assert [a.kind for a in check_run(run(loss=float("nan")), 1.0)] == ["loss_not_finite"]
    slow = RankProgress(rank=0, node="a", device="cpu", state="running", step_s=30.0)
    assert check_run(run(ranks=(slow,)), 200.0) == ()
    assert [a.kind for a in check_run(run(ranks=(slow,)), 301.0)] == ["stalled"]
    assert check_run(run(phase="saving"), 1e6) == ()


def test_words():
    assert describe_node(node(state="unreachable", last_seen_s=88.0), 100.0).text == (
        "unreachable for 12 s"
    )
    assert describe_node(node(state="unreachable", last_seen_s=None), 100.0).text == "unreachable"
    telemetry = Telemetry()
    telemetry.expect(node())
    device = telemetry[DeviceKey("alpha", "cpu")]
    assert describe_device(device, node(), 100.0).text == "waiting for readings"
    telemetry.take("alpha", Sample(time_s=1.0, seq=1, cpu_utilisation=0.0))
    assert describe_device(device, node(), 100.0).text == "idle"
    assert describe_device(device, node(), 120.0).text == "silent for 20 s"
    assert describe_run("running", "loading").text == "running, loading"
    assert describe_run("failed").tone == "error"


@pytest.mark.parametrize("utilisation", [0.0, 0.9])
def test_a_device_that_an_export_keeps_busy_says_so_by_name(utilisation: float):
    telemetry = Telemetry()
    telemetry.expect(node())
    use = GpuUse(uuid="cpu", name="the export of run r-1")
    for time_s, uses in ((1.0, (use,)), (2.0, ())):
        sample = Sample(time_s=time_s, seq=1, cpu_utilisation=utilisation, uses=uses)
        telemetry.take("alpha", sample)
        text = describe_device(telemetry[DeviceKey("alpha", "cpu")], node(), 100.0).text
        others = "busy with other work" if utilisation else "idle"
        assert text == (f"busy with {use.name}" if uses else others)
