"""What is on each picture, and how the window comes to show it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QDialog, QScrollArea, QWidget

from agents.contract.data import DataPreview
from agents.contract.spec import DataSpec, RunSpec
from app.core.library import PreviewData, SaveRecipe
from app.core.nodes import CheckNodes
from app.core.repairs import ApplyRepair, ShowRepair
from app.errors import UserError
from app.events import Certificate, FoundRun, PhaseProgress, RankProgress, RunChanged, RunSnapshot
from app.gui.application import make_application
from app.gui.kit.collapsible import CollapsibleSection
from app.gui.kit.theme import Theme
from app.gui.new_run.data_dialog import DataDialog
from app.gui.new_run.hub_dialog import HubDialog
from app.gui.repairs.repair_dialog import RepairDialog
from app.gui.repairs.windows_script_dialog import WindowsScriptDialog
from app.hub.hub_item import HubResults
from app.nodes.discovery.candidate import PcCandidate
from app.provisioning.check_row import CheckRow, make_row
from app.provisioning.system_repairs import name_own_address, synchronise_clock
from app.runs.journals.event_text import describe_line
from tests.fakes.cluster import make_preview
from tests.fakes.core import (
    NOW_S,
    FakeCore,
    busy_core,
    make_node,
    make_steps,
    past_interruptions,
    publish_history,
)
from tests.fakes.hub_items import hub_items
from tests.fakes.plans import (
    make_comparison,
    make_plan_of_all,
    make_plan_of_mixture,
    make_plan_of_stages,
)
from tests.gui.format_previews import KINDS, preview_of
from tests.gui.stage import Stage, open_dialog, press

RUN = "support-chat-7f3a"
STORY = (
    ("Start three nodes", "done"),
    ("Check them", "done"),
    ("Train on all three", "now"),
    ("Lose one", "todo"),
    ("Resume on two", "todo"),
    ("Export", "todo"),
)


def _overview(stage: Stage) -> QWidget:
    stage.window.go_to("overview")
    return stage.window


def _story(stage: Stage) -> QWidget:
    stage.window.overview.story.show_steps(STORY, "Step 14 of 60, loss 2.134")
    return _overview(stage)


def _wall_table(stage: Stage) -> QWidget:
    stage.window.overview.show_as_table(True)
    return _overview(stage)


def _figures(stage: Stage) -> QWidget:
    _run_tab(0)(stage)
    stage.window.run_page().charts.loss.show_table()
    return _dialog(stage)


def _nodes(stage: Stage) -> QWidget:
    stage.window.go_to("nodes")
    return stage.window


def _links(stage: Stage) -> QWidget:
    page = stage.window.nodes
    stage.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.links)
    page.measure_links()
    stage.wait_for(lambda: "measured" in page.links.summary.text())
    return stage.window


def _node_log(stage: Stage) -> QWidget:
    page = stage.window.nodes
    stage.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.log)
    stage.wait_for(lambda: page.log.view.document.num_lines > 0)
    return stage.window


def _check(stage: Stage) -> QWidget:
    stage.window.check()
    # Rows appear before the check has ended.
    stage.wait_for(lambda: not stage.window.nodes.banner.isVisible())
    return stage.window


def _repair(stage: Stage) -> QWidget:
    """The repair of the hosts file of gamma, about to be applied."""
    row = make_row(
        "hostname",
        "gamma",
        "warn",
        "its own name gamma means 127.0.1.1, which is loopback",
        "In /etc/hosts there, replace 127.0.1.1",
        name_own_address("gamma", "192.168.1.27"),
    )
    _check(stage)
    results = stage.window.nodes.results
    results.show_rows((row,))
    results.table.selectRow(0)
    press(results, "Fix\u2026")
    dialog = open_dialog(RepairDialog)
    stage.wait_for(lambda: dialog.apply.isEnabled())
    return dialog


def _prepare(stage: Stage) -> QWidget:
    """The first of two repairs of a node that is being prepared."""
    rows = tuple(
        make_row(check, "gamma", "warn", "not as it should be", "repair it", repair)
        for check, repair in (
            ("hostname", name_own_address("gamma", "192.168.1.27")),
            ("clock", synchronise_clock()),
        )
    )

    async def check(*args: object) -> tuple[CheckRow, ...]:
        return rows

    stage.core.answers[CheckNodes] = check
    stage.window.go_to("nodes")
    stage.window.nodes.table.select("gamma")
    press(stage.window.nodes, "Prepare\u2026")
    stage.wait_for(lambda: bool(stage.window.findChildren(RepairDialog)))
    dialog = open_dialog(RepairDialog)
    stage.wait_for(dialog.apply.isEnabled)
    return dialog


def _repaired(stage: Stage) -> QWidget:
    dialog = _repair(stage)
    assert isinstance(dialog, RepairDialog)
    dialog.password.setText(stage.core.repairs.password)
    press(dialog, "Apply")
    stage.wait_for(lambda: "Repaired" in dialog.banner.message())
    return dialog


def _changes(stage: Stage) -> QWidget:
    repair, password = name_own_address("gamma", "192.168.1.27"), stage.core.repairs.password
    shown = asyncio.run(stage.core.do(ShowRepair(node="gamma", repair=repair)))
    apply = ApplyRepair(node="gamma", repair=repair, shown=shown, password=password)
    asyncio.run(stage.core.do(apply))
    page = stage.window.nodes
    page.open_node("gamma")
    stage.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.changes)
    stage.wait_for(lambda: "1 repair" in page.changes.summary.text())
    return stage.window


def _storage(stage: Stage) -> QWidget:
    page = stage.window.nodes
    page.open_node("gamma")
    stage.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.storage)
    stage.wait_for(lambda: "Rackless uses" in page.storage.summary.text())
    return stage.window


def _node_settings(stage: Stage) -> QWidget:
    page = stage.window.nodes
    stage.core.own_settings["gamma"] = {"when_hot": "limit"}
    page.open_node("gamma")
    stage.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.settings)
    control = page.settings.rows["when_hot"].control
    stage.wait_for(lambda: control.currentData() == "limit")
    return stage.window


def _runs(stage: Stage) -> QWidget:
    stage.window.go_to("runs")
    stage.window.runs.table.selectRow(1)
    return stage.window


def _found(stage: Stage) -> QWidget:
    """Runs that nodes list and that are not known to be this home's: one trains, one is done."""
    running = FoundRun(
        run_id="20261126-081500-abc",
        attempt=2,
        name="qwen3-diary",
        node="beta",
        state="running",
        is_active=True,
        started_s=None,
        master=None,
        files=("/home/me/diary.jsonl", "Qwen/Qwen3-8B"),
    )
    done = replace(running, run_id="20261124-190000-xyz", name="", state="done", is_active=False)
    stage.core.on_loop(stage.core.put_found, [running, done])
    stage.wait_for(lambda: not stage.window.runs.found.isHidden())
    return _runs(stage)


