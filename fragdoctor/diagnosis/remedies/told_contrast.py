"""Undo or bound what a text says a failure depends on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.framework_words import less_of_counted
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy, Weight, proposes
from fragdoctor.diagnosis.verdict_contrast import OPEN, contrast_of
from fragdoctor.model.case import ContrastKind, QuotedCode, ToldContrast

_IN_PARTS: Final = (
    "run parts of a size that works one after the other under torch.no_grad(), and join their "
    "results; in training, cut or drop what is larger"
)
_TITLES: Final = {
    ContrastKind.VERSION: "Go back to {works}",
    ContrastKind.CHANGE: "Leave out {fails}",
    ContrastKind.RAISED: "Lower {fails}{at}",
    ContrastKind.AMOUNT: "Use no more than {works} {fails} at a time",
    ContrastKind.DATA: "Limit the largest samples of the data set",
    ContrastKind.LARGE: "Split {fails} into smaller parts",
    ContrastKind.BUFFER: "Give the {fails} a lower limit",
    ContrastKind.COUNTED: "Use fewer {fails}",
}
_CHANGES: Final = {
    ContrastKind.VERSION: "install that version; or find out what the new one does differently "
    "(its release notes name new defaults: checkpointing, precision, attention, caches) and set "
    "it as it was",
    ContrastKind.CHANGE: "the run fits without it; if you need it, bound what it keeps or makes "
    "larger (a cache, a list, whole images)",
    ContrastKind.RAISED: "go back to a value that fits; for a higher one make something else "
    "smaller, such as the batch",
    ContrastKind.AMOUNT: _IN_PARTS,
    ContrastKind.DATA: "look for its longest texts, largest images and samples with the most "
    "objects, and cut, resize or drop them",
    ContrastKind.LARGE: _IN_PARTS,
    ContrastKind.BUFFER: "lower its maximum to what fits (its items times the bytes of each); keep "
    "frames as uint8, or keep it on disk (np.memmap)",
    ContrastKind.COUNTED: "",
}
_NO_GRAPH: Final = (
    "put torch.no_grad() around all that is only evaluated: since PyTorch 0.4, volatile=True has "
    "no effect; or install that version"
)
_OF_BATCH: Final = r"(?i)beam|sequences|generation|samples|candidates|hypothes"
_AS_BATCH: Final = (
    "go back to a value that fits: each one is another sample of the batch; ask for them in "
    "several calls, and keep the results on the CPU"
)
_OF_COPIES: Final = r"(?i)worker|actor|agent|env|process|replica|instance|model"
_AS_COPIES: Final = (
    "go back to a value that fits; where each one holds a copy of the model, spread the copies "
    "over more GPUs, or store the weights in fewer bits"
)


@proposes("Undo what the failure depends on")
def undo_contrast(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose to undo or bound what a text says the failure depends on."""
    message, contrast = case.message, contrast_of(case.message, case.told)
    if message is None or contrast is None or contrast.kind is None or case.cause not in OPEN:
        return
    if message.code != QuotedCode():
        return  # the code shows what to do
    title = _TITLES[contrast.kind].format(
        fails=contrast.fails,
        works=contrast.works or "the version that worked",
        at=f" from {contrast.at}" if contrast.at else " again",
    )
    told = case.told
    can_lower = (told.batch_size or 1) > 1 and not told.is_smaller_batch_tried
    if contrast.kind is ContrastKind.COUNTED and can_lower:
        title += f", or lower {told.batch_option} from {told.batch_size}"
    yield remedy.proposal(
        title=title,
        weight=Weight.CURES,
        change=_finer(case, contrast) or _CHANGES[contrast.kind],
        why=case.verdict.summary,
    )


def _finer(case: JudgedCase, contrast: ToldContrast) -> str:
    """Return a change by the words for what the failure depends on, or ""."""
    noun = contrast.fails
    if contrast.kind is ContrastKind.COUNTED:
        return less_of_counted(case, f"fewer {noun}")
    if contrast.kind is not ContrastKind.RAISED:
        return _NO_GRAPH if "torch 0.4" in noun else ""
    if re.search(_OF_BATCH, noun):
        return _AS_BATCH
    return _AS_COPIES if re.search(_OF_COPIES, noun) else less_of_counted(case, noun)
