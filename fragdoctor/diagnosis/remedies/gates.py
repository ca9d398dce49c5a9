"""Whether the PyTorch of a case knows a setting: an unknown key stops it at first use."""

from __future__ import annotations

from fragdoctor.diagnosis.remedies.plan import Plan
from fragdoctor.model.conf_keys import KEYS, key_is_known


def is_too_new(plan: Plan, key: str) -> bool:
    """Tell whether even the newest PyTorch that fits the inputs does not know a key."""
    _, high = plan.context.torch_version
    return bool(high) and not key_is_known(key, high)


def version_caveats(plan: Plan, key: str) -> tuple[str, ...]:
    """Return the warning that a key may be too new, where the version is not certain."""
    low, _ = plan.context.torch_version
    if low and key_is_known(key, low):
        return ()
    versions = KEYS.get(key)
    if versions is None:
        return ()
    since = ".".join(str(part) for part in versions.since[:2])
    return (
        f"{key} needs PyTorch {since} or later: an older one stops with an error at first use.",
    )
