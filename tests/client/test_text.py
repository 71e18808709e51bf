"""Values as text and JSON, and the cache that KV events describe."""

from __future__ import annotations

import time

import pytest

from openengine.v1 import kv_pb2, lifecycle_pb2, tasks_pb2
from openengine_adapters.client.kv_view import CacheView, RankView
from openengine_adapters.client.layout import Line, cell, escape, facts, one_line, table
from openengine_adapters.client.messages import enum_name, enum_value, to_json
from tests.client.responses import batch, cleared, removed, stored


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain äöü 漢字 🙂\n\t", "plain äöü 漢字 🙂\n\t"),
        ("\x1b[31m", r"\e[31m"),
        ("a\rb\x08\x07\x00", r"a\rb\b\a\x00"),
        ("\x7f\x85\x9b", r"\x7f\x85\x9b"),
        ("\u202eevil\u2069\u2028", r"\u202eevil\u2069\u2028"),
    ],
)
def test_escape_spells_out_what_could_act_on_a_terminal(text: str, escaped: str) -> None:
    assert escape(text) == escaped


def test_one_line() -> None:
    assert one_line("a\n\tb") == r"a\n\tb"


def test_cells_tell_absent_from_zero() -> None:
    assert [cell(value) for value in (None, 0, False, True, 0.123456, "x\n")] == [
        "-",
        "0",
        "no",
        "yes",
        "0.1235",
        r"x\n",
    ]


def test_facts_and_tables_are_aligned() -> None:
    assert facts({"a": 1, "long": None}, "T") == [
        Line("T", "bold"),
        Line("  a     1"),
        Line("  long  -", "dim"),
    ]
    assert [line.text for line in table(["name", "n"], [["x", 5], ["longer", 10]])] == [
        "name     n",
        "x        5",
        "longer  10",
    ]


def test_enum_names_go_both_ways_and_unknown_is_unspecified() -> None:
    assert enum_name(lifecycle_pb2.HealthState, lifecycle_pb2.HEALTH_STATE_NOT_READY) == "NOT_READY"
    assert enum_name(lifecycle_pb2.HealthState, 99) == "UNSPECIFIED"
    semantics = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES
    assert enum_value(tasks_pb2.TaskValueSemantics, "log-probabilities") == semantics
    with pytest.raises(KeyError):
        enum_value(tasks_pb2.TaskValueSemantics, "x")


def test_json_keeps_numbers_structures_and_bytes() -> None:
    session = kv_pb2.KvSessionRef(session_id="s")
    session.attributes_struct.update({"a": [1, {"b": None}]})
    assert to_json(session)["attributes_struct"] == {"a": [1.0, {"b": None}]}
    assert to_json(batch(1 << 63))["sequence_number"] == 1 << 63
    assert to_json(kv_pb2.KvBlockHash(value=b"\x00\xff", encoding="bytes"))["value"] == "00ff"


# ------------------------------------------------------------------------------------------- the cache


def test_a_view_follows_stores_and_removals() -> None:
    view = RankView()
    view.apply(batch(1, stored(1, 2, 3), stored(4, parent=2)))
    assert (view.blocks, view.chains()) == (4, (2, 3))
    view.apply(batch(2, removed(3)))
    assert (view.blocks, view.chains()) == (3, (1, 3))
    view.apply(batch(3, removed(1, 2, 4)))
    assert (view.blocks, view.chains()) == (0, (0, 0))
    assert (view.stored, view.removed, view.sequence_number) == (4, 4, 3)
    assert not view._parent, "what has left is remembered"


def test_a_block_stored_twice_goes_with_its_last_copy() -> None:
    view = RankView()
    gpu, cpu = kv_pb2.STORAGE_MEDIUM_GPU, kv_pb2.STORAGE_MEDIUM_CPU_PINNED
    view.apply(batch(1, stored(1, medium=gpu), stored(1, medium=gpu), stored(1, medium=cpu)))
    for event in (removed(1, medium=gpu), removed(1, medium=gpu)):
        view.apply(batch(2, event))
        assert view.blocks == 1
    view.apply(batch(3, removed(1, medium=cpu)))
    assert view.blocks == 0


def test_a_clear_forgets_everything() -> None:
    view = RankView()
    view.apply(batch(1, stored(1), cleared(), stored(2)))
    assert (view.blocks, view.cleared) == (1, 1)


def test_removals_of_unknown_blocks_and_loops_of_parents_do_no_harm() -> None:
    view = RankView()
    view.apply(batch(1, removed(9), stored(1, parent=2), stored(2, parent=1), stored(3, parent=3)))
    assert view.blocks == 3
    assert view.chains()[0] == 0
    view.apply(batch(2, stored(9)))
    assert view.blocks == 4


def test_a_view_counts_what_never_came_and_how_late_it_is() -> None:
    cache = CacheView()
    cache.apply(batch(4, rank=1))
    cache.apply(batch(7, rank=1, timestamp_unix_nanos=time.time_ns() - 2_000_000_000))
    view = cache.ranks[1]
    assert (view.skipped, view.batches) == (2, 2)
    assert view.lag == pytest.approx(2, abs=1)
