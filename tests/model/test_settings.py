from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import ConfigError
from fragdoctor.model.conf_keys import KEYS, key_is_known, parse_version
from fragdoctor.model.settings import (
    AllocatorSettings,
    Era,
    era_of,
    parse_conf,
)
from fragdoctor.units import MIB


def test_empty_string_gives_the_defaults():
    assert parse_conf("") == AllocatorSettings()
    assert parse_conf("  ") == AllocatorSettings(conf="  ")


# What 2.12.1 made of these strings.
@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("max_split_size_mb:128", "max_split_bytes", 128 * MIB),
        (" max_split_size_mb : 128 , expandable_segments : True ", "expandable_segments", True),
        ("max_split_size_mb:128,", "max_split_bytes", 128 * MIB),
        ("max_split_size_mb:128,max_split_size_mb:256", "max_split_bytes", 256 * MIB),
        ("max_split_size_mb:128:expandable_segments:True", "expandable_segments", True),
        ("max_split_size_mb:512MB", "max_split_bytes", 512 * MIB),
        ("max_split_size_mb:100.9", "max_split_bytes", 100 * MIB),
        ("max_split_size_mb:-1", "max_split_bytes", None),
        ("max_split_size_mb:20", "max_split_bytes", 20 * MIB),
        ("large_segment_size_mb:11,max_split_size_mb:12", "max_split_bytes", 12 * MIB),
        ("large_segment_size_mb:64", "large_segment_bytes", 64 * MIB),
        ("large_segment_size_mb:64", "max_non_split_rounding_bytes", 64 * MIB),
        ("large_segment_size_mb:32,large_segment_size_mb:64", "large_segment_bytes", 64 * MIB),
        ("max_non_split_rounding_mb:96", "max_non_split_rounding_bytes", 96 * MIB),
        ("garbage_collection_threshold:0.6x", "garbage_collection_threshold", 0.6),
        ("garbage_collection_threshold:1e-3", "garbage_collection_threshold", 0.001),
        ("garbage_collection_threshold:0x1p-2", "garbage_collection_threshold", 0.25),
        ("garbage_collection_threshold:.5", "garbage_collection_threshold", 0.5),
        ("per_process_memory_fraction:0.5", "memory_fraction", 0.5),
        ("backend:native", "backend", "native"),
        ("backend:cudaMallocAsync", "backend", "cudaMallocAsync"),
        ("release_lock_on_cudamalloc:True", "other", {"release_lock_on_cudamalloc": True}),
        ("pinned_num_register_threads:8", "other", {"pinned_num_register_threads": 8}),
    ],
)
def test_valid_string_is_read_as_pytorch_reads_it(text, field, value):
    assert getattr(parse_conf(text, "2.12.1"), field) == value


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("4", "4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4"),
        ("1", "1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"),
        ("[256:1,512:2,1024:4,>:8]", "1 1 1 1 1 1 1 1 1 2 4 8 8 8 8 8"),
        ("[1:2,16:4,>:8]", "2 0 0 0 4 8 8 8 8 8 8 8 8 8 8 8"),
        ("[>:8]", "0 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8"),
        ("[1024:4,256:2,>:8]", "4 4 4 4 4 4 4 4 2 8 8 8 8 8 8 8"),
        ("[256:0,>:8]", "0 0 0 0 0 0 0 0 0 8 8 8 8 8 8 8"),
        ("[>:8,256:4]", "4 4 4 4 4 4 4 4 4 8 8 8 8 8 8 8"),
        ("[>:8,>:4]", "0 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4"),
        ("[65536:4]", "4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4"),
        ("[256:4,]", "4 4 4 4 4 4 4 4 4 0 0 0 0 0 0 0"),
        ("[]", "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0"),
    ],
)
def test_roundup_divisions_fill_the_table_as_2_12_does(text, table):
    settings = parse_conf(f"roundup_power2_divisions:{text},", "2.12.1")

    assert " ".join(map(str, settings.roundup_power2_divisions)) == table


