"""What an exception says to a program and to a person."""

from __future__ import annotations

from fragdoctor.errors import ConfigError, TruncatedSnapshot


def test_text_of_an_exception_holds_the_message_the_place_and_the_hint() -> None:
    error = ConfigError("record() needs PyTorch, which is not installed.", hint="pip install torch")
    cut = TruncatedSnapshot("The file ends.", hint="Copy it again.", offset=7)

    assert str(error) == "record() needs PyTorch, which is not installed. pip install torch"
    assert str(cut) == "The file ends. (byte 7)"
    assert cut.sentence == "The file ends. (byte 7)"
    assert str(ConfigError("No.")) == "No."