def _compare(stage: Stage) -> QWidget:
    """The run that goes on beside one that was interrupted and one that is done."""
    others = [run for run in stage.core.run_map.values() if run.run_id != RUN][:2]
    for number, run in enumerate(others, 1):
        stage.core.step_map[run.run_id] = [
            replace(one, loss=(one.loss or 0.0) * (1 + 0.1 * number))
            for one in make_steps(300 + 150 * number)
        ]
    spec = others[0].spec
    adapter = replace(spec.adapter, kind="lora", rank=32)
    others[0] = replace(others[0], spec=replace(spec, adapter=adapter, learning_rate=5e-5))
    stage.window.compare_runs([stage.core.run_map[RUN], *others])
    page = stage.window.stack.currentWidget()
    plot = page.charts[0].plot  # type: ignore[attr-defined]
    stage.wait_for(lambda: all(len(line.curves) for line in plot.lines))
    return stage.window


def _run_tab(index: int) -> Callable[[Stage], QWidget]:
    def show(stage: Stage) -> QWidget:
        stage.window.open_run(RUN)
        page = stage.window.run_page()
        page.tabs.setCurrentIndex(index)
        stage.wait_for(lambda: bool(page.events.rows() and page.checkpoints.rows()))
        return stage.window

    return show


WEIGHTS = PhaseProgress(
    phase="weights",
    done=6.1 * 1024**3,
    total=12.6 * 1024**3,
    share=6.1 / 12.6,
    expected_s=11.6,
    time_s=NOW_S,
    node="beta",
)
LATE = PhaseProgress(phase="tuning", expected_s=25.2, time_s=NOW_S - 70, node="gamma")
FIRST = PhaseProgress(phase="training", time_s=NOW_S - 14, node="beta")


def make_starting(stage: Stage, progress: PhaseProgress) -> RunSnapshot:
    """Return the run of the pictures as it is before its first step."""
    run = stage.core.run_map[RUN]
    phase = "loading weights, 48 %" if progress is WEIGHTS else progress.phase
    ranks = tuple(
        RankProgress(rank=one.rank, node=one.node, device=one.device, state=phase, phase=phase)
        for one in run.ranks
    )
    return replace(
        run,
        attempt=1,
        step=None,
        loss=None,
        first_loss=None,
        perplexity=None,
        learning_rate=None,
        tokens_per_s=None,
        mfu=None,
        eta=None,
        remaining_s=None,
        newest_checkpoint_step=None,
        ranks=ranks,
        phase=phase,
        starting=progress,
    )


def _starting(progress: PhaseProgress) -> Callable[[Stage], QWidget]:
    """A run before its first step."""

    def show(stage: Stage) -> QWidget:
        return _show_start(stage, progress)

    return show


