"""What is worth a notification, and the cluster in one line."""

from dataclasses import replace

import pytest

from app.events import NodeSnapshot
from app.telemetry.alerts import Alert
from app.telemetry.notices import REPEAT_S, SETTING_OF, Notices
from app.telemetry.stream import Device, DeviceKey, StreamReading
from app.telemetry.whole import describe_whole
from tests.fakes.core import NOW_S, home_cluster, make_run, running_run

HOT = Alert(kind="hot", severity="warning", text="hot: 88 \u00b0C")


def device(*alerts, node="beta"):
    reading = StreamReading(name="RTX 3090", is_gpu=True)
    return Device(DeviceKey(node, "cuda:0"), reading, alerts=alerts)


def end(state, **values):
    notices = Notices()
    run = running_run()
    assert notices.take_run(run, NOW_S) is None
    return notices.take_run(replace(run, state=state, **values), NOW_S)


def test_a_run_that_finishes_is_told_with_its_loss_and_time():
    notice = end("done", first_loss=2.5, loss=0.9, started_s=NOW_S - 3600, ended_s=NOW_S)
    assert notice.title == "support-chat has finished"
    assert notice.text == "Loss 2.500 to 0.900. It took 1 h."
    assert (notice.kind, notice.tone) == ("finished", "good")


def test_a_run_that_fails_says_why_and_what_to_do():
    notice = end("failed", message="gamma has no memory left.", hint="Take a smaller batch.")
    assert notice.title == "support-chat has failed"
    assert notice.text == "gamma has no memory left. Take a smaller batch."
    assert end("interrupted").kind == "interrupted"


def test_what_ended_while_nobody_looked_is_told_with_its_time():
    assert "That was at" in end("done", ended_s=NOW_S - 7200).text


@pytest.mark.parametrize("state", ["stopped", "stopping", "running"])
def test_what_a_person_did_is_no_news(state):
    assert end(state) is None


def test_what_was_so_at_the_start_is_no_news():
    notices = Notices()
    done = make_run("a-1", "a", "done")
    assert notices.take_run(done, NOW_S) is None
    assert notices.take_run(done, NOW_S) is None


def test_a_hot_device_is_told_once_in_a_while():
    notices = Notices()
    assert notices.take_devices([device()], NOW_S) == ()
    (notice,) = notices.take_devices([device(HOT)], NOW_S)
    assert notice.title == "RTX 3090 in beta is hot: 88 \u00b0C"
    assert notice.node == "beta"
    assert notices.take_devices([device(HOT)], NOW_S + 5) == ()
    assert len(notices.take_devices([device(HOT), device(HOT, node="gamma")], NOW_S + 9)) == 1
    assert len(notices.take_devices([device(HOT)], NOW_S + REPEAT_S)) == 1


def test_every_kind_can_be_switched_off():
    from app.settings import SETTINGS

    assert set(SETTING_OF.values()) <= {setting.key for setting in SETTINGS}


def online():
    return [replace(node, state="online") for node in home_cluster()]


def test_the_cluster_in_one_line():
    assert describe_whole(online(), [], []).text == "nothing runs"
    assert describe_whole(online(), [], []).tone == "calm"
    run = running_run()
    whole = describe_whole(online(), [run, make_run("a-1", "a", "done")], [device()])
    assert whole.text.startswith("support-chat 34 %")
    assert (whole.tone, round(whole.share, 2)) == ("busy", 0.34)
    two = replace(run, run_id="b", step=600)
    assert describe_whole(online(), [run, two], []).text == "2 runs keep training"


def test_a_problem_goes_before_work():
    run = running_run()
    whole = describe_whole(online(), [run], [device(HOT)])
    assert (whole.tone, whole.text) == ("warning", "beta: RTX 3090 hot: 88 \u00b0C")
    nodes = [replace(n, state="unreachable") if n.name == "beta" else n for n in online()]
    whole = describe_whole(nodes, [run], [device(HOT)])
    assert whole.tone == "error"
    assert whole.text.startswith("beta cannot be reached; support-chat")
    off: list[NodeSnapshot] = [replace(node, state="unreachable") for node in online()]
    assert describe_whole(off, [], []).tone == "calm", "a PC that sleeps while nothing runs"
