"""The Storage tab: what fills a node's disk, why it stays, and deleting it after a question."""

from app.gui.nodes.storage_pane import StoragePane
from tests.fakes.storage import CHECKPOINT, LAST, MODEL, PARTIAL
from tests.gui.stage import answer_question, press


def test_items_are_deleted_after_a_question_and_last_copies_are_not_offered(busy):
    pane = show_storage(busy)
    reasons = {item.name: item.protected for item in pane.model.rows()}
    assert reasons == {MODEL: "", CHECKPOINT: LAST, PARTIAL: ""}
    assert not pane.delete.isEnabled()
    pane.table.select(CHECKPOINT)
    assert not pane.delete.isEnabled()
    pane.table.select(MODEL)
    answer_question("Delete")
    press(pane, "Delete\u2026")
    busy.wait_for(lambda: "16.0 GiB are free again on alpha" in pane.banner.message())
    busy.wait_for(lambda: pane.leftovers.isEnabled())
    busy.core.storage.changed[PARTIAL] = "a transfer runs"
    answer_question("Delete")
    press(pane, "Delete leftovers\u2026")
    busy.wait_for(lambda: f"{PARTIAL} stays: a transfer runs" in pane.banner.message())
    freed = [call[1:] for call in busy.core.calls if call[0] == "storage.free"]
    assert freed == [("alpha", MODEL), ("alpha", PARTIAL)]
    answer_question("Cancel")
    busy.wait_for(lambda: pane.leftovers.isEnabled())
    press(pane, "Delete leftovers\u2026")
    assert len([call for call in busy.core.calls if call[0] == "storage.free"]) == 2


def show_storage(stage) -> StoragePane:
    page = stage.window.nodes
    page.open_node("alpha")
    stage.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.storage)
    stage.wait_for(lambda: "Rackless uses 24.0 GiB" in page.storage.summary.text())
    return page.storage