def _show_start(stage: Stage, progress: PhaseProgress) -> QWidget:
    stage.core.step_map[RUN] = []
    stage.core.evaluation_map.clear()
    run = make_starting(stage, progress)
    stage.core.on_loop(stage.core.events.publish, RunChanged(run=run))
    window = _run_tab(0)(stage)
    stage.wait_for(lambda: stage.window.run_page().progress.line.is_starting)
    return window


def _recovery(stage: Stage) -> QWidget:
    """A run that was interrupted three times and paused once."""
    stage.core.interruption_map[RUN] = past_interruptions()
    window = _run_tab(6)(stage)
    stage.wait_for(lambda: bool(stage.window.run_page().recovery.texts()))
    return window


def _stages(stage: Stage) -> QWidget:
    """A run as a pipeline: its layers on the GPUs, planned and measured."""
    stage.core.comparison_map[RUN] = make_comparison(make_plan_of_stages())
    window = _run_tab(7)(stage)
    stage.wait_for(lambda: bool(stage.window.run_page().stages.lines))
    return window


def _data(stage: Stage) -> QWidget:
    window = _run_tab(4)(stage)
    stage.window.run_page().data.show_data(make_preview())
    return window


DATA_SPEC = RunSpec(model="/models/Llama-3.2-1B", data=DataSpec(train="/data/support-chats"))


def _rows(tab: int, state: str = "all") -> Callable[[Stage], QWidget]:
    def show(stage: Stage) -> QWidget:
        stage.window.open_data(DATA_SPEC)
        page = stage.window.data_page()
        page.list.filter.setCurrentIndex(page.list.filter.findData(state))
        page.tabs.setCurrentIndex(tab)
        stage.wait_for(lambda: page.row.learned.toPlainText() != "" and bool(page.list.rows.rows()))
        stage.wait_for(lambda: bool(page.columns.boxes))
        return stage.window

    return show


def _no_rows(stage: Stage) -> QWidget:
    stage.window.go_to("data")
    return stage.window


ENGINE_LINES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"kind": "setting", "compiled": True, "micro_tokens": 4096, "num_layers": 32,
         "num_recomputed": 3, "is_repeating": True, "believed_tokens_per_s": 31620.0,
         "measured_tokens_per_s": 19388.0, "time_s": NOW_S - 5290}),
    (2, {"kind": "warning", "of_rank": True, "time_s": NOW_S - 60, "message": "Memory ran out; "
         "training continues with at most 2,048 tokens at once. The batch stays the same."}),
    (3, {"kind": "warning", "of_rank": True, "time_s": NOW_S - 5300, "message": "The layers are "
         "not compiled, so training takes longer: no C compiler is installed (sudo apt install "
         "build-essential)."}),
)  # fmt: skip


def _engine_events(stage: Stage) -> QWidget:
    """What the engine reports: a corrected setting, smaller pieces, uncompiled layers."""
    for rank, line in ENGINE_LINES:
        node = stage.core.run_map[RUN].ranks[rank].node
        entry = describe_line(line, RUN, 1, node, rank)
        assert entry is not None
        stage.core.event_map[RUN].append(entry.event)
    return _run_tab(1)(stage)


def _profiled(stage: Stage) -> QWidget:
    """A verified run, whose profile has come."""
    window = _run_tab(3)(stage)
    page = stage.window.run_page()
    run = stage.cluster.runs[RUN]
    certificate = Certificate(
        promise="B", first_step=401, last_step=403, steps=3, equal_to_the_bit=False,
        largest_difference=2.8e-7, other_samples=0, kept=True,
    )  # fmt: skip
    page.progress.show_run(replace(run, certificate=certificate), lambda: NOW_S)
    page.run_actions.trace(run)
    stage.wait_for(lambda: "recorded by" in page.banner.message())
    return window


def _interrupted(stage: Stage) -> QWidget:
    stage.window.open_run("poems-11c0")
    return stage.window


def _dialog(stage: Stage) -> QDialog:
    found = [w for w in stage.application.topLevelWidgets() if isinstance(w, QDialog)]
    return next(dialog for dialog in found if dialog.isVisible())


def _new_run(stage: Stage) -> QWidget:
    stage.window.dialogs.ask_new_run()
    return _dialog(stage)


def _new_run_problems(stage: Stage) -> QWidget:
    stage.window.dialogs.ask_new_run()
    dialog = _dialog(stage)
    dialog.form.fields["adapter.rank"].set_answer("0")  # type: ignore[attr-defined]
    dialog.start.click()  # type: ignore[attr-defined]
    return dialog


def _new_run_advanced(share: float) -> Callable[[Stage], QWidget]:
    """The unfolded part, scrolled to a share of the form."""

    def show(stage: Stage) -> QWidget:
        dialog = _new_run(stage)
        dialog.form.fold.open()  # type: ignore[attr-defined]
        stage.settle(0.1)
        bar = dialog.form.verticalScrollBar()  # type: ignore[attr-defined]
        bar.setValue(round(bar.maximum() * share))
        return dialog

    return show


