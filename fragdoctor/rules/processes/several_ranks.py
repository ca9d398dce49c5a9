"""FD503: several ranks ran out of memory in the same log."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Found, rule
from fragdoctor.units import format_count


@rule("FD503", Severity.INFO)
def several_ranks(context: Context) -> Iterator[Found]:
    """Several ranks ran out of memory in the same log.

    What it finds. Messages of more than one rank, and whether they name the same device.

    Why it costs memory. Ranks that share a device by mistake divide it among themselves; ranks that
    fail on devices of their own share the cause.

    Evidence used. Rank prefixes and device numbers of the messages.

    What to do. Same device: torch.cuda.set_device(local_rank) before anything else. Different
    devices: the first message is the one to read.

    What it can get wrong. With CUDA_VISIBLE_DEVICES every rank calls its own device 0, which is no
    mistake; ranks of other machines count their devices anew.

    Example. Ranks 0 to 3 all fail on GPU 0.

    References. torch.distributed.run: Definitions; torch.cuda.set_device.
    """
    context.need_message()
    log = context.case.oom
    messages = () if log is None else log.messages
    failed = [m for m in messages if m.is_device_oom and m.rank is not None]
    ranks = sorted({m.rank for m in failed if m.rank is not None})
    if len(ranks) < 2:
        return
    devices = {m.device_index for m in failed}
    same = len(devices) == 1 and None not in devices
    where = f"all on device {devices.pop()}" if same else "on devices of their own"
    yield Found(
        f"{format_count(len(ranks))} ranks ran out of memory, {where}; the first is rank "
        f"{failed[0].rank} in line {format_count(failed[0].line)}.",
        severity=Severity.WARNING if same else Severity.INFO,
        confidence=Confidence.POSSIBLE if same else Confidence.PROVEN,
        evidence=(Evidence("ranks", len(ranks), "count", "oom message"),),
    )