def test_roundup_list_up_to_2_4_overwrites_the_last_interval():
    text = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"

    old = parse_conf(text, "2.4.1").roundup_power2_divisions

    assert old == (1,) * 9 + (2,) + (8,) * 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:128;expandable_segments:True", "semicolon"),
        (",max_split_size_mb:128", "key is missing"),
        ("max_split_size_mb:128,,expandable_segments:True", "key is missing"),
        ("max_split_size_mb 128", "does not exist"),
        ("max_split_size_mb=128", "does not exist"),
        ("max_split_size_mb", "no value"),
        ("max_split_size_mb:", "no value"),
        ("max_split_size_mb::128", "no value"),
        ("max_split_size_mb:abc", "whole number"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:99999999999999999999999", "whole number"),
        ("max_split_size_mb:[128:1]", "does not take a list"),
        ("max_split_size_mb:32,large_segment_size_mb:64", "at least 64"),
        ("large_segment_size_mb:10", "more than 10"),
        ("max_non_split_rounding_mb:19", "at least 20"),
        ("expandable_segments:true", "True or False"),
        ("garbage_collection_threshold:1", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("garbage_collection_threshold:x", "must be a number"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:0", "power of two"),
        ("roundup_power2_divisions:[3:4]", "powers of two"),
        ("roundup_power2_divisions:[256:3]", "power of two"),
        ("roundup_power2_divisions:[256:4", "not well formed"),
        ("roundup_power2_divisions:[256:4]expandable_segments:True", "key is missing"),
        ("backend:foo", "does not exist"),
        ("pinned_num_register_threads:3", "power of two"),
        ("pinned_num_register_threads:256", "up to 128"),
        ("pinned_reserve_segment_size_mb:0", "more than 0"),
        ("roundup_bypass_threshold_mb:64", "gone in 2.0"),
        ("pinned_max_cached_size_mb:64", "from 2.13"),
        ("foo:1", "does not exist"),
    ],
)
def test_string_that_2_12_refuses_is_refused(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_conf(text, "2.12.1")

    assert caught.value.message.count(". ") == 0


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("max_split_size", "Did you mean max_split_size_mb?"),
        ("Expandable_Segments", "Did you mean expandable_segments?"),
        ("max_split_size_mb=5", "colon"),
        ("zzz", "Known keys"),
    ],
)
def test_unknown_key_is_answered_with_a_suggestion(key, hint):
    with pytest.raises(ConfigError) as caught:
        parse_conf(f"{key}:1")

    assert hint in caught.value.hint


def test_max_split_size_of_20_is_refused_up_to_2_4():
    with pytest.raises(ConfigError, match="more than 20"):
        parse_conf("max_split_size_mb:20", "2.4.1")


@pytest.mark.parametrize(
    ("key", "version", "known"),
    [
        ("expandable_segments", "2.0.1", False),
        ("expandable_segments", "2.1.0", True),
        ("roundup_bypass_threshold_mb", "1.13.1", True),
        ("roundup_bypass_threshold_mb", "2.0.0", False),
        ("large_segment_size_mb", "2.10.0+cu128", False),
        ("large_segment_size_mb", "2.11.0", True),
        ("expandable_segments_reserve", "2.15.0a0", True),
        ("nonsense", "2.12.1", False),
    ],
)
def test_key_is_known_follows_the_releases(key, version, known):
    assert key_is_known(key, version) is known


def test_every_key_is_accepted_without_a_version():
    for key in KEYS:
        assert key_is_known(key)


@pytest.mark.parametrize(
    ("version", "era"),
    [
        ("1.13.1", Era.ADDRESS),
        ("2.11.0", Era.ADDRESS),
        ("2.12.0+cu130", Era.BLOCK_COUNTER),
        ("2.13.0", Era.SEGMENT_COUNTER),
        ("3.0", Era.SEGMENT_COUNTER),
    ],
)
def test_era_of_follows_the_releases(version, era):
    assert era_of(version) is era


def test_version_without_numbers_is_refused():
    assert parse_version("v2.12.1+cu130") == (2, 12, 1)
    with pytest.raises(ConfigError, match="not a PyTorch version"):
        parse_version("nightly")


@given(st.text(alphabet="maxsplit_sizemb:,[]>;=0123456789.TrueFalse \n\u0660", max_size=60))
def test_any_text_is_parsed_or_refused_in_words(text):
    try:
        settings = parse_conf(text)
    except ConfigError:
        return

    assert settings.conf == text


def test_recorded_settings_take_hidden_keys_from_the_string():
    recorded = {
        "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:64,max_split_size_mb:128",
        "max_split_size": 128 * MIB,
        "expandable_segments": True,
        "roundup_power2_divisions": {"1": 4, "2": -3, "4": True},
    }

    settings = AllocatorSettings.from_recorded(recorded)

    assert settings.is_recorded
    assert settings.large_segment_bytes == 64 * MIB
    assert settings.max_split_bytes == 128 * MIB
    assert settings.expandable_segments
    assert settings.roundup_power2_divisions[:3] == (4, 0, 0)


def test_recorded_string_that_cannot_be_read_is_kept_as_it_is():
    settings = AllocatorSettings.from_recorded({"PYTORCH_CUDA_ALLOC_CONF": "a;b"})

    assert settings.conf == "a;b"
    assert settings.max_split_bytes is None