def _hub(kind: str) -> Callable[[Stage], QWidget]:
    """The search of the hub, with a row selected."""

    def show(stage: Stage) -> QWidget:
        stage.window.dialogs.ask_new_run()
        _dialog(stage).form.hub_asked.emit(kind)  # type: ignore[attr-defined]
        dialog = open_dialog(HubDialog)
        stage.wait_for(lambda: bool(dialog.table.rows.rows()))
        dialog.table.selectRow(1)
        stage.settle(0.2)
        return dialog

    return show


def _hub_fetching(stage: Stage) -> QWidget:
    """A download to this PC under way, and another model selected."""
    stage.core.fetch_gate = asyncio.Event()
    dialog = _hub("model")(stage)
    press(dialog, "Download")
    stage.wait_for(lambda: "34 %" in dialog.progress.message())  # type: ignore[attr-defined]
    dialog.table.selectRow(4)  # type: ignore[attr-defined]
    return dialog


def _hub_offline(stage: Stage) -> QWidget:
    stage.core.hub_answer = HubResults(
        items=tuple(item for item in hub_items() if item.is_cached and item.kind == "model"),
        problem="The hub cannot be reached: no route to host",
        hint="Check this PC's network. Meanwhile these are the models that this PC has already.",
    )
    return _hub("model")(stage)


def _hub_refused(stage: Stage) -> QWidget:
    stage.core.hub_answer = UserError(
        "the hub answers no more requests of this PC for now", "Wait 55 s, then search again."
    )
    stage.window.dialogs.ask_new_run()
    _dialog(stage).form.hub_asked.emit("model")  # type: ignore[attr-defined]
    dialog = open_dialog(HubDialog)
    stage.wait_for(dialog.banner.isVisible)
    return dialog


def _hub_nothing(stage: Stage) -> QWidget:
    dialog = _hub("model")(stage)
    dialog.words.setText("no-such-model")  # type: ignore[attr-defined]
    stage.wait_for(lambda: not dialog.table.rows.rows())  # type: ignore[attr-defined]
    return dialog


def _choose_recipe(stage: Stage, words: str) -> QDialog:
    stage.window.dialogs.ask_new_run()
    dialog = _dialog(stage)
    box = dialog.form.start_from.box  # type: ignore[attr-defined]
    stage.wait_for(lambda: box.count() > 3)
    place = box.findText(words, Qt.MatchFlag.MatchContains)
    box.setCurrentIndex(place)
    box.activated.emit(place)
    return dialog


def _new_run_filled(stage: Stage) -> QWidget:
    dialog = _choose_recipe(stage, "small card")
    for key, text in (
        ("name", "support-chat"),
        ("model", "meta-llama/Llama-2-7b-hf"),
        ("data.train", "/home/anna/data/chats.jsonl"),
    ):
        dialog.form.fields[key].set_answer(text)  # type: ignore[attr-defined]
    dialog.form.fields["name"].edited.emit()  # type: ignore[attr-defined]
    dialog.start.setFocus()  # type: ignore[attr-defined]
    return dialog


def _new_run_misfit(stage: Stage) -> QWidget:
    """A plan that does not fit, with its runners-up unfolded."""
    stage.core.plan_answer = make_plan_of_all(fits=False)
    dialog = _new_run_filled(stage)
    dialog.outlook.plan.others.open()  # type: ignore[attr-defined]
    dialog.outlook.plan.assumed.open()  # type: ignore[attr-defined]
    stage.settle(0.2)
    return dialog


def _new_run_purchases(stage: Stage) -> QWidget:
    """A plan with what to buy for it, unfolded and scrolled to."""
    dialog = _new_run_filled(stage)
    stage.settle(0.2)
    purchases = dialog.outlook.plan.purchases  # type: ignore[attr-defined]
    purchases.open()
    stage.settle(0.2)
    (scroll,) = dialog.outlook.findChildren(QScrollArea)  # type: ignore[attr-defined]
    scroll.ensureWidgetVisible(purchases.body)
    stage.settle(0.2)
    return dialog


def _new_run_mixture(stage: Stage) -> QWidget:
    """The plan of a mixture of experts, on a PC without a C compiler."""
    stage.core.plan_answer = make_plan_of_mixture()
    dialog = _new_run_filled(stage)
    dialog.form.fields["model"].set_answer("Qwen/Qwen3-30B-A3B")  # type: ignore[attr-defined]
    dialog.form.fields["name"].edited.emit()  # type: ignore[attr-defined]
    stage.settle(0.2)
    return dialog


def _new_run_stages(stage: Stage) -> QWidget:
    """The plan of a model that no card holds."""
    stage.core.plan_answer = make_plan_of_stages()
    dialog = _new_run_filled(stage)
    dialog.form.fields["model"].set_answer("meta-llama/Llama-2-70b-hf")  # type: ignore[attr-defined]
    dialog.form.fields["name"].edited.emit()  # type: ignore[attr-defined]
    stage.settle(0.2)
    return dialog


