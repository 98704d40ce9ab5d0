"""Actions on a run, shared by the table of runs and the page of a single run."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from app.conversation import Subject
from app.core.runs import EraseRun, ResumeRun, SaveCheckpoint, StopRun, TakeOverRun, TraceRun
from app.events import ACTIVE_STATES, RunSnapshot, TraceResult
from app.gui.chat.chat_dialog import open_chat
from app.gui.export.export_wizard import ExportWizard
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.primitives import copy_to_clipboard
from app.gui.runs.resume_dialog import ResumeDialog
from app.gui.session.banner_task import last_with_run, run_in_banner, show_run_error
from app.gui.session.context import Context
from app.presentation.result_text import describe_saved, describe_trace
from app.text import capitalize, show_share

TRACED_STEPS = 3


def can_stop(run: RunSnapshot) -> bool:
    # A run that is stopping may be stopped at once, without its checkpoint.
    return run.state in ACTIVE_STATES or run.is_recovering or run.is_resuming


def can_save(run: RunSnapshot) -> bool:
    return run.state == "running"


def can_resume(run: RunSnapshot) -> bool:
    return run.state in ("stopped", "interrupted", "failed") and not run.is_resuming


def can_take_over(run: RunSnapshot) -> bool:
    return run.is_foreign and run.state not in ("created", "done")


def can_delete(run: RunSnapshot) -> bool:
    return run.state not in ACTIVE_STATES


def can_export(run: RunSnapshot) -> bool:
    return run.newest_checkpoint_step is not None or run.state == "done"


class RunActions:
    """Confirms where needed, calls the core, and reports progress and result in `banner`."""

    def __init__(self, context: Context, parent: QWidget, banner: Banner) -> None:
        self._context, self._parent, self._banner = context, parent, banner

    def save(self, run: RunSnapshot) -> None:
        title = f"Saving a checkpoint of {run.name}"
        self._banner.show_message("busy", title, "After the current step; training continues.")
        self._context.bridge.do(
            SaveCheckpoint(run_id=run.run_id),
            success=lambda saved: self._show_result(run, run.name, describe_saved(saved)),
            failure=partial(show_run_error, self._context, self._banner, run.run_id),
        )

    def _show_result(self, run: RunSnapshot, title: str, text: str) -> None:
        """Show a result until the run is resumed or deleted."""
        self._banner.show_message("good", title, text)
        last_with_run(self._context, self._banner, run.run_id, with_state=False)

    def trace(self, run: RunSnapshot) -> None:
        run_in_banner(
            self._context.bridge,
            self._banner,
            TraceRun(run_id=run.run_id, num_steps=TRACED_STEPS),
            lambda made: self._show_trace(run, made),
            title=f"Profiling {run.name}",
            hint=f"Recording the next {TRACED_STEPS} steps on every rank.",
            cancelled="The ranks may still write traces, but they are not collected.",
            failed=partial(show_run_error, self._context, self._banner, run.run_id),
        )

    def _show_trace(self, run: RunSnapshot, made: TraceResult) -> None:
        whole = [trace for trace in made.ranks if not trace.problem]
        if not whole:
            self._banner.show_message("warning", run.name, describe_trace(made))
            return
        paths = "\n".join(trace.path for trace in whole)
        # Kernel names of CUTLASS run to hundreds of characters; their start tells them apart.
        most = [f"{row.name[:40]} {show_share(row.share)}" for row in whole[0].top[:3]]
        self._banner.show_message(
            "good",
            f"{run.name}: {describe_trace(made)}",
            f"Most time in {', '.join(most)}. Open at ui.perfetto.dev:\n{paths}",
            ("Copy paths", lambda: copy_to_clipboard(paths)),
        )

    def stop(self, run: RunSnapshot) -> None:
        text = "The run writes a checkpoint, then ends on every node. You can resume it later."
        if run.is_recovering:
            text = "The run is then not resumed automatically. You can resume it later."
        elif run.state == "stopping":
            text = "It is stopping already. Stop it at once, without waiting for its checkpoint?"
        elif run.state in ("created", "launching") or run.is_resuming:
            text = "Its start ends, and nothing of it stays on any node. You can resume it later."
        if not confirm(self._parent, self._context.theme, f"Stop {run.name}?", text, "Stop run"):
            return
        title = f"Stopping {run.name}"
        self._banner.show_message("busy", title, "Waiting for its checkpoint.")
        self._context.bridge.do(
            StopRun(run_id=run.run_id),
            progress=lambda line: self._banner.show_message("busy", title, capitalize(line)),
            success=lambda result: self._show_result(
                run, f"Stopped {run.name}", "All of its processes on the nodes have ended."
            ),
            failure=partial(show_run_error, self._context, self._banner, run.run_id),
        )

    def take_over(self, run: RunSnapshot) -> None:
        text = (
            "After a loss, this PC then resumes the run. The master that started it is "
            "notified, and only watches it. Training continues."
        )
        theme = self._context.theme
        if not confirm(self._parent, theme, f"Take over {run.name}?", text, "Take over"):
            return
        self._context.bridge.do(
            TakeOverRun(run_id=run.run_id),
            success=lambda result: self._show_result(
                run, f"Took over {run.name}", "This PC resumes it after a loss."
            ),
            failure=partial(show_run_error, self._context, self._banner, run.run_id),
        )

    def resume(self, run: RunSnapshot) -> None:
        dialog = ResumeDialog(self._context, self._parent, run)
        if not dialog.exec():
            return
        choice = dialog.choice()
        step, nodes, verify_steps = choice.step, choice.nodes, choice.verify_steps
        run_in_banner(
            self._context.bridge,
            self._banner,
            ResumeRun(run_id=run.run_id, checkpoint=step, nodes=nodes, verify_steps=verify_steps),
            # From here on the state of the run shows the progress of the resume.
            lambda result: self._banner.hide(),
            title=f"Resuming {run.name}",
            hint=f"On {', '.join(nodes)}.",
            cancelled="Its checkpoints are unchanged. Anything already launched is stopped.",
            at_close=f"Resuming {run.name} stops: it does not train yet. Its checkpoints stay.",
            failed=partial(show_run_error, self._context, self._banner, run.run_id),
        )

    def delete(self, run: RunSnapshot) -> None:
        text = (
            "Deletes its checkpoints, logs and metrics on this PC and on its nodes. Artifacts "
            "are kept. This cannot be undone."
        )
        theme = self._context.theme
        if not confirm(
            self._parent,
            theme,
            f"Delete {run.name}?",
            text,
            "Delete permanently",
            is_dangerous=True,
        ):
            return
        self._context.bridge.do(
            EraseRun(run_id=run.run_id),
            failure=partial(show_run_error, self._context, self._banner, run.run_id),
        )

    def chat(self, run: RunSnapshot, step: int | None = None) -> None:
        """Open a chat with the run's models; `step` adds the checkpoint of that step."""
        wanted = None if step is None else Subject(what=run.run_id, checkpoint=step)
        open_chat(self._context, self._parent, run, wanted)

    def export(self, run: RunSnapshot) -> None:
        """Open the export wizard at the step where it was closed, or at the running export."""
        wizard = ExportWizard(self._context, self._parent, run)
        # Without this flag every closed wizard would live as long as the window.
        wizard.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        wizard.show()
