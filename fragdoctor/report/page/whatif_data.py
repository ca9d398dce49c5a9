"""What was replayed for the diagnosis, for the page to compare: settings, changes of the code."""

from __future__ import annotations

from typing import Any, Final

from fragdoctor.model.diagnosis import Diagnosis, Recommendation
from fragdoctor.report import escape

_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF="
_MAX_TEXT: Final = 200


def whatif_data(diagnosis: Diagnosis, *, is_live: bool) -> dict[str, Any] | None:
    """Return the recorded run and every variant that was replayed; None where nothing was.

    The page of a server (``is_live``) can ask for more, so that it needs no variants.
    """
    device = diagnosis.verdict.device
    if device is None and diagnosis.devices:
        device = diagnosis.devices[0].device
    figures = next((f for f in diagnosis.devices if f.device == device), None)
    tried = [r for r in (*diagnosis.recommendations, *diagnosis.rejected) if _is_replayed(r)]
    if figures is None or device not in diagnosis.analyses or not (tried or is_live):
        return None
    return {
        "device": device,
        "live": is_live,
        "capacity": figures.capacity_bytes,
        "recorded": {
            "name": "as recorded",
            "fits": not figures.ooms,
            "peak": figures.peak_reserved_bytes,
            "retries": figures.alloc_retries,
        },
        "least": figures.peak_allocated_bytes,
        "variants": [_variant(r) for r in tried],
    }


def _is_replayed(one: Recommendation) -> bool:
    return one.predicted.method in {"replay", "estimate"} and bool(
        one.predicted.peak_reserved_bytes
    )


def _variant(one: Recommendation) -> dict[str, Any]:
    name = one.setting.removeprefix(_VARIABLE) or one.title
    p = one.predicted
    return {
        "name": escape.visible(name[:_MAX_TEXT]),
        "fits": p.fits,
        "peak": p.peak_reserved_bytes,
        "retries": p.retries,
        "margin": p.margin_bytes,
        "calls": p.driver_calls,
        "outlook": p.outlook.state.value if p.outlook is not None else None,
    }