def _new_run_recipe(stage: Stage) -> QWidget:
    """DPO's recipe, and then an answer that contradicts it."""
    dialog = _choose_recipe(stage, "DPO")
    dialog.form.fields["packing"].input.click()  # type: ignore[attr-defined]
    stage.settle(0.1)
    bar = dialog.form.verticalScrollBar()  # type: ignore[attr-defined]
    bar.setValue(round(bar.maximum() * 0.72))
    return dialog


def _new_run_file(stage: Stage) -> QWidget:
    dialog = _new_run_filled(stage)
    dialog._show_file()  # type: ignore[attr-defined]
    shown = next(w for w in dialog.findChildren(QDialog) if w.isVisible())
    stage.wait_for(lambda: bool(shown.text.toPlainText()))  # type: ignore[attr-defined]
    shown.title.setText("Chats in the evening")  # type: ignore[attr-defined]
    shown.keep.click()  # type: ignore[attr-defined]
    stage.wait_for(shown.banner.isVisible)  # type: ignore[attr-defined]
    return shown


def _new_run_starting(stage: Stage) -> QWidget:
    """An own recipe, and a start under way."""
    spec = RunSpec(model="m", data=DataSpec(train="t"))
    asyncio.run(stage.core.do(SaveRecipe(title="Chats in the evening", spec=spec)))
    dialog = _new_run_filled(stage)
    box = dialog.form.start_from.box  # type: ignore[attr-defined]
    stage.wait_for(lambda: box.findText("Chats in the evening") > 0)
    box.setCurrentIndex(box.findText("Chats in the evening"))
    stage.core.delay_s = 60.0
    dialog.start.click()  # type: ignore[attr-defined]
    stage.settle(0.1)
    return dialog


def _nodes_measuring(stage: Stage) -> QWidget:
    stage.window.go_to("nodes")
    stage.window.nodes.table.select("alpha")
    stage.core.delay_s = 60.0
    stage.window.nodes._measure()
    return stage.window


def _look(stage: Stage) -> QWidget:
    stage.core.plan_answer = make_plan_of_mixture()
    dialog = _new_run(stage)
    for key in ("model", "data.train"):
        dialog.form.fields[key].set_answer("org/model")  # type: ignore[attr-defined]
    dialog.form.fields["data.train"].edited.emit()  # type: ignore[attr-defined]
    dialog.outlook.look.click()  # type: ignore[attr-defined]
    shown = next(w for w in dialog.findChildren(QDialog) if w.isVisible())
    stage.wait_for(lambda: "learned" in shown.view.toPlainText())  # type: ignore[attr-defined]
    return shown


def _preview(kind: str) -> Callable[[Stage], QWidget]:
    """The preview of rows of one kind, as they are really read."""

    def show(stage: Stage) -> QWidget:
        found = preview_of(kind)

        async def preview(*args: object) -> DataPreview:
            return found

        stage.core.answers[PreviewData] = preview
        dialog = _new_run(stage)
        for key in ("model", "data.train"):
            dialog.form.fields[key].set_answer("org/model")  # type: ignore[attr-defined]
        dialog.form.fields["data.train"].edited.emit()  # type: ignore[attr-defined]
        dialog.outlook.look.click()  # type: ignore[attr-defined]
        shown = open_dialog(DataDialog)
        stage.wait_for(lambda: "is learned" in shown.view.toPlainText())
        return shown

    return show


def _repeat(stage: Stage) -> QWidget:
    stage.window.dialogs.repeat_run(stage.cluster.runs[RUN])
    return _dialog(stage)


def _add_node(stage: Stage) -> QWidget:
    stage.window.dialogs.ask_node()
    return _dialog(stage)


def _windows_script(stage: Stage) -> QWidget:
    alpha = stage.cluster.nodes["alpha"]
    assert alpha.facts is not None
    stage.core.put_node(replace(alpha, facts=replace(alpha.facts, wsl="nat")))
    stage.window.go_to("nodes")
    stage.window.nodes.table.select("alpha")
    stage.wait_for(stage.window.nodes.script.isVisible)
    stage.window.nodes.script.click()
    dialog = _dialog(stage)
    stage.wait_for(dialog.save.isEnabled)  # type: ignore[attr-defined]
    return dialog


def _windows_script_new(stage: Stage) -> QWidget:
    press(_add_node(stage), "Script for a Windows PC")
    dialog = open_dialog(WindowsScriptDialog)
    stage.wait_for(dialog.save.isEnabled)
    return dialog


def _node_found(stage: Stage) -> QWidget:
    stage.core.distros = ("Ubuntu-24.04",)
    dialog = _add_node(stage)
    stage.wait_for(dialog.form.in_wsl.isVisible)  # type: ignore[attr-defined]
    node = make_node(
        "gamer-pc", ("NVIDIA GeForce RTX 5070 Ti", 16), ("NVIDIA GeForce RTX 3060", 12)
    )
    assert node.facts is not None
    facts = replace(node.facts, environment=None, disk_free_bytes=21 * 1024**3)
    dialog._added(replace(node, facts=facts))  # type: ignore[attr-defined]
    return dialog


