"""FD304: a setting that the PyTorch of this input does not know."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.errors import ConfigError
from fragdoctor.model.finding import Confidence, Finding, Severity
from fragdoctor.model.settings import parse_conf
from fragdoctor.rules.rule import Context, Rule


class UnknownSetting(Rule):
    """A setting does not fit this version of PyTorch.

    What it finds. Keys that the newest PyTorch that fits the input does not know, and values that
    it refuses.

    Why it costs memory. An unknown key stops PyTorch at its first use of the device; a wrong value
    may be read as another number.

    Evidence used. The recorded setting string and the versions whose files look like this one.

    What to do. Remove the key, or upgrade.

    What it can get wrong. A string that PyTorch recorded was accepted by it: then this program's
    table of keys is behind. That is why it is only a remark.

    Example. large_segment_size_mb:64 before PyTorch 2.11.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """

    code = "FD304"
    severity = Severity.INFO

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding where the recorded string cannot be read."""
        settings = context.need_settings()
        version = context.case.overrides.torch_version or context.torch_version[1] or None
        try:
            parse_conf(settings.conf, version)
        except ConfigError as error:
            yield self.finding(
                context,
                f"The recorded settings do not fit: {error.message}",
                confidence=Confidence.POSSIBLE,
            )
