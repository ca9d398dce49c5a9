"""How a checklist item is made."""

from __future__ import annotations

from dataclasses import dataclass

from fragdoctor.model.diagnosis import ChecklistItem, Status


@dataclass(frozen=True, slots=True)
class Item:
    """Id and title of an item; each method makes the item with one outcome."""

    id: str
    title: str

    def passed(self, value: str, detail: str, source: str) -> ChecklistItem:
        """Return the item as passed."""
        return ChecklistItem(self.id, self.title, Status.PASS, value, detail, source)

    def warn(self, value: str, detail: str, source: str) -> ChecklistItem:
        """Return the item as worth a look."""
        return ChecklistItem(self.id, self.title, Status.WARN, value, detail, source)

    def fail(self, value: str, detail: str, source: str) -> ChecklistItem:
        """Return the item as failed."""
        return ChecklistItem(self.id, self.title, Status.FAIL, value, detail, source)

    def skip(self, reason: str, value: str = "") -> ChecklistItem:
        """Return the item as not answered by any input, with the reason."""
        return ChecklistItem(self.id, self.title, Status.SKIP, value, reason)