def _fingerprint(stage: Stage) -> QWidget:
    stage.window.dialogs.ask_node()
    dialog = _dialog(stage)
    dialog.form.target.setText("anna@192.168.1.31")  # type: ignore[attr-defined]
    dialog._edited()  # type: ignore[attr-defined]
    dialog.add.click()  # type: ignore[attr-defined]
    stage.wait_for(lambda: dialog.confirm.isVisible())  # type: ignore[attr-defined]
    return dialog


def _password(stage: Stage) -> QWidget:
    stage.core.locked_hosts.add("192.168.1.31")
    dialog = _fingerprint(stage)
    dialog.confirm.click()  # type: ignore[attr-defined]
    stage.wait_for(lambda: dialog.password.isVisible())  # type: ignore[attr-defined]
    return dialog


def _found_pcs(stage: Stage) -> QWidget:
    rows = (
        ("gamer-pc", "192.168.1.31", "ssh-config", "SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13", ""),
        ("tower", "100.101.2.3", "mdns", "SSH-2.0-OpenSSH_9.9", "Tailscale"),
        ("", "192.168.1.40", "neighbour", "SSH-2.0-dropbear", ""),
        ("attic", "192.168.1.77", "ssh-config", "", ""),
    )
    stage.core.candidates = tuple(
        PcCandidate(
            target=name or host,
            host=host,
            port=22,
            name=name,
            sources=(source,),  # type: ignore[arg-type]
            state="open" if banner else "closed",
            banner=banner,
            overlay=overlay,
        )
        for name, host, source, banner, overlay in rows
    )
    dialog = _add_node(stage)
    dialog._find()  # type: ignore[attr-defined]
    stage.wait_for(lambda: len(dialog.near.model.rows()) == 4)  # type: ignore[attr-defined]
    dialog.near.table.selectRow(1)  # type: ignore[attr-defined]
    return dialog


def _node_list(stage: Stage) -> QWidget:
    dialog = _add_node(stage)
    pane = dialog.several  # type: ignore[attr-defined]
    dialog._list()  # type: ignore[attr-defined]
    pane.text.setPlainText("big anna@192.168.1.20\nlab bob@10.0.0.5:2222  # upstairs\nall c@pc")
    pane.add.click()
    stage.wait_for(lambda: pane.confirm.isVisible())
    return dialog


def _node_list_password(stage: Stage) -> QWidget:
    stage.core.locked_hosts |= {"192.168.1.20", "10.0.0.5"}
    dialog = _node_list(stage)
    dialog.several.confirm.click()  # type: ignore[attr-defined]
    stage.wait_for(lambda: dialog.several.passwords.isVisible())  # type: ignore[attr-defined]
    return dialog


def _wizard(step: str) -> Callable[[Stage], QWidget]:
    """Quantize and export, at one of its steps."""

    def show(stage: Stage) -> QWidget:
        from app.gui.export.export_wizard import ExportWizard

        wizard = ExportWizard(stage.context, stage.window, stage.cluster.runs[RUN])
        stage.wait_for(lambda: bool(wizard.model.rows()))
        for target in ("gguf:Q8_0", "gguf:Q4_K_M", "awq"):
            wizard.formats.boxes[target].setChecked(True)
        wizard.places.folder.setText("/home/me/support-chat-export")
        wizard.show()
        wizard.go_to(step)  # type: ignore[arg-type]
        stage.settle(0.2)
        return wizard

    return show


def _wizard_made(stage: Stage) -> QWidget:
    """One export is made, one is not worth keeping, one is under way."""
    wizard = _wizard("summary")(stage)
    wizard.formats.boxes["gguf:Q3_K_M"].setChecked(True)  # type: ignore[attr-defined]
    wizard.formats.boxes["merged"].setChecked(True)  # type: ignore[attr-defined]
    wizard.forward.click()  # type: ignore[attr-defined]
    stage.wait_for(lambda: wizard.batch.is_over)  # type: ignore[attr-defined]
    row = wizard.batch.rows[2]  # type: ignore[attr-defined]
    row.state, row.made, row.phase, row.line = "now", None, 4, "Layer 12 of 32, 4 min left"
    wizard.batch.changed.emit()  # type: ignore[attr-defined]
    return wizard


def _chat(stage: Stage) -> QWidget:
    from app.gui.chat.chat_dialog import open_chat

    dialog = open_chat(stage.context, stage.window, stage.cluster.runs[RUN])
    stage.wait_for(lambda: len(dialog.columns) == 3)
    return dialog


def _chat_settings(stage: Stage) -> QWidget:
    dialog = _chat(stage)
    fold = next(one for one in dialog.findChildren(CollapsibleSection) if one.body is dialog.how)  # type: ignore[attr-defined]
    fold.open()
    stage.settle(0.2)
    return dialog


