from __future__ import annotations

import diagnoses
import pandas as pd
import pytest

from fragdoctor.model.diagnosis import Diagnosis


@pytest.fixture
def diagnosis() -> Diagnosis:
    return diagnoses.fragmentation()


def test_holders_frame_has_a_row_a_line(diagnosis: Diagnosis) -> None:
    frame = diagnosis.holders_frame()

    assert [h.now_bytes for h in diagnosis.holders] == frame["now_bytes"].tolist()
    first = diagnosis.holders[0].location
    assert first is not None
    assert frame["location"][0].startswith(f"{first.filename}:{first.line}")


def test_stranders_frame_has_a_row_a_group(diagnosis: Diagnosis) -> None:
    frame = diagnosis.stranders_frame()

    assert [p.stranded_bytes for p in diagnosis.stranders] == frame["stranded_bytes"].tolist()
    assert frame["stranded_bytes"].dtype == "Int64"


def test_checklist_frame_is_looked_up_by_id(diagnosis: Diagnosis) -> None:
    frame = diagnosis.checklist_frame()

    assert [i.id for i in diagnosis.checklist] == frame.index.tolist()
    first = diagnosis.checklist[0]
    assert (str(first.status), first.value) == tuple(frame.loc[first.id, ["status", "value"]])


def test_recommendations_frame_has_what_helps_and_what_does_not(diagnosis: Diagnosis) -> None:
    frame = diagnosis.recommendations_frame()

    everything = [*diagnosis.recommendations, *diagnosis.rejected]
    assert [r.code for r in everything] == frame["code"].tolist()
    assert [r.rank for r in everything] == frame.index.tolist()
    for fits, r in zip(frame["fits"], everything, strict=True):
        assert (fits is pd.NA) if r.predicted.fits is None else (bool(fits) == r.predicted.fits)


def test_frames_of_nothing_have_their_columns(diagnosis: Diagnosis) -> None:
    empty = Diagnosis(diagnosis.case, diagnosis.verdict, ())

    frames = [
        empty.holders_frame(), empty.stranders_frame(), empty.checklist_frame(),
        empty.recommendations_frame(),
    ]  # fmt: skip

    assert [len(f) for f in frames] == [0, 0, 0, 0]
    assert all(len(f.columns) >= 5 for f in frames)
