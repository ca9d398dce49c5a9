from __future__ import annotations

from fragdoctor.comparison.settings_proof import conf_meaning, setting_changes
from fragdoctor.model.comparison import SettingChange
from fragdoctor.model.settings import AllocatorSettings, parse_conf


def recorded(conf: str, **more: object) -> AllocatorSettings:
    return AllocatorSettings.from_recorded({"PYTORCH_CUDA_ALLOC_CONF": conf, **more})


def test_setting_that_differs_is_named_by_its_key() -> None:
    changes = setting_changes(recorded(""), recorded("expandable_segments:True"))

    assert changes == (SettingChange("expandable_segments", "False", "True"),)


def test_roundup_list_shows_what_is_on() -> None:
    settings = recorded("roundup_power2_divisions:[64:1,128:4,>:2]")

    assert settings.described()["roundup_power2_divisions"].startswith("[128:4,256:2")


def test_same_settings_in_another_spelling_are_told_by_the_string() -> None:
    changes = setting_changes(
        recorded("max_split_size_mb:128,expandable_segments:False"),
        recorded("expandable_segments:False,max_split_size_mb:128"),
    )

    assert changes is not None
    assert [c.key for c in changes] == ["PYTORCH_CUDA_ALLOC_CONF"]


def test_unrecorded_settings_are_not_compared() -> None:
    assert setting_changes(AllocatorSettings(), recorded("")) is None
    assert setting_changes(None, recorded("")) is None


def test_settings_changed_by_the_program_become_a_string_that_means_them() -> None:
    settings = recorded("", expandable_segments=True, max_split_size=200 * 2**20)

    told = parse_conf(conf_meaning(settings))

    assert (told.expandable_segments, told.max_split_bytes) == (True, 200 * 2**20)


def test_recorded_string_is_taken_as_it_is() -> None:
    assert conf_meaning(recorded("max_split_size_mb:64")) == "max_split_size_mb:64"