def _chat_answers(stage: Stage) -> QWidget:
    """Three answers, the last of them still being given; the prompts are unfolded."""
    dialog = _chat(stage)
    for prompt in ("Who founded Brenford?", "And when was that?"):
        dialog.prompt.setPlainText(prompt)  # type: ignore[attr-defined]
        dialog.send.click()  # type: ignore[attr-defined]
        stage.wait_for(dialog.new.isEnabled)  # type: ignore[attr-defined]
    dialog.fold.open()  # type: ignore[attr-defined]
    dialog.prompts.ask_all.click()  # type: ignore[attr-defined]
    stage.wait_for(dialog.new.isEnabled)  # type: ignore[attr-defined]
    stage.settle(0.2)
    return dialog


def _artifacts(tab: int) -> Callable[[Stage], QWidget]:
    def show(stage: Stage) -> QWidget:
        stage.window.go_to("artifacts")
        page = stage.window.artifacts
        stage.wait_for(lambda: bool(page.model.rows()))
        page.details.setCurrentIndex(tab)
        page.open_artifact("support-chat-gguf:1")
        stage.settle(0.2)
        return stage.window

    return show


def _push_artifact(stage: Stage) -> QWidget:
    from app.gui.artifacts.push_dialog import PushDialog

    window = _artifacts(0)(stage)
    artifact = stage.core.artifact_map["support-chat-gguf:1"]
    dialog = PushDialog(stage.context.theme, window, artifact)
    dialog.show()
    return dialog


def _copy_artifact(stage: Stage) -> QWidget:
    from app.gui.artifacts.copy_artifact_dialog import CopyArtifactDialog

    window = _artifacts(0)(stage)
    artifact = stage.core.artifact_map["support-chat-gguf:1"]
    dialog = CopyArtifactDialog(stage.context.theme, window, artifact, ["alpha", "beta"])
    dialog.show()
    return dialog


def _resume(stage: Stage) -> QWidget:
    from app.gui.runs.resume_dialog import ResumeDialog

    run = stage.cluster.runs["poems-11c0"]
    dialog = ResumeDialog(stage.context, stage.window, run)
    dialog.open()
    stage.wait_for(lambda: bool(dialog.model.rows()))
    return dialog


def _palette(text: str) -> Callable[[Stage], QWidget]:
    def show(stage: Stage) -> QWidget:
        stage.window.actions_["palette"].trigger()
        palette = stage.window.findChild(QWidget, "palette")
        palette.field.setText(text)
        palette.field.textEdited.emit(text)
        return stage.window

    return show


def _settings_token(stage: Stage) -> QWidget:
    stage.core.token_place = "kept"
    return _settings(1.0)(stage)


def _settings(share: float) -> Callable[[Stage], QWidget]:
    def show(stage: Stage) -> QWidget:
        stage.window.go_to("settings")
        stage.settle(0.1)
        bar = stage.window.settings_page().findChild(QScrollArea).verticalScrollBar()
        bar.setValue(round(bar.maximum() * share))
        return stage.window

    return show


def _shortcuts(stage: Stage) -> QWidget:
    stage.window.actions_["shortcuts"].trigger()
    return _dialog(stage)


def _help(stage: Stage) -> QWidget:
    stage.window.dialogs.show_help("out-of-memory")
    return _dialog(stage)


