"""The layout of PyTorch's tables is read from the headers that every build brings."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from fragdoctor.rehearsal.engine.vtables import slots_of

BASE = """
struct Base {
  virtual ~Base() = default;
  virtual void init() const { if (true) { other(); } }
  int plain() const;
  virtual bool has(int index) const = 0;
};
"""
DERIVED = """
struct TORCH_API Derived : Base {
  bool has(int index) const override { return true; }
  virtual Thing* added() const { return nullptr; }
};
"""


def test_slots_are_counted_in_order_of_declaration() -> None:
    assert slots_of((BASE, "Base")) == {"~": 0, "init": 2, "has": 3}


def test_overrides_keep_their_slot() -> None:
    assert slots_of((BASE, "Base"), (DERIVED, "Derived")) == {
        "~": 0,
        "init": 2,
        "has": 3,
        "added": 4,
    }


def test_a_class_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="Missing is not declared"):
        slots_of((BASE, "Missing"))
