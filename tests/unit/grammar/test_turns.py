"""Turns of tenants, and remembered results."""

from __future__ import annotations

from paceline.grammar.turns import Memory, Turns


def test_tenants_take_turns_regardless_of_load() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.add(item[0], item)
    assert (len(turns), turns.of("a"), turns.of("z")) == (6, 3, 0)
    assert [turns.next() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_a_late_tenant_waits_for_one_turn_of_each() -> None:
    turns: Turns[str] = Turns()
    for number in range(50):
        turns.add("a", f"a{number}")
    assert turns.next() == "a0"
    turns.add("b", "b0")
    assert [turns.next(), turns.next()] == ["a1", "b0"]


def test_a_removed_item_has_no_turn() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a1")
    turns.add("b", "b1")
    assert turns.remove("a", "a1")
    assert not turns.remove("a", "a1")
    assert not turns.remove("z", "a1")
    assert [turns.next(), turns.next()] == ["b1", None]


def test_results_are_not_shared_between_tenants() -> None:
    memory: Memory[str, bool] = Memory(9)
    memory.put("a", "x", True)
    assert (memory.get("a", "x"), memory.get("b", "x")) == (True, None)


def test_the_largest_tenant_forgets_its_oldest() -> None:
    memory: Memory[str, bool] = Memory(3)
    memory.put("b", "x", True)
    for key in "pqr":
        memory.put("a", key, True)
    assert len(memory) == 3
    assert memory.get("b", "x")
    assert [memory.get("a", key) for key in "pqr"] == [None, True, True]
    memory.get("a", "q")  # asked for lately
    memory.put("c", "x", True)
    assert [memory.get("a", key) for key in "qr"] == [True, None]


def test_a_repeated_entry_takes_no_more_room() -> None:
    memory: Memory[str, bool] = Memory(2)
    for _ in range(5):
        memory.put("a", "x", True)
    memory.put("a", "y", False)
    assert (len(memory), memory.get("a", "x"), memory.get("a", "y")) == (2, True, False)