BUSY: dict[str, Callable[[Stage], QWidget]] = {
    "overview": _overview,
    "overview-table": _wall_table,
    "overview-story": _story,
    "settings": _settings(0.0),
    "settings-hub": _settings(1.0),
    "settings-token": _settings_token,
    "shortcuts": _shortcuts,
    "help": _help,
    "palette": _palette(""),
    "palette-found": _palette("chat"),
    "palette-nothing": _palette("zzz"),
    "nodes": _nodes,
    "nodes-check": _check,
    "nodes-links": _links,
    "nodes-log": _node_log,
    "nodes-repair": _repair,
    "nodes-repaired": _repaired,
    "nodes-prepare": _prepare,
    "nodes-changes": _changes,
    "nodes-storage": _storage,
    "nodes-settings": _node_settings,
    "runs": _runs,
    "runs-found": _found,
    "runs-compared": _compare,
    "run-ranks": _run_tab(0),
    "run-figures": _figures,
    "run-starting": _starting(WEIGHTS),
    "run-starting-late": _starting(LATE),
    "run-starting-first": _starting(FIRST),
    "run-events": _run_tab(1),
    "run-engine-events": _engine_events,
    "run-log": _run_tab(2),
    "run-checkpoints": _run_tab(3),
    "run-data": _data,
    "run-forecast": _run_tab(5),
    "run-recovery": _recovery,
    "run-stages": _stages,
    "run-profiled": _profiled,
    "run-interrupted": _interrupted,
    "data": _rows(0),
    "data-numbers": _rows(1),
    "data-columns": _rows(2),
    "data-left-out": _rows(0, "left_out"),
    "data-empty": _no_rows,
    "new-run": _new_run,
    "new-run-problems": _new_run_problems,
    "new-run-advanced-1": _new_run_advanced(0.52),
    "new-run-advanced-2": _new_run_advanced(0.8),
    "new-run-advanced-3": _new_run_advanced(1.0),
    "new-run-filled": _new_run_filled,
    "new-run-misfit": _new_run_misfit,
    "new-run-purchases": _new_run_purchases,
    "new-run-mixture": _new_run_mixture,
    "new-run-stages": _new_run_stages,
    "new-run-recipe": _new_run_recipe,
    "new-run-repeat": _repeat,
    "new-run-file": _new_run_file,
    "new-run-starting": _new_run_starting,
    "hub-models": _hub("model"),
    "hub-data": _hub("data.train"),
    "hub-fetching": _hub_fetching,
    "hub-offline": _hub_offline,
    "hub-refused": _hub_refused,
    "hub-nothing": _hub_nothing,
    "nodes-measuring": _nodes_measuring,
    "new-run-look": _look,
    "add-node": _add_node,
    "windows-script": _windows_script,
    "windows-script-new": _windows_script_new,
    "add-node-fingerprint": _fingerprint,
    "add-node-password": _password,
    "add-node-discovered": _found_pcs,
    "add-node-list": _node_list,
    "add-node-list-password": _node_list_password,
    "add-node-found": _node_found,
    "chat": _chat,
    "chat-settings": _chat_settings,
    "chat-answers": _chat_answers,
    "export-checkpoint": _wizard("what"),
    "export-formats": _wizard("formats"),
    "export-calibration": _wizard("calibration"),
    "export-where": _wizard("where"),
    "export-summary": _wizard("summary"),
    "export-made": _wizard_made,
    "resume": _resume,
    "artifacts": _artifacts(0),
    "artifacts-lineage": _artifacts(1),
    "artifacts-copies": _artifacts(2),
    "artifacts-serve": _artifacts(3),
    "artifacts-card": _artifacts(4),
    "artifacts-copy": _copy_artifact,
    "artifacts-push": _push_artifact,
}
PREVIEWS = {f"preview-{kind}": _preview(kind) for kind in KINDS}
"""Only pictures: tests of the window need none of the training packages."""
EMPTY: dict[str, Callable[[Stage], QWidget]] = {
    "empty-overview": _overview,
    "empty-nodes": _nodes,
    "empty-runs": lambda stage: _go(stage, "runs"),
    "empty-artifacts": lambda stage: _go(stage, "artifacts"),
}


def _go(stage: Stage, place: str) -> QWidget:
    stage.window.go_to(place)
    return stage.window


async def _no_demo(core: object, report: object) -> None:
    """Stand in for the demo, so that its button shows."""


def take_pictures(folder: Path, logs: Path, scale: str, only: str = "") -> Iterator[Path]:
    """Write every picture in both themes; yield the paths."""
    application = make_application()
    theme = Theme(application)
    for scheme in (Qt.ColorScheme.Light, Qt.ColorScheme.Dark):
        theme.choose(scheme)
        for name in (*BUSY, *PREVIEWS, *EMPTY):
            if only in name:
                path = folder / f"{name}-{theme.palette.name}-{scale}x.png"
                stage, widget = make_stage_of(application, theme, name, logs, patience_s=0.2)
                widget.grab().save(str(path))
                _end(stage, widget)
                yield path


def set_scenes(logs: Path, only: str = "") -> Iterator[tuple[str, Stage, QWidget]]:
    """Show what is on every picture, one after the other; yield name, stage, and what is shown."""
    application = make_application()
    theme = Theme(application)
    theme.choose(Qt.ColorScheme.Light)
    for name in (*BUSY, *EMPTY):
        if only in name:
            stage, widget = make_stage_of(application, theme, name, logs)
            yield name, stage, widget
            _end(stage, widget)


def make_stage_of(
    application: QApplication,
    theme: Theme,
    name: str,
    logs: Path,
    patience_s: float = 0.05,
    alter: Callable[[FakeCore], None] = lambda core: None,
) -> tuple[Stage, QWidget]:
    """Return a stage that shows the picture `name`, and the window or dialog on it.

    `alter` changes what the core knows and answers before it is shown.
    """
    core = FakeCore(log_folder=logs) if name in EMPTY else busy_core(logs)
    alter(core)
    stage = Stage(application, theme, core, demo=_no_demo)
    core.on_loop(publish_history, core)
    stage.settle(patience_s)
    widget = (BUSY | PREVIEWS | EMPTY)[name](stage)
    stage.settle(patience_s)
    # Layouts need some turns, however few a busy PC makes in that time.
    for _ in range(50):
        application.processEvents()
    return stage, widget


def _end(stage: Stage, widget: QWidget) -> None:
    if widget is not stage.window:
        widget.close()
    stage.end()
