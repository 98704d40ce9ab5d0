"""Actions on an artifact, reported in the banner of its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QWidget

from app.artifact import ArtifactCopy, ArtifactSnapshot, tell_last
from app.conversation import Subject
from app.core import artifacts
from app.gui.artifacts.copy_artifact_dialog import CopyArtifactDialog
from app.gui.artifacts.push_dialog import PushDialog
from app.gui.chat.chat_dialog import open_chat
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.primitives import copy_to_clipboard
from app.gui.session.banner_task import run_in_banner
from app.gui.session.context import Context
from app.presentation.result_text import describe_copy
from app.telemetry.state import Tone
from app.text import count_of, show_bytes

if TYPE_CHECKING:
    from app.artifacts.deletion import DeletedArtifact
    from app.artifacts.serving import ServeCommand


class ArtifactActions:
    """Confirms where needed, calls the core, and reports the result."""

    def __init__(self, context: Context, parent: QWidget, banner: Banner) -> None:
        self._context, self._parent, self._banner = context, parent, banner

    def copy(self, artifact: ArtifactSnapshot) -> None:
        """Ask for a destination and copy the artifact there."""
        nodes = [node.name for node in self._context.cluster.node_list()]
        dialog = CopyArtifactDialog(self._context.theme, self._parent, artifact, nodes)
        if not dialog.exec():
            return
        place = dialog.place()
        run_in_banner(
            self._context.bridge,
            self._banner,
            artifacts.CopyArtifact(name=artifact.label, to=place),
            lambda found: self._banner.show_message(
                "good", f"Copied {artifact.label}", f"Saved in {place}, every file verified."
            ),
            title=f"Copying {artifact.label}",
            hint=f"To {place}.",
            cancelled="No copy was added. Copying again continues where this one stopped.",
            at_close=f"Copying {artifact.label} stops. Copying again continues from there.",
        )

    def push(self, artifact: ArtifactSnapshot) -> None:
        """Ask for a name on the hub and push the artifact."""
        dialog = PushDialog(self._context.theme, self._parent, artifact)
        if not dialog.exec():
            return
        name, private = dialog.name(), dialog.private.isChecked()
        run_in_banner(
            self._context.bridge,
            self._banner,
            artifacts.PushArtifact(name=artifact.label, hub_id=name, private=private),
            lambda found: self._banner.show_message(
                "good", f"Pushed {artifact.label} to the hub", f"As {name}."
            ),
            title=f"Pushing {artifact.label}",
            hint=f"To {name}.",
            cancelled=f"Check {name} on the hub: files already on their way may still appear "
            "there.",
            at_close=f"Pushing {artifact.label} stops. Some of its files may be on the hub.",
        )

    def chat(self, artifact: ArtifactSnapshot) -> None:
        """Open a chat with the artifact, and with its base model if its run is known."""
        # Without its run the base model is unknown here, and the chat has the artifact alone.
        run = self._context.cluster.runs.get(artifact.origin.run_id if artifact.origin else "")
        open_chat(self._context, self._parent, run, Subject(what=artifact.label))

    def check(self, artifact: ArtifactSnapshot) -> None:
        """Verify every copy by its hashes."""
        run_in_banner(
            self._context.bridge,
            self._banner,
            artifacts.VerifyArtifact(name=artifact.label),
            self._show_verified,
            title=f"Verifying {artifact.label}",
            hint="Reading every copy and comparing its hashes.",
            cancelled="The previous result still applies.",
        )

    def _show_verified(self, artifact: ArtifactSnapshot) -> None:
        bad = [one for one in artifact.copies if one.state != "whole"]
        number = count_of(len(artifact.copies), "copy", "copies")
        if not bad:
            self._banner.show_message(
                "good", f"{artifact.label}: {number} verified, every file intact"
            )
            return
        lines = "\n".join(describe_copy(one) for one in bad)
        self._banner.show_message(
            "warning", f"{artifact.label}: problems with {len(bad)} of {number}", lines
        )

    def delete(self, artifact: ArtifactSnapshot, copy: ArtifactCopy | None = None) -> None:
        """Ask for confirmation, then delete one copy, or (None) the artifact with all copies."""
        place = None if copy is None else copy.place
        warning = tell_last(artifact, place)
        what = artifact.label if copy is None else f"the copy in {copy.place}"
        text = " ".join(filter(None, (warning, "This cannot be undone.")))
        if not confirm(
            self._parent,
            self._context.theme,
            f"Delete {what}?",
            text if warning else f"Another copy of {artifact.label} remains.",
            "Delete permanently",
            is_dangerous=True,
        ):
            return
        self._context.bridge.do(
            # The dialog has warned if this is the last copy, so the core need not refuse.
            artifacts.DeleteCopies(name=artifact.label, place=place, even_last=True),
            success=self._show_deleted,
            failure=self._banner.show_error,
            at_close=f"Deleting {what} stops. Copies not reached stay.",
        )

    def _show_deleted(self, done: DeletedArtifact) -> None:
        # `left` names copies that could not be reached; they are listed, not hidden.
        freed = f"Freed {show_bytes(done.freed_bytes)}."
        tone: Tone = "warning" if done.left else "good"
        title = f"Deleted {done.label}" if done.is_forgotten else "Copy deleted"
        self._banner.show_message(tone, title, " ".join((freed, *(f"{why}." for why in done.left))))

    def add(self) -> None:
        """Ask for a folder and add it as an artifact."""
        chosen = QFileDialog.getExistingDirectory(self._parent, "Artifact folder")
        if chosen:
            self._context.bridge.do(
                artifacts.AddArtifact(folder=Path(chosen)),
                success=lambda found: self._banner.show_message(
                    "good", f"Added {found.label}", chosen
                ),
                failure=self._banner.show_error,
            )

    def open_folder(self, folder: str) -> None:
        """Show a folder in the desktop's own file manager."""
        QDesktopServices.openUrl(QUrl.fromLocalFile(folder))

    def copy_command(self, artifact: ArtifactSnapshot, command: ServeCommand) -> None:
        """Copy a command, and write the Modelfile that it names."""
        copy_to_clipboard(command.command)
        self._context.bridge.do(
            artifacts.WriteModelfile(name=artifact.label, command=command),
            success=lambda path: self._banner.show_message(
                "good",
                f"Copied the command for {command.title}",
                f"Wrote {path}." if path else "",
            ),
            failure=self._banner.show_error,
        )
